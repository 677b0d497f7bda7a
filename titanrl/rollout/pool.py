"""A rollout worker's view of the generators: a `generate` call that finds the least loaded replica."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Channel

from titanrl.types import Completion, EngineLoad, GenerationRequest

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One group, and who waits for its completions."""

    requests: Sequence[GenerationRequest]
    num_kept: int
    answer: asyncio.Future[list[Completion]]


@dataclass(slots=True)
class _Replica:
    """One generator, its load, and the groups gathered for it in this tick of the event loop."""

    actor: Any
    limit: int
    """Requests of this worker that it seems to be able to decode at once."""
    num_running: int = 0
    """Requests of this worker that it has."""
    gathered: list[_Call] = field(default_factory=list)

    def learn(self, load: EngineLoad, max_limit: int) -> None:
        """Take note of what it says: no more than it decodes while requests queue, one more when none does."""
        decoding = load.num_requests - load.num_queued
        if load.num_queued:
            self.limit = max(1, self.num_running * decoding // load.num_requests)
        else:
            self.limit = min(max_limit, self.limit + 1)


class GeneratorPool:
    """Spreads groups over replicas; a group stays on one, where its prompt is computed once.

    Groups of one tick of the event loop reach a replica as one message, and so join its batch at the same decoding step: a
    synchronous run generates the same batches, hence the same numbers, every time. Answers come back group by group, so
    that early groups are scored while late ones are still being generated.
    """

    def __init__(self, replicas: Sequence[Any], max_num_seqs: int) -> None:
        """Take one generator actor per replica; each decodes `max_num_seqs` requests at once if its cache has room."""
        self._replicas = [_Replica(actor, max_num_seqs) for actor in replicas]
        self._max_num_seqs = max_num_seqs
        self._flushes: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    async def room(self, group_size: int) -> int:
        """Groups that can start without queueing, at least one; waits for it. An idle replica always has room for one."""
        while True:
            free = [max(0, replica.limit - replica.num_running) // group_size for replica in self._replicas]
            idle = any(replica.num_running == 0 for replica in self._replicas)
            if sum(free) or idle:
                return max(1, sum(free))
            self._answered.clear()
            await self._answered.wait()

    async def generate(self, requests: Sequence[GenerationRequest], num_kept: int | None = None) -> list[Completion]:
        """Completions of one group, all from the replica with the least work; of spare requests only the first to end."""
        replica = min(self._replicas, key=lambda replica: replica.num_running)
        replica.num_running += len(requests)
        call = _Call(requests, num_kept or len(requests), asyncio.get_running_loop().create_future())
        if not replica.gathered:
            flush = asyncio.create_task(self._flush(replica))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        replica.gathered.append(call)
        return await call.answer

    async def _flush(self, replica: _Replica) -> None:
        """Send what was gathered, and hand each answer on as it comes."""
        calls, replica.gathered = replica.gathered, []
        groups, num_kept = [call.requests for call in calls], [call.num_kept for call in calls]
        port, receiver = Channel[Any].open()
        done = asyncio.ensure_future(_awaited(replica.actor.generate.call_one(groups, num_kept, port)))
        try:
            for _ in calls:
                place, completions, load = await _unless_failed(done, receiver.recv())
                calls[place].answer.set_result(completions)
                self._note_answer(replica, calls[place])
                replica.learn(load, self._max_num_seqs)
            await done
        except Exception as error:  # belongs to the callers, each of whom raises it
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
                    self._note_answer(replica, call)

    def _note_answer(self, replica: _Replica, call: _Call) -> None:
        replica.num_running -= len(call.requests)
        self._answered.set()


async def _unless_failed(call: asyncio.Future[None], message: Awaitable[T]) -> T:
    """The next message of a call, or the error it fails with. A call that has returned has sent all its messages."""
    receiving = asyncio.ensure_future(_awaited(message))
    waiting: set[asyncio.Future[Any]] = {call, receiving}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not receiving.done() and (call.cancelled() or call.exception() is not None):
        receiving.cancel()
        await call
    return await receiving


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
