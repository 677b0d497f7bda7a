"""Batches and published versions of a run: which batch is trained on next, how old it may be, and when its slots are freed.

A published version reaches the generators in the background (`WeightSync`). Then the slots of the batches that it was
trained on are freed, so a prompt admitted to a freed slot is sampled with this version or a newer one. That bounds staleness
(docs/async.md); `Publications.ages` asserts the bound on every batch of this run's own rollouts.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.algorithms.batch_plan import ReplaySchedule
from titanrl.carriers.types import DoubleArray, OptimUpdate
from titanrl.launch.trainer_mesh import PastPolicies
from titanrl.replay.groups import Batch, Freshness, TrainedBatch, joined, versions_behind
from titanrl.run.checkpoints import checkpoint_dir
from titanrl.run.run import Run

if TYPE_CHECKING:
    from titanrl.run.generation import Dump

GROUPS = "groups"
"""Folder of a checkpoint with the state of the buffer."""


class Publications:
    """Takes batches from the buffer, and publishes the versions trained on them. Created when a session begins."""

    def __init__(self, run: Run, past: PastPolicies, replay: ReplaySchedule, dump: "Dump") -> None:
        """Publish nothing yet. The session is open; `past` tells whether the trainer has kept the last published weights."""
        self._run, self._past, self._replay, self._dump = run, past, replay, dump
        self._session, self._config = run.session, run.config
        self._buffer, self._versions = run.session.rollouts.buffer, run.session.weights.versions
        self._last_known = -1  # newest published version that `take` or the loop has seen; user code may publish another
        self._unpublished: list[TrainedBatch] = []

    async def begin(self, resume_step: int | None) -> None:
        """Publish the policy and start the rollouts: those of a new run, or those of the checkpoint of a step."""
        if resume_step is not None:
            await self._continue(resume_step)
            return
        self._publish_version(self._run.state.version, then=self._session.rollouts.workers.run)
        await self._session.weights.ready()

    async def take(self) -> Batch:
        """Take a batch and the groups to replay with it. Discard batches that became too old because user code published."""
        bound = self._config.staleness_bound
        while True:
            batch = await self._session.weights.unless_failed(self._buffer.take_batch())
            # The slots guarantee the bound, unless user code has published since the last batch.
            if self._versions[-1] == self._last_known or versions_behind(self._versions, batch.oldest_version) <= bound:
                break
            groups = len(batch.records.groups)
            self._run.state = replace(self._run.state, counts=self._run.state.counts.plus(**batch.work))  # it was work, too
            await self._buffer.discard(batch.records.handles, before_version=self._versions[-1 - bound])
            self._run.recorder.directory.event("drop", step=self._run.state.step + 1, groups=groups, reason="too old")
        self._last_known = self._versions[-1]
        if not self._config.replay.fraction:
            return batch
        version = self._session.trainer.version
        return replace(batch, replayed=await self._buffer.replay(version, self._replay.beta(version)))

    def ages(self, batch: Batch) -> list[int]:
        """Return the number of versions published since each group's oldest token was sampled; assert the staleness bound."""
        versions = batch.records.groups["min_version"].tolist()
        age_of = {version: versions_behind(self._versions, version) for version in set(versions)}
        ages, bound = [age_of[version] for version in versions], self._config.staleness_bound
        # A dump may have been recorded with another bound.
        assert self._dump.is_source or max(ages) <= bound, (
            f"step {self._run.state.step + 1} got a token {max(ages)} publications old, the bound is {bound}"
        )
        return ages

    async def publish(self, batch: Batch, advantages_N: DoubleArray, updates: Sequence[OptimUpdate]) -> None:
        """Publish after `updates_per_publish` steps, which frees their slots; free the slots of a skipped step immediately.

        Args:
            batch: Batch that was trained on.
            advantages_N: Advantage of each rollout, in the order of their prompts. Priorities of replayed groups depend on it.
            updates: Results of the optimizer steps on this batch.
        """
        records, priorities = batch.all_records, None
        if all(update.skipped for update in updates):
            await self._buffer.release(records.handles)
            return
        if self._config.replay.fraction:
            records = records.by_index()
            priorities = self._replay.priorities(records, advantages_N, self._config.data.weight_of)
        self._unpublished.append((records.handles, priorities))
        version = updates[-1].version
        if version - self._versions[-1] >= self._config.algorithm.updates_per_publish:
            trained, self._unpublished = joined(self._unpublished), []
            await self._run.steering.begin_publication()  # before slots are freed and new prompts drawn
            self._publish_version(version, then=partial(self._buffer.release, *trained))

    async def save(self, folder: Path) -> None:
        """Start writing the trainer's state, the last published weights if they are older, and the buffer's groups.

        Synchronous training samples all groups between two publications in one round, and a resumed run must repeat the round.
        A checkpoint right after a publication holds no groups, so the round is sampled again. One between two publications
        holds all groups of the round. With replay, or if the data choose the prompts, the buffer's other state is saved, too.
        """
        run, state = self._run, self._run.state
        await self._session.rollouts.workers.wait_until_up()  # each shard writes its groups
        # Ages up to the bound need the last bound + 1 versions; one more is kept as a margin.
        published = self._versions[-2 - self._config.staleness_bound :]
        keeps_published = published[-1] != state.version and self._past.kept == published[-1]
        kept = published[-1] if keeps_published else None
        if published[-1] != state.version and not keeps_published:  # no copy is kept, or custom code took steps
            published.append(state.version)  # a resumed run publishes it first
        run.state = replace(state, published=tuple(published), in_flight=(), num_held=0)
        from_index = None
        if self._config.max_staleness == 0:
            if self._unpublished:
                await self._buffer.wait_until_full()
            else:
                from_index = state.next_index
        if from_index is None or self._config.replay.fraction or self._config.data.chooses_prompts:
            saved = await self._buffer.save(folder / GROUPS, self._unpublished, from_index)
            run.state = replace(run.state, next_index=saved.next_index, in_flight=saved.in_flight, num_held=saved.num_held)
        # Last: if a shard dies, `buffer.save` fails and all is written again.
        await self._session.trainer.save_checkpoint(state.step, kept)

    async def _continue(self, step: int) -> None:
        """Restore versions, groups and trainer of a checkpoint, which may lie between two publications.

        The generators first get the weights that were published last. The trainer's weights can be newer.
        """
        state, session, config = self._run.state, self._session, self._config
        published = list(state.published or (state.version,))
        num_updates, groups_per_step = state.version - published[-1], config.rollout.groups_per_step
        is_unchanged = state.num_held == num_updates * groups_per_step  # False if the batch size was changed
        continues_interval = 0 < num_updates < config.algorithm.updates_per_publish and is_unchanged
        if continues_interval:
            await session.trainer.load_published(step, published[-1])
            self._past.resume(published[-1])
        else:  # publish now: the interval is complete, or the configuration was changed
            published += [] if published[-1] == state.version else [state.version]
            await self._run.load_checkpoint()
        self._versions[:] = published[:-1]  # the list of `WeightSync`, to which publishing appends the last
        trained = await self._load_groups(step, published)
        self._unpublished = trained if continues_interval else []

        async def run() -> None:
            if trained and not continues_interval:
                await self._buffer.release(*joined(trained))
            await session.rollouts.workers.run()

        self._publish_version(published[-1], then=run)
        await session.weights.ready()
        if continues_interval:  # the generators have the older weights; now load the newer ones
            await self._run.load_checkpoint()

    async def _load_groups(self, step: int, published: Sequence[int]) -> list[TrainedBatch]:
        """Load the groups of a checkpoint; return the batches trained on since the last publication."""
        directory = self._run.recorder.directory
        folder = checkpoint_dir(directory.checkpoints, step) / GROUPS
        if not folder.exists():
            return []
        per_publish, bound = self._config.groups_per_publish, self._config.staleness_bound
        freshness = Freshness(published=tuple(published), groups_per_publish=per_publish, bound=bound)
        restored = await self._buffer.load(folder, freshness)
        counts = {"ready": restored.num_ready, "in_flight": restored.num_in_flight, "too_old": len(restored.too_old)}
        directory.event("restored", step=step, **counts)
        directory.drop_rollouts(restored.too_old)
        self._dump.drop(restored.too_old)
        return restored.trained

    def _publish_version(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start to publish a version. `then`, which frees slots, is awaited once no new request can get an older version.

        That is when one replica has pulled the version, and the others hold back new requests until they have pulled it.
        """
        directory = self._run.recorder.directory

        async def published() -> None:
            await then()
            directory.event("publication", version=version)

        self._session.weights.publish(version, then=published)
        self._last_known = version
