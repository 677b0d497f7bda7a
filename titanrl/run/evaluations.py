"""Evaluations of a run: their schedule, evaluations beside training, the best policy, and early stopping."""

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from titanrl.base.errors import StoppedError
from titanrl.carriers.types import EvaluationResult
from titanrl.launch.supervision import PartDiedError
from titanrl.metrics.steps import evaluation_metrics
from titanrl.run.checkpoints import SavedRun

BEST = "best"
"""Folder of the exported model with the best evaluation, in the checkpoint folder."""
TOLERANCE = 1e-9
"""Bound on the rounding error of a mean of rewards."""


def is_due(step: int, every: int) -> bool:
    """Return True if an action that repeats every `every` steps is due after `step`; 0 means never."""
    return every > 0 and step % every == 0


def improves(value: float, best: float | None, min_improvement: float) -> bool:
    """Return True if a value exceeds the best one so far by at least `min_improvement`, with a tolerance for rounding.

    An increase within the tolerance is never an improvement. The first value that is not NaN always is.
    """
    return not math.isnan(value) and (best is None or value - best > max(min_improvement - TOLERANCE, TOLERANCE))


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


class EvaluatedRun(SavedRun, Protocol):
    """The part of a run that `Evaluations` uses."""

    @property
    def ends_early(self) -> bool:
        """True if training should stop before its last step."""

    def note(self, **changes: Any) -> None:
        """Update fields of the state."""

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return the evaluation sets, and the number of steps after which each is due."""

    def alone(self, verb: str) -> AbstractAsyncContextManager[None]:
        """Refuse a call while another task takes a step, evaluates, saves or exports."""

    async def evaluate(self, name: str | None = None) -> EvaluationResult | float | None:
        """Evaluate a set with the newest weights, and record the result."""

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate sets while training continues, and append each result."""


