"""Base of runs with evaluation sets: schedules evaluations, keeps the best policy, and stops early."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanrl.algorithms.evaluation import improves
from titanrl.carriers.types import EvaluationResult
from titanrl.launch.supervision import PartDiedError
from titanrl.metrics.record import evaluation_metrics
from titanrl.processes.actors import StoppedError
from titanrl.rollout.open_tasks import evaluation_set
from titanrl.run.run import Run, is_due

BEST = "best"
"""Folder of the exported model with the best evaluation, in the checkpoint folder."""


@dataclass(slots=True)
class _Background:
    """Evaluations that run concurrently with training."""

    step: int
    """Step after which they were due."""
    version: int
    """Policy version that they evaluate."""
    names: Sequence[str]
    """Evaluation sets, in the order of their results."""
    sampling: "asyncio.Task[None]"
    results: list[EvaluationResult] = field(default_factory=list)
    """Results that have not been recorded yet."""
    num_taken: int = 0
    """Number of results recorded before these."""


class EvaluatedRun(Run):
    """Base of the loops with evaluation sets. In addition to the methods of `Run`, a loop defines `sample_evaluation`."""

    _background: _Background | None = None
    _warned_of_skip = False

    async def sample_evaluation(self, name: str) -> EvaluationResult:
        """Sample and score completions of an evaluation set with the newest weights."""
        raise NotImplementedError

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate sets with the last published version while training continues, and append each result.

        Raises:
            StoppedError: The evaluating generator stopped.
            PartDiedError: The evaluating generator died.
        """
        raise NotImplementedError

    async def evaluate(self, name: str | None = None) -> EvaluationResult:
        """Evaluate the newest weights, and record the result without comparing it to the best one.

        Args:
            name: Evaluation set; None means the first, which is the default set unless it was left out.

        Raises:
            ValueError: There is no such set.
        """
        subset = evaluation_set(self.config, name)
        with self._timer.phase("evaluate"):
            result = await self.sample_evaluation(subset.name)
        await self._record_evaluation(self.state.step, result)
        return result

    @property
    def ends_early(self) -> bool:
        """True if `evaluation.patience` evaluations in a row have not improved on the best policy."""
        patience = self.config.evaluation.patience
        return patience is not None and self.state.num_without_better >= patience

    def due_evaluations(self, *, is_last: bool) -> Sequence[str]:
        """Return the evaluation sets due after this step."""
        step, sets = self.state.step, self.config.evaluation_sets
        return [name for name, subset in sets.items() if is_last or step == 0 or is_due(step, subset.every_steps)]

    async def evaluate_all(self, names: Sequence[str], *, is_last: bool) -> None:
        """Evaluate sets and compare their results with the best one.

        In asynchronous training, sets due between the first and the last step run in the background (see
        `config.num_evaluator_ranks`). Otherwise this method waits for the results.
        """
        is_between = self.state.step > 0 and not is_last
        if is_between and self.config.num_evaluator_ranks:
            await self._start_evaluations(names)
            return
        for name in names:
            result = await self.evaluate(name)
            if self._decides(name) and result.version == self.session.trainer.version:
                await self._compare(self.state.step, result)

    async def _evaluate_if_due(self, num_steps: int) -> None:
        """Record finished background evaluations, and evaluate the sets that are due.

        If training ends early, all sets are due.
        """
        ended_early = self.ends_early
        if self._background is not None:
            await self._unless_ending(self._take_results(wait=self._is_last(num_steps)))
        due = self.due_evaluations(is_last=self._is_last(num_steps))
        await super()._evaluate_if_due(num_steps)
        if self.ends_early and not ended_early:
            step, best = self.state.step, self.state.best_step
            self.recorder.directory.event("early_stop", step=step, best_step=best)
            self.console.note(f"training ends early after step {step}: the best evaluation was after step {best}")
            rest = [name for name in self.config.evaluation_sets if name not in due]
            await self._unless_ending(self.evaluate_all(rest, is_last=True))

    async def _record_evaluation(self, step: int, result: EvaluationResult) -> None:
        self.recorder.evaluation(step, result)
        await self._hooks.after_evaluation(self, result)

    # Background evaluations

    async def _start_evaluations(self, names: Sequence[str]) -> None:
        """Start background evaluations of the last published version; skip them if earlier ones are still running."""
        running, step = self._background, self.state.step
        if running is not None:
            self.recorder.directory.event("evaluation_skipped", step=step, sets=list(names), running_since=running.step)
            if not self._warned_of_skip:
                self._warned_of_skip = True
                self.console.warn(
                    f"skipping the evaluation after step {step}: the evaluation after step {running.step} is still running; "
                    "raise every_steps of the evaluation sets, or lower num_prompts or num_samples"
                )
            return
        if any(map(self._decides, names)):
            await self._export_candidate()
        results, version = list[EvaluationResult](), self.session.weights.versions[-1]
        sampling = asyncio.create_task(self.sample_beside_training(names, version, results), name="evaluate in the background")
        self._background = _Background(step, version, names, sampling, results)

    async def _take_results(self, *, wait: bool) -> None:
        """Record results of background evaluations; called between two steps.

        Args:
            wait: True to wait for evaluations that are still running.
        """
        running = self._background
        if running is None:
            return
        if wait:
            with self._timer.phase("evaluate"):
                await asyncio.wait({running.sampling})
        is_done = running.sampling.done()
        results, running.results[:] = [*running.results], []
        problem, lost = "", list[str]()
        if is_done:
            self._background = None
            error = running.sampling.exception()
            if isinstance(error, PartDiedError | StoppedError):
                problem, lost = "its generator stopped", [*running.names[running.num_taken + len(results) :]]
            elif error is not None:
                raise error
        running.num_taken += len(results)
        for result in results:
            if not result.is_pinned or result.version != running.version:
                problem, lost = "its generator was replaced", [*lost, result.task]
                continue
            await self._record_evaluation(running.step, result)
            if self._decides(result.task):
                await self._compare(running.step, result, has_candidate=True)
        if lost:
            self.recorder.directory.event("evaluation_lost", step=running.step, sets=lost, reason=problem)
            self.console.warn(f"the evaluation of {', '.join(lost)} after step {running.step} is lost: {problem}")

    async def _close_session(self, *, keeps_generators: bool = False) -> None:
        """Cancel background evaluations, then stop all processes, except generators if `keeps_generators`."""
        if self._background is not None:
            background, self._background = self._background, None
            background.sampling.cancel()
            await asyncio.gather(background.sampling, return_exceptions=True)
        await super()._close_session(keeps_generators=keeps_generators)

    # Best policy

    def _decides(self, name: str) -> bool:
        """Return True if `evaluation.best_metric` is a metric of this set, so that its results select the best policy."""
        return self.config.evaluation.best_metric in self.config.evaluation_sets[name].metrics

    async def _compare(self, step: int, result: EvaluationResult, *, has_candidate: bool = False) -> None:
        """Compare a result with the best one, and keep the policy if it is better.

        A result with more failed rewards than `evaluation.max_error_frac` is a mean over other completions, so it is left out.

        Args:
            step: Step after which the policy was evaluated.
            result: Result of the evaluation.
            has_candidate: True if the policy has already been exported.
        """
        evaluation = self.config.evaluation
        if result.num_errors > evaluation.max_error_frac * result.num_completions:
            failed = {"count": result.num_errors, "completions": result.num_completions}
            self.recorder.directory.event("not_compared", step=step, set=result.task, **failed)
            self.console.warn(
                f"the evaluation after step {step} is not compared with the best policy: {result.failures}, but "
                f"evaluation.max_error_frac is {evaluation.max_error_frac:g}"
            )
            return
        value = evaluation_metrics(result).get(str(evaluation.best_metric))
        if value is None or not improves(value, self.state.best_value, evaluation.min_improvement):
            self._note(num_without_better=self.state.num_without_better + 1)
            return
        if not has_candidate:
            await self._export_candidate()
        best = self._checkpoints / BEST
        shutil.rmtree(best, ignore_errors=True)
        self._candidate.rename(best)
        self._note(best_value=value, best_step=step, num_without_better=0)
        self.recorder.directory.event("best", step=step, version=result.version, metric=evaluation.best_metric, value=value)

    async def _export_candidate(self) -> None:
        """Export the policy as a candidate for the best one."""
        with self._timer.phase("export"):
            await self.session.weights.pushed()
            shutil.rmtree(self._candidate, ignore_errors=True)
            await self.session.trainer.export_model(self._candidate)

    @property
    def _checkpoints(self) -> Path:
        return self.recorder.directory.checkpoints

    @property
    def _candidate(self) -> Path:
        return self._checkpoints / f"{BEST}.candidate"
