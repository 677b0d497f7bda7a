"""Experiment trackers that receive a copy of `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, or the user's own.

A tracker of the user is a class or function with the arguments of `TrackerFactory`, or a finished object. An entry in
`titanrl.config.registry.TRACKERS` registers a built-in one.
"""

import importlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from titanrl.config.registry import TRACKERS
from titanrl.files import replace_text
from titanrl.loading import import_object
from titanrl.plugins import Plugins, check_call

PROJECT = "titanrl"
"""Project that W&B and trackio file runs under."""
FLUSH_S = 1.0
"""Seconds after which a metric is on disk, so that a killed run loses little."""

EXPECTED = "class MyTracker: def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None)"
LOG_EXPECTED = "def log(self, step: int, values: Mapping[str, float]) -> None"
CLOSE_EXPECTED = "def close(self) -> None"


class Tracker(Protocol):
    """A destination for metrics, in the controller. If it raises, it is dropped with a warning and the run goes on.

    Example:
        class Lines:
            def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
                self.file = (run_dir / "lines.txt").open("a")

            def log(self, step: int, values: Mapping[str, float]) -> None:
                print(step, values, file=self.file)

            def close(self) -> None:
                self.file.close()
    """

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Record metrics of one step. A step can be logged more than once, each time with other metrics."""

    def close(self) -> None:
        """Write buffered metrics and finish the run."""


class TrackerFactory(Protocol):
    """A class or function that starts a tracker."""

    def __call__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None, /) -> Tracker:
        """Start a tracker.

        Args:
            run_dir: The run's own folder; its name is the run's name.
            config: The configuration as plain values.
            resume_step: Step that the run resumes from, None for a new run.
        """
        ...


class TensorBoardTracker:
    """Event files under `<run_dir>/tensorboard`."""

    module: ClassVar[str] = "torch.utils.tensorboard"

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Open an event file; hide what an earlier attempt logged after `resume_step`."""
        module = importlib.import_module(self.module)
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

    module: ClassVar[str]

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Start a run named after the run directory, or continue the one that this directory belongs to."""
        module = importlib.import_module(self.module)
        self._state_file = run_dir / f"{self.module}.json"
        is_known = resume_step is not None and self._state_file.exists()
        state: dict[str, Any] = {"id": None, "step": -1}
        if is_known:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        self._first_step, self._step = state["step"] + 1, state["step"]
        self._is_wandb = self.module == "wandb"
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


class WandbTracker(RunTracker):
    """A run of Weights & Biases."""

    module = "wandb"


class TrackioTracker(RunTracker):
    """A run of trackio."""

    module = "trackio"


class Trackers:
    """All trackers of a run. One that raises is dropped with a warning; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None], given: Collection[str] = ()) -> None:
        """Forward to `trackers`, given by name; the user has made those in `given`."""
        self._trackers = dict(trackers)
        self._warn = warn
        self._given = frozenset(given)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step in every tracker."""
        self._each(lambda tracker: tracker.log(step, values))

    def close(self, *, keep_given: bool = False) -> None:
        """Finish every tracker; `keep_given` leaves those alone that the user has made."""
        if keep_given:
            self._trackers = {name: tracker for name, tracker in self._trackers.items() if name not in self._given}
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
    names: Iterable[str],
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    warn: Callable[[str], None],
    resume_step: int | None = None,
    plugins: Plugins | None = None,
) -> Trackers:
    """Start the trackers of `logging.loggers`.

    Args:
        names: Names of built-in trackers, and import paths.
        run_dir: The run's own folder; its name is the run's name.
        config: The configuration as plain values, recorded with the run.
        warn: Called with a sentence about a tracker that was dropped.
        resume_step: Step the run resumes from, None for a new run.
        plugins: The user's objects; those under `logging.loggers` take the place of their import paths.

    Raises:
        ValueError: A tracker's package is not installed, or a tracker of the user lacks a method.
    """
    trackers: dict[str, Tracker] = {}
    given: set[str] = set()
    for i, name in enumerate(names):
        key = f"logging.loggers.{i}"
        plugin = None if plugins is None else plugins.get(key)
        made = plugin.load() if plugin is not None else _built_in(name)
        unique = name if name not in trackers else f"{name} ({i})"
        if _is_factory(made):
            try:
                made = made(run_dir, config, resume_step)
            except Exception as error:  # such as an account or a server that cannot be reached
                warn(_dropped(name, error))
                continue
        else:
            given.add(unique)
        if plugin is not None:
            _check_methods(made, key, name)
        trackers[unique] = made
    return Trackers(trackers, warn, given)


def check_tracker(candidate: Any, *, key: str, name: str) -> None:
    """Check that an object is a tracker, or starts one.

    Raises:
        ValueError: It is not.
    """
    if _is_factory(candidate):
        check_call(candidate, TrackerFactory.__call__, key=key, name=name, expected=EXPECTED)
    if isinstance(candidate, type) or not _is_factory(candidate):
        _check_methods(candidate, key, name)


def _is_factory(candidate: Any) -> bool:
    """Return True for a class, and for a callable that is not a tracker itself."""
    return isinstance(candidate, type) or (callable(candidate) and not hasattr(candidate, "log"))


def _check_methods(tracker: Any, key: str, name: str) -> None:
    for method, protocol, expected in (("log", Tracker.log, LOG_EXPECTED), ("close", Tracker.close, CLOSE_EXPECTED)):
        if not callable(getattr(tracker, method, None)):
            raise ValueError(f"{key}: the tracker has no method {method} (got {name}). Write it as `{expected}`.")
        function = getattr(tracker, method)
        is_bound = not isinstance(tracker, type)
        check_call(
            function if is_bound else partial(function, None), protocol, key=key, name=f"{name}.{method}", expected=expected
        )


def _dropped(name: str, error: Exception) -> str:
    return f"logging.loggers: {name} failed and receives no more metrics ({type(error).__name__}: {error})"


def _built_in(name: str) -> Any:
    tracker = import_object(TRACKERS[name], key="logging.loggers")
    try:
        importlib.import_module(tracker.module)
    except ImportError as error:
        raise ValueError(
            f"logging.loggers: the package of {name} cannot be imported ({error}). "
            f"Run `pip install {name}`, or remove {name} from the list."
        ) from error
    return tracker