class Evaluations:
    """Evaluates a run when its sets are due, keeps the best policy, and counts the evaluations since it.

    All sets are due before the first step and at the end. In asynchronous training, sets due in between run beside training
    (`Run.sample_beside_training`); otherwise training waits for them (`Run.evaluate`).
    """

    def __init__(self, run: EvaluatedRun) -> None:
        """Evaluate nothing yet. The best value and the last evaluated step are in the run's state."""
        self._run = run
        self._background: _Background | None = None
        self._warned_of_skip = False

    async def run_due(self, *, is_last: bool) -> None:
        """Record finished evaluations, and evaluate the sets that are due, unless a resumed run has already done so."""
        run = self._run
        ended_early = run.ends_early
        if self._background is not None:
            await run.unless_ending(self._take_results(wait=is_last))
        is_last = is_last or run.ends_early
        due = self._due(is_last=is_last)
        must_run = due and run.state.step != run.state.evaluated_step and not run.is_ending
        if must_run and await run.unless_ending(self._evaluate_all(due, is_last=is_last)):
            run.note(evaluated_step=run.state.step)
        if run.ends_early and not ended_early:
            step, best = run.state.step, run.state.best_step
            run.recorder.directory.event("early_stop", step=step, best_step=best)
            run.console.note(f"training ends early after step {step}: the best evaluation was after step {best}")
            rest = [name for name in run.evaluation_sets() if name not in due]
            await run.unless_ending(self._evaluate_all(rest, is_last=True))

    async def measure(self, name: str | None, sample: Callable[[str], Awaitable[EvaluationResult]]) -> EvaluationResult:
        """Evaluate the newest weights, and record the result without comparing it to the best one.

        Args:
            name: Evaluation set; None means the first, which is the default set unless it was left out.
            sample: Function that samples and scores the completions of a set.

        Raises:
            ValueError: There is no such set.
        """
        eval_set = self._run.config.evaluation_set(name)
        async with self._run.alone("evaluate"):
            with self._run.timer.phase("evaluate"):
                result = await sample(eval_set.name)
        await self._record(self._run.state.step, result)
        return result

    async def close(self) -> None:
        """Cancel the evaluations beside training."""
        if self._background is not None:
            background, self._background = self._background, None
            background.sampling.cancel()
            await asyncio.gather(background.sampling, return_exceptions=True)

    def _due(self, *, is_last: bool) -> list[str]:
        """Return the sets due after this step. If training has ended early, all sets are due."""
        step = self._run.state.step
        return [name for name, every in self._run.evaluation_sets().items() if is_last or step == 0 or is_due(step, every)]

    async def _evaluate_all(self, names: Sequence[str], *, is_last: bool) -> None:
        run = self._run
        if run.config.num_evaluator_ranks and run.state.step > 0 and not is_last:
            await self._start_beside_training(names)
            return
        for name in names:
            result = await run.evaluate(name)
            if isinstance(result, EvaluationResult) and self._decides(name) and result.version == run.session.trainer.version:
                await self._compare(run.state.step, result)

    # Beside training

    async def _start_beside_training(self, names: Sequence[str]) -> None:
        """Start to evaluate the last published version; skip it if earlier evaluations are still running."""
        run, running = self._run, self._background
        if running is not None:
            step = run.state.step
            run.recorder.directory.event("evaluation_skipped", step=step, sets=list(names), running_since=running.step)
            if not self._warned_of_skip:
                self._warned_of_skip = True
                run.console.warn(
                    f"skipping the evaluation after step {step}: the evaluation after step {running.step} is still running; "
                    "raise every_steps of the evaluation sets, or lower num_prompts or num_samples"
                )
            return
        if any(map(self._decides, names)):
            await self._export_candidate()
        results, version = list[EvaluationResult](), run.session.weights.versions[-1]
        sampling = asyncio.create_task(run.sample_beside_training(names, version, results), name="evaluate in the background")
        self._background = _Background(run.state.step, version, names, sampling, results)

    async def _take_results(self, *, wait: bool) -> None:
        """Record results of evaluations beside training, and wait for those that are still running if `wait`."""
        run, running = self._run, self._background
        assert running is not None
        if wait:
            with run.timer.phase("evaluate"):
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
            await self._record(running.step, result)
            if self._decides(result.task):
                await self._compare(running.step, result, has_candidate=True)
        if lost:
            run.recorder.directory.event("evaluation_lost", step=running.step, sets=lost, reason=problem)
            run.console.warn(f"the evaluation of {', '.join(lost)} after step {running.step} is lost: {problem}")

    async def _record(self, step: int, result: EvaluationResult) -> None:
        self._run.recorder.evaluation(step, result)
        await self._run.hooks.after_evaluation(self._run, result)

    # Best policy

    def _decides(self, name: str) -> bool:
        """Return True if `evaluation.best_metric` is a metric of this set, so that its results select the best policy."""
        return self._run.config.evaluation.best_metric in self._run.config.evaluation_sets[name].metrics

    async def _compare(self, step: int, result: EvaluationResult, *, has_candidate: bool = False) -> None:
        """Compare a result with the best one, and keep the policy if it is better.

        A result with more failed rewards than `evaluation.max_error_frac` is a mean over other completions, so it is left out.
        The policy was evaluated after `step`, and has already been exported if `has_candidate`.
        """
        run, evaluation = self._run, self._run.config.evaluation
        if result.num_errors > evaluation.max_error_frac * result.num_completions:
            failed = {"count": result.num_errors, "completions": result.num_completions}
            run.recorder.directory.event("not_compared", step=step, set=result.task, **failed)
            run.console.warn(
                f"the evaluation after step {step} is not compared with the best policy: {result.failures}, but "
                f"evaluation.max_error_frac is {evaluation.max_error_frac:g}"
            )
            return
        value = evaluation_metrics(result).get(str(evaluation.best_metric))
        if value is None or not improves(value, run.state.best_value, evaluation.min_improvement):
            run.note(num_without_better=run.state.num_without_better + 1)
            return
        if not has_candidate:
            await self._export_candidate()
        best = run.recorder.directory.checkpoints / BEST
        shutil.rmtree(best, ignore_errors=True)
        self._candidate.rename(best)
        run.note(best_value=value, best_step=step, num_without_better=0)
        run.recorder.directory.event("best", step=step, version=result.version, metric=evaluation.best_metric, value=value)

    async def _export_candidate(self) -> None:
        with self._run.timer.phase("export"):
            await self._run.session.weights.pushed()
            shutil.rmtree(self._candidate, ignore_errors=True)
            await self._run.session.trainer.export_model(self._candidate)

    @property
    def _candidate(self) -> Path:
        return self._run.recorder.directory.checkpoints / f"{BEST}.candidate"
