"""Parts of a run that are replaced while it goes on: a generator replica, or a rollout worker with its storage shard."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from titanrl.errors import TitanRLError
from titanrl.launch.deadlines import Pace
from titanrl.launch.fleet import Fleet
from titanrl.launch.respawns import Respawns
from titanrl.launch.supervision import ActorDiedError, PartDiedError, Replaceable, Supervisor

T = TypeVar("T")
logger = logging.getLogger(__name__)

_PACE = Pace()


class Recovery(Protocol):
    """Consequences of a replacement for the other parts; the owner of the parts implements them."""

    async def on_lost(self, part: "Part") -> None:
        """Queue the part's work again. Its processes have ended."""

    async def bring_up(self, part: "Part") -> None:
        """Start the part's actors, and introduce them to those that call them."""

    def probe(self, part: "Part") -> Awaitable[object]:
        """Request what every process of the part answers at once, unless it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Objects that all parts of a run share."""

    fleet: Fleet
    supervisor: Supervisor
    respawns: Respawns
    warn: Callable[[str], None]
    """Tells the user of a replacement."""
    start_s: float
    """Longest wait for a part to start."""


class Part:
    """Processes that live and die together, and their actors. When one of them ends or hangs, all of them are replaced.

    A request with `ask` fails with `PartDiedError` if the part dies. `until_done` sends it again to the replacement.
    """

    def __init__(self, role: str, around: Surroundings, spawn: Callable[["Part"], Awaitable[Any]], recovery: Recovery) -> None:
        """Start nothing yet; `spawn` does, with the actors as its result.

        Args:
            role: name of the processes.
            around: objects that all parts share.
            spawn: function that spawns processes and actors.
            recovery: consequences of a replacement for others.
        """
        self.role = role
        self.num_lives = 0
        """Number of times that the part was spawned."""
        self.actors: Any = None
        """Actors of the present processes."""
        self._around, self._spawn, self._recovery = around, spawn, recovery
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
        """True if the part has started and did not die since."""
        return self._is_up.is_set()

    async def spawn(self) -> None:
        """Spawn the processes for the first time."""
        self._around.supervisor.replace(self.role, Replaceable(on_end=self.die, probe=partial(self._recovery.probe, self)))
        await self._spawn_once()

    async def start(self) -> None:
        """Start the actors of the first processes; if these die meanwhile, those of their replacement.

        Wait for a replacement that has begun. Do nothing if the part is up, because it has outlived a restart of the run.
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

    async def ask(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = _PACE) -> T:
        """Return the reply to a request.

        Args:
            name: part and endpoint, such as `generator_0.pull_weights`.
            call: function that sends the request to the actors.
            timeout_s: longest wait.
            pace: parameters of the learned deadline.

        Raises:
            PartDiedError: the part died first.
        """
        life = self.num_lives
        try:
            return await self._around.supervisor.ask(name, call(self.actors), timeout_s, pace, self._lost)
        except PartDiedError:
            raise
        except ActorDiedError as error:
            if self._around.supervisor.failure:
                raise
            if life == self.num_lives:  # an actor has died, but its process has not
                self.die(str(error))
            raise PartDiedError(str(error)) from None

    async def until_done(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = _PACE) -> T:
        """Return the reply to a request as `ask` does, but send it again if the part dies."""
        while True:
            await self.wait_until_up()
            try:
                return await self.ask(name, call, timeout_s, pace)
            except PartDiedError as error:
                logger.info("%s is sent again: %s", name, error)

    async def wait_until_up(self) -> None:
        """Wait until the part has started, or its replacement has."""
        if not self._is_up.is_set():
            timeout_s = self._around.start_s * 2  # the first start may fail when it is almost done
            await self._around.supervisor.ask(f"{self.role}.replacement", self._is_up.wait(), timeout_s)

    def mark_started(self) -> None:
        """Note, in `Recovery.bring_up`, that the actors accept requests, although others do not know them yet."""
        if not self._lost.done():
            self._is_started.set()

    def die(self, cause: str) -> None:
        """Replace the processes, whatever state they are in. Further calls have no effect until the replacement has started."""
        if not self._lost.done():
            self._lost.set_result(cause)
        self._is_started.clear()
        self._is_up.clear()
        if not self._is_closed and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace(), name=f"replace {self.role}")

    async def survives(self) -> bool:
        """Return True if the part has outlived a fault that ended all requests; else begin its replacement again."""
        if self._replacing is not None and not self._is_up.is_set():
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if not self._is_up.is_set():
            self.die(self._lost.result() if self._lost.done() else "its start was interrupted by a restart of the run")
        return self._is_up.is_set()

    async def close(self) -> None:
        """Cancel a replacement that has not finished, and replace nothing from now on."""
        self._is_closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)

    async def _replace(self) -> None:
        """Replace the processes until a replacement has started; end the run if that happens too often."""
        supervisor, started, cause = self._around.supervisor, time.perf_counter(), self._lost.result()
        try:
            while self._lost.done():
                cause = self._lost.result()
                supervisor.record("fault", cause=cause)
                self._around.respawns.add(self.role, cause)
                await supervisor.kill(self.role)
                await self._around.fleet.retire(self.role)
                await self._recovery.on_lost(self)
                await self._spawn_once()
                with contextlib.suppress(PartDiedError):
                    await self._recovery.bring_up(self)
            self._is_up.set()
            seconds, respawns = time.perf_counter() - started, self._around.respawns
            supervisor.record("respawn", part=self.role, cause=cause, seconds=round(seconds, 3))
            self._around.warn(
                f"{cause}; replaced after {seconds:.1f} s ({respawns.num_recent} of {respawns.limit} replacements)"
            )
        except TitanRLError as error:
            supervisor.fail(error if self._around.respawns.limit else ActorDiedError(cause, self.role))
        except Exception as error:  # of any kind: requests would wait for the replacement
            logger.exception("the replacement of %s failed", self.role)
            supervisor.fail(ActorDiedError(f"{cause}, and could not be replaced: {error!r}", self.role))

    async def _spawn_once(self) -> None:
        self.num_lives += 1
        self._lost = asyncio.get_running_loop().create_future()
        self.actors = await self._spawn(self)
