"""One place that everything a run reports goes through: files, trackers and console."""

from collections.abc import Sequence

from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Tracker
from titanrl.types import EvaluationResult, StepMetrics


class Recorder:
    """Writes metrics to `metrics.jsonl` and the trackers, and shows them."""

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker], console: Console) -> None:
        """Write to an open run directory."""
        self.directory, self.console = directory, console
        self._trackers = trackers

    def step(self, metrics: StepMetrics) -> None:
        """A step of the loop is done."""
        self._write(metrics)
        self.console.step(metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Held-out prompts were answered."""
        prefix = f"eval/{result.task}"
        values = {f"{prefix}/mean": result.mean, f"{prefix}/response_len_mean": result.response_len_mean}
        self._write(StepMetrics(step=step, version=result.version, values=values))
        self.console.evaluation(result.task, result.version, result.mean)

    def close(self) -> None:
        """Flush and close everything but the console."""
        for tracker in self._trackers:
            tracker.close()
        self.directory.close()

    def _write(self, metrics: StepMetrics) -> None:
        self.directory.log(metrics)
        for tracker in self._trackers:
            tracker.log(metrics.step, metrics.values)
