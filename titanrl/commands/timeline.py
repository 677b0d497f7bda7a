"""Show who worked and who waited in a run: `titanrl timeline RUN`."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from titanrl.base import terminal
from titanrl.base.errors import TitanRLError
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import ConfigError, refusing
from titanrl.metrics.reading import open_run
from titanrl.metrics.timeline import Usage, trace_of, usages, window_of

Steps = tuple[int | None, int | None]
SHOWN = 0.005
"""Smallest share of a wait that the table shows."""


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl timeline") -> None:
    """Print the shares of work and waits of each process, and write the trace if one is asked for."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show how much of its time each process of a run worked, and how much it waited for what. "
        "A run in progress can be shown, too.",
    )
    parser.add_argument("run", type=terminal.path, metavar="RUN", help="directory of a run")
    help_text = "only the time of the steps A to B; the whole run by default"
    parser.add_argument("--steps", type=steps, default=(None, None), metavar="A:B", help=help_text)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the spans as a trace that https://ui.perfetto.dev opens"
    )
    arguments = parser.parse_args(argv)
    with refusing():
        try:
            run = open_run(arguments.run)
            spans, processes = run.spans(), run.processes()
            window = window_of(spans, *arguments.steps)
        except (TitanRLError, ValueError) as error:
            raise ConfigError(f"{arguments.run}: {error}") from error
    if arguments.output is not None:
        trace = trace_of(processes, spans, run.events(), window=window)
        try:
            arguments.output.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            print(f"error: --output: {arguments.output} cannot be written: {error}", file=sys.stderr)
            raise SystemExit(1) from error
    console = table_console()
    title = f"{window.end - window.start:.1f} s of {arguments.run}"
    rows = (row for usage in usages(processes, spans, window) for row in rows_of(usage))
    print_table(console, title, ["process", "seconds", "works", "waits", "for"], rows)


def rows_of(usage: Usage) -> Iterator[Sequence[str]]:
    """Return the lines of a process: its work and its longest wait, then its other waits."""
    waits = [(f"{share:.1%}", name.removeprefix("wait for ")) for name, share in usage.waiting.items() if share >= SHOWN]
    if usage.unknown >= SHOWN:
        waits.append((f"{usage.unknown:.1%}", "not recorded"))
    first, *others = waits or [("", "")]
    yield usage.process, f"{usage.seconds:.1f}", f"{usage.busy:.1%}", *first
    for wait in others:
        yield "", "", "", *wait


def steps(text: str) -> Steps:
    """Return the first and the last step of `A:B`, `A:`, `:B` or `A`.

    Raises:
        ArgumentTypeError: The text has another form, or B is less than A.
    """
    found = re.fullmatch(r"(\d{0,12})(:?)(\d{0,12})", text)
    if found is None or text in {"", ":"} or (not found[2] and found[3]):
        raise argparse.ArgumentTypeError(f"write A:B, such as 10:20, or one number (got {text!a:.40})")
    first = int(found[1]) if found[1] else None
    last = first if not found[2] else int(found[3]) if found[3] else None
    if first is not None and last is not None and last < first:
        raise argparse.ArgumentTypeError(f"the last step must not be before the first one (got {text})")
    return first, last
