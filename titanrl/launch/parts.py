"""Declare the requests of clients to their actors, each in one line (`Verb`), and replace parts of a run (`Part`).

A part is a generator replica, or a rollout worker with its storage shard. When one of its processes dies or hangs, the part is
respawned while the run continues. Requests that were lost can be retried (`Part.until_done`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from titanrl.base.errors import TitanRLError
from titanrl.launch.supervision import DISK_S, ActorDiedError, Pace, PartDiedError, Replaceable, Supervisor
from titanrl.processes.actors import ask_ranks
from titanrl.processes.children import Respawns

if TYPE_CHECKING:
    from titanrl.launch.fleet import Fleet

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M")

Limit = Literal["start_s", "step_s", "sync_s"]
"""Name of the longest wait in the section `timeouts`."""
PACE, DISK = Pace(), Pace(min_s=DISK_S)
"""Paces of requests, and of those that read or write files."""


class Verb(Generic[P, R, M]):
    """A request to the endpoint of the same name, as an attribute of a client's class. The endpoint's docstring describes it.

    The client has `mesh`, the actors, and `ask`, which awaits their replies. If it has a `model`, each request names it.

    Example: `keep_weights = Verb(PolicyTrainer.keep_weights, agreed)`
    """

    def __init__(
        self,
        endpoint: Callable[Concatenate[Any, P], Awaitable[R]],
        merge: Callable[[str, Sequence[R]], M],
        *,
        limit: Limit = "step_s",
        pace: Pace = PACE,
    ) -> None:
        """Declare the request to an endpoint; a private attribute has its name after an underscore.

        `merge` is a function of the name and of the ranks' replies, which returns the reply of the client.
        """
        self._merge, self._limit, self._pace = merge, limit, pace

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removeprefix("_")

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, M]]: ...
    @overload
    def __get__(self, client: object, owner: type) -> Callable[P, Coroutine[Any, Any, M]]: ...
    def __get__(self, client: object, owner: type) -> Callable[..., Coroutine[Any, Any, M]]:
        return self._request if client is None else partial(self._request, client)  # bound to the client like a method

    async def _request(self, client: Any, /, *args: P.args, **kwargs: P.kwargs) -> M:
        model = getattr(client, "model", None)
        named = {} if model is None else {"model": model}
        call = ask_ranks(getattr(client.mesh, self._name), *args, **kwargs, **named)
        return self._merge(self._name, await client.ask(self._name, call, self._limit, self._pace))


def done(name: str, replies: Sequence[object]) -> None:
    """Return nothing once all ranks have replied."""


def only(name: str, replies: Sequence[R]) -> R:
    """Return the reply of the only actor."""
    (reply,) = replies
    return reply


def per_rank(name: str, replies: Sequence[R]) -> Sequence[R]:
    """Return the replies in rank order."""
    return replies


def agreed(name: str, replies: Sequence[R]) -> R:
    """Return the reply on which all ranks agree; different replies mean that the ranks have diverged."""
    assert all(reply == replies[0] for reply in replies), f"ranks disagree after {name}: {replies}"
    return replies[0]


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, for example because the caller was interrupted."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an exception as retrieved
    return task


async def ask_each(
    parts: Iterable["Part"], endpoint: str, call: Callable[[Any], Awaitable[Any]], timeout_s: float
) -> list[Any]:
    """Send a request to some parts; return the replies, except those of parts that die."""

    async def reply(part: Part) -> list[Any]:
        with contextlib.suppress(PartDiedError):
            return [await part.ask(f"{part.role}.{endpoint}", call, timeout_s)]
        return []

    return [value for values in await asyncio.gather(*map(reply, parts)) for value in values]


class Recovery(Protocol):
    """Callbacks of a part's owner: recover from the part's death, and connect the replacement."""

    async def on_lost(self, part: "Part") -> None:
        """Queue the part's work again. Its processes have exited."""

    async def bring_up(self, part: "Part") -> None:
        """Start the part's actors, and connect them to their callers."""

    def probe(self, part: "Part") -> Awaitable[object]:
        """Send a request to which every process of the part replies immediately unless it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """Objects that all parts of a run share."""

    fleet: "Fleet"
    supervisor: Supervisor
    respawns: Respawns
    warn: Callable[[str], None]
    """Shows the user a message about a replacement."""
    start_s: float
    """Longest wait for a part to start, in seconds."""


class Part:
    """Processes that are replaced together, and their actors. When one process dies or hangs, all of them are respawned.

    A request sent with `ask` raises `PartDiedError` if the part dies. `until_done` resends it to the replacement.
    """

    def __init__(self, role: str, shared: SharedContext, spawn: Callable[["Part"], Awaitable[Any]], recovery: Recovery) -> None:
        self.role = role
        self.num_lives = 0
        """Number of times that the part was spawned."""
        self.actors: Any = None
        self._shared, self._spawn, self._recovery = shared, spawn, recovery
        self._lost: asyncio.Future[str]
        self._is_started, self._is_up = asyncio.Event(), asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_deaths(self) -> int:
        """Number of times that the part has died."""
        return self.num_lives - (not self._lost.done())

    @property
    def is_started(self) -> bool:
        """True after `mark_started`, until the part dies."""
        return self._is_started.is_set()

    @property
    def is_up(self) -> bool:
        """True if the part has started, its callers know it, and it has not died since."""
        return self._is_up.is_set()

    async def spawn(self) -> None:
        """Spawn the processes for the first time."""
        replaceable = Replaceable(on_death=self.die, probe=partial(self._recovery.probe, self), is_up=self._is_up.is_set)
        self._shared.supervisor.replace(self.role, replaceable)
        await self._spawn_once()

    async def start(self) -> None:
        """Start the actors. If the processes die while starting, wait for their replacement.

        If a replacement is already running, wait for it. Do nothing if the part is up because it outlived a restart of the run.
        """
        if self._is_up.is_set() or self._replacing is not None:
            await self.wait_until_up()
            return
        try:
            await self._recovery.bring_up(self)
        except PartDiedError:
            await self.wait_until_up()
        else:
            if not self._lost.done():
                self._is_up.set()

    async def ask(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = PACE) -> T:
        """Return the reply to a request; raise `PartDiedError` if the part dies first. `name` is role and endpoint."""
        life = self.num_lives
        try:
            return await self._shared.supervisor.ask(name, call(self.actors), timeout_s, pace, self._lost)
        except PartDiedError:
            raise
        except ActorDiedError as error:
            if self._shared.supervisor.failure:
                raise
            if life == self.num_lives:  # the actor died, but its process did not
                self.die(str(error))
            raise PartDiedError(str(error)) from None

    async def until_done(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = PACE) -> T:
        """Return the reply to a request like `ask`, but resend it to the replacement whenever the part dies."""
        while True:
            await self.wait_until_up()
            try:
                return await self.ask(name, call, timeout_s, pace)
            except PartDiedError as error:
                logger.info("resending %s: %s", name, error)

    async def wait_until_up(self) -> None:
        """Wait until the part or its replacement is up."""
        if not self._is_up.is_set():
            timeout_s = self._shared.start_s * 2  # the first start may fail shortly before it completes
            await self._shared.supervisor.ask(f"{self.role}.replacement", self._is_up.wait(), timeout_s)

    def mark_started(self) -> None:
        """Declare that the actors accept requests. `Recovery.bring_up` calls it before it connects them to their callers."""
        if not self._lost.done():
            self._is_started.set()

    def die(self, cause: str) -> None:
        """Replace the processes, regardless of their state. Further calls do nothing until the replacement has started."""
        if not self._lost.done():
            self._lost.set_result(cause)
        self._is_started.clear()
        self._is_up.clear()
        if not self._is_closed and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace(), name=f"replace {self.role}")

    async def survives(self) -> bool:
        """Return True if the part is still up after a fault that failed all requests; else restart its replacement."""
        if self._replacing is not None and not self._is_up.is_set():
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if not self._is_up.is_set():
            self.die(self._lost.result() if self._lost.done() else "its start was interrupted by a restart of the run")
        return self._is_up.is_set()

    async def close(self) -> None:
        """Cancel an unfinished replacement, and do not replace the part any more."""
        self._is_closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)

    async def _replace(self) -> None:
        """Respawn the processes until a start succeeds; fail the run if the limit on replacements is exceeded."""
        supervisor, started, cause = self._shared.supervisor, time.perf_counter(), self._lost.result()
        try:
            while self._lost.done():
                cause = self._lost.result()
                supervisor.record("fault", cause=cause)
                self._shared.respawns.add(self.role, cause)
                await supervisor.kill(self.role)
                await self._shared.fleet.retire(self.role)
                await self._recovery.on_lost(self)
                await self._spawn_once()
                with contextlib.suppress(PartDiedError):
                    await self._recovery.bring_up(self)
            self._is_up.set()
            seconds, respawns = time.perf_counter() - started, self._shared.respawns
            supervisor.record("respawn", part=self.role, cause=cause, seconds=round(seconds, 3))
            self._shared.warn(
                f"{cause}; replaced after {seconds:.1f} s ({respawns.num_recent} of {respawns.limit} replacements)"
            )
        except TitanRLError as error:
            supervisor.fail(error if self._shared.respawns.limit else ActorDiedError(cause, self.role))
        except Exception as error:  # of any kind, or requests would wait for the replacement indefinitely
            logger.exception("the replacement of %s failed", self.role)
            supervisor.fail(ActorDiedError(f"{cause}, and could not be replaced: {error!r}", self.role))

    async def _spawn_once(self) -> None:
        self.num_lives += 1
        self._lost = asyncio.get_running_loop().create_future()
        self.actors = await self._spawn(self)
