"""The recorder: writes metrics to the run directory, the trackers and the console."""

from titanrl.carriers.types import EvaluationResult, StepMetrics
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Trackers


class Recorder:
    """Sends metrics to `metrics.jsonl`, the trackers and the console."""

    def __init__(self, directory: RunDirectory, trackers: Trackers, console: Console) -> None:
        """Record to an open run directory and to trackers that have been started."""
        self.directory, self.console = directory, console
        self._trackers = trackers
        self._warned_of: set[str] = set()  # evaluation sets
        self._warned_of_training = False

    def step(self, metrics: StepMetrics) -> None:
        """Record a finished step."""
        self._write(metrics)
        self.console.step(metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Record an evaluation."""
        values = evaluation_metrics(result)
        if result.num_errors:
            self.directory.event(
                "scorer_error",
                step=step,
                set=result.task,
                count=result.num_errors,
                completions=result.num_completions,
                error=result.first_error,
            )
            if result.task not in self._warned_of:
                self._warned_of.add(result.task)
                self.console.warn(
                    f"evaluation {result.task}: {result.failures} (first error: {result.first_error}). "
                    f"eval/{result.task}/error_frac counts them."
                )
        self._write(StepMetrics(step=step, version=result.version, values=values))
        self.console.evaluation(result.task, result.version, result.mean, result.failures)

    def scorer_errors(self, step: int, count: int, num_completions: int, first_error: str) -> None:
        """Record completions of a training step whose reward failed; warn of the first ones."""
        self.directory.event("scorer_error", step=step, count=count, completions=num_completions, error=first_error)
        if not self._warned_of_training:
            self._warned_of_training = True
            self.console.warn(
                f"{count} of {num_completions} completions have no reward and are excluded "
                f"(first error: {first_error}). reward/error_frac counts them; the end of the run gives the total."
            )

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
    values = {
        "mean": result.mean,
        "response_len_mean": result.response_len_mean,
        **result.statistics,
        "error_frac": result.num_errors / result.num_completions,
        "num_errors": float(result.num_errors),
        "num_completions": float(result.num_completions),
    }
    num_scored = result.num_completions - result.num_errors
    values["truncated_frac"] = result.num_truncated / num_scored
    if result.num_unjudged:
        values["unjudged_frac"] = result.num_unjudged / num_scored
    values |= {f"environment/{name}_mean": value for name, value in result.environment.items()}
    return {f"eval/{result.task}/{name}": value for name, value in values.items()}
