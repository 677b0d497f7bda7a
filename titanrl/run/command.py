"""Command-line driver of a run: arguments, signal handling, shutdown and exit codes.

Exit codes: 0 success; 2 invalid configuration (message only); 130 (SIGINT), 143 (SIGTERM) or 129 (SIGHUP) interrupted and shut
down cleanly; 1 any other error.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import rich.console

from titanrl.base import terminal
from titanrl.base.errors import describe
from titanrl.carriers.record import process_start
from titanrl.config.errors import ConfigError, refusing
from titanrl.config.load import Source, check_program, parse_run, source_of, validate
from titanrl.config.schema import Config
from titanrl.config.sections import ConsoleMode
from titanrl.hosts.launcher import run_launched, tell_failure
from titanrl.launch.preflight import Checked, dry_run
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import check_idle, check_new_run
from titanrl.processes import temporary
from titanrl.processes.variables import temporary_folder
from titanrl.run.run import Run

T = TypeVar("T")

CLOSE_LIMIT_S = 25.0
"""Time limit for shutdown, from the end of the work until every process has exited, even if something hangs."""
REPORT_LIMIT_S = 60.0
"""Time limit from then on for the report and the summary."""
REPEAT_S = 2.0
"""Time in which a run on several machines treats another signal as a repetition of the first."""
SAVE_LIMIT_S = 10.0
"""Time limit from an interrupt until the checkpoint of `checkpoint.on_interrupt` is complete."""
CANCELLED = "cancelled; nothing was started"


class Cancelled(BaseException):
    """Raised by a signal during the checks before a start; its argument is the exit code."""


def main(kind: type[Run], argv: Sequence[str] | None = None, *, prog: str = "titanrl train") -> None:
    """Run the command of a kind of run, then exit the process."""
    terminal.prepare()

    def cancel(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{CANCELLED}\n".encode())  # `print` fails if the signal interrupts another one
        os._exit(128 + number)

    terminal.handle_ending(cancel)
    arguments = parse_run(argv, prog=prog, purpose=kind.purpose)
    with refusing():
        config, source = read(kind, arguments)
        accepts = arguments.accept_changed_data
        checks = partial(check, kind.for_config(config), config, arguments.resume, source, accepts)
        if arguments.dry_run:
            dry_run(config, source, checks)
            sys.exit(0)
    start = partial(run, kind, config, arguments.resume, source, accepts_changed_data=accepts)
    try:
        code = run_launched(config, source, start, checks) if config.hosts.kind == "launcher" else start()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    # Everything is closed by now. torchmonarch's cleanup at interpreter exit takes seconds and can hang.
    exit_process(code)


def read(kind: type[Run], arguments: argparse.Namespace) -> tuple[Config, Source]:
    """Return the configuration given on the command line, and its source. Tell a launcher's other processes of mistakes."""
    source = None
    try:
        source = source_of(arguments)
        config = validate(source)
        check_program(config, kind.program, source)
    except ConfigError as error:
        if not arguments.dry_run:
            tell_failure(source, str(error))
        raise
    return config, source


def check(kind: type[Run], config: Config, resume: Path | None, source: Source, accepts_changed_data: bool) -> Checked:
    """Make the checks of a start. The remark says where a resumed run would continue, and what it cannot use."""
    if resume is not None:
        check_idle(resume)
    found = kind.check(config, resume=resume, source=source, accepts_changed_data=accepts_changed_data)
    numbers = {} if found.examples is None else found.examples.summary(config)
    if resume is None:
        check_new_run(config.run_dir)
        return "", found.selections, numbers
    unusable = [f"{name} cannot be used: {reason}" for name, reason in found.unusable.items()]
    done = f", with nothing to train because num_steps is {config.num_steps}" if found.state.version >= config.num_steps else ""
    remarks = [f"continuing after step {found.state.step}{done}", *unusable, *found.remarks]
    return "; ".join(remarks), found.selections, numbers


