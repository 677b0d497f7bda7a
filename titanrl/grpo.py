"""GRPO on a policy mesh and a generator mesh: the loop, and the command `python -m titanrl.grpo --config FILE`.

How the default objective differs from the GRPO paper (arXiv:2402.03300):
1. Advantages are centred but not divided by the group's standard deviation (Dr. GRPO, arXiv:2503.20783).
2. Tokens are averaged over the whole batch, not first within each completion (DAPO, arXiv:2503.14476).
3. There is no KL term to a reference model.
4. The old log-probabilities are the generator's own; their distance to the trainer's is measured at every step.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from titanrl.algorithms.batch_plan import plan_batch
from titanrl.algorithms.loss_weights import correction_totals
from titanrl.algorithms.schedule import learning_rate
from titanrl.config import Config, ConfigError, check_files, dump_config
from titanrl.config.sizes import notes
from titanrl.data.tokenizer import load_tokenizer
from titanrl.device import Device, resolve_device
from titanrl.launch.meshes import merge_losses
from titanrl.launch.progress import RunState, checkpoint_dir, free_run_dir, latest_state, write_state
from titanrl.launch.starting_model import prepare_starting_model
from titanrl.launch.warm_start import warm_start
from titanrl.loading import loading
from titanrl.metrics import steps as measured
from titanrl.metrics.console import Console
from titanrl.metrics.phases import PhaseTimer
from titanrl.metrics.record import Recorder
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import make_trackers
from titanrl.replay.buffer import Batch
from titanrl.tables import BatchPlan, MicroBatch, Table
from titanrl.types import AdamParams, EvaluationResult, GenerationStats, LossSums, OptimUpdate, StepMetrics

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts


class GRPO:
    """A training run: its parts, and the order in which they are called.

    Example:
        run = await GRPO(load_config("configs/quickstart.yaml")).start()
        metrics = await run.step()
        await run.close()
    """

    def __init__(self, config: Config, *, resume: Path | None = None, console: Console | None = None) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            config: the run.
            resume: run directory to go on in; a new one is made without it.
            console: where progress is shown; made from `config.logging` if not given.

        Raises:
            ConfigError: files or devices the config names are not there.
        """
        problems = check_files(config)
        if problems:
            raise ConfigError(*problems)
        self.config = config
        self.device = usable_device(config)
        self.state = RunState(step=0, version=0, next_index=0) if resume is None else resumable_state(resume)
        self.run_dir = (resume or free_run_dir(config.run_dir)).resolve()
        self.console = console or Console(config.logging.console, total_steps=config.num_steps, title=config.name)
        self._resuming = resume is not None
        self._timer = PhaseTimer(on_change=self.console.current_phase)
        self._num_skipped_in_a_row = 0
        self._published: list[int] = []
        self._unpublished: list[Table] = []
        self._held: int | None = None
        self._asked: asyncio.Task[Batch] | None = None
        self._parts: Parts | None = None
        self._recorder: Recorder | None = None

    # The loop

    async def step(self) -> StepMetrics:
        """buffer -> batch -> forward_backward -> optim_step -> publish weights."""
        started, parts = time.perf_counter(), self.parts
        with self._timer.phase("rollout"):  # waits; raises what stopped a worker; metadata only
            batch = await self._take_batch()
        ages = self._ages(batch)
        plan = self._plan(batch)
        with self._timer.phase("train"):
            proximal = await self._proximal(plan.microbatches)
            reference = await self._reference(plan.microbatches)
            microbatches = await self._measured(plan.microbatches, proximal)
            run = partial(parts.trainer.forward_backward, proximal_version=proximal, reference_version=reference)
            passes = asyncio.gather(*map(run, microbatches))  # in this order
            # Sent behind the passes, not after their answers, so no message lies between the last pass and the step.
            stepping = asyncio.gather(self._optim_step(), parts.generators.take_stats(), self._figures(batch, ages))
            losses = await _before(stepping, passes)
        with self._timer.phase("sync"):  # the last push is done: weights may change
            await parts.weights.pushed()
        with self._timer.phase("optim"):
            update, generated, figures = await stepping
        await self._publish(batch, update)
        self._asked = self._ask_for_batch()  # the next step finds it here if it is together by then
        return self._report(batch, figures, plan, merge_losses(losses), update, generated, time.perf_counter() - started)

    async def train(self, num_steps: int | None = None) -> None:
        """Step until the policy has `num_steps` versions (default: the config's), with evaluations and checkpoints."""
        num_steps = num_steps or self.config.num_steps
        if self.state.step == 0:
            await self.evaluate()
        while self.state.version < num_steps:
            await self.step()
            if is_due(self.state.step, self.config.evaluation.every_steps) or self.state.version == num_steps:
                await self.evaluate()
            if is_due(self.state.step, self.config.checkpoint.every_steps) or self.state.version == num_steps:
                await self.save()

    async def start_and_train(self) -> None:
        """The whole run: start, train, and export the model."""
        await self.start()
        await self.train()
        await self.export()

    async def evaluate(self) -> EvaluationResult:
        """Answer held-out prompts with the newest weights."""
        with self._timer.phase("evaluate"):
            await self.parts.weights.ready()
            result = await self.parts.workers.evaluate(self.config.evaluation.num_prompts)
        self.recorder.evaluation(self.state.step, result)
        return result

    # Start and end

    async def start(self) -> Self:
        """Start every process, load or warm-start the policy, bring it to the generators, and begin to roll out."""
        with loading():
            from titanrl.launch.assembly import RunFiles, assemble  # brings torch, which a dry run does without

        config, console = self.config, self.console
        for note in notes(config):
            console.note(note)
        directory = RunDirectory(self.run_dir, resume_step=self.state.step if self._resuming else None)
        directory.write_config(dump_config(config))
        trackers = make_trackers(config.logging.loggers, self.run_dir, config.model_dump(mode="json"))
        self._recorder = Recorder(directory, trackers, console)
        base = prepare_starting_model(config)
        files = RunFiles(run_dir=self.run_dir, model_dir=base.initial, stop_ids=load_tokenizer(base.initial).eos_ids)
        console.note(describe_staleness(config))
        console.phase("start", f"trainer x{config.trainer.parallelism.world_size}, generator x{config.generator.num_ranks}")
        self._parts = parts = await assemble(config, self.device, files, self.state.next_index)
        generators = asyncio.create_task(parts.generators.start())
        await asyncio.gather(parts.trainer.start(), parts.workers.start())
        await parts.trainer.load_model(base.base if base.is_ready else base.initial)
        if not base.is_ready and config.warm_start is not None:
            await warm_start(parts, config, config.warm_start, base.base, console)
        if config.algorithm.kl.coef:
            await parts.trainer.keep_weights()
        if self._resuming:
            await parts.trainer.load_checkpoint(self.state.step)
        await generators
        self._published.append(self.state.version)
        parts.weights.publish(self.state.version, then=parts.workers.run)
        await parts.weights.ready()
        return self

    async def save(self) -> Path:
        """Write a checkpoint that a later run can go on from; returns its folder."""
        with self._timer.phase("checkpoint"):
            await self.parts.weights.ready()
            await self.parts.trainer.save_checkpoint(self.state.step)
            write_state(self.recorder.directory.checkpoints, self.state)
        return checkpoint_dir(self.recorder.directory.checkpoints, self.state.step)

    async def export(self) -> Path:
        """Write the policy as a Hugging Face directory, with config and tokenizer; returns it."""
        await self.parts.weights.ready()
        target = self.recorder.directory.checkpoints / "final"
        await self.parts.trainer.export_model(target)
        return target

    async def close(self) -> None:
        """Stop everything, whatever state it is in; safe to call twice."""
        if self._asked is not None:
            self._asked.cancel()
        if self._parts is not None:
            parts, self._parts = self._parts, None
            for trouble in await parts.close(self.config.timeouts.close_s):
                self.console.warn(f"while closing: {trouble}")
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self.console.close()

    @property
    def parts(self) -> "Parts":
        """The running parts."""
        assert self._parts is not None, "the run is not started"
        return self._parts

    @property
    def recorder(self) -> Recorder:
        """Where metrics go."""
        assert self._recorder is not None, "the run is not started"
        return self._recorder

    # Details of a step

    def _ask_for_batch(self) -> "asyncio.Task[Batch]":
        return self.parts.buffer.ask_for_batch(self.config.rollout.groups_per_step)

    async def _take_batch(self) -> Batch:
        """The batch asked for; it stays asked for if this is interrupted, or waits in vain."""
        self._asked = self._asked or self._ask_for_batch()
        taking = self.parts.buffer.take_batch(self.config.rollout.groups_per_step, self._asked)
        batch = await self.parts.weights.unless_failed(taking)
        self._asked = None
        return batch

    def _plan(self, batch: Batch) -> BatchPlan:
        """Advantages, loss weights and packing of a batch."""
        config = self.config
        return plan_batch(
            batch.records,
            algorithm=config.algorithm,
            constant_length=config.algorithm.constant_length or config.rollout.max_new_tokens,
            row_tokens=config.trainer.row_tokens,
            rows_per_microbatch=config.trainer.rows_per_microbatch,
            dp_size=config.trainer.parallelism.dp_size,
            share_prompts=config.trainer.share_prompts,
        )

    def _ages(self, batch: Batch) -> list[int]:
        """Versions published since the oldest token of each group was sampled; asserts the staleness bound."""
        versions = batch.records.groups["min_version"].tolist()
        age_of = {version: len(self._published) - bisect_right(self._published, version) for version in set(versions)}
        ages = [age_of[version] for version in versions]
        bound = self.config.worst_staleness
        assert max(ages) <= bound, f"step {self.state.step + 1} got a token {max(ages)} publications old, the bound is {bound}"
        return ages

    async def _proximal(self, microbatches: Sequence[MicroBatch]) -> int | None:
        """Have log-probabilities computed with the weights of the last publication, where the ratio starts from these.

        None where no pass is needed: at the first step after it these are the current weights, which `policy_loss` takes then.
        """
        algorithm, trainer, start = self.config.algorithm, self.parts.trainer, self._published[-1]
        if algorithm.proximal != "interval_start" or algorithm.updates_per_publish == 1:
            return None
        if self.state.version > start:
            for microbatch in microbatches:
                await trainer.compute_logprobs(microbatch, at_version=start)
            return start
        await trainer.keep_weights()
        is_reference = self._held == 0 and algorithm.kl.coef > 0
        if self._held is not None and self._held != start and not is_reference:
            await trainer.drop_weights(self._held)
        self._held = start
        return None

    async def _measured(self, microbatches: Sequence[MicroBatch], proximal: int | None) -> Sequence[MicroBatch]:
        """The micro-batches, with what the off-policy correction does over all of them where the config asks for it."""
        if not self.config.algorithm.correction.is_measured:
            return microbatches
        measure = partial(self.parts.trainer.measure_correction, proximal_version=proximal)
        parts = [await measure(microbatch) for microbatch in microbatches]
        totals = correction_totals(merge_losses(parts).sums)
        return [replace(microbatch, correction=totals) for microbatch in microbatches]

    async def _reference(self, microbatches: Sequence[MicroBatch]) -> int | None:
        """Have log-probabilities computed with the weights the run began with, where a divergence from these counts."""
        if not self.config.algorithm.kl.coef:
            return None
        for microbatch in microbatches:
            await self.parts.trainer.compute_logprobs(microbatch, at_version=0)
        return 0

    async def _optim_step(self) -> OptimUpdate:
        """Step as soon as no push reads the weights; a failed pass makes the trainer refuse."""
        await self.parts.weights.pushed()
        return await self.parts.trainer.optim_step(self._adam_params())

    def _adam_params(self) -> AdamParams:
        algorithm = self.config.algorithm
        rate = learning_rate(
            self.state.version,
            peak=algorithm.learning_rate,
            num_warmup_steps=algorithm.num_warmup_steps,
            decay=algorithm.lr_decay,
            num_steps=self.config.num_steps,
        )
        return AdamParams(
            learning_rate=rate,
            beta1=algorithm.betas[0],
            beta2=algorithm.betas[1],
            eps=algorithm.eps,
            weight_decay=algorithm.weight_decay,
            max_grad_norm=algorithm.max_grad_norm,
        )

    async def _publish(self, batch: Batch, update: OptimUpdate) -> None:
        """After `updates_per_publish` updates start to publish, and free their slots after it; a skipped step frees its own."""
        handles = batch.records.handles
        if not update.skipped:
            self._num_skipped_in_a_row = 0
            self._unpublished.append(handles)
            if update.version - self._published[-1] >= self.config.algorithm.updates_per_publish:
                self._published.append(update.version)
                release, self._unpublished = partial(self.parts.buffer.release, np.concatenate(self._unpublished)), []
                self.parts.weights.publish(update.version, then=release)
            return
        self._num_skipped_in_a_row += 1
        self.recorder.directory.event("skipped_step", step=self.state.step + 1, grad_norm=update.grad_norm)
        if self._num_skipped_in_a_row > self.config.algorithm.max_skipped_steps:
            raise NonFiniteGradientError(
                f"{self._num_skipped_in_a_row} steps in a row had a non-finite gradient; lower algorithm.learning_rate, "
                "or look at grad/norm and mismatch/logprob_abs_max in metrics.jsonl"
            )
        await self.parts.buffer.release(handles)

    async def _figures(self, batch: Batch, ages: Sequence[int]) -> Mapping[str, float]:
        """What the batch alone says, worked out while the trainer computes."""
        return {
            **measured.rollout_metrics(batch.records, num_tried=batch.num_tried, num_without_signal=batch.num_without_signal),
            **measured.age_metrics(ages),
            **measured.buffer_metrics(
                num_in_flight=batch.num_in_flight,
                num_ready=batch.num_ready,
                num_held=batch.num_held,
                num_tried=batch.num_tried,
            ),
        }

    def _report(
        self,
        batch: Batch,
        figures: Mapping[str, float],
        plan: BatchPlan,
        losses: LossSums,
        update: OptimUpdate,
        generated: GenerationStats,
        step_s: float,
    ) -> StepMetrics:
        rate = self._adam_params().learning_rate
        self.state = RunState(step=self.state.step + 1, version=update.version, next_index=batch.next_index)
        seconds = self._timer.take()
        values = {
            **figures,
            **measured.staleness_metrics(losses),
            **measured.loss_metrics(losses),
            **measured.optimizer_metrics(update, rate),
            **measured.speed_metrics(
                trained_tokens=plan.num_placed,
                generated=generated,
                trainer_busy_s=seconds["time/train_s"] + seconds["time/optim_s"],
                step_s=step_s,
            ),
            **self.parts.weights.take_metrics(),
            **seconds,
            "perf/packing_efficiency": plan.packing_efficiency,
        }
        metrics = StepMetrics(step=self.state.step, version=self.state.version, values=values)
        self.recorder.step(metrics)
        return metrics


