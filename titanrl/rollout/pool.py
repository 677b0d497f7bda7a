"""Client of the generators for a rollout worker: routes each group to the replica of its session, or the least loaded one."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from titanrl.base.errors import TitanRLError
from titanrl.carriers.record import span
from titanrl.carriers.types import Admission, Completion, GenerationRequest, OnTokens
from titanrl.processes.actors import SupervisionError, ask_actor, open_replies

T = TypeVar("T")
WAIT = "wait for the generators"
"""Name of the span of a call that waits for its completions, or for a replica with room."""


@dataclass(eq=False, slots=True)
class ReplicaState:
    """The router's state of one replica."""

    index: int
    num_running: int = 0
    """Number of unfinished requests sent to the replica."""
    num_sessions: int = 0
    """Number of open sessions whose next turn goes to the replica."""
    admits: bool = True
    """True if the replica admits new requests immediately, according to its last reply."""
    failed: bool = False
    """True if the last call to the replica failed."""
    is_up: bool = True
    """False after the replica died, until its replacement serves."""


@dataclass(eq=False, slots=True)
class SessionKey:
    """Identity of a session: one conversation with the policy, of any number of turns."""

    replica: ReplicaState | None = field(default=None, repr=False)
    """Replica of the last turn, whose KV cache holds the session's tokens; None before the first turn."""


class Router:
    """Least-loaded routing that keeps a session on its replica.

    A replica that failed, or that waits for weights and admits no requests, is chosen only if all others are in the same state.
    In both cases its KV cache is lost. A replica is considered waiting at most until all requests of this worker have finished
    there, because it pulls the weights then at the latest.
    """

    def __init__(self, num_replicas: int, first: int = 0) -> None:
        """Start with idle replicas. Of equally loaded ones, `first` and those after it are preferred.

        Each worker has its own router, so workers with the same preference would share some replicas and leave others idle.
        """
        self._replicas = [ReplicaState(index) for index in range(num_replicas)]
        self._first = first

    def __iter__(self) -> Iterator[ReplicaState]:
        """Iterate over all replicas, in order."""
        return iter(self._replicas)

    def assign(self, num_requests: int, session: SessionKey, fixed: int | None = None) -> ReplicaState:
        """Assign the next turn of a session to a replica that is up. The caller must call `finished` or `failed` afterwards.

        It is the replica with index `fixed` if given, that of the session's last turn, or the least loaded one.
        """
        usable = self.usable() if fixed is None else [self._replicas[fixed]]
        if session.replica not in usable:
            self.end_session(session)
            session.replica = min(usable, key=self._load)
            session.replica.num_sessions += 1
        session.replica.num_running += num_requests
        return session.replica

    @property
    def is_up(self) -> bool:
        """True if any replica is up."""
        return any(replica.is_up for replica in self._replicas)

    def _load(self, replica: ReplicaState) -> tuple[int, int, int]:
        return replica.num_running, replica.num_sessions, (replica.index - self._first) % len(self._replicas)

    def usable(self) -> list[ReplicaState]:
        """Return the healthiest replicas; empty if no replica is up."""
        up = [replica for replica in self._replicas if replica.is_up]
        least = min(map(_penalty, up), default=0)
        return [replica for replica in up if _penalty(replica) == least]

    def mark(self, replica: ReplicaState, *, is_up: bool) -> None:
        """Record that a replica died, or that its replacement serves. The caller calls `failed` for each request it had."""
        replica.is_up, replica.failed, replica.admits = is_up, False, True

    def finished(self, replica: ReplicaState, num_requests: int, *, admits: bool) -> None:
        """Record that a replica finished the requests of a group, and whether it admits new ones."""
        replica.num_running -= num_requests
        replica.failed = False
        replica.admits = admits or replica.num_running == 0

    def failed(self, replica: ReplicaState, num_requests: int) -> None:
        """Record that the requests of a group failed."""
        replica.num_running -= num_requests
        replica.failed = True

    def end_session(self, session: SessionKey) -> None:
        """End a session. A second call has no effect."""
        if session.replica is not None:
            session.replica.num_sessions -= 1
            session.replica = None


def _penalty(replica: ReplicaState) -> int:
    return 2 * replica.failed + (not replica.admits)


@dataclass(frozen=True, slots=True)
class InRound:
    """Prompt index of a group, and those of its round, whose groups join a replica's batch together, whatever their worker."""

    index: int
    indices: Sequence[int]


class ReplicaLostError(TitanRLError):
    """Raised if a replica died while it had requests. The pool sends them again."""


