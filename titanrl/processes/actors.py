"""Actor base: endpoints whose exceptions are safe to send, requests, a barrier for endpoints, and setup of process and log.

In torchmonarch 0.7.0, an exception that cannot be pickled hangs the caller of a concurrent endpoint and kills the actor of a
plain one. A `CancelledError` raised by an endpoint silently stops the actor's dispatch loop. The decorators defined here
replace such exceptions with picklable ones.

A request raises `SupervisionError` if its actor's process died. The name is private to torchmonarch; import it from this
module only.

Requests that are repeated at every step use `ask_actor` and `ask_ranks` instead of torchmonarch's `call_one` and `call`. Those
open a port for each reply, and torchmonarch 0.7.0 never forgets it: a sender keeps the last sequence number of every port that
it has sent to, 0.3 kB per request in each of the two processes, and `call_one` leaves another 0.6 kB in the caller's process
for the port that forwards the reply. Here, all replies to an event loop come through one port, which stays open. A request to a
dead actor gets no reply; the controller notices the death and ends the wait (`launch/supervision.py`).
"""

import asyncio
import atexit
import faulthandler
import functools
import importlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import sys
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TextIO, TypeVar

import cloudpickle
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as SupervisionError
from monarch.actor import Actor as Actor
from monarch.actor import ActorError as ActorError
from monarch.actor import Channel
from monarch.actor import current_rank as current_rank

from titanrl.base.errors import StoppedError, TitanRLError
from titanrl.base.files import replace_text
from titanrl.base.plugins import loading
from titanrl.carriers.record import open_timeline, process_start, span
from titanrl.processes.children import STACKS_SIGNAL

_log_file: Path | None = None  # of this process; None in the controller

LOOPBACK = "127.0.0.1"
"""Address of a process group whose ranks are on one machine."""

P = ParamSpec("P")
R = TypeVar("R")
ErrorT = TypeVar("ErrorT", bound=BaseException)
SelfT = TypeVar("SelfT")
PartT = TypeVar("PartT")


class RemoteError(TitanRLError):
    """An actor's unpicklable exception, reduced to one line of text; the actor's log has the traceback."""


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


@dataclass(frozen=True, slots=True)
class ReplyPort:
    """Address of the replies to one request. It can be sent to another process."""

    port: Any
    """Port of the asking event loop."""
    inbox: str
    """Name of the port."""
    number: int

    def send(self, value: object) -> None:
        """Send a reply, after those of `send_soon`."""
        _send_pending(asyncio.get_running_loop(), self.inbox)
        self.port.send([(self.number, value)])

    def send_soon(self, value: object) -> None:
        """Send a reply in one message with all others that this event loop sends to the same one in this tick."""
        loop = asyncio.get_running_loop()
        _, values = _pending.setdefault((loop, self.inbox), (self.port, []))
        if not values:
            loop.call_soon(_send_pending, loop, self.inbox)
        values.append((self.number, value))


_pending: dict[tuple[asyncio.AbstractEventLoop, str], tuple[Any, list[tuple[int, object]]]] = {}


