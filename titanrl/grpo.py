"""GRPO with a trainer, generators and rollout workers: the loop, and the command `python -m titanrl.grpo --config FILE`.

How the default objective differs from the GRPO paper (arXiv:2402.03300):
1. Advantages are centred but not divided by the group's standard deviation (Dr. GRPO, arXiv:2503.20783).
2. Tokens are averaged over the whole batch, not first within each completion (DAPO, arXiv:2503.14476).
3. There is no KL term to a reference model.
4. The denominator of the importance ratio is the generator's own log-probability (`algorithm.proximal: sampler`). Its
   difference from the trainer's is measured at every step.

Every `algorithm.preset` runs in this loop, PPO with a critic, too; it has the name of the default one.

`Publications` bounds staleness (docs/async.md). A prompt is admitted by reserving one of the buffer's *slots*
(`replay/buffer.py`), which its group keeps until it is trained on. A published version reaches the generators in the background
(`launch.generators.WeightSync`). Then the slots of the batches that it was trained on are freed, so a prompt admitted to a
freed slot is sampled with this version or a newer one.

The run counts two things: `step` is the number of batches taken, `version` that of the batches that changed the policy, with
one or several optimizer steps. They differ by the batches whose optimizer steps were all skipped. A run ends at a version.
"""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from titanrl.algorithms.advantages import advantages_by_task, advantages_of
from titanrl.algorithms.batch_plan import ReplaySchedule, StepPlan, next_entropy_coef, plan_batch, plan_step
from titanrl.algorithms.gae import collect_values, critic_advantages, value_metrics
from titanrl.base.errors import RankError, StoppedError, TitanRLError, TokensLostError
from titanrl.base.plugins import loaded
from titanrl.carriers.tables import RecordedGroups
from titanrl.carriers.types import (
    AdamParams,
    DoubleArray,
    EvaluationResult,
    GenerationStats,
    LossSums,
    OptimUpdate,
    StepMetrics,
)
from titanrl.config import Config, ConfigError, Source
from titanrl.config.errors import BrokenRule
from titanrl.config.load import explain_rule
from titanrl.config.sizes import describe_staleness
from titanrl.launch.roles import Roles
from titanrl.launch.trainer_mesh import PastPolicies, merge_losses
from titanrl.metrics import steps as metrics_of
from titanrl.replay.groups import Batch, Freshness, TrainedBatch, joined, versions_behind
from titanrl.run import command
from titanrl.run.checkpoints import checkpoint_dir, is_due
from titanrl.run.generation import Dump, Generation, batch_metrics, check_dump, record_advantages, record_drops, recorded_groups
from titanrl.run.run import Run
from titanrl.run.steering import TEMPERATURE

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
    examples: LossSums
    """Loss and tokens of the supervised examples (section `examples`), summed over the optimizer steps; empty without them."""