@dataclass(slots=True)
class _Call:
    """The requests of one group, and the future of their completions."""

    requests: Sequence[GenerationRequest]
    num_kept: int
    place: InRound | None
    completions: asyncio.Future[list[Completion]]
    on_tokens: OnTokens | None = None
    """Gets the tokens of the only request while they are sampled."""
    is_counted: bool = True
    """True as long as the router counts the requests at the replica."""
    sent: tuple[Any, str, int] | None = None
    """Generator, name of the message, and index in it; None while the call is queued, and after its cancellation."""

    def cancel(self) -> None:
        """Notify the generator that the completions are not needed any more."""
        if self.sent is not None:
            (actor, name, index), self.sent = self.sent, None
            done = ask_actor(actor.cancel, name, index)
            done.add_done_callback(lambda call: call.cancelled() or call.exception())  # it may have died


@dataclass(slots=True)
class _Replica:
    """One generator, its load, and the calls queued for it in the current tick of the event loop."""

    actor: Any
    state: ReplicaState
    limit: int
    """Estimated number of requests that the generator can decode for this worker at the same time."""
    queued: list[_Call] = field(default_factory=list)
    flushes: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Messages to the generator without a complete reply."""


class GeneratorPool:
    """Client that distributes groups over replicas. All requests of a group go to one replica, which computes the prompt once.

    Calls made in the same tick of the event loop reach a replica as one message and join its batch at the same decoding step.
    In a synchronous run, the calls belong to a round, whose groups join at the same step even if several workers send them. The
    batches, and with them the results, are therefore reproducible. Each group is returned when it finishes, so early groups are
    scored while others are still being generated.
    """

    def __init__(self, replicas: Sequence[Any | None], max_num_seqs: int, first: int = 0) -> None:
        """Start with idle replicas: generator actors, or None for one that is unavailable until `use` sets it.

        A replica decodes up to `max_num_seqs` requests at the same time, if its KV cache has room. `first` is that of `Router`.
        """
        self._router = Router(len(replicas), first)
        self._replicas = [_Replica(actor, state, max_num_seqs) for actor, state in zip(replicas, self._router, strict=True)]
        for replica in self._replicas:
            self._router.mark(replica.state, is_up=replica.actor is not None)
        self._max_num_seqs = max_num_seqs
        self._load_changed = asyncio.Event()

    def use(self, index: int, actor: Any | None) -> None:
        """Replace the actor of a replica that died. With None, the replica is unavailable until the next call.

        Pending requests of the replica are sent again, to other replicas or to the replacement.
        """
        replica = self._replicas[index]
        for flush in replica.flushes:
            flush.cancel()
        queued, replica.queued = replica.queued, []  # a flush cancelled before it starts does not take its calls
        self._fail(replica, queued, ReplicaLostError("the replica died"))
        replica.actor, replica.limit = actor, self._max_num_seqs
        self._router.mark(replica.state, is_up=actor is not None)
        self._load_changed.set()

    async def room(self, group_size: int) -> int:
        """Wait until groups can start without queueing, and return their number. An idle replica always has room for one."""
        while True:
            usable = [self._replicas[state.index] for state in self._router.usable()]
            free = [max(0, replica.limit - replica.state.num_running) // group_size for replica in usable]
            idle = any(replica.state.num_running == 0 for replica in usable)
            if sum(free) or idle:
                return max(1, sum(free))
            self._load_changed.clear()
            with span(WAIT, "wait"):
                await self._load_changed.wait()

    @contextmanager
    def session(self) -> "Iterator[Session]":
        """Open a session of several turns. All turns go to one replica, whose KV cache holds the tokens of earlier turns.

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
            self._router.end_session(key)

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        num_kept: int | None = None,
        *,
        when_drained: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Generate the completions of one group on the least loaded replica. Cancelling the task cancels the generation.

        Args:
            requests: Requests of the group.
            num_kept: Number of completions after which the replica cancels the other requests; None returns all completions.
            when_drained: True to let the replica first finish all earlier requests, including those of other callers. All calls
                in one tick must have the same value.
            on_tokens: Function that gets the tokens of the only request while they are sampled, except the last ones. If the
                replica dies, the tokens are sampled again, and it gets no more of them.
        """
        with self.session() as session:
            return await self._generate(requests, num_kept, session.key, when_drained=when_drained, on_tokens=on_tokens)

    async def _generate(
        self,
        requests: Sequence[GenerationRequest],
        num_kept: int | None,
        key: SessionKey,
        *,
        place: InRound | None = None,
        when_drained: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        fixed = None if place is None else place.index % len(self._replicas)
        while True:
            while not self._is_up(fixed):
                self._load_changed.clear()
                with span(WAIT, "wait"):
                    await self._load_changed.wait()
            replica = self._replicas[self._router.assign(len(requests), key, fixed).index]
            completions: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            call = _Call(requests, num_kept or len(requests), place, completions, on_tokens)
            if not replica.queued:
                flush = asyncio.create_task(self._flush(replica, when_drained=when_drained))
                replica.flushes.add(flush)
                flush.add_done_callback(replica.flushes.discard)
            replica.queued.append(call)
            try:
                with span(WAIT, "wait"):
                    return await completions
            except ReplicaLostError:
                on_tokens = None
            except asyncio.CancelledError:
                if place is None:  # a round has all of its groups
                    call.cancel()
                raise

    def _is_up(self, fixed: int | None) -> bool:
        return self._router.is_up if fixed is None else self._replicas[fixed].state.is_up

    async def _flush(self, replica: _Replica, *, when_drained: bool) -> None:
        """Send the queued calls in one message, and resolve each call when its completions arrive."""
        calls, replica.queued = replica.queued, []
        name = secrets.token_hex(8)
        for index, call in enumerate(calls):
            call.sent = replica.actor, name, index
        groups, num_kept = [call.requests for call in calls], [call.num_kept for call in calls]
        places = [call.place for call in calls if call.place is not None]
        streams = any(call.on_tokens is not None for call in calls)
        admission = Admission(when_drained=when_drained, name=name, streams=streams)
        if places:
            assert len(places) == len(calls), "either all calls of a tick belong to a round, or none"
            # A group goes to the replica at its prompt index modulo the number of replicas. A round streams no tokens: its
            # callers wait for all of its groups anyway.
            size = sum(index % len(self._replicas) == replica.state.index for index in places[0].indices)
            admission = Admission(indices=tuple(place.index for place in places), round_size=size)
        actor = replica.actor
        with open_replies() as (replies, messages):
            done = ask_actor(actor.generate, groups, num_kept, replies, admission)
            # Retrieve the exception, because nothing awaits the call if this task is cancelled.
            done.add_done_callback(lambda call: call.cancelled() or call.exception())
            done.add_done_callback(messages.put_nowait)
            for call in calls:
                if call.completions.done() and call.place is None:  # cancelled while it was queued
                    call.cancel()
            try:
                num_missing = len(calls)
                while num_missing:
                    message = await messages.get()
                    if message is done:
                        if done.cancelled() or done.exception() is not None:
                            await done
                        continue  # what it sent before it returned may still arrive
                    finished, load, sampled = message
                    num_missing -= len(finished)
                    for index, (token_ids, logprobs) in sampled:
                        on_tokens = calls[index].on_tokens
                        if on_tokens is not None and not calls[index].completions.done():
                            on_tokens(token_ids, logprobs)
                    for index, completions in finished:
                        if not calls[index].completions.done():  # else its caller has been cancelled
                            calls[index].completions.set_result(completions)
                        calls[index].is_counted = False
                        self._router.finished(replica.state, len(calls[index].requests), admits=load.admits)
                    if load.num_queued:  # this worker's share of the decoding requests
                        decoding = load.num_requests - load.num_queued
                        replica.limit = max(1, replica.state.num_running * decoding // load.num_requests)
                    else:
                        replica.limit = min(self._max_num_seqs, replica.limit + 1)  # nothing is queued: try more
                    self._load_changed.set()
                await done
            except asyncio.CancelledError:
                done.cancel()  # the reply of a dead replica never arrives
                self._fail(replica, calls, ReplicaLostError("the replica died"))
                raise
            except SupervisionError as error:
                self._fail(replica, calls, ReplicaLostError(str(error)))
                if actor is replica.actor:  # the controller has not called `use` yet
                    self.use(replica.state.index, None)
            except Exception as error:  # raised in every caller of `generate`
                self._fail(replica, calls, error)

    def _fail(self, replica: _Replica, calls: Sequence[_Call], error: Exception) -> None:
        for call in calls:
            if call.is_counted:
                call.is_counted = False
                self._router.failed(replica.state, len(call.requests))
            if not call.completions.done():
                call.completions.set_exception(error)
        self._load_changed.set()


@dataclass(frozen=True, slots=True)
class Session:
    """A session of several turns on one replica. `GeneratorPool.session` opens it."""

    pool: GeneratorPool
    key: SessionKey

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        num_kept: int | None = None,
        place: InRound | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Generate the completions of one turn, like `GeneratorPool.generate`.

        The session moves to another replica only if its replica failed, or if it waits for weights and another does not. A turn
        with a `place` waits for the other groups of the round, and passes no tokens on before its end.
        """
        return await self.pool._generate(requests, num_kept, self.key, place=place, on_tokens=on_tokens)
