"""The command `python -m titanrl.config schema|docs`, which prints the JSON schema or the configuration reference."""

import argparse
import sys

from titanrl.base import terminal
from titanrl.config.keys import reference_text, schema_text


def main() -> None:
    """Print the schema or the reference."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m titanrl.config", description="Print a file generated from the configuration models."
    )
    parser.add_argument(
        "what", choices=("schema", "docs"), help="schema prints configs/schema.json, docs prints docs/config.md"
    )
    sys.stdout.write(schema_text() if parser.parse_args().what == "schema" else reference_text())


if __name__ == "__main__":
    main()
