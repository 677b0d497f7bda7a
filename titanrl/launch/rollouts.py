"""The controller's clients of the rollout workers and of the buffer. A worker that dies or hangs is replaced."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titanrl.actors import StoppedError, resolve
from titanrl.config.operations import TimeoutsConfig
from titanrl.launch.deadlines import DISK_S, Pace
from titanrl.launch.generators import GeneratorMeshes, Replica
from titanrl.launch.parts import Part, Surroundings
from titanrl.launch.supervision import DeadlineError, PartDiedError, Supervisor
from titanrl.launch.trainer_mesh import TrainerMesh, start_request
from titanrl.replay.actors import RECORDS_FILE
from titanrl.replay.batch import Batch, Replayed
from titanrl.replay.failures import StarvationError
from titanrl.replay.saved import Freshness, Restored, Saved, TrainedBatch
from titanrl.tables import DoubleArray, Table
from titanrl.types import EvaluationResult

_DISK = Pace(min_s=DISK_S)


@dataclass(frozen=True, slots=True)
class Worker:
    """Actors of a rollout worker's process."""

    worker: Any
    """The `RolloutWorker`."""
    shard: Any
    """The `StorageShard`."""


class RolloutMesh:
    """All rollout workers, each with a storage shard.

    What a dead worker was generating, and finished groups whose tokens only its shard had, are sampled again. In synchronous
    training, everything after the last batch is sampled again, in rounds that are those of a run without a fault; so is it when
    a generator dies. The curve is then the same, bit for bit.
    """

    def __init__(
        self,
        spawns: Mapping[str, Callable[[Part], Awaitable[Worker]]],
        around: Surroundings,
        timeouts: TimeoutsConfig,
        *,
        buffer: "BufferClient",
        trainer: TrainerMesh,
        generators: GeneratorMeshes,
        in_rounds: bool,
    ) -> None:
        """Start nothing yet.

        Args:
            spawns: by role, function that spawns the process of a worker and returns its actors.
            around: supervisor and others.
            timeouts: limits of requests.
            buffer: client of the buffer.
            trainer: reads the storage shards.
            generators: serve the workers.
            in_rounds: True in synchronous training.
        """
        self.parts = [Part(role, around, spawn, self) for role, spawn in spawns.items()]
        self.supervisor, self.timeouts = around.supervisor, timeouts
        self._buffer, self._trainer, self._generators = buffer, trainer, generators
        self._in_rounds = in_rounds
        self._is_running = False
        self._rewinding = asyncio.Lock()
        self.num_rewound = 0
        """Number of times that everything after the last batch was sampled again."""
        buffer.parts = self.parts
        generators.listeners.append(self.use_generator)

    @property
    def num_deaths(self) -> int:
        """Number of workers that have died."""
        return sum(part.num_deaths for part in self.parts)

    async def spawn(self) -> None:
        """Spawn the processes and actors."""
        for part in self.parts:
            await part.spawn()

    async def start(self) -> None:
        """Load prompts, tokenizer and scoring processes."""
        await asyncio.gather(*(part.start() for part in self.parts))

    async def bring_up(self, part: Part) -> None:
        """Start a worker; let it roll out if the others do."""
        await part.ask(f"{part.role}.start", lambda actors: actors.worker.start.call_one(), self.timeouts.start_s)
        part.mark_started()
        if part.num_lives > 1:
            await self._trainer.use_shard(self.parts.index(part), part.actors.shard)
        for replica in range(len(self._generators.parts)):  # they may change meanwhile, and since the worker was spawned
            await self._tell(part, replica, self._generators.serving[replica])
        if self._is_running:
            await self._run(part)

    async def on_lost(self, part: Part) -> None:
        """Sample again what a worker was doing, and what only its shard had."""
        await self._trainer.use_shard(self.parts.index(part), None)
        await self._buffer.lose_shard(self.parts.index(part), part.num_lives)
        if self._in_rounds:
            await self._rewind()

    def probe(self, part: Part) -> Awaitable[object]:
        """Request an answer of a worker's event loop."""
        reply: Awaitable[object] = part.actors.worker.probe.call_one()
        return reply

    async def run(self) -> None:
        """Start rolling out."""
        self._is_running = True
        await asyncio.gather(*(self._run_first(part) for part in self.parts))

    async def use_generator(self, replica: int, actor: Any | None) -> None:
        """Let all workers use the replacement of a generator replica, or none while there is none."""
        await asyncio.gather(*(self._tell(part, replica, actor) for part in self.parts if part.is_started))
        if self._in_rounds and actor is None:
            await self._rewind()

    async def wait_until_up(self) -> None:
        """Wait until all workers have started, and those that died have been replaced."""
        for part in self.parts:
            await part.wait_until_up()

    async def take_back(self, handles: Table) -> None:
        """Give a batch back whose tokens are lost, to be taken again when they have been sampled again."""
        await self.wait_until_up()
        if self._in_rounds:
            await self._rewind(handles)
        else:
            await self._buffer.give_back(handles)

    async def evaluate(self, name: str) -> EvaluationResult:
        """Sample completions of an evaluation set on the first worker, and score them."""
        pace = Pace(kind=f"rollout.evaluate {name}")
        while True:
            num_rewound = self.num_rewound
            try:
                return await self.parts[0].until_done(
                    "rollout.evaluate",
                    lambda actors: actors.worker.evaluate.call_one(name),
                    self.timeouts.step_s,
                    pace,
                )
            except StoppedError:  # abandoned, like the round
                if num_rewound == self.num_rewound:
                    raise

    async def evaluate_on(self, evaluator: Part, name: str) -> EvaluationResult:
        """Evaluate a set as `evaluate` does, but on a generator of its own, while the rollouts go on.

        Raises:
            PartDiedError: The generator has ended; or StoppedError, if the worker noticed it first.
        """
        first, timeout_s = self.parts[0], self.timeouts.step_s
        pace = Pace(kind=f"rollout.evaluate {name} in the background")

        async def evaluate(replica: Replica) -> EvaluationResult:
            return await first.until_done(
                "rollout.evaluate", lambda actors: actors.worker.evaluate.call_one(name, replica.leader), timeout_s, pace
            )

        return await evaluator.ask("evaluator.evaluate", evaluate, 2 * timeout_s, Pace(min_s=timeout_s))

    async def abandon_evaluation(self, replica: int, actor: Any | None) -> None:
        """Cancel an evaluation in the background when its generator has ended; a listener of that generator."""
        part = self.parts[0]
        if actor is None and part.is_started:
            with contextlib.suppress(PartDiedError):
                role, timeout_s = part.role, self.timeouts.step_s
                await part.ask(
                    f"{role}.abandon_evaluation", lambda actors: actors.worker.abandon_evaluation.call_one(), timeout_s
                )

    async def close(self) -> None:
        """Stop the rollout loops and the scoring processes."""
        await asyncio.gather(*(part.close() for part in self.parts))
        await self._each("close", self.timeouts.close_s / 4)

    async def _run_first(self, part: Part) -> None:
        await part.wait_until_up()
        with contextlib.suppress(PartDiedError):  # its replacement runs as soon as it is up
            await self._run(part)

    async def _run(self, part: Part) -> None:
        await part.ask(f"{part.role}.run", lambda actors: actors.worker.run.call_one(), self.timeouts.step_s)

    async def _rewind(self, handles: Table | None = None) -> None:
        """Sample again everything after the last batch. No round may begin before every part has forgotten the present one."""
        async with self._rewinding:
            self.num_rewound += 1
            await self._buffer.hold_rounds()
            await self._each("abandon_round", self.timeouts.step_s)
            await self._generators.abandon_round()
            await self._buffer.rewind(handles)

    async def _tell(self, part: Part, replica: int, actor: Any | None) -> None:
        with contextlib.suppress(PartDiedError):
            await part.ask(
                f"{part.role}.use_generator",
                lambda actors: actors.worker.use_generator.call_one(replica, actor),
                self.timeouts.step_s,
            )

    async def _each(self, endpoint: str, timeout_s: float) -> None:
        """Call an endpoint of all workers that have started; one that dies needs no call."""

        async def call(part: Part) -> None:
            with contextlib.suppress(PartDiedError):
                await part.ask(f"{part.role}.{endpoint}", lambda actors: getattr(actors.worker, endpoint).call_one(), timeout_s)

        await asyncio.gather(*(call(part) for part in self.parts if part.is_started))


