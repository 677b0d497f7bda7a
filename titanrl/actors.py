"""Actor base: endpoint decorators that make exceptions safe to send, and the setup of an actor's process and log.

In torchmonarch 0.7.0, an exception that cannot be pickled hangs the caller of a concurrent endpoint and kills the actor of a
plain one. A `CancelledError` raised by an endpoint silently stops the actor's dispatch loop. The decorators defined here
replace such exceptions with picklable ones.

A request raises `SupervisionError` if its actor's process died. The name is private to torchmonarch; import it from this
module only.
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
"""Signal that makes a process append the Python stacks of all its threads to its log."""

P = ParamSpec("P")
R = TypeVar("R")
ErrorT = TypeVar("ErrorT", bound=BaseException)
SelfT = TypeVar("SelfT", bound=Actor)


class RemoteError(TitanRLError):
    """An actor's unpicklable exception, reduced to one line of text; the actor's log has the traceback."""


class StoppedError(TitanRLError):
    """The request cannot complete because part of the actor stopped; the cause is reported separately."""


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that an actor raised, unwrapped from `ActorError`; return any other exception unchanged."""
    while isinstance(error, ActorError):
        error = error.exception
    return error


def portable(error: BaseException) -> Exception:
    """Return the cause of the error (see `cause_of`) if it survives pickling, else a `RemoteError` with its text."""
    error = cause_of(error)
    if isinstance(error, Exception):
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        except Exception:  # pickling runs arbitrary code
            logging.getLogger(__name__).debug("cannot pickle %r", type(error))
    return RemoteError(" ".join("".join(traceback.format_exception_only(error)).split()))


def located(error: ErrorT) -> ErrorT:
    """Add a note to an error that names this process and the log with the traceback.

    Errors with a text written for the user, and errors that already have a note, are left unchanged.
    """
    is_for_user = isinstance(error, TitanRLError) and not isinstance(error, RemoteError)
    if _log_file is not None and not is_for_user and not hasattr(error, "__notes__"):
        error.add_note(f"raised in {_log_file.stem}; traceback: {_log_file}")
    return error


def is_stop(error: BaseException) -> bool:
    """Return True if the error only reports a cancelled request or a stopped actor, neither of which is a failure."""
    return isinstance(cause_of(error), asyncio.CancelledError | StoppedError)


def replying(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Wrap an endpoint so that its exceptions reach the caller and the actor keeps running."""

    @functools.wraps(method)
    async def reply(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except GeneratorExit:  # the coroutine is being discarded
            raise
        except BaseException as error:  # some libraries derive their exceptions from it
            log = logging.getLogger(type(self).__name__)
            if is_stop(error):
                log.info("%s did not finish: %r", method.__name__, error)
            else:
                log.exception("%s failed", method.__name__)
            raise located(portable(error)) from None

    return reply


def endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """Declare an endpoint whose calls run one at a time. While one runs, Monarch starts no other endpoint of this actor."""
    return monarch.actor.endpoint(replying(method))


def concurrent_endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """Declare an endpoint whose calls may overlap; a plain endpoint may also start while they run."""
    return monarch.actor.concurrent_endpoint(replying(method))


class ProcessVariables(Actor):
    """Actor that sets environment variables in its process."""

    @endpoint
    async def set(self, values: Mapping[str, str]) -> None:
        """Set environment variables, which C libraries in the process also see from now on."""
        os.environ.update(values)


async def resolve(call: Awaitable[R]) -> R:
    """Await a call. This turns a Monarch future into the coroutine that `asyncio.create_task` requires."""
    return await call


def set_up_process(role: str, log_dir: Path, imports: Sequence[str], path: Sequence[str] = ()) -> None:
    """Redirect a new process's output to `<log_dir>/<role>_<rank>.log`, then import its actors' modules.

    Redirecting the file descriptors, in addition to `sys.stdout`, also captures the output of C++ libraries. The process id and
    host name in `<role>_<rank>.pid` identify the process if it dies.

    Modules are imported here because actors that are spawned at the same time import on several threads, where packages with
    circular imports fail.

    Args:
        role: Role of the process, such as `trainer`.
        log_dir: Folder of the logs.
        imports: Modules to import.
        path: The controller's `sys.path`, so that user modules can be imported.
    """
    global _log_file
    file = _log_file = log_dir / f"{role}_{current_rank().rank}.log"
    log = file.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")  # stays open until the process exits
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
    """Exit without tearing down the interpreter, after all other exit handlers have run.

    With torch loaded, the teardown takes most of a second of CPU time per process, longer than a run on a busy machine waits.
    The exit code is therefore always 0. The supervisor relies on the time of an exit, not on its code.
    """
    log.flush()
    os._exit(0)
