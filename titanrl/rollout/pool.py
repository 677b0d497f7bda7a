"""A rollout worker's client of the generators: it sends each group to the least loaded replica."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Channel

from titanrl.actors import resolve
from titanrl.rollout.routing import Router, Seat, SessionKey
from titanrl.types import Completion, EngineLoad, GenerationRequest

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One group of requests, and the future of its completions."""

    requests: Sequence[GenerationRequest]
    num_kept: int
    completions: asyncio.Future[list[Completion]]


@dataclass(slots=True)
class _Replica:
    """One generator, its load, and the calls queued for it in this tick of the event loop."""

    actor: Any
    seat: Seat
    limit: int
    """Estimated number of this worker's requests that the generator can decode at once."""
    queued: list[_Call] = field(default_factory=list)

    def update_limit(self, load: EngineLoad, max_limit: int) -> None:
        """Lower the limit to this worker's share of the decoding requests while requests queue, else raise it by one."""
        decoding = load.num_requests - load.num_queued
        if load.num_queued:
            self.limit = max(1, self.seat.num_running * decoding // load.num_requests)
        else:
            self.limit = min(max_limit, self.limit + 1)


class GeneratorPool:
    """Client that spreads groups over replicas. All requests of a group go to one replica, which computes the prompt once.

    The calls of one tick of the event loop reach a replica as one message and join its batch at the same decoding step. A
    synchronous run therefore repeats the same batches and the same numbers. Each group is returned when it ends, so early
    groups are scored while late ones are still being generated.
    """

    def __init__(self, replicas: Sequence[Any], max_num_seqs: int) -> None:
        """Start with idle replicas.

        Args:
            replicas: Generator actors, one per replica.
            max_num_seqs: Requests that a replica decodes at once if its KV cache has room.
        """
        self._router = Router(len(replicas))
        self._replicas = [_Replica(actor, seat, max_num_seqs) for actor, seat in zip(replicas, self._router, strict=True)]
        self._max_num_seqs = max_num_seqs
        self._flushes: set[asyncio.Task[None]] = set()
        self._load_changed = asyncio.Event()

    async def room(self, group_size: int) -> int:
        """Wait until a group can start without queueing; return the number of such groups. An idle replica has room for one."""
        while True:
            usable = [self._replicas[seat.place] for seat in self._router.usable()]
            free = [max(0, replica.limit - replica.seat.num_running) // group_size for replica in usable]
            idle = any(replica.seat.num_running == 0 for replica in usable)
            if sum(free) or idle:
                return max(1, sum(free))
            self._load_changed.clear()
            await self._load_changed.wait()

    @contextmanager
    def session(self) -> "Iterator[Session]":
        """Open a session of several turns. All turns go to one replica, whose cache holds the tokens of the earlier turns.

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
        """Generate the completions of one group on the least loaded replica.

        With `num_kept`, return only the completions that end first; the replica cancels the other requests.
        """
        with self.session() as session:
            return await session.generate(requests, num_kept)

    async def _generate(self, requests: Sequence[GenerationRequest], num_kept: int | None, key: SessionKey) -> list[Completion]:
        replica = self._replicas[self._router.assign(len(requests), key).place]
        call = _Call(requests, num_kept or len(requests), asyncio.get_running_loop().create_future())
        if not replica.queued:
            flush = asyncio.create_task(self._flush(replica))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        replica.queued.append(call)
        return await call.completions

    async def _flush(self, replica: _Replica) -> None:
        """Send the queued calls, and resolve each one when its completions arrive."""
        calls, replica.queued = replica.queued, []
        groups, num_kept = [call.requests for call in calls], [call.num_kept for call in calls]
        port, receiver = Channel[Any].open()
        done = asyncio.ensure_future(resolve(replica.actor.generate.call_one(groups, num_kept, port)))
        # Retrieve the exception: nothing awaits the call if `close` cancels this task.
        done.add_done_callback(lambda call: call.cancelled() or call.exception())
        try:
            num_missing = len(calls)
            while num_missing:
                finished, load = await _unless_failed(done, receiver.recv())
                num_missing -= len(finished)
                for place, completions in finished:
                    calls[place].completions.set_result(completions)
                    self._router.finished(replica.seat, len(calls[place].requests), admits=load.admits)
                replica.update_limit(load, self._max_num_seqs)
                self._load_changed.set()
            await done
        except Exception as error:  # each caller raises it
            for call in calls:
                if not call.completions.done():
                    call.completions.set_exception(error)
                    self._router.failed(replica.seat, len(call.requests))
            self._load_changed.set()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of several turns with one replica; `GeneratorPool.session` opens it."""

    pool: GeneratorPool
    key: SessionKey

    async def generate(self, requests: Sequence[GenerationRequest], num_kept: int | None = None) -> list[Completion]:
        """Generate the completions of one turn, as `GeneratorPool.generate` does.

        The session moves to another replica only if its replica failed, or waits for weights while another does not.
        """
        return await self.pool._generate(requests, num_kept, self.key)


async def _unless_failed(call: asyncio.Future[None], message: Awaitable[T]) -> T:
    """Wait for the next message of a call, or raise the call's exception.

    A call that has returned has already sent all of its messages.
    """
    receiving = asyncio.ensure_future(resolve(message))
    waiting: set[asyncio.Future[Any]] = {call, receiving}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not receiving.done() and (call.cancelled() or call.exception() is not None):
        receiving.cancel()
        await call
    return await receiving
