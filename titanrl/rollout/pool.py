"""A rollout worker's view of the generators: a `generate` call that finds the least loaded replica."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Channel

from titanrl.rollout.routing import Router, Seat, SessionKey
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
    seat: Seat
    limit: int
    """Requests of this worker that it seems to be able to decode at once."""
    gathered: list[_Call] = field(default_factory=list)

    def learn(self, load: EngineLoad, max_limit: int) -> None:
        """Take note of what it says: no more than it decodes while requests queue, one more when none does."""
        decoding = load.num_requests - load.num_queued
        if load.num_queued:
            self.limit = max(1, self.seat.num_running * decoding // load.num_requests)
        else:
            self.limit = min(max_limit, self.limit + 1)


class GeneratorPool:
    """Spreads groups over replicas; a group stays on one, where its prompt is computed once.

    Groups of one tick of the event loop reach a replica as one message, and so join its batch at the same decoding step: a
    synchronous run generates the same batches, hence the same numbers, every time. Answers come back as groups end, so
    that early groups are scored while late ones are still being generated.
    """

    def __init__(self, replicas: Sequence[Any], max_num_seqs: int) -> None:
        """Take one generator actor per replica; each decodes `max_num_seqs` requests at once if its cache has room."""
        self._router = Router(len(replicas))
        self._replicas = [_Replica(actor, seat, max_num_seqs) for actor, seat in zip(replicas, self._router, strict=True)]
        self._max_num_seqs = max_num_seqs
        self._flushes: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    async def room(self, group_size: int) -> int:
        """Groups that can start without queueing, at least one; waits for it. An idle replica always has room for one."""
        while True:
            usable = [self._replicas[seat.place] for seat in self._router.usable()]
            free = [max(0, replica.limit - replica.seat.num_running) // group_size for replica in usable]
            idle = any(replica.seat.num_running == 0 for replica in usable)
            if sum(free) or idle:
                return max(1, sum(free))
            self._answered.clear()
            await self._answered.wait()

    @contextmanager
    def session(self) -> "Iterator[Session]":
        """A conversation with the policy: all of its turns go to one replica, which has the tokens up to there cached.

        Example:
            with pool.session() as session:
                first = await session.generate(requests)
                ...
                second = await session.generate(longer_requests)
        """
        key = SessionKey()
        try:
            yield Session(self, key)
        finally:
            self._router.leave(key)

    async def generate(self, requests: Sequence[GenerationRequest], num_kept: int | None = None) -> list[Completion]:
        """Completions of one group, all from the replica with the least work; of spare requests only the first to end."""
        with self.session() as session:
            return await session.generate(requests, num_kept)

    async def _generate(self, requests: Sequence[GenerationRequest], num_kept: int | None, key: SessionKey) -> list[Completion]:
        replica = self._replicas[self._router.assign(len(requests), key).place]
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
        done.add_done_callback(lambda call: call.cancelled() or call.exception())  # when closing nobody waits for it
        try:
            num_missing = len(calls)
            while num_missing:
                answered, load = await _unless_failed(done, receiver.recv())
                num_missing -= len(answered)
                for place, completions in answered:
                    calls[place].answer.set_result(completions)
                    self._router.answered(replica.seat, len(calls[place].requests), admits=load.admits)
                replica.learn(load, self._max_num_seqs)
                self._answered.set()
            await done
        except Exception as error:  # belongs to the callers, each of whom raises it
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
                    self._router.failed(replica.seat, len(call.requests))
            self._answered.set()


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that belong together, and their replica; made by `GeneratorPool.session`."""

    pool: GeneratorPool
    key: SessionKey

    async def generate(self, requests: Sequence[GenerationRequest], num_kept: int | None = None) -> list[Completion]:
        """Completions of one turn, as `GeneratorPool.generate`; another replica than before only if that one has failed, or
        waits for weights while another does not.
        """
        return await self.pool._generate(requests, num_kept, self.key)


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
