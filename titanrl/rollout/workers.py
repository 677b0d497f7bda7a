"""The rollout worker: an actor that reserves buffer slots, generates and scores groups, and commits them to the buffer."""

import asyncio
import gc
import logging
import math
import pickle
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.base.errors import StoppedError
from titanrl.base.plugins import Plugins, loaded, loading
from titanrl.carriers.dumps import DumpReader, DumpWriter
from titanrl.carriers.record import span
from titanrl.carriers.types import EvaluationResult, Group, GroupRecord, Rejection, Rollout
from titanrl.config.schema import Config
from titanrl.processes.actors import Actor, ActorError, ask_actor, cause_of, concurrent_endpoint, endpoint, is_stop, located
from titanrl.processes.sandbox import log_respawn
from titanrl.replay.groups import Reservation
from titanrl.replay.shards import Payloads, shared_payloads
from titanrl.rollout.group import (
    GroupRecorder,
    credited_values_differ,
    fit_to_rows,
    keeps,
    mask_truncated,
    newest_version,
    num_generated,
    record_of,
    roll_out,
    sampling_requests,
)
from titanrl.rollout.pool import GeneratorPool, InRound

if TYPE_CHECKING:
    from titanrl.rollout.open_tasks import OpenTask


T = TypeVar("T")
logger = logging.getLogger(__name__)

