"""What all actors share: endpoints that neither kill nor wedge their actor, and processes that log to a file of their own.

torchmonarch 0.7.0 hangs the caller when a concurrent endpoint raises something that cannot be pickled, kills the actor
when a plain one does, and silently ends the dispatch loop when `CancelledError` leaks out. Here every endpoint answers
with an exception that survives the journey.
"""

import asyncio
import atexit
import faulthandler
import functools
import importlib
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

import monarch.actor
from monarch.actor import Actor, ActorError, current_rank

from titanrl.loading import loading

__all__ = [
    "Actor",
    "RemoteError",
    "StoppedError",
    "concurrent_endpoint",
    "current_rank",
    "endpoint",
    "resolve",
    "set_up_process",
]

P = ParamSpec("P")
R = TypeVar("R")
SelfT = TypeVar("SelfT", bound=Actor)


class RemoteError(Exception):
    """An error in an actor that cannot travel as it is; its text is the remote traceback."""


class StoppedError(Exception):
    """What was asked of an actor will not come, because a part of it has ended; whatever ended it has told why."""


def portable(error: BaseException) -> Exception:
    """The error itself if a pickle round trip keeps it, else a `RemoteError` with its traceback."""
    if isinstance(error, Exception):
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        except Exception:  # any failure to pickle means the same: the error cannot travel
            logging.getLogger(__name__).debug("cannot pickle %r", type(error))
    return RemoteError("".join(traceback.format_exception(error)))


def is_stop(error: BaseException) -> bool:
    """Whether an error only tells that something was stopped, here or at an actor that was asked, which is no failure."""
    cause = error.exception if isinstance(error, ActorError) else error
    return isinstance(cause, asyncio.CancelledError | StoppedError)


def answering(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Wrap an endpoint so that whatever goes wrong in it reaches the caller, and the actor lives on."""

    @functools.wraps(method)
    async def answer(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            log = logging.getLogger(type(self).__name__)
            if is_stop(error):
                log.info("%s was not finished: %r", method.__name__, error)
            else:
                log.exception("%s failed", method.__name__)
            raise portable(error) from None

    return answer


def endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """An endpoint that runs alone: calls to the actor's plain endpoints are served one after another."""
    return monarch.actor.endpoint(answering(method))


def concurrent_endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """An endpoint whose calls overlap with each other and with plain ones."""
    return monarch.actor.concurrent_endpoint(answering(method))


async def resolve(call: Awaitable[R]) -> R:
    """Await a call. A Monarch future is not a coroutine, which `asyncio.create_task` needs."""
    return await call


def set_up_process(role: str, log_dir: Path, imports: Sequence[str]) -> None:
    """Prepare a new process before its actors: output to `<log_dir>/<role>_<rank>.log`, then the modules of its actors.

    `<role>_<rank>.pid` beside it tells who the process is, should it die. Redirecting the file descriptors, not only
    `sys.stdout`, also catches what C++ libraries print. The imports come here because actors spawned together would import on
    several threads, where packages with circular imports fail.
    """
    log = open(log_dir / f"{role}_{current_rank().rank}.log", "a", buffering=1)  # noqa: SIM115 - open as long as the process
    (log_dir / f"{role}_{current_rank().rank}.pid").write_text(f"{os.getpid()} {socket.gethostname()}")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    atexit.register(_end_at_once, log)
    with loading():
        for module in imports:
            importlib.import_module(module)


def _end_at_once(log: TextIO) -> None:
    """End a process whose actors have stopped, after the exit handlers of what it imported and without taking Python apart.

    With torch loaded that takes most of a second of CPU time in each process: under load, longer than a run waits for its end.
    How a process ended is not in its exit code, then; the supervisor does not look at that, but at when it ended.
    """
    log.flush()
    os._exit(0)
