"""Keep a run's packages imported, so that runs on this machine start faster: `titanrl warm`."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

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
    sys.exit(asyncio.run(serve(config)))


async def serve(config: Config) -> int:
    """Serve templates until a signal arrives. Return the exit code: 128 + signal, or 1 if no template can be used."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(128 + number)

    for number in terminal.ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP under nohup
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    folder = private_folder()
    templates: dict[str, Template] = {}
    for kind, (environment, load) in needed(config, resolve_device(config.device), Roles(rollouts=True)).items():
        base, path = templates.get(BASE), folder.path / digest_of_imports(environment, load)
        templates[kind] = Template(environment, load, folder.path / f"{kind}.log", path, None if base is None else base.path)
    imports = asyncio.gather(*(template.is_ready() for template in templates.values()))
    try:
        waiting: set[asyncio.Future[Any]] = {imports, ended}
        with terminal.announcing("importing the packages"):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        are_ready = imports.result()
        for (kind, template), is_ready in zip(templates.items(), are_ready, strict=True):
            if not is_ready:
                print(f"{kind}: {template.log.read_text(errors='replace').strip()}", file=sys.stderr)
        if not any(are_ready):
            return 1
        print("Ready. Start runs in this directory, in a shell with this variable:")
        print(f"\n  export {SHARED}={in_shell(folder.path)}\n")
        print("Ctrl-C ends this command, and the processes of runs that use it.", flush=True)
        return await ended
    finally:
        for template in templates.values():
            template.close()
        folder.delete()
        await imports  # otherwise asyncio cancels it at the end and prints a traceback


if __name__ == "__main__":
    main()
