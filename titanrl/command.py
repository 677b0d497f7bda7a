"""A run as a command: arguments, signals, exit codes, and the last lines.

Exit codes: 0 done, 2 bad configuration (message only), 130 interrupted and closed in order, 1 anything else.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import rich.console

from titanrl.config import Config, ConfigError, render_dry_run
from titanrl.config.load import validate
from titanrl.config.source import read_source
from titanrl.metrics.console import Console
from titanrl.metrics.outcome import INTERRUPTED, last_lines, summarize

if TYPE_CHECKING:
    from titanrl.grpo import GRPO

CLOSE_LIMIT_S = 25.0
"""Longest time from the end of the work to that of every process, whatever hangs."""


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m titanrl.grpo`; ends the process."""
    arguments = parse(argv)
    try:
        path = arguments.resume / "config.yaml" if arguments.resume else arguments.config
        source = read_source(path, arguments.overrides)
        config = validate(source)
        if arguments.dry_run:
            print(render_dry_run(config, source))
            sys.exit(0)
        code = run(config, arguments.resume)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    # Everything is closed by now; torchmonarch's own clean-up at the interpreter's end takes seconds and can hang.
    leave(code)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m titanrl.grpo", description="Train a policy with GRPO.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", type=Path, help="YAML file of the run, such as configs/quickstart.yaml")
    which.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on in a run directory, from its newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and its sizes; start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that replace the file's")
    return parser.parse_args(argv)


def run(config: Config, resume: Path | None) -> int:
    """Train, and tell how it ended; returns the exit code.

    Raises:
        ConfigError: files or devices the config names are not there; nothing was started.
    """
    from titanrl.grpo import GRPO

    with own_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        console = Console(config.logging.console, total_steps=config.num_steps, title=config.name, err=err)
        grpo = GRPO(config, resume=resume, console=console)
        with console, log_to(grpo.run_dir / "logs" / "controller_0.log"):
            code, cause, give_up = asyncio.run(train(grpo, err))
        give_up.cancel()
        console.done(last_lines(grpo.run_dir, summarize(grpo.run_dir, code=code, cause=cause)))
        if code == 1:
            err.print(f"error: {cause}", markup=False, highlight=False)
    return code


async def train(grpo: "GRPO", err: rich.console.Console) -> tuple[int, str, threading.Timer]:
    """Run to the end, whatever that is, and close; returns the exit code, the cause if it is not 0, and a running timer.

    When the timer is not cancelled in time, something hangs, and it ends this process.
    """
    code, cause = await outcome(grpo)
    logging.getLogger(__name__).info("closing; exit code %d", code)
    give_up = threading.Timer(CLOSE_LIMIT_S, leave_at_once, (code, cause, err))
    give_up.daemon = True
    give_up.start()
    await grpo.close()
    return code, cause, give_up


async def outcome(grpo: "GRPO") -> tuple[int, str]:
    """Run to the end of the work; returns the exit code and the cause if it is not 0."""
    task = asyncio.create_task(grpo.start_and_train())
    on_signal(task)
    try:
        await task
    except asyncio.CancelledError:
        return INTERRUPTED, "interrupted"
    except Exception as error:  # the edge of the program: the user gets the cause, the log the rest
        logging.getLogger(__name__).exception("the run failed")
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's clean-up; what was written is written."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_at_once(code: int, cause: str, err: rich.console.Console) -> None:
    """End this process without further ado; the run's processes die with it."""
    slow = f"closing took more than {CLOSE_LIMIT_S:g} s"
    err.print(f"error: {cause} ({slow})" if cause else f"error: {slow}", markup=False, highlight=False)
    os._exit(code or 1)


def on_signal(task: "asyncio.Task[None]") -> None:
    """The first SIGINT or SIGTERM ends the run in order; the second at once, and the run's processes die with this one."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, os._exit, INTERRUPTED)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


@contextlib.contextmanager
def own_stderr() -> Iterator[TextIO]:
    """A stream to the real stderr; what libraries write to file descriptor 2 is dropped until `log_to` takes it up."""
    with os.fdopen(os.dup(2), "w", buffering=1) as stderr:
        try:
            yield stderr
        finally:
            os.dup2(stderr.fileno(), 2)


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send log records, and what libraries print to file descriptor 2, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1) as log:
        os.dup2(log.fileno(), 2)
        logging.basicConfig(
            stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        try:
            yield
        finally:
            logging.basicConfig(handlers=[logging.NullHandler()], force=True)  # the file is closed
