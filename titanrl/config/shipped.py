"""The configurations that come with the package, and the command that lists and copies them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
"""Folder of the shipped configurations; in a checkout, a link to `configs/`."""


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the description of a shipped configuration, its first line without the comment sign."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def config_file(path: str | Path) -> Path:
    """Return the file of a configuration: the path itself, or the shipped configuration of this name if no such file exists."""
    path = Path(path)
    return path if os.path.exists(path) else shipped_configs().get(str(path), path)


def data_file(path: Path) -> Path:
    """Return a file of examples: the path itself, or the shipped file of this name if no such file exists."""
    shipped = FOLDER / path
    return shipped if not os.path.exists(path) and path.suffix == ".jsonl" and os.path.isfile(shipped) else path


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.config.shipped") -> None:
    """List the shipped configurations, print one, or copy one."""
    parser = argparse.ArgumentParser(
        prog=prog, description="List the configurations that come with TitanRL, print one, or copy one to a file to change it."
    )
    parser.add_argument("name", nargs="?", help="configuration to print; without it, all are listed")
    parser.add_argument("--to", type=Path, metavar="FILE", help="copy it to a new file instead")
    arguments = parser.parse_args(argv)
    configs = shipped_configs()
    if arguments.name is None:
        if arguments.to is not None:
            parser.error("--to: no configuration to copy. Name one of those that are listed without --to.")
        width = max(map(len, configs))
        for name, path in configs.items():
            print(f"{name:{width}}  {description(path)}")
        return
    if arguments.name not in configs:
        parser.error(f"name: no such configuration (got {arguments.name}). Choose one of {', '.join(configs)}.")
    # The schema is beside the shipped file; an editor must find it from the copy, too.
    text = configs[arguments.name].read_text(encoding="utf-8").replace("$schema=schema.json", f"$schema={FOLDER}/schema.json")
    if arguments.to is None:
        sys.stdout.write(text)
        return
    try:
        with arguments.to.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        parser.error(f"--to: the file cannot be created: {error.strerror} (got {arguments.to}). Name a new file.")
    print(f"Copied to {arguments.to}. Use it with `--config {arguments.to}`.")


if __name__ == "__main__":
    main()
