"""The controller's client of the generators. Replicas that die or hang are replaced, and pull the newest weights."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from titanrl.carriers.types import GenerationStats
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.supervision import Part, PartDiedError, SharedContext, ask_each
from titanrl.launch.verbs import start_request
from titanrl.processes.actors import ask_actor, ask_ranks
from titanrl.weights.records import Commit, HeldAdapter

if TYPE_CHECKING:
    from titanrl.weights.store import WeightSource


@dataclass(frozen=True, slots=True)
class Replica:
    """Actors of a generator replica."""

    mesh: Any
    """All tensor-parallel ranks."""
    leader: Any
    """Rank 0, which serves the replica's requests."""

    @classmethod
    def of(cls, mesh: Any) -> Self:
        """Wrap a mesh and slice it once, because slicing takes half a millisecond."""
        return cls(mesh, mesh.slice(procs=0))


OnReplica = Callable[[int, Any | None], Awaitable[None]]
"""Called with a replica's index and its new leader, or None if the replica died."""


class GeneratorMeshes:
    """Client of all generator replicas, each a mesh of tensor-parallel ranks. `spawns` are functions that spawn them."""

    def __init__(
        self, spawns: Mapping[str, Callable[[Part], Awaitable[Replica]]], shared: SharedContext, timeouts: TimeoutsConfig
    ) -> None:
        self.parts = [Part(role, shared, spawn, self) for role, spawn in spawns.items()]
        self.supervisor, self.timeouts = shared.supervisor, timeouts
        self.listeners: list[OnReplica] = []
        """Called when a replica dies, and again when its replacement serves."""
        self.catch_up: Callable[[int], Awaitable[None]] | None = None
        """Pulls the newest weights into a replica; None if they never change, or if each request pulls its own weights."""
        self._pulled = [-1] * len(self.parts)
        self._newest = -1  # version that a replica needs before it may serve
        self._serving: set[int] = set()
        self._held: dict[int, HeldAdapter] = {}

    @property
    def actors(self) -> tuple[Any, ...]:
        """Rank 0 of each replica, which serves the replica's requests."""
        return tuple(part.actors.leader for part in self.parts)

    @property
    def serving(self) -> tuple[Any | None, ...]:
        """Like `actors`, with None for each replica that does not serve, because a dead actor cannot be sent in a message."""
        return tuple(
            part.actors.leader if replica in self._serving and part.is_started else None
            for replica, part in enumerate(self.parts)
        )

    async def spawn(self) -> None:
        """Spawn the processes and actors."""
        for part in self.parts:
            await part.spawn()

    async def start(self) -> None:
        """Load vLLM and build the engines. From then on, a replica is replaced if one of its ranks cannot follow rank 0."""
        await asyncio.gather(*(part.start() for part in self.parts))

    async def bring_up(self, part: Part) -> None:
        """Build the engine of a replica, pull the newest weights into it, and announce it to the listeners."""
        await part.ask(f"{part.role}.start", lambda replica: replica.mesh.start.call(), self.timeouts.start_s)
        mesh = part.actors.mesh
        for rank in range(1, mesh.size()):
            follower = mesh.slice(procs=rank)
            self.supervisor.guard(part.role, f"rank {rank} of {part.role}", follower.follow.call_one())
        replica = self.parts.index(part)
        self._pulled[replica] = -1
        part.mark_started()
        while self.catch_up is not None and self._pulled[replica] < self._newest:  # newer ones may be published during a pull
            await self.catch_up(replica)
            if not part.is_started:
                raise PartDiedError(f"{part.role} died while pulling the newest weights")
        given = set[int]()
        while missing := self._held.keys() - given:  # more may be held during these requests
            for number in sorted(missing):
                if (held := self._held.get(number)) is not None:
                    give = partial(self._hold, held)
                    await part.ask(f"{part.role}.hold_adapter", give, self.timeouts.sync_s)
            given |= missing
        self._serving.add(replica)
        await self._notify(replica, part.actors.leader)

    async def start_over(self, source: "WeightSource | None") -> None:
        """Reset the engines for a restarted run: drop their requests and weights; replace replicas that do not reply.

        The weights come from `source` from now on.
        """
        self._newest, self._pulled = -1, [-1] * len(self.parts)
        self._held.clear()
        survive = await asyncio.gather(*(part.survives() for part in self.parts))
        alive = [part for part, survives in zip(self.parts, survive, strict=True) if survives]
        # The replacement of a part that dies now starts with the new source.
        await ask_each(alive, "start_over", lambda replica: replica.mesh.start_over.call(source), self.timeouts.step_s)

    async def on_lost(self, part: Part) -> None:
        """Announce the death of a replica, so that its callers resend their requests to other replicas or the replacement."""
        self._serving.discard(self.parts.index(part))
        await self._notify(self.parts.index(part), None)

    def probe(self, part: Part) -> Awaitable[object]:
        """Request a reply from every rank's event loop and engine."""
        return ask_ranks(part.actors.mesh.probe)

    async def expect_weights(self, version: int) -> None:
        """Make every serving replica hold new requests until it has pulled this version."""
        self._newest = max(self._newest, version)
        await self._each(
            "expect_weights", lambda replica: ask_actor(replica.leader.expect_weights, version), self.timeouts.sync_s
        )

    async def pull_weights(self, replica: int, commit: Commit) -> int:
        """Load a committed version on all ranks of one replica; return the number of bytes received over the network.

        A replica that is being replaced returns 0 and does not delay the publication: it pulls the newest version before it
        serves.
        """
        part, timeout_s = self.parts[replica], self.timeouts.sync_s
        self._newest = max(self._newest, commit.version)
        if part.is_started:
            with contextlib.suppress(PartDiedError):
                received: int = sum(
                    await part.ask(
                        f"{part.role}.pull_weights", lambda replica: ask_ranks(replica.mesh.pull_weights, commit), timeout_s
                    )
                )
                self._pulled[replica] = commit.version
                return received
        return 0

    async def hold_adapter(self, held: HeldAdapter) -> None:
        """Hold an adapter on all replicas beside the policy's, also on replacements, until it is dropped."""
        self._held[held.number] = held
        try:
            await self._each("hold_adapter", partial(self._hold, held), self.timeouts.sync_s)
        except BaseException:  # including cancellation: no replacement may need it
            del self._held[held.number]
            raise

    async def drop_adapter(self, number: int) -> None:
        """Forget a held adapter, whose requests have finished."""
        del self._held[number]
        await self._each("drop_adapter", lambda replica: ask_actor(replica.leader.drop_adapter, number), self.timeouts.sync_s)

    def _hold(self, held: HeldAdapter, replica: Replica) -> Awaitable[object]:
        return ask_ranks(replica.mesh.hold_adapter, held)

    def take_stats(self) -> "asyncio.Task[GenerationStats]":
        """Request the statistics of all replicas since the last call. A dead replica's work is not included."""

        async def take() -> GenerationStats:
            stats = await self._each("stats", lambda replica: ask_actor(replica.leader.stats), self.timeouts.step_s)
            return GenerationStats(
                num_tokens=sum(stat.num_tokens for stat in stats),
                busy_s=sum(stat.busy_s for stat in stats),
                wall_s=sum(stat.wall_s for stat in stats),
                num_replicas=len(stats),
            )

        return start_request(take(), "take_stats")

    async def abandon_round(self) -> None:
        """Drop the requests of an incomplete round."""
        await self._each("abandon_round", lambda replica: replica.leader.abandon_round.call_one(), self.timeouts.step_s)

    async def close(self) -> None:
        """Stop the engines."""
        await asyncio.gather(*(part.close() for part in self.parts))
        await self._each("close", lambda replica: replica.mesh.close.call(), self.timeouts.close_s / 4)

    async def _each(self, endpoint: str, call: Callable[[Replica], Awaitable[Any]], timeout_s: float) -> list[Any]:
        """Return the replies of the serving replicas, except those that die."""
        return await ask_each((self.parts[replica] for replica in sorted(self._serving)), endpoint, call, timeout_s)

    async def _notify(self, replica: int, actor: Any | None) -> None:
        await asyncio.gather(*(listener(replica, actor) for listener in self.listeners))
