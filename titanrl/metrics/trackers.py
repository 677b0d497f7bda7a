"""Experiment trackers besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio."""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

TrackerName = Literal["tensorboard", "wandb", "trackio"]

PROJECT = "titanrl"
"""Project that runs are filed under."""


class Tracker(Protocol):
    """Something that takes the metrics of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Write what is still buffered."""


class TensorBoardTracker:
    """Event files under `<run_dir>/tensorboard`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """`resume_step` hides what an earlier run logged after that step."""
        module = _import("torch.utils.tensorboard", package="tensorboard")
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class RunTracker:
    """A run of wandb, or of trackio, which has the same interface."""

    def __init__(self, package: Literal["wandb", "trackio"], run_dir: Path, config: Mapping[str, Any]) -> None:
        """Start a run named like the run directory."""
        self._module = _import(package, package=package)
        options: dict[str, Any] = {}
        if package == "wandb":
            # wandb would otherwise record, and so break, the live display.
            options = {"dir": str(run_dir), "settings": self._module.Settings(console="off", quiet=True)}
        self._module.init(project=PROJECT, name=run_dir.name, config=dict(config), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of the step at once."""
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        """Upload or write the rest."""
        self._module.finish()


def make_trackers(
    names: Iterable[TrackerName], run_dir: Path, config: Mapping[str, Any], *, resume_step: int | None = None
) -> list[Tracker]:
    """The trackers of `logging.loggers`, started.

    Args:
        names: Which.
        run_dir: The run's own folder; its name is the run's name.
        config: The configuration as plain values, recorded with the run.
        resume_step: Step the run goes on from.

    Raises:
        ValueError: A tracker's package is not installed.
    """
    return [
        TensorBoardTracker(run_dir, config, resume_step) if name == "tensorboard" else RunTracker(name, run_dir, config)
        for name in names
    ]


def _import(module: str, *, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging.loggers names {package}, whose package cannot be imported ({error}); "
            f"run `pip install {package}`, or take it off the list"
        ) from error
