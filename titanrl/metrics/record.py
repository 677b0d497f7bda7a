"""The recorder: writes metrics to the run directory, the trackers and the console."""

from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Trackers
from titanrl.types import EvaluationResult, StepMetrics


class Recorder:
    """Sends metrics to `metrics.jsonl`, the trackers and the console."""

    def __init__(self, directory: RunDirectory, trackers: Trackers, console: Console) -> None:
        """Record to an open run directory and to trackers that have been started."""
        self.directory, self.console = directory, console
        self._trackers = trackers

    def step(self, metrics: StepMetrics) -> None:
        """Record a finished step."""
        self._write(metrics)
        self.console.step(metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation."""
        values = evaluation_metrics(result)
        if result.num_errors:
            self.directory.event("scorer_error", step=step, count=result.num_errors, error=result.first_error)
        self._write(StepMetrics(step=step, version=result.version, values=values))
        self.console.evaluation(result.task, result.version, result.mean)

    def heldout_loss(self, metrics: StepMetrics) -> None:
        """Record the loss on held-out examples, `loss/eval`."""
        self._write(metrics)
        self.console.heldout_loss(metrics.version, metrics.values["loss/eval"])

    def close(self, *, resumes: bool = False) -> None:
        """Flush and close the trackers and the run directory; the console stays open.

        Args:
            resumes: True if the run restarts and another recorder follows. Tracker objects that the user passed in stay open
                for it.
        """
        self._trackers.close(keep_given=resumes)
        self.directory.close()

    def _write(self, metrics: StepMetrics) -> None:
        self.directory.log(metrics)
        self._trackers.log(metrics.step, metrics.values)


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of an evaluation, `eval/<set>/*`."""
    values = {"mean": result.mean, "response_len_mean": result.response_len_mean, **result.statistics}
    num_completions = result.num_prompts * result.num_samples
    values["truncated_frac"] = result.num_truncated / (num_completions - result.num_errors)
    if result.num_unjudged:
        values["unjudged_frac"] = result.num_unjudged / (num_completions - result.num_errors)
    if result.num_errors:
        values["error_frac"] = result.num_errors / num_completions
    values |= {f"environment/{name}_mean": value for name, value in result.environment.items()}
    return {f"eval/{result.task}/{name}": value for name, value in values.items()}
