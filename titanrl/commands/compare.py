"""Compare runs: `titanrl compare RUN RUN ...`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from titanrl.base import terminal
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import refusing
from titanrl.metrics.comparison import as_dict, metrics_to_compare, read_runs, tables, variants_of, write_comparison
from titanrl.metrics.reading import open_run


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl compare") -> None:
    """Print the comparison, and write its page if one is asked for."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare runs: first, final and best scores with 95 % confidence intervals, and the configuration keys "
        "that differ. Runs that differ only in their seed are averaged. Runs in progress can be compared, too.",
    )
    parser.add_argument("runs", nargs="+", type=terminal.path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="another metric to compare; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the tables and the overlaid curves")
    arguments = parser.parse_args(argv)
    with refusing():
        records = [open_run(path) for path in arguments.runs]
        runs = read_runs(records)
        metrics = metrics_to_compare(runs, arguments.metric)
    variants = variants_of(runs)
    shown = tables(variants, metrics)
    if arguments.html is not None:
        try:
            write_comparison(arguments.html, records, arguments.metric)
        except OSError as error:
            print(f"error: --html: {arguments.html} cannot be written: {error}", file=sys.stderr)
            raise SystemExit(1) from error
    if arguments.json:
        print(json.dumps(as_dict(variants, metrics), indent=2))
        return
    console = table_console()
    for table in shown:
        print_table(console, table.title, table.columns, table.rows)
