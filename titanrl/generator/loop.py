"""The thread that drives an engine: it decodes while there is work, and runs commands between two steps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from titanrl.generator.engine import Engine, Finished

T = TypeVar("T")


class EngineStoppedError(Exception):
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


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to run on the engine's thread, and its result."""

    run: Callable[["Engine"], Any]
    result: Future[Any]


class EngineLoop:
    """Owns an engine and its thread; every touch of the engine happens there. Its methods are called from an event loop."""

    def __init__(self, build: Callable[[], "Engine"]) -> None:
        """Start the thread, which first builds the engine; `call` waits for that."""
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[_Group, int]] = {}
        self._stopped: str | None = None
        self._num_tokens, self._busy_s, self._since = 0, 0.0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    async def submit(self, groups: Sequence[Sequence[GenerationRequest]]) -> list[Future[list[Completion]]]:
        """Let all requests join the batch at the same step; a group's completions come together, in their order."""
        return await self.call(lambda engine: [self._admit(engine, group) for group in groups])

    async def call(self, run: Callable[["Engine"], T]) -> T:
        """Run something on the engine between two steps.

        Raises:
            EngineStoppedError: the engine could not be built, broke, or was closed.
        """
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)
        command = _Command(run, Future())
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
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self, build: Callable[[], "Engine"]) -> None:
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

    def _serve(self, engine: "Engine") -> bool:
        """Run the commands that have come in; without running requests wait for one. False when told to stop."""
        while engine.num_running == 0 or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            try:
                command.result.set_result(command.run(engine))
            except Exception as error:  # belongs to whoever gave the command; the engine goes on
                command.result.set_exception(error)
        return True

    def _step(self, engine: "Engine") -> None:
        started = time.perf_counter()
        for finished in engine.step():
            self._num_tokens += len(finished.completion.token_ids)
            self._deliver(finished)
        self._busy_s += time.perf_counter() - started

    def _admit(self, engine: "Engine", requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        group = _Group(Future(), [None] * len(requests), len(requests))
        for place, request in enumerate(requests):
            self._waiting[engine.add(request)] = (group, place)
        return group.result

    def _deliver(self, finished: "Finished") -> None:
        """Put a completion into its group; the last one answers it, so that the event loop is woken once a group."""
        group, place = self._waiting.pop(finished.ticket)
        group.completions[place] = finished.completion
        group.num_missing -= 1
        if group.num_missing == 0:
            group.result.set_result([completion for completion in group.completions if completion is not None])

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        for result in {id(group): group.result for group, _ in self._waiting.values()}.values():
            result.set_exception(EngineStoppedError(reason))
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command.result.set_exception(EngineStoppedError(reason))