def run(kind: type[Run], config: Config, resume: Path | None, source: Source, *, accepts_changed_data: bool = False) -> int:
    """Train, print the outcome, and return the exit code: 0, 1, or 128 plus a signal. `Run` describes the arguments."""
    with terminal.original_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        console = Console(config.logging.console, total_steps=config.num_steps, title=config.name, err=err)
        code, cause = 1, ""

        def cancel(number: int, frame: FrameType | None) -> None:
            terminal.exit_on_signals()
            raise Cancelled(128 + number)  # restores the cursor, and deletes the run directory

        terminal.handle_ending(cancel)
        try:
            training = kind.for_config(config)(
                config, resume=resume, console=console, source=source, accepts_changed_data=accepts_changed_data
            )
            training.since = process_start()
            with console, log_to(training.run_dir / "logs" / "controller_0.log"), temporary_folder():
                code, cause, watchdog = asyncio.run(train(training, err))
            if not terminal.is_ending():
                terminal.exit_on_signals()  # everything is closed, also the event loop, which the first signal needs
            watchdog.cancel()
            watchdog = start_watchdog(code, cause, err, REPORT_LIMIT_S, "writing the report")
            training.summarize(code=code, cause=cause)
            watchdog.cancel()
        except Cancelled as cancelled:
            code = cancelled.args[0]
            err.print(CANCELLED)
        except OSError as error:  # before startup or after shutdown: the run directory is not writable
            location = "" if error.filename else f": '{config.run_dir}'"
            code, cause = code or 1, cause or f"{type(error).__name__}: {error}{location}"
        if code == 1:
            err.print(f"error: {cause}", markup=False, highlight=False)
    return code


async def train(training: Run, err: rich.console.Console) -> tuple[int, str, threading.Timer]:
    """Train to completion, then stop every process.

    Returns:
        The exit code, the cause if the code is not 0, and a running watchdog timer. The caller must cancel the timer in time;
        otherwise the watchdog treats the shutdown as hung, and exits this process.
    """
    code, cause = await outcome(training)
    logging.getLogger(__name__).info("closing; exit code %d", code)
    limit_s = CLOSE_LIMIT_S - SAVE_LIMIT_S / 2 if training.config.checkpoint.on_interrupt else CLOSE_LIMIT_S  # 30 s in all
    watchdog = start_watchdog(code, cause, err, limit_s, "closing")
    await training.stop(code=code, cause=cause)
    return code, cause, watchdog


async def outcome(training: Run) -> tuple[int, str]:
    """Train to completion; return the exit code, and the cause if the code is not 0."""
    task = asyncio.create_task(training.start_and_train())
    interrupt = Interrupt(task, training)
    try:
        await task
    except asyncio.CancelledError:
        interrupt.report(is_saved=False)
        return interrupt.code, "interrupted"
    except Exception as error:  # top level of the program: the user sees the cause, the log has the traceback
        logging.getLogger(__name__).exception("the run failed")
        return 1, describe(error)
    if interrupt.saves:
        interrupt.report(is_saved=True)
        return interrupt.code, "interrupted"
    return 0, ""


def save_limit_s(config: Config) -> float:
    """Return the time limit from an interrupt until its checkpoint is complete; Slurm's early notice may extend it."""
    if config.hosts.kind != "slurm":
        return SAVE_LIMIT_S
    return max(SAVE_LIMIT_S, config.hosts.slurm.notice_s - CLOSE_LIMIT_S - SAVE_LIMIT_S)


