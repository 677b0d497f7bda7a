"""Experiment trackers that receive a copy of `metrics.jsonl`: TensorBoard, Weights & Biases, trackio."""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from titanrl.config.choices import TrackerName
from titanrl.metrics.run_directory import replace_text

PROJECT = "titanrl"
"""Project that W&B and trackio file runs under."""
FLUSH_S = 1.0
"""Seconds after which a metric is on disk, so that a killed run loses little."""

_MODULES: Mapping[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step. A step can be logged more than once, each time with other metrics."""

    def close(self) -> None:
        """Write buffered metrics and finish the run."""


class TensorBoardTracker:
    """Event files under `<run_dir>/tensorboard`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Open an event file; hide what an earlier attempt logged after `resume_step`."""
        module = _import("tensorboard")
        purge_step = None if resume_step is None else resume_step + 1
        folder = str(run_dir / "tensorboard")
        self._writer = module.SummaryWriter(log_dir=folder, purge_step=purge_step, flush_secs=FLUSH_S)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record one scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class RunTracker:
    """A run of wandb or of trackio, whose interfaces are alike.

    Neither can take a step back. A resumed run therefore continues the same run behind the last step it holds: steps between
    the checkpoint and that step keep the values of the earlier attempt. `<run_dir>/<package>.json` holds the run's id and
    that step.
    """

    def __init__(
        self, package: Literal["wandb", "trackio"], run_dir: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        """Start a run named after the run directory, or continue the one that this directory belongs to."""
        module = _import(package)
        self._state_file = run_dir / f"{package}.json"
        is_known = resume_step is not None and self._state_file.exists()
        state: dict[str, Any] = {"id": None, "step": -1}
        if is_known:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        self._first_step, self._step = state["step"] + 1, state["step"]
        self._is_wandb = package == "wandb"
        options: dict[str, Any] = {"project": PROJECT, "name": run_dir.name, "config": dict(config)}
        if self._is_wandb:
            # wandb would otherwise capture the live display, which garbles both.
            settings = module.Settings(console="off", quiet=True, x_transaction_log_flush_interval=FLUSH_S)
            self._run = module.init(**options, id=state["id"], resume="allow", dir=str(run_dir), settings=settings)
        else:
            self._run = module.init(**options, resume="must" if is_known else "never", embed=False)
            if is_known and self._run.id != state["id"]:
                self._run.finish()
                raise ValueError(f"another run named {run_dir.name} was started later, and trackio resumes runs by name")
        self._save(self._step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record all metrics at once, unless the run holds this step from an earlier attempt."""
        if step < self._first_step:
            return
        self._run.log(dict(values), step=step)
        if step > self._step:
            # W&B writes a step once the next one begins, trackio at once.
            self._save(self._step if self._is_wandb else step)
            self._step = step

    def close(self) -> None:
        """Upload or write buffered metrics."""
        # The module's own finish() looks the run up in a context variable, which another task does not see.
        self._run.finish()
        self._save(self._step)

    def _save(self, step: int) -> None:
        replace_text(self._state_file, json.dumps({"id": self._run.id, "step": step}))


class Trackers:
    """All trackers of a run. One that raises is dropped with a warning; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        """Forward to `trackers`, given by name."""
        self._trackers = dict(trackers)
        self._warn = warn

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step in every tracker."""
        self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        """Finish every tracker."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # of any kind: a tracker must not end the run
                del self._trackers[name]
                self._warn(_dropped(name, error))


def make_trackers(
    names: Iterable[TrackerName],
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    warn: Callable[[str], None],
    resume_step: int | None = None,
) -> Trackers:
    """Start the trackers of `logging.loggers`.

    Args:
        names: Trackers to start.
        run_dir: The run's own folder; its name is the run's name.
        config: The configuration as plain values, recorded with the run.
        warn: Called with a sentence about a tracker that was dropped.
        resume_step: Step the run resumes from, None for a new run.

    Raises:
        ValueError: A tracker's package is not installed.
    """
    trackers: dict[str, Tracker] = {}
    for name in names:
        _import(name)
        try:
            if name == "tensorboard":
                trackers[name] = TensorBoardTracker(run_dir, config, resume_step)
            else:
                trackers[name] = RunTracker(name, run_dir, config, resume_step)
        except Exception as error:  # such as an account or a server that cannot be reached
            warn(_dropped(name, error))
    return Trackers(trackers, warn)


def _dropped(name: str, error: Exception) -> str:
    return f"logging.loggers: {name} failed and receives no more metrics ({type(error).__name__}: {error})"


def _import(name: TrackerName) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ValueError(
            f"logging.loggers: the package of {name} cannot be imported ({error}). "
            f"Run `pip install {name}`, or remove {name} from the list."
        ) from error
