"""GRPO on a policy mesh and a generator mesh: the loop, and the command `python -m titanrl.grpo --config FILE`.

How the default objective differs from the GRPO paper (arXiv:2402.03300):
1. Advantages are centred but not divided by the group's standard deviation (Dr. GRPO, arXiv:2503.20783).
2. Tokens are averaged over the whole batch, not first within each completion (DAPO, arXiv:2503.14476).
3. There is no KL term to a reference model.
4. The old log-probabilities are the generator's own; their distance to the trainer's is measured at every step.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from titanrl.algorithms.batch_plan import plan_batch
from titanrl.algorithms.by_task import advantages_by_task
from titanrl.algorithms.minibatches import StepPlan, plan_step
from titanrl.algorithms.replay import ReplaySchedule
from titanrl.algorithms.schedule import adam_params
from titanrl.base.errors import TitanRLError
from titanrl.base.loading import import_object
from titanrl.base.plugins import loaded
from titanrl.carriers.types import AdamParams, EvaluationResult, GenerationStats, LossSums, OptimUpdate, StepMetrics
from titanrl.config import Config, Source
from titanrl.config.sizes import describe_staleness
from titanrl.launch.past_policies import PastPolicies
from titanrl.launch.trainer_mesh import merge_losses
from titanrl.metrics import steps as metrics_of
from titanrl.metrics.console import Console
from titanrl.metrics.steps import task_metrics
from titanrl.processes.actors import StoppedError
from titanrl.replay.actors import TokensLostError
from titanrl.replay.groups import Batch, Freshness, Replayed, TrainedBatch, joined, versions_behind
from titanrl.run import command
from titanrl.run.dumped import DumpedRun
from titanrl.run.progress import checkpoint_dir

GROUPS = "groups"
"""Folder of a checkpoint with the state of the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Results of the optimizer steps on one batch."""

    losses: Sequence[LossSums]
    """Loss metrics of each optimizer step, summed over ranks and micro-batches."""
    updates: Sequence[OptimUpdate]
    """Result of each optimizer step."""
    generated: GenerationStats
    """Work of the generators since the previous batch."""
    batch_metrics: Mapping[str, float]
    """Metrics that depend on the batch alone."""


class GRPO(DumpedRun):
    """A training run: rollout workers, trainer and generators, and the order in which they are called.

    Example:
        async with GRPO(load_config("configs/quickstart.yaml")) as run:
            metrics = await run.step()
    """

    with_data = True

    @classmethod
    def for_config(cls, config: Config) -> "type[GRPO]":
        """Return the class that runs a configuration: this one, or with `train: false` a subclass that only generates."""
        generation: type[GRPO] = import_object("titanrl.commands.generation:Generation", key="train")
        return cls if config.train else generation

    def __init__(
        self,
        config: Config,
        *,
        resume: Path | None = None,
        console: Console | None = None,
        source: Source | None = None,
        accepts_changed_data: bool = False,
        **objects: object,
    ) -> None:
        """Check the configuration and the machine without starting a process; see `Run`."""
        super().__init__(
            config,
            resume=resume,
            console=console,
            source=source,
            accepts_changed_data=accepts_changed_data,
            **objects,
        )
        self._last_published = -1  # version that the loop published last, or that it has seen published by custom code
        self._unpublished: list[TrainedBatch] = []
        self._num_deaths = 0  # of rollout workers, when a batch was last returned
        self._advantage = loaded(self._plugins, "algorithm.advantage")
        self._advantages_by_task = advantages_by_task(self.config, self._plugins)
        self._replay = ReplaySchedule(config.replay, config.num_steps, loaded(self._plugins, "replay.priority"))
        self._past: PastPolicies

    async def step(self) -> StepMetrics:
        """Take a batch, plan it, train on it, publish the weights, report."""
        await self._hooks.before_step(self)
        started, buffer = time.perf_counter(), self.session.rollouts.buffer
        params = self.steered(adam_params(self.config.algorithm, self.session.trainer.version, self.config.num_steps))
        while True:
            with self._timer.phase("rollout"):
                batch = await self._take_batch()
            with self._timer.phase("train"):
                plan = self._plan(batch)
                try:
                    trained = await self._train(batch, plan, params)
                    break
                except TitanRLError as error:
                    await self._return_batch(batch, error)
        await self._publish(batch, plan, trained.updates)
        buffer.prefetch()
        metrics = self._report(batch, plan, trained, params, time.perf_counter() - started)
        await self._hooks.after_step(self, metrics)
        return metrics

    async def _train(self, batch: Batch, plan: StepPlan, params: AdamParams) -> Trained:
        """Accumulate the gradient of each mini-batch and step the optimizer.

        Each optimizer step is requested together with its passes, so the trainer does not wait for the controller in between.
        """
        trainer, weights, past_policies = self.session.trainer, self.session.weights, self._past
        ages = self._ages(batch)
        if self.config.trainer.max_optimizer_steps > 1:
            await trainer.hold_rollouts(plan.microbatches)  # no tokens can be lost after the first optimizer step
        past = await past_policies.compute(plan.first_epoch, version=trainer.version, published=weights.versions[-1])
        losses: list[LossSums] = []
        updates: list[OptimUpdate] = []
        for number, minibatch in enumerate(plan.updates, 1):
            microbatches = await past_policies.with_correction_totals(minibatch.microbatches, past)
            passes = trainer.forward_backward(microbatches, proximal_version=past.proximal, reference_version=past.reference)
            stepping = trainer.optim_step(params, after=weights.pushed, completes=number == len(plan.updates))
            if number == 1:  # while the trainer computes
                generated, batch_metrics = self.session.generators.take_stats(), self._batch_metrics(batch, ages)
            losses.append(await passes)
            with self._timer.phase("sync"):
                await weights.pushed()  # the last push still reads the weights
            with self._timer.phase("optim"):
                updates.append(await stepping)
        return Trained(losses=losses, updates=updates, generated=await generated, batch_metrics=batch_metrics)

    async def _return_batch(self, batch: Batch, error: TitanRLError) -> None:
        """Return a batch to the buffer after a rollout worker has died with tokens that the trainer had not fetched.

        Raises:
            TitanRLError: The error has another cause.
        """
        workers = self.session.rollouts.workers
        # Any trainer rank may report the error, also in the words of another rank.
        if TokensLostError.__name__ not in f"{error!r}" or workers.num_deaths == self._num_deaths:
            raise error
        self._num_deaths = workers.num_deaths
        await self.session.trainer.zero_grad()
        await workers.return_batch(batch.all_records.handles)

    async def sample_evaluation(self, name: str) -> EvaluationResult:
        """Sample and score completions of an evaluation set with the newest weights."""
        await self.session.weights.ready()
        return await self.session.rollouts.workers.evaluate(name)

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate sets on the separate evaluation generator, which keeps `version` until then; append each result."""
        session = self.session
        (part,) = session.evaluator.parts
        await part.wait_until_up()  # before the pull takes its lease, because publications wait for leases
        if not await session.weights.pull_held(version, partial(session.evaluator.pull_weights, 0)):
            raise StoppedError(f"version {version} was overwritten while the generator was replaced")
        for name in names:
            results.append(await session.rollouts.workers.evaluate_on(part, name))

    async def begin(self) -> None:
        """Publish the policy to the generators and start the rollouts."""
        self.console.note(describe_staleness(self.config))
        self.open_dump()
        self._last_published, self._num_deaths, self._unpublished = -1, 0, []
        passes = {"epochs": self.config.trainer.epochs, "num_minibatches": self.config.trainer.minibatches_per_batch}
        self._past = PastPolicies(self.session.trainer, self.config.algorithm, self.config.checkpoint, **passes)
        await self._past.start()  # keeps the reference policy, before a checkpoint replaces the weights
        if self._resume_step is not None:
            await self._continue(self._resume_step)
        else:
            self._publish_version(self.state.version, then=self.session.rollouts.workers.run)
            await self.session.weights.ready()

    async def _continue(self, step: int) -> None:
        """Restore versions, groups and trainer of a checkpoint, which may lie between two publications.

        The generators first get the weights that were published last. The trainer's weights can be newer.
        """
        state, session, config = self.state, self.session, self.config
        published = list(state.published or (state.version,))
        num_updates, groups_per_step = state.version - published[-1], config.rollout.groups_per_step
        is_unchanged = state.num_held == num_updates * groups_per_step  # False if the batch size was changed
        in_interval = 0 < num_updates < config.algorithm.updates_per_publish and is_unchanged
        if in_interval:
            await session.trainer.load_published(step, published[-1])
            self._past.resume(published[-1])
        else:  # publish now: the interval is complete, or the configuration was changed
            published += [] if published[-1] == state.version else [state.version]
            await self.resume()
        session.weights.versions[:] = published[:-1]
        trained = await self._load_groups(step, published)
        self._unpublished = trained if in_interval else []

        async def run() -> None:
            if trained and not in_interval:
                await session.rollouts.buffer.release(*joined(trained))
            await session.rollouts.workers.run()

        self._publish_version(published[-1], then=run)
        await session.weights.ready()
        if in_interval:
            await self.resume()

    async def _load_groups(self, step: int, published: Sequence[int]) -> list[TrainedBatch]:
        """Load the groups of a checkpoint; return the batches trained on since the last publication."""
        folder = checkpoint_dir(self.recorder.directory.checkpoints, step) / GROUPS
        if not folder.exists():
            return []
        per_publish, bound = self.config.groups_per_publish, self.config.worst_staleness
        freshness = Freshness(published=tuple(published), groups_per_publish=per_publish, bound=bound)
        restored = await self.session.rollouts.buffer.load(folder, freshness)
        counts = {"ready": restored.num_ready, "in_flight": restored.num_in_flight, "too_old": len(restored.too_old)}
        self.recorder.directory.event("restored", step=step, **counts)
        self.recorder.directory.drop_rollouts(restored.too_old)
        self.drop_saved(restored.too_old)
        return restored.trained

    async def save_parts(self, folder: Path) -> None:
        """Write the trainer's state, the last published weights if they are older, and the buffer's groups.

        Synchronous training samples all groups between two publications in one round, and a resumed run must repeat the round.
        A checkpoint right after a publication holds no groups, so the round is sampled again. A later one holds all of them.
        """
        state, session = self.state, self.session
        await session.rollouts.workers.wait_until_up()
        buffer, published = session.rollouts.buffer, session.weights.versions[-2 - self.config.worst_staleness :]
        in_interval = published[-1] != state.version and self._past.kept == published[-1]
        kept = published[-1] if in_interval else None
        if published[-1] != state.version and not in_interval:  # after optimizer steps of custom code
            published.append(state.version)
        self.state = replace(state, published=tuple(published), in_flight=(), num_held=0)
        from_index = None
        if self.config.max_staleness == 0:
            if self._unpublished:
                await buffer.wait_until_full()
            else:
                from_index = state.next_index
        if from_index is None or self.config.replay.fraction or self.config.data.chooses_prompts:
            saved = await buffer.save(folder / GROUPS, self._unpublished, from_index)
            self.state = replace(self.state, next_index=saved.next_index, in_flight=saved.in_flight, num_held=saved.num_held)
        await session.trainer.save_checkpoint(state.step, kept)  # last, because `buffer.save` restarts if a shard dies

    async def finish_parts(self) -> None:
        """Wait until the groups are on disk."""
        await super().finish_parts()
        await self.session.rollouts.buffer.finish_save()

    # Parts of a step

    def _plan(self, batch: Batch) -> StepPlan:
        """Compute advantages, and loss weights and packing of each mini-batch."""
        config = self.config
        plan = partial(
            plan_batch,
            algorithm=config.algorithm,
            constant_length=config.algorithm.constant_length or config.rollout.max_new_tokens,
            row_tokens=config.trainer.row_tokens,
            rows_per_microbatch=config.trainer.rows_per_microbatch,
            dp_size=config.trainer.parallelism.dp_size,
            share_prompts=config.trainer.share_prompts,
            custom_advantage=self._advantage,
            weight_of=config.data.weight_of,
            by_task=self._advantages_by_task,
        )
        epochs, num_minibatches = config.trainer.epochs, config.trainer.minibatches_per_batch
        seed = (config.seed, self.state.step)
        return plan_step(batch.all_records, plan, epochs=epochs, num_minibatches=num_minibatches, seed=seed)

    async def _take_batch(self) -> Batch:
        """Take a batch and the groups to replay with it. Discard batches that became too old because user code published."""
        session, bound = self.session, self.config.worst_staleness
        buffer = session.rollouts.buffer
        while True:
            batch = await session.weights.unless_failed(buffer.take_batch())
            versions = session.weights.versions
            if versions[-1] == self._last_published or versions_behind(versions, batch.oldest_version) <= bound:
                break
            groups = len(batch.records.groups)
            self._count(batch)
            await buffer.discard(batch.records.handles, before_version=versions[-1 - bound])
            self.recorder.directory.event("drop", step=self.state.step + 1, groups=groups, reason="too old")
        if not self.config.replay.fraction:
            return batch
        version = session.trainer.version
        return replace(batch, replayed=await buffer.replay(version, self._replay.beta(version)))

    def _ages(self, batch: Batch) -> list[int]:
        """Return, for each group, the versions published since its oldest token was sampled; assert the staleness bound."""
        versions = batch.records.groups["min_version"].tolist()
        age_of = {version: versions_behind(self.session.weights.versions, version) for version in set(versions)}
        ages = [age_of[version] for version in versions]
        bound, is_replay = self.config.worst_staleness, self._recorded is not None
        assert is_replay or max(ages) <= bound, (
            f"step {self.state.step + 1} got a token {max(ages)} publications old, the bound is {bound}"
        )
        self._last_published = self.session.weights.versions[-1]
        return ages

    async def _publish(self, batch: Batch, plan: StepPlan, updates: Sequence[OptimUpdate]) -> None:
        """Publish after `updates_per_publish` steps, which frees their slots; free the slots of a skipped step immediately."""
        records, update = batch.all_records, updates[-1]
        for taken in updates:
            self.count_skipped(taken, batch.records.rewards)
        if all(taken.skipped for taken in updates):
            await self.session.rollouts.buffer.release(records.handles)
            return
        priorities = None
        if self.config.replay.fraction:
            records = records.by_index()
            priorities = self._replay.priorities(records, plan.advantages_N, self.config.data.weight_of)
        self._unpublished.append((records.handles, priorities))
        if update.version - self.session.weights.versions[-1] >= self.config.algorithm.updates_per_publish:
            trained, self._unpublished = joined(self._unpublished), []
            self._publish_version(update.version, then=partial(self.session.rollouts.buffer.release, *trained))

    def _publish_version(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start to publish a version. `then` is awaited once no generator serves requests with an older version."""
        directory = self.recorder.directory

        async def published() -> None:
            await then()
            directory.event("publication", version=version)

        self.session.weights.publish(version, then=published)
        self._last_published = version

    def _batch_metrics(self, batch: Batch, ages: Sequence[int]) -> dict[str, float]:
        """Return the metrics that depend on the batch alone."""
        return {
            **metrics_of.rejection_metrics(batch.drops, batch.num_tried, self.config.rollout),
            **metrics_of.rollout_metrics(
                batch.records,
                num_tried=batch.num_tried,
                num_without_signal=batch.num_without_signal,
                num_tried_rollouts=batch.num_tried_rollouts,
                num_errors=batch.num_errors,
                of_turns=bool(batch.counts),
            ),
            **metrics_of.episode_metrics(batch.counts),
            **metrics_of.environment_metrics(batch.environment, is_mixture=len(self.config.data.tasks) > 1),
            **task_metrics(batch.records, self.config.data.tasks, batch.drops_by_task),
            **batch.prompts,
            **metrics_of.age_metrics(ages),
            **self._replay_metrics(batch.replayed),
            **metrics_of.buffer_metrics(
                num_in_flight=batch.num_in_flight,
                num_ready=batch.num_ready,
                num_held=batch.num_held,
                num_tried=batch.num_tried,
                num_bytes=batch.usage.num_bytes,
                num_spilled_bytes=batch.usage.num_spilled_bytes,
            ),
        }

    def _replay_metrics(self, replayed: Replayed | None) -> dict[str, float]:
        if replayed is None:
            return {}
        version, num_stored, num_evicted = self.session.trainer.version, replayed.num_stored, replayed.num_evicted
        return metrics_of.replay_metrics(replayed.records, version=version, num_stored=num_stored, num_evicted=num_evicted)

    def _report(self, batch: Batch, plan: StepPlan, trained: Trained, params: AdamParams, step_s: float) -> StepMetrics:
        """Count the step, and record its metrics and groups."""
        self.save_batch(batch)
        losses, updates = trained.losses, trained.updates
        num_trained = (int(loss.sums["num_tokens"]) for loss, update in zip(losses, updates, strict=True) if not update.skipped)
        self._count(batch, trained_tokens=sum(num_trained))
        version, busy_s, merged = updates[-1].version, sum(update.busy_s for update in updates), merge_losses(losses)
        self.state = replace(self.state, step=self.state.step + 1, version=version, next_index=batch.next_index)
        values = {
            **trained.batch_metrics,
            **metrics_of.optimizer_metrics(updates, params.learning_rate),
            **metrics_of.staleness_metrics(merged),
            **metrics_of.loss_metrics(merged, len(losses)),
            **metrics_of.speed_metrics(
                trained_tokens=plan.num_placed, generated=trained.generated, trainer_busy_s=busy_s, step_s=step_s
            ),
            **self.session.weights.take_metrics(),
            **self._timer.take(),
            "perf/packing_efficiency": plan.packing_efficiency,
            **self.state.counts.metrics(),
        }
        metrics = StepMetrics(step=self.state.step, version=self.state.version, values=values)
        self.recorder.step(metrics)
        if self.config.logging.rollouts_per_step:
            self._record_advantages(batch, plan)
        self.record_drops(batch)
        return metrics

    def _count(self, batch: Batch, trained_tokens: int = 0) -> None:
        """Add the groups of a batch, and those discarded before it, to the counts of the run."""
        counts = self.state.counts.plus(
            prompts=batch.num_tried,
            rollouts=batch.num_tried_rollouts,
            environment_steps=batch.counts.get("turns", 0),
            generated_tokens=batch.num_tried_tokens,
            trained_tokens=trained_tokens,
        )
        self.state = replace(self.state, counts=counts)

    def _record_advantages(self, batch: Batch, plan: StepPlan) -> None:
        """Record the advantages of the groups that `rollouts.jsonl` shows."""
        directory, rollout = self.recorder.directory, self.config.rollout
        groups = batch.all_records.by_index().groups
        ends = np.cumsum(groups["num_rollouts"])
        is_shown = groups["index"] % rollout.groups_per_step < self.config.logging.rollouts_per_step
        shown = np.flatnonzero(is_shown & np.isin(groups["index"], batch.records.groups["index"]))
        starts = ends - groups["num_rollouts"]
        rows = [
            (int(groups["index"][i]), int(groups["max_version"][i]), plan.advantages_N[starts[i] : ends[i]].tolist())
            for i in shown
        ]
        if rows:
            directory.log_advantages(self.state.step, rows)

    def record_drops(self, batch: Batch) -> None:
        """Record the groups dropped since the previous batch, and failed rewards."""
        directory = self.recorder.directory
        for reason, num_dropped in batch.drops.items():
            directory.event("drop", step=self.state.step, groups=num_dropped, reason=reason)
        if batch.num_errors:
            self.recorder.scorer_errors(self.state.step, batch.num_errors, batch.num_tried_rollouts, batch.first_error)


main = partial(command.main, GRPO, prog="python -m titanrl.grpo")
"""Function `main(argv, prog=...)` that trains as a command."""


if __name__ == "__main__":
    main()
