"""`python -m titanrl.config schema | docs`: print the JSON schema, or the reference of all keys."""

import argparse
import sys

from titanrl.config.docs import reference_text, schema_text


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m titanrl.config", description="Print what is generated from the configuration models."
    )
    parser.add_argument("what", choices=("schema", "docs"), help="configs/schema.json, or docs/config.md")
    sys.stdout.write(schema_text() if parser.parse_args().what == "schema" else reference_text())


if __name__ == "__main__":
    main()
