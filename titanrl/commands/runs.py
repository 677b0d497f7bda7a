"""The commands on the directories of runs: `titanrl board`, `compare`, `timeline`, `explain` and `steer`."""

import argparse
import asyncio
import json
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import rich.console

from titanrl.base import control, terminal
from titanrl.base.errors import TitanRLError, describe
from titanrl.base.files import why_no_folder
from titanrl.base.plugins import loading
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import ConfigError, inline, refusing
from titanrl.config.load import parse_overrides
from titanrl.metrics import report
from titanrl.metrics.reading import RunRecord, open_run
from titanrl.metrics.timeline import trace_of, usages, window_of
from titanrl.processes.children import stacks_of

SHOWN = 0.005
"""Smallest share of a wait that the table of `timeline` shows."""
COLUMNS = {
    "generator_logprob": ("lp_gen", ".4f"),
    "proximal_logprob": ("lp_prox", ".4f"),
    "logprob": ("lp", ".4f"),
    "ratio": ("ratio", ".4f"),
    "clip": ("clip", ""),
    "correction": ("corr", ".4g"),
    "advantage": ("adv", ".4g"),
    "weight": ("weight", ".3e"),
    "loss": ("loss", ".3e"),
    "gradient": ("gradient", ".3e"),
    "share": ("share", ".1%"),
}
"""Heading and format of the columns that `explain` prints."""


def board(argv: Sequence[str] | None = None, *, prog: str = "titanrl board") -> None:
    """Show runs in a browser until a signal ends the command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show the runs of a folder in a browser, while they run: curves, rollouts, evaluations and timelines. Only "
        "this machine can reach the page, and its address contains a key.",
    )
    help_text = "folder of runs, or the directory of a run (default: runs)"
    parser.add_argument("folder", nargs="?", type=terminal.path, default=Path("runs"), metavar="FOLDER", help=help_text)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: 0, which selects a free one)")
    arguments = parser.parse_intermixed_args(argv)
    if not 0 <= arguments.port < 65536:
        parser.error(f"--port: must be 0 to 65535 (got {arguments.port}). Give one such as 8080.")
    with refusing():
        if found := why_no_folder(arguments.folder):
            raise ConfigError(f"FOLDER: it {found} (got {arguments.folder}). Give a folder of runs, or the directory of a run.")
    with terminal.original_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        try:
            _, code = asyncio.run(terminal.until_signal(_serve(arguments.folder, arguments.port)))
        except OSError as error:
            err.print(f"error: --port {arguments.port}: {describe(error)}", markup=False, highlight=False)
            code = 1
    raise SystemExit(0 if code in (0, 130) else code)


async def _serve(folder: Path, port: int) -> None:
    """Listen, print the address, and pass on changes of files until the task is cancelled."""
    from titanrl.serving.http import LOCAL, listen
    from titanrl.serving.runs import Board

    page = Board(folder, secrets.token_urlsafe(32), explained)
    listener = await listen(page, (LOCAL[0], port))
    port = int(listener.url.rpartition(":")[2])
    try:
        print(f"board of {folder} at {listener.url}/#key={page.key}", flush=True)
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        print(f"From another machine: {tunnel}, then open the same address.", flush=True)
        await page.watch(lambda text: print(f"warning: {text}", file=sys.stderr, flush=True))
    finally:
        page.close()
        await listener.close()


def explained(run: RunRecord, step: int, index: int) -> list[dict[str, Any]]:
    """Return how the tokens of a group entered the loss of a step. A custom loss is not imported."""
    from titanrl.run.explanation import explain  # imports torch, which the other pages do not need

    return [segment.as_dict() for segment in explain(run, step, index)]


def compare(argv: Sequence[str] | None = None, *, prog: str = "titanrl compare") -> None:
    """Print the comparison of runs, and write its page if one is asked for."""
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
    arguments = parser.parse_intermixed_args(argv)
    with refusing():
        records = [open_run(path) for path in arguments.runs]
        runs = report.read_runs(records)
        metrics = report.metrics_to_compare(runs, arguments.metric)
    variants = report.variants_of(runs)
    shown = report.tables(variants, metrics)
    if arguments.html is not None:
        try:
            page = report.comparison_page(records, arguments.metric)
            arguments.html.write_text(page, encoding="utf-8")
        except OSError as error:
            _exit_unwritten("--html", arguments.html, error)
    if arguments.json:
        print(json.dumps(report.as_dict(variants, metrics), indent=2))
        return
    console = table_console()
    for table in shown:
        print_table(console, table.title, table.columns, table.rows)


def timeline(argv: Sequence[str] | None = None, *, prog: str = "titanrl timeline") -> None:
    """Print the shares of work and waits of each process, and write the trace if one is asked for."""
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
    arguments = parser.parse_intermixed_args(argv)
    with refusing():
        try:
            run = open_run(arguments.run)
            spans, processes = run.spans(), run.processes()
            events = run.events() if arguments.output is not None else []
            window = window_of(spans, *arguments.steps)
        except (TitanRLError, ValueError) as error:
            raise ConfigError(f"{arguments.run}: {error}") from error
    if arguments.output is not None:
        trace = trace_of(processes, spans, events, window=window)
        try:
            arguments.output.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            _exit_unwritten("--output", arguments.output, error)
    title = f"{window.end - window.start:.1f} s of {arguments.run}"
    rows = []  # for each process its work and its longest wait, then its other waits
    for usage in usages(processes, spans, window):
        waits = [(f"{share:.1%}", name.removeprefix("wait for ")) for name, share in usage.waiting.items() if share >= SHOWN]
        if usage.unknown >= SHOWN:
            waits.append((f"{usage.unknown:.1%}", "not recorded"))
        first, *others = waits or [("", "")]
        rows.append((usage.process, f"{usage.seconds:.1f}", f"{usage.busy:.1%}", *first))
        rows += [("", "", "", *wait) for wait in others]
    print_table(table_console(), title, ["process", "seconds", "works", "waits", "for"], rows)


def steps(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last step of `A:B`, `A:`, `:B` or `A`; refuse other forms, and B less than A."""
    found = re.fullmatch(r"(\d{0,12})(:?)(\d{0,12})", text)
    if found is None or text in {"", ":"} or (not found[2] and found[3]):
        raise argparse.ArgumentTypeError(f"write A:B, such as 10:20, or one number (got {text!a:.40})")
    first = int(found[1]) if found[1] else None
    last = first if not found[2] else int(found[3]) if found[3] else None
    if first is not None and last is not None and last < first:
        raise argparse.ArgumentTypeError(f"the last step must not be before the first one (got {text})")
    return first, last