def _send_pending(loop: asyncio.AbstractEventLoop, inbox: str) -> None:
    port, values = _pending.pop((loop, inbox), (None, []))
    if values:
        port.send(values)


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of an endpoint on one rank."""

    rank: int
    size: int
    """Number of ranks that got the request."""
    value: Any
    error: Exception | None


def replying(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Callable[..., Coroutine[Any, Any, R | None]]:
    """Wrap an endpoint so that its exceptions reach the caller and the actor keeps running.

    If the first argument is an `Asked`, the result goes to its address, else to the caller of `call` or `call_one`.
    """

    async def result(self: SelfT, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with span(f"{type(self).__name__}.{method.__name__}", "serve"):
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

    @functools.wraps(method)
    async def reply(self: SelfT, *args: Any, **kwargs: Any) -> R | None:
        if not (args and isinstance(args[0], Asked)):
            return await result(self, *args, **kwargs)
        asked, place = args[0], current_rank()
        try:
            answer = Answer(place.rank, place.extent.nelements, await result(self, *args[1:], **kwargs), None)
        except Exception as error:  # `result` raises nothing that cannot be sent
            answer = Answer(place.rank, place.extent.nelements, None, error)
        try:
            asked.replies.send(answer)
        except Exception as error:  # the value cannot be pickled
            asked.replies.send(replace(answer, value=None, error=located(portable(error))))
        return None

    del reply.__wrapped__  # or torchmonarch would refuse the additional argument
    return reply


class PickledPort:
    """A port that is pickled only once: torchmonarch pickles the code of a function with each port, which takes 0.1 ms."""

    def __init__(self, port: Any) -> None:
        self.send, self._pickled = port.send, cloudpickle.dumps(port)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


@dataclass(frozen=True, slots=True)
class Asked:
    """First argument of a request that `ask_actor` or `ask_ranks` sends."""

    replies: ReplyPort


class _Inbox:
    """The port through which an event loop gets all replies, and what waits for them."""

    def __init__(self) -> None:
        port, self._receiver = Channel[Any].open()
        self._port = PickledPort(port)
        self._name = secrets.token_hex(8)
        self._handlers: dict[int, Callable[[Any], None]] = {}
        self._numbers = itertools.count()
        self._receiving = asyncio.create_task(self._receive(), name="replies")
        self.requests: set[asyncio.Future[Any]] = set()
        """Requests without a complete reply."""

    @classmethod
    def of_loop(cls) -> "_Inbox":
        """Return the inbox of the running event loop. The first call opens it."""
        loop = asyncio.get_running_loop()
        inbox = _inboxes.get(loop)
        if inbox is None:
            inbox = _inboxes[loop] = cls()
        return inbox

    def open(self, handler: Callable[[Any], None]) -> ReplyPort:
        """Return an address whose replies go to a function until `close`."""
        number = next(self._numbers)
        self._handlers[number] = handler
        return ReplyPort(self._port, self._name, number)

    def close(self, replies: ReplyPort) -> None:
        """Ignore later replies to an address."""
        del self._handlers[replies.number]

    async def _receive(self) -> None:
        while True:
            try:
                replies = await self._receiver.recv()
            except Exception as error:  # an unreadable reply, or torchmonarch has shut down
                for request in list(self.requests):
                    if not request.done():
                        request.set_exception(error)
                if isinstance(error, EOFError):
                    return
                continue
            for number, value in replies:
                handler = self._handlers.get(number)
                if handler is not None:
                    handler(value)


_inboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox]" = weakref.WeakKeyDictionary()


def ask_actor(endpoint: Any, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
    """Send a request to the only actor of a mesh; return a future of its reply. The endpoint must be of this module.

    The request is sent immediately. Cancelling the future does not cancel it. If the actor raises, the future has an
    `ActorError`; see `cause_of`.
    """
    return _ask(endpoint, args, kwargs, _only)


def ask_ranks(endpoint: Any, *args: Any, **kwargs: Any) -> "asyncio.Future[list[Any]]":
    """Send a request to all actors of a mesh; return a future of their replies in rank order, like `ask_actor`.

    It waits for all ranks, and then raises the error of the first rank that has one.
    """
    return _ask(endpoint, args, kwargs, list)


@contextmanager
def open_replies() -> "Iterator[tuple[ReplyPort, asyncio.Queue[Any]]]":
    """Open an address for several replies to one request, and a queue that gets them while the body runs.

    They arrive in order, and before the result of the endpoint that sends them.
    """
    inbox, queue = _Inbox.of_loop(), asyncio.Queue[Any]()
    replies = inbox.open(queue.put_nowait)
    try:
        yield replies, queue
    finally:
        inbox.close(replies)


def _ask(
    endpoint: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result_of: Callable[[list[Any]], R]
) -> "asyncio.Future[R]":
    inbox, answers = _Inbox.of_loop(), dict[int, Answer]()
    request: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def on_answer(answer: Answer) -> None:
        answers[answer.rank] = answer
        if len(answers) == answer.size and not request.done():
            ordered = [answers[rank] for rank in sorted(answers)]
            failed = next((each.error for each in ordered if each.error is not None), None)
            if failed is None:
                request.set_result(result_of([each.value for each in ordered]))
            else:
                request.set_exception(ActorError(failed))

    def end(done: "asyncio.Future[R]") -> None:
        inbox.close(replies)
        inbox.requests.discard(done)

    replies = inbox.open(on_answer)
    inbox.requests.add(request)
    request.add_done_callback(end)
    try:
        endpoint.broadcast(Asked(replies), *args, **kwargs)
    except SupervisionError as error:  # the actor is known to be dead
        request.set_exception(error)
    return request


def _only(replies: list[R]) -> R:
    (reply,) = replies
    return reply


def endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Callable[Concatenate[SelfT, P], Awaitable[R]]:
    """Declare an endpoint whose calls run one at a time. While one runs, Monarch starts no other endpoint of this actor."""
    declared: Callable[Concatenate[SelfT, P], Awaitable[R]] = monarch.actor.endpoint(replying(method))
    return declared


def concurrent_endpoint(method: Callable[Concatenate[SelfT, P], Awaitable[R]]) -> Any:
    """Declare an endpoint whose calls may overlap; a plain endpoint may also start while they run."""
    return monarch.actor.concurrent_endpoint(replying(method))


class Gathering(Generic[PartT, R]):
    """Collects numbered parts from several callers, runs a function on all parts, and returns its result to every caller.

    Callers may arrive in any order. The next round can start as soon as the function has been called. All calls must come from
    one event loop.
    """

    def __init__(self, run: Callable[[Mapping[int, PartT]], Coroutine[Any, Any, R]]) -> None:
        """Start without parts. `run` gets all parts by number, in ascending order."""
        self._run = run
        self._parts: dict[int, PartT] = {}
        self._result: asyncio.Future[R] | None = None
        self._running: dict[asyncio.Task[None], asyncio.Future[R]] = {}

    async def add(self, parts: Mapping[int, PartT], num_parts: int) -> R:
        """Add a caller's parts, wait until `num_parts` parts have arrived, and return the function's result.

        Cancelling a caller does not withdraw its parts. If the function raises, every caller gets the exception.
        """
        assert not parts.keys() & self._parts.keys(), "part added twice"
        result = self._result = self._result or asyncio.get_running_loop().create_future()
        self._parts |= parts
        if len(self._parts) == num_parts:
            complete, self._parts, self._result = dict(sorted(self._parts.items())), {}, None
            task = asyncio.create_task(self._finish(complete, result), name="gathered work")
            self._running[task] = result
            task.add_done_callback(self._running.pop)
        return await asyncio.shield(result)

    def reset(self, error: Exception) -> None:
        """Discard all parts after a caller died: fail the waiting calls with `error`, and cancel a running function."""
        for result in [self._result, *self._running.values()]:
            if result is not None and not result.done():
                result.set_exception(error)
                result.exception()  # mark it as retrieved, because a dead caller does not
        for task in self._running:
            task.cancel()
        self._parts, self._result = {}, None

    async def _finish(self, parts: Mapping[int, PartT], result: "asyncio.Future[R]") -> None:
        try:
            value = await self._run(parts)
        except Exception as error:  # any exception goes to all callers
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)


class ProcessVariables(Actor):
    """Actor that sets environment variables in its process, and opens the store of a process group on this machine."""

    @endpoint
    async def set(self, values: Mapping[str, str]) -> None:
        """Set environment variables, which C libraries in the process also see from now on."""
        os.environ.update(values)

    @endpoint
    async def open_store(self) -> int:
        """Open a store for a process group, and return its port. It accepts only connections from this machine.

        By default, torch's stores listen on all interfaces.
        """
        from torch.distributed import TCPStore

        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            port: int = listener.getsockname()[1]
            self._store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return port


async def resolve(call: Awaitable[R]) -> R:
    """Await a call. This turns a Monarch future into the coroutine that `asyncio.create_task` requires."""
    return await call


def set_up_process(role: str, log_dir: Path, imports: Sequence[str], path: Sequence[str] = (), span_bytes: int = 0) -> None:
    """Redirect a new process's output to `<log_dir>/<role>_<rank>.log`, then import its actors' modules.

    Redirecting the file descriptors, in addition to `sys.stdout`, also captures the output of C++ libraries. The process id and
    host name in `<role>_<rank>.pid` identify the process if it dies.

    Modules are imported here because actors that are spawned at the same time import on several threads, where packages with
    circular imports fail. `path` is the controller's `sys.path`, so that user modules can be imported.

    The process records its spans in the run directory, the parent of `log_dir`, up to `span_bytes`; with 0 it records none.
    """
    global _log_file
    file = _log_file = log_dir / f"{role}_{current_rank().rank}.log"
    log = file.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")  # stays open until the process exits
    replace_text(file.with_suffix(".pid"), f"{os.getpid()} {socket.gethostname()}")  # its errors name the file
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(STACKS_SIGNAL, log)
    logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    atexit.register(_exit_without_teardown, log)
    if span_bytes:
        open_timeline(log_dir.parent, file.stem, span_bytes, is_server=True, since=process_start())
    sys.path.extend(entry for entry in path if entry not in sys.path)
    with loading(), span("import the packages"):
        for module in imports:
            importlib.import_module(module)


def _exit_without_teardown(log: TextIO) -> None:
    """Exit without tearing down the interpreter, after all other exit handlers have run.

    With torch loaded, the teardown takes most of a second of CPU time per process, longer than a run on a busy machine waits.
    The exit code is therefore always 0. The supervisor relies on the time of an exit, not on its code.
    """
    log.flush()
    os._exit(0)
