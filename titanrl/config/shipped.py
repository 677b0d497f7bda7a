"""The configurations shipped with the package, and the command that lists and copies them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titanrl.base import terminal
from titanrl.base.files import in_shell
from titanrl.config.section import FOLDER


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the description of a shipped configuration, which is its first line without the comment sign."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def config_file(path: str | Path) -> Path:
    """Return the path if it exists, else the shipped configuration of this name."""
    path = Path(path)
    return path if os.path.exists(path) else shipped_configs().get(str(path), path)


def data_file(path: Path) -> Path:
    """Return the path of a JSONL file if it exists, else the shipped file of this name."""
    shipped = FOLDER / path
    return shipped if not os.path.exists(path) and path.suffix == ".jsonl" and os.path.isfile(shipped) else path


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.config.shipped") -> None:
    """List the shipped configurations, print one, or copy one."""
    parser = argparse.ArgumentParser(
        prog=prog, description="List the configurations shipped with TitanRL, print one, or copy one to a new file."
    )
    parser.add_argument("name", nargs="?", help="configuration to print; without it, all are listed")
    parser.add_argument("--to", type=terminal.path, metavar="FILE", help="copy it to a new file instead")
    terminal.prepare()
    arguments = parser.parse_args(argv)
    configs = shipped_configs()
    if arguments.name is None:
        if arguments.to is not None:
            parser.error("--to: no configuration to copy. Give its name; without --to, all names are listed.")
        width = max(map(len, configs))
        for name, path in configs.items():
            print(f"{name:{width}}  {description(path)}")
        return
    if arguments.name not in configs:
        parser.error(f"name: no such configuration (got {arguments.name}). Choose one of {', '.join(configs)}.")
    # The schema is next to the shipped file. Use its absolute path, so that editors also find it from the copy.
    text = configs[arguments.name].read_text(encoding="utf-8").replace("$schema=schema.json", f"$schema={FOLDER}/schema.json")
    if arguments.to is None:
        sys.stdout.write(text)
        return
    try:
        with arguments.to.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        parser.error(f"--to: the file cannot be created: {error.strerror} (got {arguments.to}). Give the path of a new file.")
    print(f"Copied to {arguments.to}. Use it with `--config {in_shell(arguments.to)}`.")


if __name__ == "__main__":
    main()
