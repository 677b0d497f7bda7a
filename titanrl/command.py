"""A run as a command: arguments, signals, exit codes, and the last lines.

Exit codes: 0 done, 2 bad configuration (message only), 130 (SIGINT) or 143 (SIGTERM) interrupted and closed in order,
1 anything else.
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
from types import FrameType
from typing import NoReturn, Protocol, TextIO

import rich.console

from titanrl.config import Config, ConfigError, Source
from titanrl.config.load import validate
from titanrl.config.source import read_source
from titanrl.launch.environment import temporary_folder
from titanrl.metrics.console import Console
from titanrl.preflight import dry_run

CLOSE_LIMIT_S = 25.0
"""Longest time from the end of the work to the end of every process, even if something hangs."""


class Run(Protocol):
    """A training run, as the command needs it; `titanrl.grpo.GRPO` is one."""

    run_dir: Path
    console: Console

    @property
    def num_unsaved_steps(self) -> int:
        """Steps taken since the last checkpoint."""

    async def start_and_train(self) -> None:
        """Do the whole run."""

    async def stop(self, *, code: int, cause: str) -> None:
        """Stop every process."""

    def summarize(self, *, code: int, cause: str) -> None:
        """Write the report and print the last lines."""


class MakeRun(Protocol):
    """Constructor of a run."""

    def __call__(self, config: Config, *, resume: Path | None, console: Console, source: Source) -> Run:
        """Check everything that can be checked before a process is started."""


def main(make_run: MakeRun, argv: Sequence[str] | None = None) -> None:
    """Run the command line, then end the process."""
    arguments = parse(argv)
    try:
        path = arguments.resume / "config.yaml" if arguments.resume else arguments.config
        source = read_source(path, arguments.overrides)
        config = validate(source)
        if arguments.dry_run:
            dry_run(config, source)
            sys.exit(0)
        code = run(make_run, config, arguments.resume, source)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    # Everything is closed by now. torchmonarch's own clean-up at the interpreter's end takes seconds and can hang.
    leave(code)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m titanrl.grpo", description="Train a policy with GRPO.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", type=Path, help="YAML file of the run, such as configs/quickstart.yaml")
    which.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue a run from its newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that replace those of the file")
    return parser.parse_args(argv)


def run(make_run: MakeRun, config: Config, resume: Path | None, source: Source) -> int:
    """Train, and print how the run ended; return the exit code.

    Raises:
        ConfigError: a file or device that the configuration names is missing; nothing was started.
    """
    with own_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        console = Console(config.logging.console, total_steps=config.num_steps, title=config.name, err=err)
        training = make_run(config, resume=resume, console=console, source=source)
        with console, log_to(training.run_dir / "logs" / "controller_0.log"), temporary_folder():
            code, cause, watchdog = asyncio.run(train(training, err))
        watchdog.cancel()
        training.summarize(code=code, cause=cause)
        if code == 1:
            err.print(f"error: {cause}", markup=False, highlight=False)
    return code


async def train(training: Run, err: rich.console.Console) -> tuple[int, str, threading.Timer]:
    """Train to the end, then stop every process.

    Returns:
        The exit code, the cause if the code is not 0, and a running watchdog. If the watchdog is not cancelled in time,
        something hangs, and it ends this process.
    """
    code, cause = await outcome(training)
    logging.getLogger(__name__).info("closing; exit code %d", code)
    watchdog = threading.Timer(CLOSE_LIMIT_S, leave_at_once, (code, cause, err))
    watchdog.daemon = True
    watchdog.start()
    await training.stop(code=code, cause=cause)
    return code, cause, watchdog


async def outcome(training: Run) -> tuple[int, str]:
    """Train to the end; return the exit code, and the cause if it is not 0."""
    task = asyncio.create_task(training.start_and_train())
    interrupt = Interrupt(task, training)
    try:
        await task
    except asyncio.CancelledError:
        return interrupt.code, "interrupted"
    except Exception as error:  # the edge of the program: the user gets the cause, the log the traceback
        logging.getLogger(__name__).exception("the run failed")
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


class Interrupt:
    """Handles SIGINT and SIGTERM: the first closes the run in order, the second ends this process at once."""

    def __init__(self, task: "asyncio.Task[None]", training: Run) -> None:
        """Install the handlers. Signals of Python's own, not the loop's, are handled even while the loop is blocked."""
        self._task, self._training = task, training
        self._loop = asyncio.get_running_loop()
        self.code = 128 + signal.SIGINT
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._first)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.code = 128 + number
        for either in (signal.SIGINT, signal.SIGTERM):
            signal.signal(either, self._second)
        steps = self._training.num_unsaved_steps
        unsaved = f"; the last {steps} steps are in no checkpoint" if steps else ""
        self._training.console.warn(f"interrupted; closing in order{unsaved}. A second signal ends the run at once.")
        self._loop.call_soon_threadsafe(self._task.cancel)

    def _second(self, number: int, frame: FrameType | None) -> None:
        os._exit(self.code)


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's clean-up; every file is written by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_at_once(code: int, cause: str, err: rich.console.Console) -> None:
    """End this process although something hangs; the run's processes end with it."""
    slow = f"closing took more than {CLOSE_LIMIT_S:g} s"
    err.print(f"error: {cause} ({slow})" if cause else f"error: {slow}", markup=False, highlight=False)
    os._exit(code or 1)


@contextlib.contextmanager
def own_stderr() -> Iterator[TextIO]:
    """Yield a stream to the real stderr; until `log_to`, file descriptor 2 still leads there for libraries, too."""
    with os.fdopen(os.dup(2), "w", buffering=1) as stderr:
        try:
            yield stderr
        finally:
            os.dup2(stderr.fileno(), 2)


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send log records, and everything that libraries write to file descriptor 2, to a file."""
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