def describe_staleness(config: Config) -> str:
    """The bound on staleness, with the numbers it follows from."""
    if config.max_staleness == 0 and config.algorithm.updates_per_publish == 1:
        return f"synchronous: {config.num_slots} groups at a time, trained on by the weights that sampled them"
    return (
        f"B={config.num_slots} slots, window W={config.window_groups}, P={config.groups_per_publish} groups per publication: "
        f"no token older than (B + W - 2) // P = {config.worst_staleness} published versions"
    )


async def _before(behind: "asyncio.Future[Any]", passes: "asyncio.Future[list[LossSums]]") -> list[LossSums]:
    """What the passes answer; should one fail, nobody waits for what was sent behind them."""
    behind.add_done_callback(lambda sent: sent.cancelled() or sent.exception())  # nor complains that nobody did
    try:
        return await passes
    except BaseException:  # an interrupt, too; it goes on to the caller
        behind.cancel()
        raise


class NonFiniteGradientError(Exception):
    """Training cannot go on: gradients are not finite step after step."""


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now; 0 is never."""
    return every > 0 and step % every == 0


def usable_device(config: Config) -> Device:
    """The device of the run.

    Raises:
        ConfigError: it is not to be had here.
    """
    try:
        return resolve_device(config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resumable_state(run_dir: Path) -> RunState:
    """Where a run directory's newest whole checkpoint stands.

    Raises:
        ConfigError: there is none.
    """
    state = latest_state(run_dir / "checkpoints")
    if state is None:
        raise ConfigError(f"--resume {run_dir}: no checkpoint there; give the directory of a run that saved one")
    return state


if __name__ == "__main__":
    from titanrl.command import main

    main()
