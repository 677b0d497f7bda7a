"""Standard streams, signal handlers and arguments of the commands. A closed or full output does not stop a command."""

import argparse
import asyncio
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that terminate a command."""
QUIET_S = 3.0
"""Time in seconds after which a command says what it is waiting for."""

T = TypeVar("T")

_is_ending = False


def prepare() -> None:
    """Make the standard streams safe to write to, and let signals exit the process without a traceback.

    Exit with code 2 if the working directory was deleted, since relative paths and modules of the user are looked up in it.
    """
    exit_on_signals()
    sys.excepthook = sys.__excepthook__  # `titanrl` sets another one for the imports
    # Open /dev/null for closed standard descriptors. Otherwise the next opened file would receive all output.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # otherwise a caller has replaced it

        def warn(error: OSError) -> None:
            print(f"warning: stdout: {error.strerror}; the command continues without it", file=sys.stderr)

        sys.stdout = lasting_stream(1, warn)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = lasting_stream(2)
    try:
        os.getcwd()
    except OSError as error:
        print(
            f"working directory: it was deleted, or cannot be entered ({error.strerror}). Change to an existing one: cd ~",
            file=sys.stderr,
        )
        sys.exit(2)


def path(text: str) -> Path:
    """Return the path given as an argument, for `argparse` as `type`; refuse an empty one, the working directory for `Path`."""
    if not text:
        raise argparse.ArgumentTypeError("a path must not be empty")
    return Path(text)


@contextmanager
def announcing(text: str) -> Iterator[None]:
    """Print a line on stderr if the body takes longer than `QUIET_S`, so that a command is never silent for long."""
    timer = threading.Timer(QUIET_S, print, (f"{text} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_on_signals() -> None:
    """Exit immediately with code 128 + signal number on a terminating signal. Use this while there is nothing to close."""
    handle_ending(lambda number, frame: os._exit(128 + number))


def handle_ending(handler: Callable[[int, FrameType | None], None], *, is_ending: bool = False) -> None:
    """Install a handler for the signals that terminate a command. Under nohup, SIGHUP stays ignored.

    SIGINT is handled even if it is ignored, as in a script's background job, which receives it only from `kill`. `is_ending` is
    True if the command is already shutting down, and the handler is for a second signal.
    """
    global _is_ending
    _is_ending = is_ending
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def is_ending() -> bool:
    """Return True if this command is shutting down because of a signal."""
    return _is_ending


def lasting_stream(descriptor: int, on_failure: Callable[[OSError], None] = lambda error: None) -> TextIO:
    """Return a text stream that discards all output after a failed write.

    Characters that the encoding cannot represent are replaced. The stream does not close the descriptor. `on_failure` gets the
    error of the first failed write, for example of a closed pipe or a full disk.
    """
    file = _LastingFile(descriptor, on_failure)
    encoding = "utf-8" if sys.__stdout__ is None else sys.__stdout__.encoding
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors="replace", line_buffering=True)


class _LastingFile(io.FileIO):
    def __init__(self, descriptor: int, on_failure: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._on_failure = on_failure

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # libraries may write to the descriptor directly
            os.close(nowhere)
            self._on_failure(error)
            return len(data)


async def until_signal(work: Coroutine[Any, Any, T]) -> tuple[T | None, int]:
    """Await work until a signal cancels it; return its result, and the exit code. A second signal exits the process at once."""
    task, loop, code = asyncio.create_task(work), asyncio.get_running_loop(), 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = 128 + number
        exit_on_signals()
        loop.call_soon_threadsafe(task.cancel)

    handle_ending(end)
    try:
        return await task, code
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("interrupted")
        return None, code


@contextmanager
def original_stderr() -> Iterator[TextIO]:
    """Yield a stream to the original stderr. The body may redirect file descriptor 2, which this restores on exit."""
    descriptor = os.dup(2)
    stream = lasting_stream(descriptor)
    try:
        yield stream
    finally:
        stream.flush()
        os.dup2(descriptor, 2)
        os.close(descriptor)