def explain(argv: Sequence[str] | None = None, *, prog: str = "titanrl explain") -> None:
    """Print how the tokens of a group entered the loss of a step."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show how each token of a recorded group entered the loss of a step: log-probabilities of generator, "
        "proximal and current policy, ratio, clipping, correction, advantage, loss weight, loss, and share of the gradient.",
    )
    parser.add_argument("run", type=terminal.path, metavar="RUN", help="directory of a run")
    parser.add_argument("step", type=int, metavar="STEP", help="step, from 1")
    parser.add_argument("index", type=int, metavar="INDEX", help="prompt of the group: its index in the record")
    parser.add_argument("--json", action="store_true", help="print the columns as JSON")
    parser.add_argument(
        "--load-loss", action="store_true", help="import the custom loss of the run, which executes its code with your rights"
    )
    arguments = parser.parse_intermixed_args(argv)
    with loading():
        from titanrl.run import explanation  # imports torch, which help does not need
    with refusing():
        run = open_run(arguments.run)
        segments = explanation.explain(run, arguments.step, arguments.index, loads_loss=arguments.load_loss)
    if arguments.json:
        print(json.dumps([segment.as_dict() for segment in segments], indent=1))
        return
    console = table_console()
    for segment in segments:
        columns = segment.columns
        texts = run.token_texts(columns["token_id"]) if segment.completion is not None else [""] * len(columns["position"])
        rows = [
            [str(position), inline(text, 24), *(format(columns[name][i], spec) for name, (_, spec) in COLUMNS.items())]
            for i, (position, text) in enumerate(zip(columns["position"].tolist(), texts, strict=True))
        ]
        completion = "" if segment.completion is None else f", completion {segment.completion}"
        title = f"step {segment.step}, update {segment.update}, group {segment.index}{completion}, sequence {segment.segment}"
        print_table(console, title, ("token", "text", *(heading for heading, _ in COLUMNS.values())), rows)
    if left_out := segments[0].left_out:
        console.print(f"not included: {', '.join(left_out)}", markup=False, highlight=False)


def steer(argv: Sequence[str] | None = None, *, prog: str = "titanrl steer") -> None:
    """Send a request to a run in progress, and print its reply, or print the stacks of its processes."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Steer a run in progress, on the host of its controller: pause it, let it continue, or change keys of its "
        "configuration. `status` lists the keys that can be changed. A change takes effect from the next step on. `stacks` "
        "prints the states and stacks of its processes on this host, also of a controller that does not answer.",
    )
    parser.add_argument("run", type=terminal.path, metavar="RUN", help="directory of the run")
    parser.add_argument("action", choices=("status", "pause", "resume", "set", "stacks"), help="what to do")
    parser.add_argument("values", nargs="*", metavar="key=value", help="new values, for set")
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    arguments = parser.parse_intermixed_args(argv)
    with refusing():
        values = {".".join(override.path): override.value for override in parse_overrides(arguments.values)}
    if bool(values) != (arguments.action == "set"):
        parser.error(
            "set needs values such as algorithm.learning_rate=2e-5" if arguments.action == "set" else "only set has values"
        )
    with refusing():
        if arguments.action == "stacks":
            reply: dict[str, Any] = {"text": asyncio.run(stacks_of(arguments.run))}
        else:
            reply = asyncio.run(control.steer(arguments.run, arguments.action, values))
    if arguments.json:
        print(json.dumps(reply, indent=2))
        return
    print(reply["text"])
    for key, value in reply["keys"].items() if arguments.action == "status" else ():
        print(f"  {key} = {inline(value)}")


def _exit_unwritten(option: str, path: Path, error: OSError) -> NoReturn:
    print(f"error: {option}: {path} cannot be written: {error}", file=sys.stderr)
    raise SystemExit(1) from error
