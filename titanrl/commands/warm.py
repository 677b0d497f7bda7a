"""Keep a run's packages imported, so that runs on this machine start faster: `titanrl warm`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from titanrl.base import terminal
from titanrl.base.files import in_shell
from titanrl.config import Config, load_config
from titanrl.config.device import resolve_device
from titanrl.config.errors import refusing
from titanrl.launch.roles import Roles, needed
from titanrl.processes.templates import BASE, SHARED, Template, digest_of_imports
from titanrl.processes.temporary import private_folder
from titanrl.processes.variables import secure_caches


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.warm") -> None:
    """Import the packages of a configuration's roles, and serve them until a signal ends the command."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Import the packages of a run once, for the runs that are started on this machine while the command runs.",
    )
    parser.add_argument(
        "--config", type=terminal.path, required=True, help="YAML file of the runs, or the name of a shipped configuration"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    arguments = parser.parse_intermixed_args(argv)
    with refusing():
        config = load_config(arguments.config, arguments.overrides)
        secure_caches()
    _, code = asyncio.run(terminal.until_signal(serve(config)))
    sys.exit(code or 1)


async def serve(config: Config) -> None:
    """Serve templates until the task is cancelled; return if none of them can be used."""
    folder = private_folder()
    templates: dict[str, Template] = {}
    for kind, (environment, load) in needed(config, resolve_device(config.device), Roles(rollouts=True)).items():
        base, path = templates.get(BASE), folder.path / digest_of_imports(environment, load)
        templates[kind] = Template(environment, load, folder.path / f"{kind}.log", path, None if base is None else base.path)
    imports = asyncio.gather(*(template.is_ready() for template in templates.values()))
    try:
        with terminal.announcing("importing the packages"):
            are_ready = await asyncio.shield(imports)
        for (kind, template), is_ready in zip(templates.items(), are_ready, strict=True):
            if not is_ready:
                print(f"{kind}: {template.log.read_text(errors='replace').strip()}", file=sys.stderr)
        if any(are_ready):
            print("Ready. Start runs in this directory, in a shell with this variable:")
            print(f"\n  export {SHARED}={in_shell(folder.path)}\n")
            print("Ctrl-C ends this command, and the processes of runs that use it.", flush=True)
            await asyncio.Event().wait()
    finally:
        for template in templates.values():
            template.close()
        folder.delete()
        await imports  # otherwise asyncio cancels it at the end and prints a traceback


if __name__ == "__main__":
    main()