@dataclass(slots=True)
class BufferClient:
    """The replay buffer, with at most one batch requested ahead of time."""

    actor: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    starvation_timeout_s: float
    groups_per_step: int
    parts: Sequence[Part] = ()
    """Workers, each with a storage shard."""
    _requested: "asyncio.Task[Batch] | None" = None
    _last_at: float | None = None
    """Time at which the last batch was taken, on the clock of `time.perf_counter`."""

    def prefetch(self) -> None:
        """Request the next batch, so that it is sent as soon as it is complete; `take_batch` waits for it."""
        if self._requested is None:
            request = self.actor.take_batch.call_one(self.groups_per_step)
            self._requested = start_request(resolve(request), "next batch")

    async def take_batch(self) -> Batch:
        """Return the next batch; the deadline starts now. If this wait is interrupted or times out, the request stays.

        Raises:
            StarvationError: no batch with a signal was complete in time; a later call waits for it again.
            RolloutError: a rollout worker failed.
        """
        self.prefetch()
        assert self._requested is not None
        # The time since the last batch is learned: where batches are ready early, waits are too short to learn from.
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

    def _why_starved(self, waited_s: float) -> Awaitable[str]:
        """Request the groups that have finished since the last batch, as text."""
        reply: Awaitable[str] = self.actor.why_starved.call_one(self.groups_per_step, waited_s)
        return reply

    async def replay(self, version: int, beta: float) -> Replayed:
        """Draw groups of earlier batches for a batch that trains weights of `version`; `beta` is for importance weights."""
        return await self.supervisor.ask("buffer.replay", self.actor.replay.call_one(version, beta), self.timeouts.step_s)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, as before a measurement; at most as long as for a batch."""
        call = self.actor.wait_until_full.call_one()
        await self.supervisor.ask("buffer.wait_until_full", call, self.starvation_timeout_s)

    async def release(self, handles: Table, priorities: DoubleArray | None = None) -> None:
        """Free the slots of batches, given as a table of handles, or keep their groups for replay.

        Args:
            handles: groups of the batches, new and replayed ones.
            priorities: priority of each group; None if they were not trained on.
        """
        call = self.actor.release.call_one(handles, priorities)
        await self.supervisor.ask("buffer.release", call, self.timeouts.step_s)

    async def save(self, folder: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Start to write the state into a folder: the owner the records, each shard its tokens. Generation continues.

        Args:
            folder: folder of its own.
            trained: batches trained on since the last publication.
            from_index: see `GroupBuffer.state`.

        Raises:
            PartDiedError: a shard has died, with tokens that it had to write.
        """
        lives = [(part.num_lives, part.num_deaths) for part in self.parts]
        call = self.actor.save.call_one(folder / RECORDS_FILE, trained, from_index)
        saved: Saved = await self.supervisor.ask("buffer.save", call, self.timeouts.step_s, _DISK)
        # The replacement of a shard does not have the groups that the records name.
        if lives != [(part.num_lives, part.num_deaths) for part in self.parts]:
            raise PartDiedError("a storage shard has died while its groups were listed")
        await self._each_shard("save", folder, saved.payloads)
        return saved

    async def finish_save(self) -> None:
        """Wait until the files of `save` are on disk.

        Raises:
            PartDiedError: a shard has died, and its file with it.
        """
        await self._each_shard("finish_save")

    async def load(self, folder: Path, freshness: Freshness) -> Restored:
        """Continue with the state that `save` wrote, before any other call."""
        call = self.actor.load.call_one(folder / RECORDS_FILE, freshness, len(self.parts))
        restored: Restored = await self.supervisor.ask("buffer.load", call, self.timeouts.step_s, _DISK)
        await self._each_shard("load", folder, restored.moves)
        return restored

    async def hold_rounds(self) -> None:
        """Let no round begin until `rewind`."""
        await self.supervisor.ask("buffer.hold_rounds", self.actor.hold_rounds.call_one(), self.timeouts.step_s)

    async def rewind(self, handles: Table | None) -> None:
        """Sample everything after the last batch again; see `GroupBuffer.rewind`."""
        await self.supervisor.ask("buffer.rewind", self.actor.rewind.call_one(handles), self.timeouts.step_s)

    async def lose_shard(self, shard: int, num_lives: int) -> None:
        """Sample again what a shard held whose process has ended, after so many lives."""
        call = self.actor.lose_shard.call_one(shard, num_lives)
        await self.supervisor.ask("buffer.lose_shard", call, self.timeouts.step_s)

    async def give_back(self, handles: Table) -> None:
        """Take back a batch that cannot be trained on; see `GroupBuffer.give_back`."""
        await self.supervisor.ask("buffer.give_back", self.actor.give_back.call_one(handles), self.timeouts.step_s)

    async def _each_shard(self, endpoint: str, *args: Any) -> None:
        """Call an endpoint of all storage shards.

        Raises:
            PartDiedError: a shard has died, with what it had to write.
        """
        timeout_s = self.timeouts.step_s
        await asyncio.gather(
            *(
                part.ask(f"shards.{endpoint}", lambda actors: getattr(actors.shard, endpoint).call_one(*args), timeout_s, _DISK)
                for part in self.parts
            )
        )

    async def discard(self, handles: Table, before_version: int) -> None:
        """Free the slots of a batch that is not trained on, and those of all groups with a token older than a version."""
        call = self.actor.discard.call_one(handles, before_version)
        await self.supervisor.ask("buffer.discard", call, self.timeouts.step_s)

    def close(self) -> None:
        """Cancel the request for the next batch."""
        if self._requested is not None:
            self._requested.cancel()
