"""The controller's clients of the rollout workers and of the replay buffer. Workers that die or hang are replaced."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Channel, PortReceiver

from titanrl.base.errors import StoppedError
from titanrl.carriers.tables import Table
from titanrl.carriers.types import EvaluationResult
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.generators import GeneratorMeshes, Replica
from titanrl.launch.supervision import DISK, PACE, DeadlineError, Pace, Part, PartDiedError, SharedContext, Supervisor, ask_each
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.launch.verbs import Limit, Verb, done, only, start_request
from titanrl.processes.actors import ActorError, ask_actor, cause_of, resolve
from titanrl.replay.buffer import RECORDS_FILE, BufferActor, GroupBuffer
from titanrl.replay.groups import Batch, Freshness, Restored, Saved, StarvationError, TrainedBatch
from titanrl.rollout.workers import SandboxNote

T = TypeVar("T")


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
        self._in_rounds = in_rounds  # in synchronous training
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
        """Return a batch whose tokens are lost to the buffer, so that its groups are sampled again."""
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
        """Replace no worker any more, and read no more messages."""
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
        """Sample everything after the last batch again. No round may begin before all actors have dropped the current one."""
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
