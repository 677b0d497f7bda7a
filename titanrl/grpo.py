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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from titanrl.algorithms.batch_plan import plan_batch
from titanrl.algorithms.schedule import adam_params
from titanrl.command import main
from titanrl.config import Config, Source, dump_config
from titanrl.config.sizes import notes
from titanrl.data.tokenizer import load_tokenizer
from titanrl.device import resolve_device
from titanrl.launch.past_policies import PastPolicies
from titanrl.launch.progress import RunState, checkpoint_dir, free_run_dir, resumable_state, write_state
from titanrl.launch.starting_model import prepare_starting_model
from titanrl.launch.warm_start import warm_start
from titanrl.loading import loading
from titanrl.metrics import steps as metrics_of
from titanrl.metrics.console import Console
from titanrl.metrics.outcome import last_lines, summarize
from titanrl.metrics.phases import PhaseTimer
from titanrl.metrics.record import Recorder
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import make_trackers
from titanrl.preflight import preflight
from titanrl.replay.buffer import Batch
from titanrl.tables import BatchPlan, Table
from titanrl.types import EvaluationResult, GenerationStats, LossSums, OptimUpdate, StepMetrics

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts


class NonFiniteGradientError(Exception):
    """Training cannot continue: gradients are not finite step after step."""


class GRPO:
    """A training run: its processes, and the order in which they are called.

    Example:
        async with GRPO(load_config("configs/quickstart.yaml")) as run:
            metrics = await run.step()
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: Path | None = None,
        console: Console | None = None,
        source: Source | None = None,
    ) -> None:
        """Check everything that can be checked before a process is started.

        Args:
            config: the run.
            resume: run directory to continue in; None makes a new one.
            console: shows progress; made from `config.logging` by default.
            source: source of the configuration; with it messages name lines and overrides.

        Raises:
            ConfigError: a file or device that the configuration names is missing.
        """
        self.config = config
        self.state = RunState(step=0, version=0, next_index=0) if resume is None else resumable_state(resume)
        self.run_dir = (resume or free_run_dir(config.run_dir)).resolve()
        preflight(config, source, meanwhile=_import_heavy_packages)
        self.device = resolve_device(config.device)
        self.console = console or Console(config.logging.console, total_steps=config.num_steps, title=config.name)
        self._resume_step = None if resume is None else self.state.step
        self._saved_step = self.state.step
        self._timer = PhaseTimer(on_change=self.console.current_phase)
        self._published: list[int] = []
        self._unpublished: list[Table] = []
        self._num_skipped_in_a_row = 0
        self._warned_of_scorer = False
        self._parts: Parts | None = None
        self._recorder: Recorder | None = None
        self._past: PastPolicies

    # The loop

    async def step(self) -> StepMetrics:
        """Take a batch, plan it, train on it, publish the weights, report."""
        started, parts = time.perf_counter(), self.parts
        with self._timer.phase("rollout"):
            batch = await parts.weights.unless_failed(parts.buffer.take_batch())
        ages, plan = self._ages(batch), self._plan(batch)
        params = adam_params(self.config.algorithm, self.state.version, self.config.num_steps)
        with self._timer.phase("train"):
            past = await self._past.compute(plan.microbatches, version=self.state.version, published=self._published[-1])
            microbatches = await self._past.with_correction_totals(plan.microbatches, past)
            passes = parts.trainer.forward_backward(
                microbatches, proximal_version=past.proximal, reference_version=past.reference
            )
            stepping = parts.trainer.optim_step(params, after=parts.weights.pushed)
            taking = parts.generators.take_stats()
            values = self._batch_metrics(batch, ages)  # while the trainer computes
            losses = await passes
        with self._timer.phase("sync"):  # the last push reads the weights
            await parts.weights.pushed()
        with self._timer.phase("optim"):
            update, generated = await stepping, await taking
        await self._publish(batch, update)
        parts.buffer.prefetch()
        values |= metrics_of.optimizer_metrics(update, params.learning_rate)
        return self._report(batch, plan, values, losses, update, generated, time.perf_counter() - started)

    async def train(self, num_steps: int | None = None) -> None:
        """Step until the policy has `num_steps` versions (default: the configuration's), with evaluations and checkpoints."""
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
        """Do the whole run: start, train, export the model."""
        await self.start()
        await self.train()
        await self.export()

    async def evaluate(self) -> EvaluationResult:
        """Score greedy completions of held-out prompts, sampled with the newest weights."""
        with self._timer.phase("evaluate"):
            await self.parts.weights.ready()
            result = await self.parts.workers.evaluate(self.config.evaluation.num_prompts)
        self.recorder.evaluation(self.state.step, result)
        return result

    # Start and end

    async def start(self) -> Self:
        """Start every process, load or warm-start the policy, publish it to the generators, and start the rollouts."""
        with loading():
            from titanrl.launch.assembly import RunFiles, assemble  # imports torch, which a dry run does not need

        config, console = self.config, self.console
        for note in notes(config):
            console.note(note)
        self._recorder = recorder = self._open_recorder()
        base = prepare_starting_model(config)
        files = RunFiles(run_dir=self.run_dir, model_dir=base.initial, stop_ids=load_tokenizer(base.initial).eos_ids)
        console.note(describe_staleness(config))
        console.phase("start", f"trainer x{config.trainer.parallelism.world_size}, generator x{config.generator.num_ranks}")
        self._parts = parts = await assemble(
            config, self.device, files, self.state.next_index, on_event=recorder.directory.event
        )
        generators = asyncio.create_task(parts.generators.start())
        await asyncio.gather(parts.trainer.start(), parts.workers.start())
        await parts.trainer.load_model(base.base if base.is_ready else base.initial)
        if not base.is_ready and config.warm_start is not None:
            await warm_start(parts, config, config.warm_start, base.base, console)
        self._past = PastPolicies(parts.trainer, config.algorithm)
        await self._past.start()
        if self._resume_step is not None:
            await parts.trainer.load_checkpoint(self._resume_step)
        await generators
        self._publish_version(self.state.version, then=parts.workers.run)
        await parts.weights.ready()
        return self

    async def save(self) -> Path:
        """Write a checkpoint that a later run can resume from; return its folder."""
        with self._timer.phase("checkpoint"):
            await self.parts.weights.ready()
            await self.parts.trainer.save_checkpoint(self.state.step)
            write_state(self.recorder.directory.checkpoints, self.state)
        folder = checkpoint_dir(self.recorder.directory.checkpoints, self.state.step)
        self._saved_step = self.state.step
        self.recorder.directory.event("checkpoint", step=self.state.step, path=str(folder))
        return folder

    async def export(self) -> Path:
        """Write the policy as a Hugging Face directory, with configuration and tokenizer; return it."""
        await self.parts.weights.ready()
        target = self.recorder.directory.checkpoints / "final"
        await self.parts.trainer.export_model(target)
        return target

    async def close(self, error: BaseException | None = None) -> None:
        """Stop every process, write the report, and print where everything is. A second call does nothing.

        Args:
            error: why the run ended, if it failed; recorded as its cause.
        """
        code, cause = (0, "") if error is None else (1, f"{type(error).__name__}: {error}")
        was_open = self._recorder is not None
        await self.stop(code=code, cause=cause)
        if was_open:
            self.summarize(code=code, cause=cause)

    async def stop(self, *, code: int = 0, cause: str = "") -> None:
        """Stop every process and close every file, whatever state the run is in. A second call does nothing.

        Args:
            code: exit code of the run, for its last event.
            cause: why it ended, if the code is not 0.
        """
        if self._parts is not None:
            parts, self._parts = self._parts, None
            for problem in await parts.close(self.config.timeouts.close_s):
                self.console.warn(f"while closing: {problem}")
        if self._recorder is not None:
            self._recorder.directory.event("end", code=code, cause=cause)
            self._recorder.close()
            self._recorder = None
        self.console.close()

    def summarize(self, *, code: int = 0, cause: str = "") -> None:
        """Write the report of a stopped run and print its last lines.

        Args:
            code: exit code of the run.
            cause: why it ended, if the code is not 0.
        """
        outcome = summarize(self.run_dir, code=code, cause=cause, num_steps=self.config.num_steps)
        self.console.done(last_lines(self.run_dir, outcome))

    async def __aenter__(self) -> Self:
        """Start the run; stop it if the start fails."""
        try:
            return await self.start()
        except BaseException as error:  # an interrupt, too
            await self.close(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run; record the exception of the body as its cause."""
        await self.close(error)

    @property
    def parts(self) -> "Parts":
        """Clients of the running processes."""
        assert self._parts is not None, "the run has not started"
        return self._parts

    @property
    def recorder(self) -> Recorder:
        """Destination of metrics and events."""
        assert self._recorder is not None, "the run has not started"
        return self._recorder

    @property
    def num_unsaved_steps(self) -> int:
        """Steps taken since the last checkpoint."""
        return self.state.step - self._saved_step

    # Details of a step

    def _plan(self, batch: Batch) -> BatchPlan:
        """Compute advantages, loss weights and packing of a batch."""
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
        """Return, for each group, the versions published since its oldest token was sampled; assert the staleness bound."""
        versions = batch.records.groups["min_version"].tolist()
        age_of = {version: len(self._published) - bisect_right(self._published, version) for version in set(versions)}
        ages = [age_of[version] for version in versions]
        bound = self.config.worst_staleness
        assert max(ages) <= bound, f"step {self.state.step + 1} got a token {max(ages)} publications old, the bound is {bound}"
        return ages

    async def _publish(self, batch: Batch, update: OptimUpdate) -> None:
        """Publish after `updates_per_publish` updates and free their slots afterwards; free those of a skipped step now."""
        handles = batch.records.handles
        if update.skipped:
            self._count_skipped(update)
            await self.parts.buffer.release(handles)
            return
        self._num_skipped_in_a_row = 0
        self._unpublished.append(handles)
        if update.version - self._published[-1] >= self.config.algorithm.updates_per_publish:
            trained, self._unpublished = np.concatenate(self._unpublished), []
            self._publish_version(update.version, then=partial(self.parts.buffer.release, trained))

    def _publish_version(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start to publish a version; await `then` when no request is served with an older one any more."""
        directory = self.recorder.directory

        async def published() -> None:
            await then()
            directory.event("publication", version=version)

        self._published.append(version)
        self.parts.weights.publish(version, then=published)

    def _count_skipped(self, update: OptimUpdate) -> None:
        self._num_skipped_in_a_row += 1
        self.recorder.directory.event("skipped_step", step=self.state.step + 1, grad_norm=update.grad_norm)
        if self._num_skipped_in_a_row > self.config.algorithm.max_skipped_steps:
            raise NonFiniteGradientError(
                f"algorithm.max_skipped_steps: {self._num_skipped_in_a_row} steps in a row had a non-finite gradient (got "
                f"{self.config.algorithm.max_skipped_steps}). Lower algorithm.learning_rate; grad/norm and "
                "mismatch/logprob_abs_max in metrics.jsonl show where it began."
            )

    def _batch_metrics(self, batch: Batch, ages: Sequence[int]) -> dict[str, float]:
        """Return the metrics that depend on the batch alone."""
        return {
            **metrics_of.rollout_metrics(
                batch.records,
                num_tried=batch.num_tried,
                num_without_signal=batch.num_without_signal,
                num_tried_rollouts=batch.num_tried_rollouts,
                num_errors=batch.num_errors,
            ),
            **metrics_of.age_metrics(ages),
            **metrics_of.buffer_metrics(
                num_in_flight=batch.num_in_flight,
                num_ready=batch.num_ready,
                num_held=batch.num_held,
                num_tried=batch.num_tried,
            ),
        }

    def _report(
        self,
        batch: Batch,
        plan: BatchPlan,
        batch_metrics: Mapping[str, float],
        losses: LossSums,
        update: OptimUpdate,
        generated: GenerationStats,
        step_s: float,
    ) -> StepMetrics:
        """Count the step and record everything about it."""
        self.state = RunState(step=self.state.step + 1, version=update.version, next_index=batch.next_index)
        values = {
            **batch_metrics,
            **metrics_of.staleness_metrics(losses),
            **metrics_of.loss_metrics(losses),
            **metrics_of.speed_metrics(
                trained_tokens=plan.num_placed, generated=generated, trainer_busy_s=update.busy_s, step_s=step_s
            ),
            **self.parts.weights.take_metrics(),
            **self._timer.take(),
            "perf/packing_efficiency": plan.packing_efficiency,
        }
        metrics = StepMetrics(step=self.state.step, version=self.state.version, values=values)
        self.recorder.step(metrics)
        self._record_groups(batch, plan)
        return metrics

    def _record_groups(self, batch: Batch, plan: BatchPlan) -> None:
        """Record the advantages of the groups that `rollouts.jsonl` shows, and the groups dropped since the last batch."""
        directory, rollout = self.recorder.directory, self.config.rollout
        groups = batch.records.by_index().groups
        ends = np.cumsum(groups["num_rollouts"])
        shown = np.flatnonzero(groups["index"] % rollout.groups_per_step < self.config.logging.rollouts_per_step)
        starts = ends - groups["num_rollouts"]
        rows = [
            (int(groups["index"][i]), int(groups["max_version"][i]), plan.advantages_N[starts[i] : ends[i]].tolist())
            for i in shown
        ]
        if rows:
            directory.log_advantages(self.state.step, rows)
        if num_dropped := batch.num_tried - len(groups):
            directory.event("drop", step=self.state.step, groups=num_dropped, reason="no signal, or no reward")
        if batch.num_errors:
            directory.event("scorer_error", step=self.state.step, count=batch.num_errors, error=batch.first_error)
            if not self._warned_of_scorer:
                self._warned_of_scorer = True
                self.console.warn(
                    f"the scorer failed on {batch.num_errors} of {batch.num_tried_rollouts} completions, which are left out "
                    f"(first error: {batch.first_error}); reward/error_frac counts them"
                )

    def _open_recorder(self) -> Recorder:
        """Open the run directory and start the trackers."""
        config = self.config
        directory = RunDirectory(self.run_dir, resume_step=self._resume_step)
        directory.write_config(dump_config(config))
        directory.event("start" if self._resume_step is None else "resume", step=self.state.step)
        trackers = make_trackers(
            config.logging.loggers,
            self.run_dir,
            config.model_dump(mode="json"),
            warn=self.console.warn,
            resume_step=self._resume_step,
        )
        return Recorder(directory, trackers, self.console)


def describe_staleness(config: Config) -> str:
    """Return the bound on staleness as a sentence, with the numbers it follows from."""
    if config.max_staleness == 0 and config.algorithm.updates_per_publish == 1:
        return f"synchronous: {config.num_slots} groups at a time, trained on by the weights that sampled them"
    return (
        f"B={config.num_slots} slots, window W={config.window_groups}, P={config.groups_per_publish} groups per publication: "
        f"no token older than (B + W - 2) // P = {config.worst_staleness} published versions"
    )


def is_due(step: int, every: int) -> bool:
    """Return whether an action of every `every` steps is due after `step`; 0 means never."""
    return every > 0 and step % every == 0


def _import_heavy_packages() -> None:
    """Import torch and everything else that `GRPO.start` needs, which takes seconds."""
    with loading():
        import titanrl.launch.assembly  # noqa: F401


if __name__ == "__main__":
    main(GRPO)