class GRPO(Run):
    """A training run: rollout workers, trainer and generators, and the order in which they are called.

    Example:
        async with GRPO(load_config("configs/quickstart.yaml")) as run:
            metrics = await run.step()
    """

    with_data = True
    admits_prompts = True

    @classmethod
    def for_config(cls, config: Config) -> type[Run]:
        """Return the class that runs a configuration: this one, or with `train: false` a loop that only generates."""
        return cls if config.train else Generation

    @classmethod
    def check_loop(cls, config: Config, resume: Path | None, source: Source | None) -> None:
        """Raise `ConfigError` if the run does not train, or `rollout.save` holds the dump of another run."""
        if not config.train:
            fix = f"use {Generation.__module__}.{Generation.__name__}"
            raise ConfigError(explain_rule(BrokenRule(values={"train": False}, rule=f"{cls.__name__} trains", fix=fix), source))
        check_dump(config, resume, source)

    def prepare(self) -> None:
        """Open the dumps, and load the user-defined advantages and priorities."""
        self._dump = Dump(self.config)
        self._examples = self._found.examples
        self._advantages_by_task = advantages_by_task(self.config, self._plugins)
        priority = loaded(self._plugins, "replay.priority")
        self._replay_schedule = ReplaySchedule(self.config.replay, self.config.num_steps, priority)

    def roles(self) -> Roles:
        """Return the roles to start: all, except generators if a dump is the source of the batches."""
        return Roles(generators=not self._dump.is_source, rollouts=True)

    async def begin(self) -> None:
        """Publish the policy to the generators and start the rollouts."""
        self.console.note(describe_staleness(self.config))
        if self._examples is not None:
            for name, text in self._examples.summary(self.config).items():
                self.console.note(f"{name}: {text}")
        self._dump.begin(self.state, self.session.tokenizer, self.console)
        passes = {"epochs": self.config.trainer.epochs, "num_minibatches": self.config.trainer.minibatches_per_batch}
        self._past = PastPolicies(self.session.trainer, self.config.algorithm, self.config.checkpoint, **passes)
        await self._past.start()  # keeps the reference policy, before a checkpoint replaces the weights
        self._num_deaths = 0  # of rollout workers of this session, up to the last returned batch
        self._publications = Publications(self, self._past, self._replay_schedule, self._dump)
        await self._publications.begin(self._resume_step)  # calls `load_checkpoint` if there is a checkpoint

    async def train_step(self) -> StepMetrics:
        """Take a batch, plan it, train on it, publish the weights, report."""
        started = time.perf_counter()
        # Counted in batches, so that all optimizer steps of a batch have one learning rate.
        params = AdamParams.at_step(
            self.config.algorithm, self.session.trainer.version, self.config.num_steps, rate=self.state.learning_rate
        )
        while True:  # until a batch is trained on; a rollout worker that dies takes the tokens of its groups with it
            with self.timer.phase("rollout"):
                batch = await self._publications.take()
            with self.timer.phase("train"):
                try:
                    plan, critic_metrics = await self._plan(batch)
                    trained = await self._train(batch, plan, params)
                    break
                except TitanRLError as error:
                    await self._return_batch_if_lost(batch, error)
        for update in trained.updates:
            self.count_skipped(update, batch.records.rewards)
        await self._publications.publish(batch, plan.advantages_N, trained.updates)
        self.session.rollouts.buffer.prefetch()  # the next batch is sent while this one is reported, evaluated and saved
        metrics = {**trained.batch_metrics, **critic_metrics, **await self._heldout_loss()}
        trained = replace(trained, batch_metrics=metrics)
        return self._report(batch, plan, trained, params, time.perf_counter() - started)

    async def apply_changes(self, keys: Collection[str]) -> None:
        """Send changed values to the processes that use them."""
        config, rollouts = self.config, self.session.rollouts
        if any(key.startswith("data.mixture.") for key in keys):
            await rollouts.buffer.reweigh([task.weight for task in config.data.mixture.values()])
        if {"logging.rollouts_per_step", TEMPERATURE}.intersection(keys):
            await rollouts.workers.change(config.logging.rollouts_per_step, config.rollout.temperature)
        if TEMPERATURE in keys:
            await self.session.use_temperature(config.rollout.temperature)

    async def after_pause(self) -> None:
        """Restart the buffer's clock, so that the pause does not count as time that a batch took."""
        self.session.rollouts.buffer.restart_clock()

    async def _plan(self, batch: Batch) -> tuple[StepPlan, dict[str, float]]:
        """Compute advantages, and loss weights and packing of each mini-batch; return the plan and the critic's metrics."""
        config = self.config
        plan_records = partial(
            plan_batch,
            algorithm=config.algorithm,
            constant_length=config.algorithm.constant_length or config.rollout.max_new_tokens,
            row_tokens=config.trainer.row_tokens,
            rows_per_microbatch=self.session.trainer.rows_per_microbatch,
            dp_size=config.trainer.parallelism.dp_size,
            share_prompts=config.trainer.share_prompts,
        )
        records, critic_metrics = batch.all_records.by_index(), dict[str, float]()
        if not config.algorithm.has_critic:
            advantages_N, spans = advantages_of(records, self._advantages_by_task, config.data.weight_of)
        else:
            passes = plan_records(records, advantages_N=np.zeros(len(records.rewards))).microbatches  # over all sequences
            values = [await self.session.trainer.compute_values(microbatch) for microbatch in passes]
            advantages_N, spans = critic_advantages(records, collect_values(records, passes, values), config.algorithm)
            critic_metrics = value_metrics(spans)
        epochs, num_minibatches = config.trainer.epochs, config.trainer.minibatches_per_batch
        seed = (config.seed, self.state.step)
        plan_records = partial(plan_records, advantages_N=advantages_N, spans=spans)
        plan = plan_step(records, plan_records, epochs=epochs, num_minibatches=num_minibatches, seed=seed)
        return plan, critic_metrics

    async def _train(self, batch: Batch, plan: StepPlan, params: AdamParams) -> Trained:
        """Accumulate the gradient of each mini-batch and step the optimizer.

        Each optimizer step is requested together with its passes, so the trainer does not wait for the controller in between.
        """
        trainer, weights, past_policies = self.session.trainer, self.session.weights, self._past
        ages = self._publications.ages(batch)
        if self.config.trainer.max_optimizer_steps > 1:
            # After an optimizer step the batch cannot be returned, so fetch its tokens first.
            await trainer.hold_rollouts(plan.microbatches)
        past = await past_policies.compute(plan.first_epoch, version=trainer.version, published=weights.versions[-1])
        losses: list[LossSums] = []
        updates: list[OptimUpdate] = []
        of_examples: list[LossSums] = []
        entropy_coef = self._entropy_coef()
        recorded = recorded_groups(batch, self.config)
        for number, minibatch in enumerate(plan.updates, 1):
            microbatches = await past_policies.with_correction(minibatch.microbatches, past)
            microbatches = [replace(microbatch, entropy_coef=entropy_coef) for microbatch in microbatches]
            if recorded:
                groups = RecordedGroups(step=self.state.step + 1, update=number - 1, indices=recorded)
                microbatches = [replace(microbatch, recorded=groups) for microbatch in microbatches]
            of_examples.append(await self._train_on_examples(number))
            passes = trainer.forward_backward(microbatches, proximal_version=past.proximal, reference_version=past.reference)
            stepping = trainer.optim_step(params, after=weights.pushed, completes=number == len(plan.updates))
            if number == 1:  # while the trainer computes
                of_batch = batch_metrics(batch, ages, trainer.version, self.config)
            losses.append(await passes)
            if number == 1:  # not before the passes: if they fail, the batch is trained on again, and counts this work
                generated = self.session.generators.take_stats()
            with self.timer.phase("sync"):
                await weights.pushed()  # the step waits for this, too: the last push still reads the weights
            with self.timer.phase("optim"):
                updates.append(await stepping)
        merged = merge_losses(of_examples)
        return Trained(losses=losses, updates=updates, generated=await generated, batch_metrics=of_batch, examples=merged)

    async def _train_on_examples(self, number: int) -> LossSums:
        """Add the gradient of the loss on the next examples to that of an optimizer step; return the sums of loss and tokens.

        The `number` of the optimizer step on its batch, from 1 on, selects the examples.
        """
        section, examples = self.config.examples, self._examples
        if section is None or examples is None:
            return LossSums(sums={}, maxima={})
        first = self._first_example + (number - 1) * section.batch_size
        data, num_tokens = examples.data_of(first, section, self.config.seed)
        output = await self.session.trainer.run_data(data, "cross_entropy", {}, backward=True)
        loss = output.metrics["loss:sum"] / section.weight  # `data_of` has multiplied it by the weight
        num_placed = sum(len(datum.model_input) for datum in data)
        return LossSums(sums={"loss": loss * num_tokens, "num_tokens": num_tokens, "num_placed": num_placed}, maxima={})

    @property
    def _first_example(self) -> int:
        """First position in the examples that no step has passed. Earlier versions did not record it."""
        state, section = self.state, self.config.examples
        if state.next_example is not None or section is None:
            return state.next_example or 0
        return state.step * self.config.trainer.max_optimizer_steps * section.batch_size

    async def _heldout_loss(self) -> dict[str, float]:
        """Return the loss on held-out examples after the optimizer steps, as a metric; empty unless an evaluation is due."""
        is_last = self.session.trainer.version >= self.config.num_steps  # of the step in progress
        is_evaluated = is_last or is_due(self.state.step + 1, self.config.evaluation.every_steps)
        if self._examples is None or not is_evaluated:
            return {}
        with self.timer.phase("evaluate"):
            forward = partial(self.session.trainer.run_data, loss_fn="cross_entropy", loss_fn_config={}, backward=False)
            loss = await self._examples.heldout_loss(forward, self.config)
        return {} if loss is None else {"examples/heldout_loss": loss}

    def _entropy_coef(self) -> float | None:
        """Return the coefficient of the entropy bonus in the next step; None if it is that of the configuration."""
        target, state = self.config.algorithm.entropy_target, self.state
        if target is None:
            return None
        is_low = state.entropy is not None and state.entropy <= target  # no bonus before the entropy was measured
        return state.entropy_coef if is_low else 0.0

    async def _return_batch_if_lost(self, batch: Batch, error: TitanRLError) -> None:
        """Return a batch to the buffer if the trainer failed because a rollout worker died with its tokens; else raise."""
        workers = self.session.rollouts.workers
        # Any trainer rank may report the error, also one that had its tokens.
        has_lost_tokens = isinstance(error, TokensLostError) or (isinstance(error, RankError) and error.has_lost_tokens)
        if not has_lost_tokens or workers.num_deaths == self._num_deaths:
            raise error
        self._num_deaths = workers.num_deaths
        await self.session.trainer.zero_grad()
        await workers.return_batch(batch.all_records.handles)

    def _report(self, batch: Batch, plan: StepPlan, trained: Trained, params: AdamParams, step_s: float) -> StepMetrics:
        self._dump.add(batch, self.state)
        losses, updates, state = trained.losses, trained.updates, self.state
        num_trained = (int(loss.sums["num_tokens"]) for loss, update in zip(losses, updates, strict=True) if not update.skipped)
        counts = state.counts.plus(**batch.work, trained_tokens=sum(num_trained))
        version, busy_s, merged = updates[-1].version, sum(update.busy_s for update in updates), merge_losses(losses)
        of_losses = metrics_of.loss_metrics(merged, len(losses))
        if (entropy_coef := self._entropy_coef()) is not None:
            entropy = of_losses["policy/entropy"]
            of_losses["policy/entropy_coef"] = entropy_coef
            if merged.sums["num_tokens"] and math.isfinite(entropy):
                coef = next_entropy_coef(state.entropy_coef, entropy, self.config.algorithm)
                state = replace(state, entropy_coef=coef, entropy=entropy)
        if self.config.examples is not None:
            num_used = self._first_example + self.config.trainer.max_optimizer_steps * self.config.examples.batch_size
            state = replace(state, next_example=num_used)
        self.state = replace(state, step=state.step + 1, version=version, next_index=batch.first_untaken, counts=counts)
        of_examples = trained.examples.sums
        if self.config.examples is not None and self._examples is not None:
            of_losses["examples/loss"] = of_examples["loss"] / of_examples["num_tokens"]
            of_losses["examples/tokens"] = of_examples["num_tokens"]
            of_losses["examples/epoch"] = num_used / len(self._examples.training)
        num_placed = plan.num_placed + int(of_examples.get("num_placed", 0))
        values = {
            **trained.batch_metrics,
            **metrics_of.optimizer_metrics(updates, params.learning_rate),
            **metrics_of.staleness_metrics(merged),
            **of_losses,
            **metrics_of.speed_metrics(
                trained_tokens=num_placed, generated=trained.generated, trainer_busy_s=busy_s, step_s=step_s
            ),
            **self.session.weights.take_metrics(),
            **self.timer.take(),
            **self.steering.metrics(),
            "perf/packing_efficiency": plan.packing_efficiency,
            **counts.metrics(),
        }
        metrics = StepMetrics(step=self.state.step, version=version, values=values)
        self.recorder.step(metrics)
        record_advantages(self.recorder.directory, batch, plan.advantages_N, self.state.step, self.config)
        record_drops(self.recorder, batch, self.state.step)
        return metrics

    # Evaluations and checkpoints, which the run calls between steps

    @property
    def ends_early(self) -> bool:
        """True if evaluations have stopped improving, or if all batches of the dump are used."""
        num_steps = self._dump.num_steps
        return super().ends_early or (num_steps is not None and self.state.step >= num_steps)

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return the evaluation sets; none without generators."""
        return super().evaluation_sets() if self.config.evaluates else {}

    async def evaluate(self, name: str | None = None) -> EvaluationResult:
        """Evaluate the newest weights, and record the result; see `Evaluations.measure`."""

        async def sample(name: str) -> EvaluationResult:
            await self.session.weights.ready()
            return await self.session.rollouts.workers.evaluate(name)

        return await self.evaluations.measure(name, sample)

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate `version` on the separate evaluation generator while training continues; append the result of each set."""
        session = self.session
        (part,) = session.evaluator.parts
        await part.wait_until_up()  # before the pull takes its lease, because publications wait for leases
        if not await session.weights.pull_held(version, partial(session.evaluator.pull_weights, 0)):
            raise StoppedError(f"version {version} was overwritten while the generator was replaced")
        for name in names:
            results.append(await session.rollouts.workers.evaluate_on(part, name))

    async def save_parts(self, folder: Path) -> None:
        """Start writing a checkpoint; see `Publications.save`."""
        await self._publications.save(folder)

    async def finish_parts(self) -> None:
        """Wait until the groups and the dump's list of batches are on disk."""
        self._dump.flush()
        await self.session.rollouts.buffer.finish_save()


class Publications:
    """Takes batches from the buffer, and publishes the versions trained on them. Created when a session begins.

    It decides which batch is trained on next, how old it may be, and when its slots are freed. `ages` asserts the bound on
    every batch of this run's own rollouts.
    """

    def __init__(self, run: Run, past: PastPolicies, replay: ReplaySchedule, dump: Dump) -> None:
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


main = partial(command.main, GRPO, prog="python -m titanrl.grpo")
"""Function `main(argv, prog=...)` that trains as a command."""


if __name__ == "__main__":
    main()