RUN = "roll out"
"""Name of the asyncio task that generates groups until the worker closes."""
ROUND, EVALUATION = "round", "evaluation"
"""Names of the asyncio tasks that `abandon_round` cancels."""
IN_BACKGROUND = "evaluation in the background"
"""Name of the asyncio task that `abandon_evaluation` cancels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxNote:
    """Message of a rollout worker: it has replaced the process that forks its scoring processes."""

    worker: int
    cause: str
    seconds: float
    """Seconds until it was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Arguments of a rollout worker."""

    number: int
    """Index of the worker, and of its storage shard."""
    life: int
    """Number of workers that have had this index so far, including this one."""
    config: Config
    model_dir: Path
    """Hugging Face model directory with the tokenizer."""
    run_dir: Path
    """Run directory; sampled rollouts are recorded in it."""
    buffer: Any
    generators: tuple[Any | None, ...]
    """Generator actors, one per replica; None for a replica that is not serving yet."""
    plugins: Plugins = field(default_factory=dict)
    save: Path | None = None
    """Folder to which all rollouts are written."""
    notes: Any = None
    """Port to which the worker sends a `SandboxNote` for each replacement of its sandbox; None only logs them."""
    replay: Path | None = None
    """Folder with saved rollouts to use instead of generating new ones."""


class RolloutWorker(Actor):
    """Turns prompts into scored groups."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        first = setup.number * len(setup.generators) // setup.config.rollout.num_workers
        self._pool = GeneratorPool(setup.generators, setup.config.generator.max_num_seqs, first)
        self._tasks: set[asyncio.Task[Any]] = set()
        config = setup.config
        # With dynamic sampling or a filter, a finished group can free its slot immediately, so it must not wait for older ones.
        drops_groups = config.rollout.dynamic_sampling or config.rollout.group_filter is not None
        in_order = (config.window_groups == 1 and not drops_groups) or setup.replay is not None
        dump = None if setup.save is None else DumpWriter(setup.save, setup.number).write
        self._payloads = shared_payloads(setup.number, config.replay.shard_memory_bytes, setup.run_dir)
        self._outbox = Outbox(self._payloads, setup.buffer, in_order=in_order, dump=dump)
        self._recorded = None if setup.replay is None else DumpReader(setup.replay)
        # In synchronous training, rollouts and evaluations must not overlap, or they would change each other's decoding batches
        # and the run would not be reproducible. A round needs all workers, so it waits while this one evaluates.
        self._turn = asyncio.Lock()
        self._tasks_of_run: list[OpenTask] = []
        self._rollouts_per_step = config.logging.rollouts_per_step

    @endpoint
    async def start(self) -> None:
        """Load the tokenizer, prompts and rewards, and start the scoring processes."""
        with loading():
            from titanrl.data.tokenizer import load_tokenizer
            from titanrl.rollout.open_tasks import EvaluationSets, open_tasks

        config, plugins = self._setup.config, self._setup.plugins
        self._tokenizer = load_tokenizer(self._setup.model_dir)
        rollout = self._setup.config.rollout
        self._decode = partial(self._tokenizer.decode_completion, stop=rollout.stop, keep_stop=rollout.keep_stop)
        name = f"rollout_{self._setup.number}_0"  # as its log
        self._record = GroupRecorder(self._setup.run_dir, name, config, self._tokenizer)
        if self._recorded is not None:
            return
        self._filter = loaded(plugins, "rollout.group_filter")
        log = self._setup.run_dir / "logs" / f"environments_{self._setup.number}.log"
        tasks = await open_tasks(config, self._tokenizer, plugins, log, on_respawn=self._note_respawn)
        self._tasks_of_run = list(tasks.values())
        # All groups of a round make the same number of calls, regardless of their task.
        self._num_calls = max(task.num_calls for task in self._tasks_of_run)
        self._sets = EvaluationSets(config, self._tokenizer, plugins, tasks, self._note_respawn)
        gc.set_threshold(20_000)  # with the default of 700, garbage collection takes 2 % of the time

    @endpoint
    async def run(self) -> None:
        """Start generating groups in the background. A failure is reported to the buffer, which raises it in the controller.

        A second call has no effect. If a worker is replaced while the run starts, both the start and the replacement call this.
        """
        if not any(task.get_name() == RUN for task in self._tasks):
            self._start_task(self._run_and_report_failure(), RUN)

    @concurrent_endpoint
    async def use_generator(self, replica: int, actor: Any | None) -> None:
        """Replace a generator replica; None marks the replica as unavailable until its replacement serves."""
        self._pool.use(replica, actor)

    @concurrent_endpoint
    async def use_generators(self, actors: Sequence[Any | None]) -> None:
        """Replace all generator replicas, as `use_generator` does."""
        for replica, actor in enumerate(actors):
            self._pool.use(replica, actor)

    @concurrent_endpoint
    async def change(self, rollouts_per_step: int, temperature: float) -> None:
        """Change the number of recorded groups per step, and the temperature of groups that start from now on."""
        self._rollouts_per_step = rollouts_per_step
        self._tasks_of_run = [task.at_temperature(temperature) for task in self._tasks_of_run]

    @concurrent_endpoint
    async def abandon_round(self) -> None:
        """Cancel this worker's groups of a round and its evaluation, because another worker or a generator died."""
        await self._cancel(ROUND, EVALUATION)
        self._outbox.reset()

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return immediately; a reply shows that the event loop is running."""

    @concurrent_endpoint
    async def evaluate(self, name: str, evaluator: Any | None = None) -> EvaluationResult:
        """Sample and score completions for the prompts of an evaluation set.

        With an `evaluator`, which is used instead of the generators for rollouts, the evaluation runs in the background. Raise
        `ScorerError` if the reward failed on every completion, and `StoppedError` if the evaluation was abandoned, the worker
        was closed, or a generator died.
        """
        if evaluator is None:
            task = self._start_task(self._evaluate(name), EVALUATION)
        else:
            pool = GeneratorPool((evaluator,), self._setup.config.generator.max_num_seqs)
            task = self._start_task(self._sets.evaluate(name, pool.generate, record=self._record.evaluation), IN_BACKGROUND)
        try:
            return await task
        except asyncio.CancelledError:  # another endpoint cancelled the task
            raise StoppedError("the evaluation was abandoned") from None

    @concurrent_endpoint
    async def abandon_evaluation(self) -> None:
        """Cancel the evaluation in the background, because its generator died."""
        await self._cancel(IN_BACKGROUND)

    async def _cancel(self, *names: str) -> None:
        cancelled = [task for task in self._tasks if task.get_name() in names]
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)

    async def _evaluate(self, name: str) -> EvaluationResult:
        # Groups of other workers may still be decoding the last round.
        generate = partial(self._pool.generate, when_drained=self._setup.config.max_staleness == 0)
        async with self._turn:  # in asynchronous training, rollouts never hold this lock
            return await self._sets.evaluate(name, generate, record=self._record.evaluation)

    @endpoint
    async def close(self) -> None:
        """Cancel all background tasks, and stop the scoring processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._recorded is not None:
            return
        await self._sets.close()
        for opened in self._tasks_of_run:
            await opened.close()

    def _start_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_respawn(self, cause: str, seconds: float) -> None:
        log_respawn(cause, seconds)
        if self._setup.notes is not None:
            self._setup.notes.send(SandboxNote(worker=self._setup.number, cause=cause, seconds=seconds))

    async def _run(self) -> None:
        """Reserve slots and generate groups until cancelled. A group starts when a slot is free and a generator has room."""
        config = self._setup.config
        share = -(-config.num_slots // config.rollout.num_workers)
        group_size = max((task.config.rollout.num_requests for task in self._tasks_of_run), default=0)
        async with asyncio.TaskGroup() as groups:
            while True:
                limit = share if self._recorded else min(share, await self._pool.room(group_size))
                call = ask_actor(self._setup.buffer.reserve, limit, self._setup.number, self._setup.life)
                with span("wait for a slot", "wait"):
                    reservations, dropped = await call
                self._payloads.drop(dropped)
                for reservation in reservations:
                    groups.create_task(self._roll_out(reservation))

    async def _run_in_rounds(self) -> None:
        """Run rounds until cancelled, for synchronous training.

        A round starts when all workers have finished their groups of the previous round, and fills all free slots. Its groups
        join the generators' batches at the same decoding step, so the batches depend neither on the number of workers nor on
        their speed.
        """
        setup = self._setup
        while True:
            call = ask_actor(setup.buffer.reserve_round, setup.number, setup.config.rollout.num_workers, setup.life)
            try:
                with span("wait for a slot", "wait"):
                    reservations, dropped = await call
            except ActorError as error:
                if is_stop(error):  # a worker or generator died, and the rounds start over
                    continue
                raise
            self._payloads.drop(dropped)
            round_ = self._start_task(self._run_round(reservations), ROUND)
            await asyncio.wait({round_})
            if not round_.cancelled():
                round_.result()

    async def _run_round(self, reservations: Sequence[Reservation]) -> None:
        indices = [reservation.index for reservation in reservations]
        async with self._turn, asyncio.TaskGroup() as groups:
            for reservation in reservations:
                if reservation.handle.shard == self._setup.number:
                    groups.create_task(self._roll_out(reservation, InRound(reservation.index, indices)))

    async def _roll_out(self, reservation: Reservation, place: InRound | None = None) -> None:
        """Generate and score one group, or read it from a dump, and commit it to the buffer."""
        if self._recorded is not None and reservation.index >= self._recorded.num_groups:
            return  # the dump ends here, and no batch needs this group
        self._outbox.begin(reservation.index)
        if self._recorded is not None:
            group, rejection = await asyncio.to_thread(self._recorded.group, reservation.index), None
        else:
            group = await self._sample(reservation, place)
            rejection = self._rejection(group, reservation.draw.task)
        await self._commit(reservation, group, rejection)

    async def _sample(self, reservation: Reservation, place: InRound | None) -> Group:
        task = self._tasks_of_run[reservation.draw.task]
        config = task.config
        draw = reservation.draw
        prompt = task.prompts.prompt(reservation.index, draw.level, draw.stream_index)
        with self._pool.session() as session:
            if task.episodes is None:
                requests = sampling_requests(prompt, config.rollout, config.seed, experts=config.records_experts)
                generate = partial(session.generate, num_kept=config.rollout.group_size, place=place)
                group = await roll_out(prompt, requests, generate, task.scoring.score, self._decode, self._tokenizer.decode_raw)
            else:
                group = await task.episodes.roll_out(prompt, partial(session.generate, place=place), in_round=place is not None)
            for _ in range(0 if place is None else self._num_calls - task.num_calls):
                await session.generate([], place=place)
        return group

    async def _commit(self, reservation: Reservation, group: Group, rejection: Rejection | None) -> None:
        config = self._setup.config if self._recorded else self._tasks_of_run[reservation.draw.task].config
        counted = mask_truncated(group) if config.algorithm.mask_truncated else group
        trained, num_overlong = fit_to_rows(counted, config.trainer)
        differs = credited_values_differ(group, trained, config.algorithm, config.data)
        has_signal = group.rewards_differ or differs or (config.trains_on_equal_rewards and bool(group.rollouts))
        has_tokens = any(segment.mask.any() for rollout in trained.rollouts for segment in rollout.segments)
        record = record_of(
            trained,
            reservation.handle,
            has_payload=has_signal and has_tokens and rejection is None,
            num_overlong=num_overlong,
            rejection=rejection,
            parts_differ=differs,
            num_generated=num_generated(group),
            whole=group,
        )
        # Record before the delivery, so that a checkpoint never contains a group whose record was lost in a crash.
        if reservation.index % config.rollout.groups_per_step < self._rollouts_per_step:
            environment = config.data.environment
            await asyncio.to_thread(
                self._record.rollouts,
                group,
                self._decode,
                status=status_of(record),
                version=record.max_version if group.rollouts else newest_version(group),
                environment=None if environment is None else environment.name,
            )
        await self._outbox.deliver(record, trained.rollouts, group)

    def _rejection(self, group: Group, task: int) -> Rejection | None:
        """Return why a group must not be trained on; None if it may be, or if it has no rewards at all."""
        rollout = self._tasks_of_run[task].config.rollout
        if not group.rollouts:
            return None
        if len(group.rollouts) < rollout.min_group_size:
            return "too small"
        if self._filter is None or keeps(self._filter, group, self._decode, str(rollout.group_filter)):
            return None
        return "filtered"

    async def _run_and_report_failure(self) -> None:
        try:
            await (self._run() if self._setup.config.max_staleness else self._run_in_rounds())
        except* Exception as errors:  # top level of a background task: any failure must reach the controller
            logger.exception("the rollouts failed")
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            first = located(cause_of(error))
            await self._setup.buffer.fail.call_one("".join(traceback.format_exception_only(first)).strip())


MAX_HELD = 8
"""Number of queued groups at which they are sent without waiting for an older one. This bounds the size of a message."""


_Finished = tuple[GroupRecord, tuple[Rollout, ...], Group | None]
Dump = Callable[[Sequence[tuple[Group, str]]], object]


class Outbox:
    """Queue of finished groups.

    One delivery runs at a time. Groups that finish during a delivery, or in the same tick of the event loop, share the next
    message, because a message has a high fixed cost. If batches keep the order of prompts, a group also waits for older groups
    of this worker, because no batch can contain it before them.
    """

    def __init__(self, payloads: Payloads, buffer: Any, *, in_order: bool, dump: Dump | None = None) -> None:
        """Start with an empty queue.

        The worker's `StorageShard` reads from `payloads`. `in_order` is True if batches keep the order of prompts. `dump`
        writes groups to disk before they are delivered, each with its status; see `status_of`.
        """
        self._payloads, self._buffer, self._in_order, self._dump = payloads, buffer, in_order, dump
        self._unfinished: dict[int, None] = {}  # prompt indices, oldest first
        self._pending: list[_Finished] = []
        self._due = asyncio.Event()
        self._delivering = asyncio.Lock()
        self._next: asyncio.Task[None]

    def begin(self, index: int) -> None:
        """Register a group by its prompt index, before it is generated. Call this in the order of prompts."""
        self._unfinished[index] = None

    def reset(self) -> None:
        """Discard all unfinished and pending groups, because their round was abandoned."""
        self._unfinished.clear()
        if self._pending:
            self._next.cancel()
            self._pending = []
        self._due.clear()

    async def deliver(self, record: GroupRecord, rollouts: tuple[Rollout, ...], whole: Group | None = None) -> None:
        """Queue a finished group and wait until the buffer has its record; `whole` is the group as sampled, for a dump."""
        self._unfinished.pop(record.index, None)
        if not self._pending:
            self._next = asyncio.create_task(self._deliver_pending(), name="deliver groups")
        self._pending.append((record, rollouts, whole))
        oldest_unfinished = next(iter(self._unfinished), math.inf)
        oldest = min(queued.index for queued, _, _ in self._pending)
        if not self._in_order or oldest < oldest_unfinished or len(self._pending) >= MAX_HELD:  # else no batch can use them yet
            self._due.set()
        await asyncio.shield(self._next)

    async def _deliver_pending(self) -> None:
        async with self._delivering:
            await self._due.wait()
            self._due.clear()
            groups, self._pending = self._pending, []
            if self._dump is not None:
                whole = [(group, status_of(record)) for record, _, group in groups if group is not None]
                await asyncio.to_thread(self._dump, whole)
            # Store the tokens first: the trainer may fetch them as soon as the buffer has the record.
            for record, rollouts, _ in groups:
                if record.has_payload:
                    parts = packed(rollouts)
                    if self._payloads.has_room(parts):  # a thread costs more than storing the group
                        self._payloads.put(record.handle, parts)
                    else:
                        await asyncio.to_thread(self._payloads.put, record.handle, parts)
            with span("deliver"):
                await ask_actor(self._buffer.commit, [record for record, _, _ in groups], self._payloads.usage)


def status_of(record: GroupRecord) -> str:
    """Return the status of a group: `kept`, or why it is not trained on."""
    if not record.rewards:
        return "no reward"
    return record.rejection or ("kept" if record.has_payload else "no signal")


def packed(rollouts: Iterable[Rollout]) -> tuple[bytes, ...]:
    """Pickle each segment, so that only the worker that creates it and the trainer rank that uses it convert it."""
    return tuple(pickle.dumps(segment, pickle.HIGHEST_PROTOCOL) for rollout in rollouts for segment in rollout.segments)
