"""Standard streams and early signals of a command: a run does not end because its output is not read."""

import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command."""

_is_ending = False


def prepare() -> None:
    """Make the standard streams usable, whatever they are, and let signals end the process without a traceback."""
    end_quietly()
    _open_standard_descriptors()
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # else a caller has replaced it
        sys.stdout = lasting_stream(1, lambda error: _warn(f"stdout: {error.strerror}; the command continues without it"))
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = lasting_stream(2)


def end_quietly() -> None:
    """End the process at a signal, with the exit code of a shell; nothing has to be closed yet."""
    handle_ending(_end)


def handle_ending(handler: Callable[[int, FrameType | None], None], *, is_ending: bool = False) -> None:
    """Install a handler for the signals that end a command. Under nohup SIGHUP stays ignored.

    SIGINT is handled even if it is ignored, as in a background job of a script, to which only `kill` sends it.

    Args:
        handler: Handler.
        is_ending: The command ends already, and the handler is for a second signal.
    """
    global _is_ending
    _is_ending = is_ending
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def is_ending() -> bool:
    """Return True if a signal has ended this command, which closes in order."""
    return _is_ending


def lasting_stream(descriptor: int, on_failure: Callable[[OSError], None] = lambda error: None) -> TextIO:
    """Return a text stream that discards what is written after a write has failed.

    Characters that the encoding lacks are replaced.

    Args:
        descriptor: File descriptor; the stream does not close it.
        on_failure: Called with the error of the first failed write: the reader has closed a pipe, the disk is full, ...
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
            os.dup2(nowhere, self.fileno())  # for libraries that write to the descriptor, too
            os.close(nowhere)
            self._on_failure(error)
            return len(data)


def _open_standard_descriptors() -> None:
    """Open those that the caller has closed. Otherwise the next file would get the number, and with it all output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