class Interrupt:
    """Handler of SIGINT, SIGTERM and SIGHUP: the first signal shuts the run down cleanly, the second exits immediately.

    With `checkpoint.on_interrupt`, the first signal lets the current step finish and saves a checkpoint before the shutdown.
    """

    def __init__(self, task: "asyncio.Task[None]", training: Run) -> None:
        """Install the handlers with `signal.signal`, whose handlers run even while the event loop is blocked."""
        self._task, self._training = task, training
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self.code = 128 + signal.SIGINT
        self.saves = False
        """True after an interrupt that waits for a checkpoint."""
        terminal.handle_ending(self._first)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.code, self._since = 128 + number, time.monotonic()
        terminal.handle_ending(self._second, is_ending=True)
        self.saves = self._training.is_training and self._training.config.checkpoint.on_interrupt
        if self.saves:
            doing, offer = "interrupted; saving a checkpoint after the current step, then shutting down", ""
            self._loop.call_soon_threadsafe(self._save)
        else:
            steps = self._training.num_unsaved_steps
            doing = "interrupted; shutting down" + (f"; the last {steps} steps are in no checkpoint" if steps else "")
            offer = " With checkpoint.on_interrupt=true, a run saves one first." if steps else ""
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._training.console.warn(f"{doing}. A second signal ends the run immediately.{offer}")

    def _save(self) -> None:
        self._training.end_after_step()
        self._loop.call_later(save_limit_s(self._training.config), self._task.cancel)

    def report(self, *, is_saved: bool) -> None:
        """Report whether the checkpoint of an interrupt was saved; do nothing if none was due."""
        if not self.saves:
            return
        steps = self._training.num_unsaved_steps
        if not self._training.state.step:
            self._training.console.warn("no checkpoint was saved: the run has taken no step")
        elif is_saved and not steps:
            self._training.console.warn(f"saved step {self._training.state.step}; --resume continues after it")
        else:
            reason = f"step and checkpoint took more than {save_limit_s(self._training.config):g} s"
            self._training.console.warn(f"no checkpoint was saved: {reason}; the last {steps} steps are in no checkpoint")

    def _second(self, number: int, frame: FrameType | None) -> None:
        # Schedulers and launchers signal all hosts, which forward the signal, so the first one may arrive twice.
        if not self._training.config.hosts.across_machines or time.monotonic() > self._since + REPEAT_S:
            os._exit(self.code)


def exit_process(code: int) -> NoReturn:
    """Delete temporary folders, flush logs and standard streams, and exit without the interpreter's cleanup."""
    temporary.delete_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_watchdog(code: int, cause: str, err: rich.console.Console, limit_s: float, doing: str) -> threading.Timer:
    """Exit this process after a time limit, because what it is `doing` hangs; the run's other processes exit with it.

    Call `cancel` of the returned timer when it is done.
    """

    def exit_now() -> None:
        slow = f"{doing} took more than {limit_s:g} s"
        err.print(f"error: {cause} ({slow})" if cause else f"error: {slow}", markup=False, highlight=False)
        os._exit(code or 1)

    watchdog = threading.Timer(limit_s, exit_now)
    watchdog.daemon = True
    watchdog.start()
    return watchdog


def run_session(
    work: Callable[[Console], Coroutine[Any, Any, T]], *, title: str, folder: Path, mode: ConsoleMode = "plain"
) -> tuple[T | None, int]:
    """Do work with a console until a signal ends it; return its result and the exit code.

    The logs are in `folder`, which is deleted at the end, except after an error.
    """
    with terminal.original_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        console = Console(mode, total_steps=0, title=title, out=err, err=err)
        try:
            with log_to(folder / "controller.log"), temporary_folder():
                found = asyncio.run(terminal.until_signal(work(console)))
        except Exception as error:  # top level of the program: the user sees the cause, the log has the traceback
            err.print(f"error: {describe(error)}. The logs are in {folder}", markup=False, highlight=False)
            return None, 1
    shutil.rmtree(folder, ignore_errors=True)
    return found


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Redirect log records, and everything that libraries write to file descriptor 2, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        os.dup2(log.fileno(), 2)
        logging.basicConfig(
            stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        try:
            yield
        finally:
            logging.basicConfig(handlers=[logging.NullHandler()], force=True)  # the file is closed
