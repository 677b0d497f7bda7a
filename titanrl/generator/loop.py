"""The thread that drives an engine: it decodes while there is work, and runs commands between two steps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.actors import StoppedError
from titanrl.types import Completion, EngineLoad, GenerationRequest

if TYPE_CHECKING:
    from titanrl.generator.engine import Engine, Finished
    from titanrl.generator.lockstep import Leader

T = TypeVar("T")


class EngineStoppedError(StoppedError):
    """The engine's thread has ended; the text says why."""


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """What an engine has done since it was last asked."""

    num_tokens: int
    """Tokens of the completions that ended."""
    busy_s: float
    """Seconds spent decoding."""
    wall_s: float
    """Seconds passed."""


@dataclass(slots=True)
class _Group:
    """Requests that are answered together."""

    result: Future[list[Completion]]
    completions: list[Completion | None]
    num_missing: int
    """Completions still to come; spare requests may be left when there are none."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to run on the engine's thread, and its result."""

    run: Callable[["Engine | Leader"], Any]
    result: Future[Any]
    when_drained: bool
    """Wait until no request is running, and let nothing in until then."""


class EngineLoop:
    """Owns an engine and its thread; every touch of the engine happens there. Its methods are called from an event loop."""

    def __init__(self, build: Callable[[], "Engine | Leader"]) -> None:
        """Start the thread, which first builds the engine; `call` waits for that."""
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._draining: _Command | None = None
        self._closing = False
        self._waiting: dict[int, tuple[_Group, int]] = {}
        self.load = EngineLoad(num_requests=0, num_queued=0)
        self._stopped: str | None = None
        self._num_tokens, self._busy_s, self._since = 0, 0.0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    async def submit(
        self, groups: Sequence[Sequence[GenerationRequest]], num_kept: Sequence[int]
    ) -> list[Future[list[Completion]]]:
        """Let all requests join the batch at the same step; a group's completions come together, in their order.

        Once `num_kept` requests of a group have ended, the rest of it is aborted. If the engine refuses a request, none joins.
        """
        return await self.call(lambda engine: self._admit_all(engine, groups, num_kept))

    async def call(self, run: Callable[["Engine | Leader"], T], *, when_drained: bool = False) -> T:
        """Run something on the engine between two steps, or when all requests that came before have ended.

        Raises:
            EngineStoppedError: the engine could not be built, broke, or was closed.
        """
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)
        command = _Command(run, Future(), when_drained)
        self._inbox.put(command)
        return await asyncio.wrap_future(command.result)

    def take_stats(self) -> GeneratorStats:
        """Work done since the last call."""
        now = time.perf_counter()
        stats = GeneratorStats(self._num_tokens, self._busy_s, now - self._since)
        self._num_tokens, self._busy_s, self._since = 0, 0.0, now
        return stats

    async def close(self) -> None:
        """Stop after the current step; what is unfinished fails with `EngineStoppedError`."""
        self._closing = True
        self._inbox.put(None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    def _run(self, build: Callable[[], "Engine | Leader"]) -> None:
        """The thread: whatever ends it, nobody is left waiting."""
        reason = "the engine was closed"
        try:
            engine = build()
            while self._serve(engine):
                self._step(engine)
        except Exception as error:  # the edge of the thread: every waiter gets the cause
            reason = f"the engine failed: {error!r}"
            raise
        finally:
            self._stop(reason)

    def _serve(self, engine: "Engine | Leader") -> bool:
        """Run the commands that have come in; without anything to decode wait for one. False when told to stop."""
        while not engine.can_step or not self._inbox.empty() or self._draining is not None:
            command, self._draining = self._draining or self._inbox.get(), None
            if command is None:
                break
            if command.when_drained and engine.can_step:
                self._draining = command
                break
            try:
                command.result.set_result(command.run(engine))
            except Exception as error:  # belongs to whoever gave the command; the engine goes on
                command.result.set_exception(error)
        return not self._closing

    def _step(self, engine: "Engine | Leader") -> None:
        started = time.perf_counter()
        for finished in engine.step():
            self._num_tokens += len(finished.completion.token_ids)
            self._deliver(engine, finished)
        self.load = replace(engine.load, admits=self._draining is None)
        self._busy_s += time.perf_counter() - started

    def _admit_all(
        self, engine: "Engine | Leader", groups: Sequence[Sequence[GenerationRequest]], num_kept: Sequence[int]
    ) -> list[Future[list[Completion]]]:
        before = set(self._waiting)
        try:
            return [self._admit(engine, *group) for group in zip(groups, num_kept, strict=True)]
        except Exception:  # whatever it is, the caller gets it, and nothing of the call may stay behind
            self._take_back(engine, self._waiting.keys() - before)
            raise

    def _admit(
        self, engine: "Engine | Leader", requests: Sequence[GenerationRequest], num_kept: int
    ) -> Future[list[Completion]]:
        group = _Group(Future(), [None] * len(requests), num_kept)
        for place, request in enumerate(requests):
            self._waiting[engine.add(request)] = (group, place)
        return group.result

    def _deliver(self, engine: "Engine | Leader", finished: "Finished") -> None:
        """Put a completion into its group; the last one answers it, so that the event loop is woken once a group."""
        if finished.ticket not in self._waiting:
            return  # a spare that ended at the very step that completed its group
        group, place = self._waiting.pop(finished.ticket)
        group.completions[place] = finished.completion
        group.num_missing -= 1
        if group.num_missing == 0:
            self._abort_spares(engine, group)
            group.result.set_result([completion for completion in group.completions if completion is not None])

    def _abort_spares(self, engine: "Engine | Leader", group: _Group) -> None:
        if None in group.completions:
            self._take_back(engine, {ticket for ticket, (of, _) in self._waiting.items() if of is group})

    def _take_back(self, engine: "Engine | Leader", tickets: Set[int]) -> None:
        """Abort requests that nobody waits for any longer."""
        for ticket in tickets:
            del self._waiting[ticket]
        engine.abort(tickets)

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        for result in {id(group): group.result for group, _ in self._waiting.values()}.values():
            result.set_exception(EngineStoppedError(reason))
        commands = [self._draining]
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        for command in commands:
            if command is not None:
                command.result.set_exception(EngineStoppedError(reason))
