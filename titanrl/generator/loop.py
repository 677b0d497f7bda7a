"""The engine's thread, which decodes while requests are running and executes commands between decoding steps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.base.errors import StoppedError
from titanrl.carriers.record import span
from titanrl.carriers.types import Completion, EngineLoad, GenerationRequest, GenerationStats

if TYPE_CHECKING:
    from titanrl.generator.engine import Engine, Finished, Sampled
    from titanrl.generator.lockstep import Leader

T = TypeVar("T")

OnSampled = Callable[[int, "Sampled"], None]
"""Function that gets the index of a group, and the next tokens of its only request, on the engine's thread."""
SAMPLED_S = 0.02
"""Shortest time between two deliveries of tokens that are being sampled, in seconds. A tiny model would spend more time on them
than on its steps."""
SAMPLED_EACH_S = 0.001
"""The same for each request whose tokens are delivered, because their messages and events cost time."""


class EngineStoppedError(StoppedError):
    """The engine's thread has stopped; the message gives the reason."""


@dataclass(slots=True)
class _Group:
    """Requests whose completions are returned as one result."""

    result: Future[list[Completion]]
    completions: list[Completion | None]
    num_missing: int
    """Completions still needed; at 0 the remaining requests are spares."""
    on_sampled: Callable[["Sampled"], None] | None = None
    """Gets the tokens of the only request while they are sampled."""
    num_delivered: int = 0
    """Tokens that it has got."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A function to run on the engine's thread, and its result."""

    run: Callable[["Engine | Leader"], Any]
    result: Future[Any]
    when_drained: bool
    """True if the command waits until no request is running."""


