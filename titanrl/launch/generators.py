"""The controller's clients of all that samples: generators, rollout workers, and the replay buffer that holds their groups.

`GeneratorMeshes` comes first, then `WeightSync`, which brings the generators the versions of the trainer's weights, then
`RolloutMesh` and `BufferClient`.

In synchronous training, groups are sampled in *rounds*: the requests of all groups between two publications join each replica's
batch together, whatever their worker, so a run can be repeated bit for bit (`rollout/pool.py`).

Replicas that die or hang are replaced, and pull the newest weights. Each trainer rank holds the last two versions, each in a
shared memory segment of its own (an arena) or under keys of torchstore (docs/weights.md). Published adapters refer to their
*base*, the weights below them, which a reader needs once.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from monarch.actor import Channel, PortReceiver

from titanrl.base.errors import StoppedError, TitanRLError
from titanrl.carriers.tables import Table
from titanrl.carriers.types import EvaluationResult, GenerationStats
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.supervision import (
    DISK,
    PACE,
    DeadlineError,
    Limit,
    Pace,
    Part,
    PartDiedError,
    SharedContext,
    Supervisor,
    Verb,
    ask_each,
    done,
    only,
    start_request,
)
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.processes.actors import ActorError, ask_actor, ask_ranks, cause_of, resolve
from titanrl.replay.buffer import RECORDS_FILE, BufferActor, GroupBuffer
from titanrl.replay.groups import Batch, Freshness, Restored, Saved, StarvationError, TrainedBatch
from titanrl.rollout.workers import SandboxNote
from titanrl.weights.records import VERSIONS_HELD, Commit, HeldAdapter, StoreHandle, WeightManifest, WeightMismatchError

if TYPE_CHECKING:
    from titanrl.weights.store import WeightSource

T = TypeVar("T")


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
        self._pulled = [-1] * len(self.parts)  # last version that each replica has pulled; -1 before the first
        self._newest = -1  # version that a replica needs before it may serve
        self._serving: set[int] = set()  # indices of the replicas that the listeners know; started ones may still pull
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
        """Build the engine of a replica, give it the newest weights and the held adapters, and announce it to the listeners."""
        await part.ask(f"{part.role}.start", lambda replica: replica.mesh.start.call(), self.timeouts.start_s)
        mesh = part.actors.mesh
        for rank in range(1, mesh.size()):
            follower = mesh.slice(procs=rank)
            self.supervisor.guard(part.role, f"rank {rank} of {part.role}", follower.follow.call_one())
        replica = self.parts.index(part)
        self._pulled[replica] = -1
        part.mark_started()
        given = set[int]()
        while True:  # during each request, a version may be published, and an adapter held or dropped
            if self.catch_up is not None and self._pulled[replica] < self._newest:
                await self.catch_up(replica)
                if not part.is_started:
                    raise PartDiedError(f"{part.role} died while pulling the newest weights")
            elif missing := self._held.keys() - given:
                held = self._held[min(missing)]
                try:
                    await part.ask(f"{part.role}.hold_adapter", partial(self._hold, held), self.timeouts.sync_s)
                    given.add(held.number)
                except WeightMismatchError:
                    if held.number in self._held:  # otherwise it was dropped meanwhile, and its bytes deleted
                        raise
            elif dropped := given - self._held.keys():
                await part.ask(f"{part.role}.drop_adapter", partial(self._drop, min(dropped)), self.timeouts.sync_s)
                given.remove(min(dropped))
            else:
                break
        self._serving.add(replica)  # without an await since the last check: `expect_weights` asks only serving replicas
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
        except BaseException:  # including cancellation: some replicas hold it, and no replacement may need it
            with contextlib.suppress(TitanRLError):
                await self.drop_adapter(held.number)
            raise

    async def drop_adapter(self, number: int) -> None:
        """Forget a held adapter, whose requests have finished."""
        self._held.pop(number, None)  # a restarted run holds none
        await self._each("drop_adapter", partial(self._drop, number), self.timeouts.sync_s)

    def _hold(self, held: HeldAdapter, replica: Replica) -> Awaitable[object]:
        return ask_ranks(replica.mesh.hold_adapter, held)

    def _drop(self, number: int, replica: Replica) -> Awaitable[object]:
        return ask_actor(replica.leader.drop_adapter, number)

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
        """Drop the requests of an incomplete round of synchronous training; see `Generator.generate`."""
        await self._each("abandon_round", lambda replica: replica.leader.abandon_round.call_one(), self.timeouts.step_s)

    async def close(self) -> None:
        """Stop the engines. `Parts.close` has `close_s / 2` for the workers and then the generators, half of it for each."""
        await asyncio.gather(*(part.close() for part in self.parts))
        await self._each("close", lambda replica: replica.mesh.close.call(), self.timeouts.close_s / 4)

    async def _each(self, endpoint: str, call: Callable[[Replica], Awaitable[Any]], timeout_s: float) -> list[Any]:
        """Return the replies of the serving replicas, except those that die."""
        return await ask_each((self.parts[replica] for replica in sorted(self._serving)), endpoint, call, timeout_s)

    async def _notify(self, replica: int, actor: Any | None) -> None:
        await asyncio.gather(*(listener(replica, actor) for listener in self.listeners))


Pull = Callable[[Commit], Awaitable[int]]
"""Pulls a version into one reader, usually a generator replica; returns the bytes received, not counting shared memory."""


class ReaderLeases:
    """Reader leases on versions. A leased version is neither overwritten nor deleted."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        self._returned = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lease(self, version: int) -> AsyncIterator[None]:
        """Hold a lease on a version while the body runs."""
        self._held[version] += 1
        try:
            yield
        finally:  # without an await, at which a second cancellation could keep the lease
            self._held[version] -= 1
            if not self._held[version]:
                del self._held[version]
            self._returned.set()

    async def wait_unused(self, version: int) -> None:
        """Wait until no reader holds a lease on a version. This needs no deadline, because every reader has one."""
        while self._held[version]:
            self._returned.clear()
            await self._returned.wait()


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A version that every trainer rank has pushed, the times of `time.perf_counter` around the push, and the running pulls."""

    commit: Commit
    overwritten: Sequence[Commit]
    """Commit records of the versions that it replaced, which have no readers."""
    num_bytes: int
    """Bytes that every replica needs: those of the version, and of its base if the previous version had another."""
    pulls: Sequence["asyncio.Task[None]"]
    started: float
    ended: float


class WeightSync:
    """Publisher of versions, one after another. Each publication has four stages.

    1. Wait until no reader holds a lease on the version that the new one overwrites, then push the shards of every trainer
       rank.
    2. Create the commit record. From then on `pushed()` returns, and the trainer may change its weights.
    3. Every replica pulls the version and continues independently.
    4. Once one replica has pulled, and the others hold back new requests until they have pulled, call `then` to free slots
       of the replay buffer. All later requests get the new weights, and a slow replica does not delay the slots. Once all
       replicas have pulled, delete the bytes of older versions from the store, if they are in it.

    The next version can be published while replicas still pull this one, because it goes into the other arena. `ready()`
    returns when all stages of all versions are complete. `publish()`, `pushed()` and `ready()` raise the first error of any
    version, so nothing is published after it.
    """

    def __init__(
        self,
        delete: Callable[[str], Awaitable[None]],
        *,
        push: Callable[[int], Awaitable[Sequence[WeightManifest]]],
        expect: Callable[[int], Awaitable[None]],
        pulls: Sequence[Pull],
        num_listed: int = 100,
    ) -> None:
        """Prepare to publish.

        Args:
            delete: Callback that deletes a key from the store, which has the bytes of versions that are not in arenas.
            push: Callback that pushes a version on every trainer rank.
            expect: Callback that makes every generator hold back new requests until it has pulled a version.
            pulls: Callbacks that pull a version, one per generator replica. They have deadlines of their own, and return
                normally if the replica died, because an error ends all publications.
            num_listed: Length of `versions`, above the staleness bound, because the ages of tokens are computed from it.
        """
        self._num_listed = num_listed
        self._delete, self._push, self._expect, self._pulls = delete, push, expect, pulls
        self._leases = ReaderLeases()
        self._pull_locks = [asyncio.Lock() for _ in pulls]
        self._last_freed: asyncio.Event | None = None
        self._pushing: asyncio.Task[_Pushed] | None = None
        self._publishing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._held: list[Commit] = []  # versions that readers may pull, at most `VERSIONS_HELD`, oldest first
        self._stored: list[Commit] = []  # held ones, and those that are being overwritten or deleted
        self._metrics: dict[str, float] = {}
        self._num_received = 0
        self.versions: list[int] = []
        """Versions published so far, including running publications; only the last `num_listed` of them."""

    def publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start publishing a version, and call `then` in stage 4. Await `pushed()` for the previous version first.

        Raises:
            Exception: The first error of any version.
        """
        self._raise_failure()
        assert self._pushing is None or self._pushing.done(), "publish() called before pushed() returned"
        self.versions.append(version)
        del self.versions[: -self._num_listed]  # a run can publish any number of versions
        self._pushing = asyncio.create_task(self._push_and_commit(version), name=f"push v{version}")
        publishing = asyncio.create_task(self._finish(self._pushing, then), name=f"publish v{version}")
        self._publishing.add(publishing)
        publishing.add_done_callback(self._record_end)

    async def pushed(self) -> None:
        """Wait until every trainer rank has pushed the latest version. Cancelling the wait does not cancel the push."""
        if self._pushing is not None:
            await asyncio.wait({self._pushing})
            self._pushing.result()
        self._raise_failure()

    async def ready(self) -> None:
        """Wait until every replica uses the latest version. Cancelling the wait does not cancel the publication."""
        while self._publishing:
            await asyncio.wait(self._publishing, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
        self._raise_failure()

    async def unless_failed(self, awaited: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, but raise as soon as a publication fails: its slots are never freed, so the wait may never end."""
        waiting, failed = asyncio.create_task(awaited), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({waiting, failed}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            return waiting.result()
        finally:
            waiting.cancel()
            failed.cancel()

    async def catch_up(self, replica: int) -> None:
        """Pull the newest committed version into a replica with new processes, after any earlier pulls of this replica."""
        if self._held:
            await self._pull(replica, self._held[-1])

    async def pull_held(self, version: int, pull: Pull) -> bool:
        """Pull one of the last two versions for a reader that is not a replica; return False if it has been overwritten.

        Only the publication that overwrites the version waits for this pull.

        Raises:
            Exception: The first error of any version, if the version is still being pushed.
        """
        async with self._leases.lease(version):
            if self._pushing is not None and version == self.versions[-1]:
                await self.pushed()
            commit = next((commit for commit in self._held if commit.version == version), None)
            if commit is not None:
                received = await pull(commit)  # await first: other pulls update the sum in the meantime
                self._num_received += received
        return commit is not None

    def take_metrics(self) -> Mapping[str, float]:
        """Return `sync/*` metrics of the last version that reached every replica: seconds, bytes and bandwidth.

        `sync/network_bytes` counts all pulls since the last report, also those by `catch_up` and `pull_held`; `sync/gb_per_s`
        is the size of one copy of the weights over the time from the start of the push to the end of the slowest pull. Each
        version's metrics are returned once; the mapping is empty if there are none.
        """
        metrics, self._metrics = self._metrics, {}
        if metrics:
            metrics["sync/network_bytes"], self._num_received = float(self._num_received), 0
        return metrics

    async def _push_and_commit(self, version: int) -> _Pushed:
        overwritten, self._held = self._held[: 1 - VERSIONS_HELD], self._held[1 - VERSIONS_HELD :]  # no new readers
        for commit in overwritten:
            await self._leases.wait_unused(commit.version)
        started = time.perf_counter()
        commit = Commit(version, tuple(await self._push(version)))
        has_base = bool(self._held) and self._held[-1].base == commit.base
        num_bytes = commit.num_bytes + (0 if has_base else sum(manifest.num_bytes for manifest in commit.base))
        self._held.append(commit)
        self._stored.append(commit)
        # Start the pulls before pushed() returns, so that they hold their leases when the version after the next is pushed.
        pulls = [asyncio.create_task(self._pull(replica, commit)) for replica in range(len(self._pulls))]
        return _Pushed(commit, overwritten, num_bytes, pulls, started, time.perf_counter())

    async def _finish(self, pushing: "asyncio.Task[_Pushed]", then: Callable[[], Awaitable[None]]) -> None:
        """Run the stages that follow the push."""
        pushed = await pushing
        await asyncio.gather(self._measure(pushed), self._free_slots(pushed, then))
        for commit in pushed.overwritten:
            self._stored.remove(commit)
        bases = {manifest for commit in self._stored for manifest in commit.base}
        manifests = [
            manifest for commit in pushed.overwritten for manifest in (*commit.manifests, *commit.base) if manifest not in bases
        ]
        keys = [handle.key for manifest in manifests for handle in manifest.handles if isinstance(handle, StoreHandle)]
        for key in keys:
            await self._delete(key)

    async def _pull(self, replica: int, commit: Commit) -> None:
        """Pull a version into a replica, after earlier versions."""
        async with self._leases.lease(commit.version), self._pull_locks[replica]:
            received = await self._pulls[replica](commit)
            self._num_received += received

    async def _free_slots(self, pushed: _Pushed, then: Callable[[], Awaitable[None]]) -> None:
        """Call `then` once no new request can be served with an older version, after the `then` of earlier versions."""
        earlier, freed = self._last_freed, asyncio.Event()
        self._last_freed = freed
        try:
            if len(pushed.pulls) > 1:  # a single replica serves no older version after its pull
                await self._expect(pushed.commit.version)
            if pushed.pulls:  # a replay of dumped rollouts has no generators
                done, _ = await asyncio.wait(pushed.pulls, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done)
            if earlier is not None:
                await earlier.wait()
            await then()
        finally:
            freed.set()

    async def _measure(self, pushed: _Pushed) -> None:
        if not pushed.pulls:
            return
        await asyncio.gather(*pushed.pulls)
        pulled = time.perf_counter()
        self._metrics = {
            "sync/push_s": pushed.ended - pushed.started,
            "sync/pull_s": pulled - pushed.ended,
            "sync/bytes": float(pushed.num_bytes),
            "sync/gb_per_s": pushed.num_bytes / (pulled - pushed.started) / 1e9,
        }

    def _record_end(self, publishing: "asyncio.Task[None]") -> None:
        self._publishing.discard(publishing)
        error = None if publishing.cancelled() else publishing.exception()
        if error is not None and self._failure is None:
            self._failure = error
            self._failed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


# Rollout workers and the buffer


@dataclass(frozen=True, slots=True)
class Worker:
    """The two actors in a rollout worker's process."""

    worker: Any
    """The `RolloutWorker`."""
    shard: Any
    """The `StorageShard`."""


class RolloutMesh:
    """Client of all rollout workers, each with a storage shard. `spawns` are functions that spawn one, by role.

    When a worker dies, its unfinished groups are sampled again, and so are the finished groups stored in its shard. In
    synchronous training, the death of a worker or a generator rewinds to the last batch: everything after it is sampled again,
    in the same rounds as in a run without faults. The training curve is then identical, bit for bit.
    """

    def __init__(
        self,
        spawns: Mapping[str, Callable[[Part], Awaitable[Worker]]],
        shared: SharedContext,
        timeouts: TimeoutsConfig,
        *,
        buffer: "BufferClient",
        trainer: TrainerMesh,
        generators: GeneratorMeshes,
        in_rounds: bool,
    ) -> None:
        self.parts = [Part(role, shared, spawn, self) for role, spawn in spawns.items()]
        self.supervisor, self.timeouts = shared.supervisor, timeouts
        self._buffer, self._trainer, self._generators = buffer, trainer, generators
        self._in_rounds = in_rounds
        self._is_running = False
        self._rewinding = asyncio.Lock()
        self.num_rewound = 0
        """Number of times that everything after the last batch was sampled again."""
        self._warn = shared.warn
        self.notes: Any = None
        """Port for the workers' messages; opened by `spawn`."""
        self._reading: asyncio.Task[None] | None = None
        self._changed: tuple[int, float] | None = None  # since the workers were spawned
        buffer.parts = self.parts
        generators.listeners.append(self.use_generator)

    @property
    def num_deaths(self) -> int:
        """Number of workers that have died."""
        return sum(part.num_deaths for part in self.parts)

    async def spawn(self) -> None:
        """Spawn the processes and actors."""
        self.notes, receiver = Channel[SandboxNote].open()
        self._reading = asyncio.create_task(self._read_notes(receiver), name="notes of the rollout workers")
        for part in self.parts:
            await part.spawn()

    async def start(self) -> None:
        """Load prompts, tokenizer and scoring processes. Call this after the trainer was spawned, which gets the shards."""
        await asyncio.gather(*(part.start() for part in self.parts))

    async def bring_up(self, part: Part) -> None:
        """Start a worker, connect it to the generators, and let it generate if the other workers do."""
        await part.ask(f"{part.role}.start", lambda actors: actors.worker.start.call_one(), self.timeouts.start_s)
        part.mark_started()
        number = self.parts.index(part)
        # The death of the part ends this request, because a shard whose process died cannot be sent.
        await part.ask(
            f"{part.role}.announce_shard", lambda actors: self._trainer.use_shard(number, actors.shard), self.timeouts.step_s
        )
        # They may have changed since the worker was spawned.
        await self._each("use_generators", self._generators.serving, parts=[part])
        if self._changed is not None:
            await self._each("change", *self._changed, parts=[part])
        if self._is_running:
            await part.ask(f"{part.role}.run", lambda actors: actors.worker.run.call_one(), self.timeouts.step_s)

    async def on_lost(self, part: Part) -> None:
        """Sample again a dead worker's unfinished groups, and the finished ones stored in its shard."""
        await self._trainer.use_shard(self.parts.index(part), None)
        await self._buffer.lose_shard(self.parts.index(part), part.num_lives)
        if self._in_rounds:
            await self._rewind()

    def probe(self, part: Part) -> Awaitable[object]:
        """Request a reply from a worker's event loop."""
        return ask_actor(part.actors.worker.probe)

    async def run(self) -> None:
        """Start to generate."""
        self._is_running = True

        async def run(part: Part) -> None:
            await part.wait_until_up()
            await self._each("run", parts=[part])  # if it dies, its replacement runs as soon as it is up

        await asyncio.gather(*map(run, self.parts))

    async def use_generator(self, replica: int, actor: Any | None) -> None:
        """Announce a generator replica's new actor to all workers, or None while the replica is down."""
        await self._each("use_generator", replica, actor)
        if self._in_rounds and actor is None:
            await self._rewind()

    async def change(self, rollouts_per_step: int, temperature: float) -> None:
        """Change the number of recorded groups per step, and the temperature of groups that start from now on."""
        self._changed = rollouts_per_step, temperature
        await self._each("change", rollouts_per_step, temperature)

    async def wait_until_up(self) -> None:
        """Wait until all workers have started, including replacements of dead ones."""
        for part in self.parts:
            await part.wait_until_up()

    async def return_batch(self, handles: Table) -> None:
        """Return to the buffer a batch whose tokens are lost, so that its groups are sampled again."""
        await self.wait_until_up()
        if self._in_rounds:
            await self._rewind(handles)
        else:
            await self._buffer.return_batch(handles)

    async def evaluate(self, name: str) -> EvaluationResult:
        """Sample completions of an evaluation set on the first worker, and score them.

        Raise `RolloutError` if a worker fails: in synchronous training, the evaluation would wait for its round forever.
        """
        first, pace = self.parts[0], Pace(kind=f"rollout.evaluate {name}")
        while True:
            num_rewound = self.num_rewound
            try:
                return await self._buffer.unless_failed(
                    first.until_done(
                        "rollout.evaluate", lambda actors: actors.worker.evaluate.call_one(name), self.timeouts.step_s, pace
                    )
                )
            except StoppedError:  # abandoned by a rewind, which abandons the whole round
                if num_rewound == self.num_rewound:
                    raise

    async def evaluate_on(self, evaluator: Part, name: str) -> EvaluationResult:
        """Evaluate a set like `evaluate`, but on a separate generator, while the rollouts continue.

        If the generator dies, raise `PartDiedError`, or `StoppedError` if the worker detected it first.
        """
        first, timeout_s = self.parts[0], self.timeouts.step_s
        pace = Pace(kind=f"rollout.evaluate {name} in the background")

        async def evaluate(replica: Replica) -> EvaluationResult:
            return await first.until_done(
                "rollout.evaluate", lambda actors: actors.worker.evaluate.call_one(name, replica.leader), timeout_s, pace
            )

        return await evaluator.ask("evaluator.evaluate", evaluate, 2 * timeout_s, Pace(min_s=timeout_s))

    async def abandon_evaluation(self, replica: int, actor: Any | None) -> None:
        """Cancel the background evaluation if its generator died. This is a listener of that generator."""
        if actor is None and self.parts[0].is_started:
            await self._each("abandon_evaluation", parts=self.parts[:1])

    async def release(self) -> None:
        """Replace no worker any more, and read no more messages. Enough before a restart, which kills the processes."""
        await asyncio.gather(*(part.close() for part in self.parts))
        if self._reading is not None:
            self._reading.cancel()

    async def close(self) -> None:
        """Stop the rollout loops and the scoring processes."""
        await self.release()
        await self._each("close", timeout_s=self.timeouts.close_s / 4)

    async def _read_notes(self, receiver: PortReceiver[SandboxNote]) -> None:
        """Record each replacement of a sandbox like that of a process, and tell the user."""
        while True:
            note = await receiver.recv()
            part = f"rollout_{note.worker} sandbox"
            self.supervisor.record("fault", cause=note.cause)
            self.supervisor.record("respawn", part=part, cause=note.cause, seconds=round(note.seconds, 3))
            self._warn(f"{part}: {note.cause}; replaced after {note.seconds:.1f} s, and its groups are scored again")

    async def _rewind(self, handles: Table | None = None) -> None:
        """Sample everything after the last batch again, and the batch of `handles` if given.

        No round may begin before all actors have dropped the current one.
        """
        async with self._rewinding:
            self.num_rewound += 1
            await self._buffer.hold_rounds()
            await self._each("abandon_round")
            await self._generators.abandon_round()
            await self._buffer.rewind(handles)

    async def _each(
        self, endpoint: str, *args: Any, parts: Sequence[Part] | None = None, timeout_s: float | None = None
    ) -> None:
        """Call an endpoint of all workers that have started, or of some parts; ignore workers that die."""
        if parts is None:
            parts = [part for part in self.parts if part.is_started]
        limit_s = timeout_s or self.timeouts.step_s
        await ask_each(parts, endpoint, lambda actors: getattr(actors.worker, endpoint).call_one(*args), limit_s)


@dataclass(slots=True)
class BufferClient:
    """Client of the run's buffer; requests at most one batch ahead of time. `BufferActor` describes the verbs."""

    mesh: Any
    """The `BufferActor`."""
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    starvation_timeout_s: float
    groups_per_step: int
    parts: Sequence[Part] = ()
    """Workers, each with a storage shard."""
    _requested: "asyncio.Task[Batch] | None" = None
    _failed: "asyncio.Task[None] | None" = None
    """Request that raises the failure of the rollouts."""
    _last_at: float | None = None
    """Time at which the last batch was taken, on the clock of `time.perf_counter`."""

    replay = Verb(GroupBuffer.replay, only)
    release = Verb(GroupBuffer.release, done)
    discard = Verb(GroupBuffer.discard, done)
    lose_shard = Verb(GroupBuffer.lose_shard, done)
    return_batch = Verb(GroupBuffer.return_batch, done)
    hold_rounds = Verb[[], None, None](BufferActor.hold_rounds, done)
    rewind = Verb(GroupBuffer.rewind, done)
    reweigh = Verb(GroupBuffer.reweigh, done)

    async def ask(self, name: str, call: Awaitable[T], limit: Limit = "step_s", pace: Pace = PACE) -> T:
        """Await a request to the buffer."""
        return await self.supervisor.ask(f"buffer.{name}", call, getattr(self.timeouts, limit), pace)

    def prefetch(self) -> None:
        """Request the next batch, so that the buffer sends it as soon as it is complete; `take_batch` awaits it."""
        if self._requested is None:
            request = ask_actor(self.mesh.take_batch, self.groups_per_step)
            self._requested = start_request(resolve(request), "next batch")

    def restart_clock(self) -> None:
        """Measure the time to the next batch from the call of `take_batch`, because no batch was wanted before."""
        self._last_at = None

    async def take_batch(self) -> Batch:
        """Return the next batch. The deadline starts with this call, not with `prefetch`.

        If the wait is interrupted or times out, the request stays pending, and a later call waits for it again. Raise
        `StarvationError` if no batch with a learning signal was complete in time, and `RolloutError` if a worker failed.
        """
        self.prefetch()
        assert self._requested is not None
        # Learn from the time since the last batch: if batches are ready early, the wait itself is too short to learn from.
        pace = Pace(since=self._last_at, progress=partial(self._why_starved, 0.0))
        try:
            batch = await self.supervisor.ask(
                "buffer.take_batch", asyncio.shield(self._requested), self.starvation_timeout_s, pace
            )
        except DeadlineError:
            call = self._why_starved(self.starvation_timeout_s)
            raise StarvationError(await self.supervisor.ask("buffer.why_starved", call, self.timeouts.close_s)) from None
        self._requested, self._last_at = None, time.perf_counter()
        return batch

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that the rollout workers do; if one of them fails, cancel it and raise `RolloutError`."""
        if self._failed is None:
            self._failed = start_request(resolve(self.mesh.wait_until_failed.call_one()), "failure of the rollouts")
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            has_failed = not task.done() and not self._failed.cancelled()  # `close` cancels it
            if has_failed and isinstance(error := self._failed.exception(), ActorError):
                raise cause_of(error) from error
            return await task  # if the buffer died, the supervisor ends it
        finally:
            task.cancel()

    def _why_starved(self, waited_s: float) -> Awaitable[str]:
        """Request a text about the groups that have finished since the last batch."""
        return ask_actor(self.mesh.why_starved, self.groups_per_step, waited_s)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, for example before a measurement; at most as long as for a batch."""
        call = ask_actor(self.mesh.wait_until_full)
        await self.supervisor.ask("buffer.wait_until_full", call, self.starvation_timeout_s)

    async def save(self, folder: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Start to write the state into a new folder, while generation continues.

        The buffer writes the records, and each shard its tokens. Raise `PartDiedError` if a shard dies with tokens that it had
        to write. See `GroupBuffer.state` for the other arguments.
        """
        lives = [(part.num_lives, part.num_deaths) for part in self.parts]
        call = ask_actor(self.mesh.save, folder / RECORDS_FILE, trained, from_index)
        saved: Saved = await self.ask("save", call, pace=DISK)
        # A replaced shard does not have the groups that the records name.
        if lives != [(part.num_lives, part.num_deaths) for part in self.parts]:
            raise PartDiedError("a storage shard died while its groups were listed")
        await self._each_shard("save", folder, saved.payloads)
        return saved

    async def finish_save(self) -> None:
        """Wait until the files of `save` are on disk; raise `PartDiedError` if a shard dies before."""
        await self._each_shard("finish_save")

    async def load(self, folder: Path, freshness: Freshness) -> Restored:
        """Restore the state that `save` wrote. Call it before any other method."""
        call = ask_actor(self.mesh.load, folder / RECORDS_FILE, freshness, len(self.parts))
        restored: Restored = await self.ask("load", call, pace=DISK)
        await self._each_shard("load", folder, restored.moves)
        return restored

    async def _each_shard(self, endpoint: str, *args: Any) -> None:
        """Call an endpoint of all storage shards; raise `PartDiedError` if one dies."""
        timeout_s = self.timeouts.step_s
        await asyncio.gather(
            *(
                part.ask(
                    f"shards.{endpoint}", lambda actors: ask_actor(getattr(actors.shard, endpoint), *args), timeout_s, DISK
                )
                for part in self.parts
            )
        )

    def close(self) -> None:
        """Cancel the pending requests."""
        for request in (self._requested, self._failed):
            if request is not None:
                request.cancel()
