"""A rollout worker's client of the generators: it sends each group to the least loaded replica."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Channel

from titanrl.actors import SupervisionError, resolve
from titanrl.errors import TitanRLError
from titanrl.rollout.routing import Router, Seat, SessionKey
from titanrl.types import Admission, Completion, EngineLoad, GenerationRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InRound:
    """Place of a group in a round, whose groups join the batch of their replica together, whichever worker sends them."""

    index: int
    """Prompt position of the group."""
    indices: Sequence[int]
    """Prompt positions of all groups of the round."""

    def num_at(self, replica: int, num_replicas: int) -> int:
        """Return the number of the round's groups that go to a replica: those with its remainder."""
        return sum(index % num_replicas == replica for index in self.indices)


class ReplicaLostError(TitanRLError):
    """A replica has ended with requests; they are sent again."""


@dataclass(slots=True)
class _Call:
    """One group of requests, and the future of its completions."""

    requests: Sequence[GenerationRequest]
    num_kept: int
    place: InRound | None
    completions: asyncio.Future[list[Completion]]


@dataclass(slots=True)
class _Replica:
    """One generator, its load, and the calls queued for it in this tick of the event loop."""

    actor: Any
    seat: Seat
    limit: int
    """Estimated number of this worker's requests that the generator can decode at once."""
    queued: list[_Call] = field(default_factory=list)
    flushes: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Messages to the generator that are not answered."""

    def update_limit(self, load: EngineLoad, max_limit: int) -> None:
        """Lower the limit to this worker's share of the decoding requests while requests queue, else raise it by one."""
        decoding = load.num_requests - load.num_queued
        if load.num_queued:
            self.limit = max(1, self.seat.num_running * decoding // load.num_requests)
        else:
            self.limit = min(max_limit, self.limit + 1)


class GeneratorPool:
    """Client that spreads groups over replicas. All requests of a group go to one replica, which computes the prompt once.

    The calls of one tick of the event loop reach a replica as one message and join its batch at the same decoding step. In a
    synchronous run they are part of a round, whose groups join at the same step although several workers send them, so the
    batches repeat, and the numbers with them. Each group is returned when it ends, so early groups are scored while late ones
    are still being generated.
    """

    def __init__(self, replicas: Sequence[Any | None], max_num_seqs: int) -> None:
        """Start with idle replicas.

        Args:
            replicas: Generator actors, one per replica; None for one that does not serve until `use` says so.
            max_num_seqs: Requests that a replica decodes at once if its KV cache has room.
        """
        self._router = Router(len(replicas))
        self._replicas = [_Replica(actor, seat, max_num_seqs) for actor, seat in zip(replicas, self._router, strict=True)]
        for replica in self._replicas:
            self._router.set_up(replica.seat, is_up=replica.actor is not None)
        self._max_num_seqs = max_num_seqs
        self._load_changed = asyncio.Event()

    def use(self, place: int, actor: Any | None) -> None:
        """Use the replacement of a replica that has ended; with None, requests wait for it or go to other replicas.

        The requests that it had are sent again.
        """
        replica = self._replicas[place]
        for flush in replica.flushes:
            flush.cancel()
        queued, replica.queued = replica.queued, []  # a message that has not begun is cancelled before it takes its calls
        self._fail(replica, queued, ReplicaLostError("the replica has ended"))
        replica.actor, replica.limit = actor, self._max_num_seqs
        self._router.set_up(replica.seat, is_up=actor is not None)
        self._load_changed.set()

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

    async def generate(
        self, requests: Sequence[GenerationRequest], num_kept: int | None = None, *, when_drained: bool = False
    ) -> list[Completion]:
        """Generate the completions of one group on the least loaded replica.

        Args:
            requests: requests of the group.
            num_kept: number of completions to return, those that end first; the replica cancels the other requests. None
                returns all.
            when_drained: True if the replica first finishes all earlier requests, of other callers, too. Calls of one tick must
                agree.
        """
        with self.session() as session:
            return await self._generate(requests, num_kept, session.key, when_drained=when_drained)

    async def _generate(
        self,
        requests: Sequence[GenerationRequest],
        num_kept: int | None,
        key: SessionKey,
        *,
        place: InRound | None = None,
        when_drained: bool = False,
    ) -> list[Completion]:
        fixed = None if place is None else place.index % len(self._replicas)
        while True:
            while not self._is_up(fixed):
                self._load_changed.clear()
                await self._load_changed.wait()
            replica = self._replicas[self._router.assign(len(requests), key, fixed).place]
            call = _Call(requests, num_kept or len(requests), place, asyncio.get_running_loop().create_future())
            if not replica.queued:
                flush = asyncio.create_task(self._flush(replica, when_drained=when_drained))
                replica.flushes.add(flush)
                flush.add_done_callback(replica.flushes.discard)
            replica.queued.append(call)
            with suppress(ReplicaLostError):
                return await call.completions

    def _is_up(self, fixed: int | None) -> bool:
        return bool(self._router.usable()) if fixed is None else self._replicas[fixed].seat.is_up

    async def _flush(self, replica: _Replica, *, when_drained: bool) -> None:
        """Send the queued calls, and resolve each one when its completions arrive."""
        calls, replica.queued = replica.queued, []
        groups, num_kept = [call.requests for call in calls], [call.num_kept for call in calls]
        places = [call.place for call in calls if call.place is not None]
        admission = Admission(when_drained=when_drained)
        if places:
            assert len(places) == len(calls), "calls of one tick are all part of a round, or none is"
            size = places[0].num_at(replica.seat.place, len(self._replicas))
            admission = Admission(indices=tuple(place.index for place in places), round_size=size)
        port, receiver = Channel[Any].open()
        actor = replica.actor
        done = asyncio.ensure_future(resolve(actor.generate.call_one(groups, num_kept, port, admission)))
        # Retrieve the exception: nothing awaits the call if this task is cancelled.
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
        except asyncio.CancelledError:
            self._fail(replica, calls, ReplicaLostError("the replica has ended"))
            raise
        except SupervisionError as error:
            self._fail(replica, calls, ReplicaLostError(str(error)))
            if actor is replica.actor:  # the controller has not told it yet
                self.use(replica.seat.place, None)
        except Exception as error:  # each caller raises it
            self._fail(replica, calls, error)

    def _fail(self, replica: _Replica, calls: Sequence[_Call], error: Exception) -> None:
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

    async def generate(
        self, requests: Sequence[GenerationRequest], num_kept: int | None = None, place: InRound | None = None
    ) -> list[Completion]:
        """Generate the completions of one turn, as `GeneratorPool.generate` does.

        The session moves to another replica only if its replica failed, or waits for weights while another does not. With a
        place in a round, the turn waits for the other groups of the round.
        """
        return await self.pool._generate(requests, num_kept, self.key, place=place)


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