class EngineLoop:
    """Owner of an engine and of the only thread that uses it. Call the methods from an event loop.

    Commands run in the order in which they were sent. A command that waits for a drain blocks all later commands, including
    new requests.
    """

    def __init__(self, build: Callable[[], "Engine | Leader"]) -> None:
        """Start the thread, which builds the engine before it runs the first command."""
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self._draining: _Command | None = None  # waits until no request is running
        self._dropping: str | None = None  # reason of `start_over`, until its command runs
        self._closing = False
        self._engine: Engine | Leader | None = None
        """Kept until the process ends: when it is collected, vLLM visits all objects of the process, which takes seconds."""
        self._waiting: dict[int, tuple[_Group, int]] = {}  # by ticket of the request: its group, and its index there
        self._streams: dict[int, _Group] = {}  # groups with `on_sampled`, by ticket
        self._next_delivery = 0.0
        self.load = EngineLoad(num_requests=0, num_queued=0)
        self._stopped: str | None = None
        self._num_tokens, self._busy_s, self._since = 0, 0.0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        *,
        when_drained: bool = False,
        on_sampled: OnSampled | None = None,
    ) -> list[Future[list[Completion]]]:
        """Add all requests to the batch at the same step; return one future per group.

        With `when_drained`, the requests first wait until all earlier requests have finished.

        When `num_kept` requests of a group have finished, the engine aborts the rest. The future then returns the completions
        in request order. If the engine refuses any request, none of this call's requests are added.

        `on_sampled` gets the tokens of groups with one request while they are sampled, except the last ones.
        """
        return await self.call(lambda engine: self._add_groups(engine, groups, num_kept, on_sampled), when_drained=when_drained)

    async def cancel(self, result: Future[list[Completion]]) -> None:
        """Cancel the requests of a group, whose future then returns no completions, unless it is done."""

        def cancel(engine: "Engine | Leader") -> None:
            tickets = {ticket for ticket, (group, _) in self._waiting.items() if group.result is result}
            if tickets:
                self._abort(engine, tickets)
                result.set_result([])

        await self.call(cancel)

    async def call(self, run: Callable[["Engine | Leader"], T], *, when_drained: bool = False) -> T:
        """Run a function on the engine between two steps; `when_drained` first waits until all earlier requests have finished.

        Raises:
            EngineStoppedError: The engine could not be built, failed, or was closed.
        """
        command = _Command(run, Future(), when_drained)
        self._inbox.put(command)
        if self._stopped is not None:  # checked after the put: a thread that stops later fails the command itself
            raise EngineStoppedError(self._stopped)
        return await asyncio.wrap_future(command.result)

    async def turn(self) -> None:
        """Wait until the thread has finished its current step or command, without waiting for a drain.

        Raises:
            EngineStoppedError: The thread has stopped.
        """
        turned: Future[None] = Future()
        self._turns.put(turned)
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)
        self._inbox.put(_Command(lambda engine: None, Future(), when_drained=False))  # wakes the thread
        await asyncio.wrap_future(turned)

    async def start_over(self, reason: str) -> None:
        """Drop all requests and the weights. Commands sent earlier run first, but no longer wait for requests to drain.

        Raises:
            EngineStoppedError: The thread has stopped.
        """

        def begin(engine: "Engine | Leader") -> None:
            self._drop(engine, reason)
            engine.invalidate(reason)
            self._dropping = None

        self._dropping = reason
        await self.call(begin)
        self.take_stats()

    def take_stats(self) -> GenerationStats:
        """Return the work done since the previous call."""
        now = time.perf_counter()
        stats = GenerationStats(num_tokens=self._num_tokens, busy_s=self._busy_s, wall_s=now - self._since, num_replicas=1)
        self._num_tokens, self._busy_s, self._since = 0, 0.0, now
        return stats

    async def close(self) -> None:
        """Stop after the current step; fail unfinished requests and commands with `EngineStoppedError`."""
        self._closing = True
        self._inbox.put(None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    def _run(self, build: Callable[[], "Engine | Leader"]) -> None:
        """Run the thread. When it exits for any reason, every pending future fails with that reason."""
        reason = "the engine was closed"
        try:
            engine = self._engine = build()
            while self._run_commands(engine):
                self._step(engine)
                self._end_turn()
        except Exception as error:  # thread boundary: every pending future gets the cause
            reason = f"the engine failed: {error!r}"
            raise
        finally:
            self._stop(reason)

    def _run_commands(self, engine: "Engine | Leader") -> bool:
        """Run the queued commands; block if there is nothing to decode. Return False once the loop is closing."""
        while not engine.can_step or not self._inbox.empty() or self._draining is not None:
            command, self._draining = self._draining or self._inbox.get(), None
            if command is None:
                break
            if self._dropping is not None:
                self._drop(engine, self._dropping)
            if command.when_drained and engine.can_step and not command.result.cancelled():
                self._draining = command
                break
            if not command.result.set_running_or_notify_cancel():  # else it cannot be cancelled any more
                continue
            try:
                command.result.set_result(command.run(engine))
            except Exception as error:  # belongs to the caller; the engine continues
                command.result.set_exception(error)
            self._end_turn()
        return not self._closing

    def _end_turn(self) -> None:
        while not self._turns.empty():
            turned = self._turns.get()
            if turned.set_running_or_notify_cancel():
                turned.set_result(None)

    def _step(self, engine: "Engine | Leader") -> None:
        started = time.perf_counter()
        with span("decode"):
            for finished in engine.step():
                self._num_tokens += len(finished.completion.token_ids)
                self._deliver(engine, finished)
            if self._streams and time.perf_counter() >= self._next_delivery:
                self._deliver_sampled(engine)
        self.load = replace(engine.load, admits=self._draining is None)
        self._busy_s += time.perf_counter() - started

    def _add_groups(
        self,
        engine: "Engine | Leader",
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        on_sampled: OnSampled | None,
    ) -> list[Future[list[Completion]]]:
        before = set(self._waiting)
        results = list[Future[list[Completion]]]()
        try:
            for requests, num_missing in zip(groups, num_kept, strict=True):
                group = _Group(Future(), [None] * len(requests), num_missing)
                if not requests:  # a group that needs no more turns in this round
                    group.result.set_result([])
                for index, request in enumerate(requests):
                    ticket = engine.add(request)
                    self._waiting[ticket] = (group, index)
                    if on_sampled is not None and len(requests) == 1:
                        group.on_sampled = partial(on_sampled, len(results))
                        self._streams[ticket] = group
                results.append(group.result)
        except Exception:  # raised to the caller, after removing the requests that were already added
            self._abort(engine, self._waiting.keys() - before)
            raise
        return results

    def _deliver(self, engine: "Engine | Leader", finished: "Finished") -> None:
        """Store a completion in its group; the last one needed resolves the group's future and aborts the spare requests."""
        if finished.ticket not in self._waiting:
            return  # a spare that finished at the same step as the last completion that its group needed
        group, index = self._waiting.pop(finished.ticket)
        self._streams.pop(finished.ticket, None)
        group.completions[index] = finished.completion
        group.num_missing -= 1
        if group.num_missing == 0:
            if None in group.completions:
                self._abort(engine, {ticket for ticket, (other, _) in self._waiting.items() if other is group})
            group.result.set_result([completion for completion in group.completions if completion is not None])

    def _deliver_sampled(self, engine: "Engine | Leader") -> None:
        sampled = engine.sampled({ticket: group.num_delivered for ticket, group in self._streams.items()})
        for ticket, (token_ids, logprobs) in sampled.items():
            group = self._streams[ticket]
            assert group.on_sampled is not None
            group.num_delivered += len(token_ids)
            group.on_sampled((token_ids, logprobs))
        self._next_delivery = time.perf_counter() + max(SAMPLED_S, SAMPLED_EACH_S * len(self._streams))

    def _abort(self, engine: "Engine | Leader", tickets: Set[int]) -> None:
        for ticket in tickets:
            del self._waiting[ticket]
            self._streams.pop(ticket, None)
        engine.abort(tickets)

    def _drop(self, engine: "Engine | Leader", reason: str) -> None:
        if self._waiting:
            self._fail_groups(StoppedError(reason))
            self._abort(engine, set(self._waiting))

    def _fail_groups(self, error: StoppedError) -> None:
        for result in {id(group): group.result for group, _ in self._waiting.values()}.values():
            result.set_exception(error)

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        self._fail_groups(EngineStoppedError(reason))
        commands = [self._draining]
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        waiting = [command.result for command in commands if command is not None]
        while not self._turns.empty():
            waiting.append(self._turns.get())
        for result in waiting:
            if result.set_running_or_notify_cancel():
                result.set_exception(EngineStoppedError(reason))
