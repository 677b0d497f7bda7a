"""Base of all actors: endpoints that survive any exception, and processes that log to their own file.

In torchmonarch 0.7.0, an exception that cannot be pickled hangs the caller of a concurrent endpoint and kills the actor of a
plain one, and a `CancelledError` that leaves an endpoint silently ends the actor's dispatch loop. The endpoints defined here
replace such exceptions by ones that can be pickled.

`SupervisionError`, which a request raises when its actor's process has ended, is a private name of torchmonarch. Only this
module imports it.
"""

import asyncio
import atexit
import faulthandler
import functools
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, current_rank

from titanrl.errors import TitanRLError
from titanrl.loading import loading

__all__ = [
    "Actor",
    "ActorError",
    "RemoteError",
    "StoppedError",
    "SupervisionError",
    "cause_of",
    "concurrent_endpoint",
    "current_rank",
    "endpoint",
    "resolve",
    "set_up_process",
]

_log_file: Path | None = None  # of this process; None in the controller

STACKS_SIGNAL = signal.SIGUSR2
"""Signal at which a process appends the Python stacks of its threads to its log."""

P = ParamSpec("P")
R = TypeVar("R")
ErrorT = TypeVar("ErrorT", bound=BaseException)
SelfT = TypeVar("SelfT", bound=Actor)


class RemoteError(TitanRLError):
    """An actor's exception that cannot be pickled, as one line of text; the actor's log has its traceback."""


class StoppedError(TitanRLError):
    """The request cannot complete because part of the actor stopped; the cause is reported separately."""


def cause_of(error: BaseException) -> BaseException:
    """Return what an actor raised if the error is that of a request to it, else the error itself."""
    while isinstance(error, ActorError):
        error = error.exception
    return error


def portable(error: BaseException) -> Exception:
    """Return the error, or what another actor raised, if it survives pickling, else a `RemoteError` with its text."""
    error = cause_of(error)
    if isinstance(error, Exception):
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        except Exception:  # pickling runs arbitrary code
            logging.getLogger(__name__).debug("cannot pickle %r", type(error))
    return RemoteError(" ".join("".join(traceback.format_exception_only(error)).split()))


def located(error: ErrorT) -> ErrorT:
    """Note on an error, unless its text was written for the user, that this process raised it and where the traceback is."""
    is_told = isinstance(error, TitanRLError) and not isinstance(error, RemoteError)
    if _log_file is not None and not is_told and not hasattr(error, "__notes__"):
        error.add_note(f"raised in {_log_file.stem}; traceback: {_log_file}")
    return error


def is_stop(error: BaseException) -> bool:
    """Return True if the error only reports that a request was cancelled or its actor stopped, which is no failure."""
    return isinstance(cause_of(error), asyncio.CancelledError | StoppedError)


def replying(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Wrap an endpoint so that its exceptions reach the caller and the actor continues."""

    @functools.wraps(method)
    async def reply(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except GeneratorExit:  # the coroutine is being discarded
            raise
        except BaseException as error:  # some libraries derive exceptions from it
            log = logging.getLogger(type(self).__name__)
            if is_stop(error):
                log.info("%s did not finish: %r", method.__name__, error)
            else:
                log.exception("%s failed", method.__name__)
            raise located(portable(error)) from None

    return reply


def endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """Declare an endpoint whose calls run one at a time. While one runs, Monarch starts no other endpoint of the actor."""
    return monarch.actor.endpoint(replying(method))


def concurrent_endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """Declare an endpoint whose calls overlap with each other; a plain endpoint may start while they run."""
    return monarch.actor.concurrent_endpoint(replying(method))


class ProcessVariables(Actor):
    """Sets environment variables of its process."""

    @endpoint
    async def set(self, values: Mapping[str, str]) -> None:
        """Set these variables; later calls of C libraries see them, too."""
        os.environ.update(values)


async def resolve(call: Awaitable[R]) -> R:
    """Await a call. A Monarch future is not a coroutine, which `asyncio.create_task` needs."""
    return await call


def set_up_process(role: str, log_dir: Path, imports: Sequence[str], path: Sequence[str] = ()) -> None:
    """Redirect a new process's output to `<log_dir>/<role>_<rank>.log`, then import the modules of its actors.

    `path` is the controller's `sys.path`, so that modules of the user can be imported here, too.

    `<role>_<rank>.pid` identifies the process if it dies. Redirecting the file descriptors, not only `sys.stdout`, also
    captures the output of C++ libraries. The imports run here because actors spawned at the same time would import on several
    threads, where packages with circular imports fail.
    """
    global _log_file
    file = _log_file = log_dir / f"{role}_{current_rank().rank}.log"
    log = file.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")  # open until the process ends
    file.with_suffix(".pid").write_text(f"{os.getpid()} {socket.gethostname()}")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(STACKS_SIGNAL, log)
    logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    atexit.register(_exit_without_teardown, log)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    with loading():
        for module in imports:
            importlib.import_module(module)


def _exit_without_teardown(log: TextIO) -> None:
    """Exit after the other exit handlers, but without tearing down the interpreter.

    With torch loaded, the teardown takes most of a second of CPU time per process, longer than a run on a busy machine waits.
    The exit code is then always 0; the supervisor uses the time at which a process ended, not its exit code.
    """
    log.flush()
    os._exit(0)
