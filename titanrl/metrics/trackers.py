"""Destinations of the steps of a run: the recorder, the experiment trackers, and the hooks of the user.

Trackers receive a copy of `metrics.jsonl`. They are TensorBoard, Weights & Biases, trackio, MLflow
(`titanrl.config.sections.TRACKERS`), or a custom tracker: a class or function with the signature of `TrackerFactory`, or an
object with the methods of `Tracker`. Hooks are callbacks around the steps; the controller calls them one after another.
"""

import asyncio
import importlib
import inspect
import json
import math
import queue
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from titanrl.base.errors import TitanRLError
from titanrl.base.files import replace_text
from titanrl.base.plugins import Plugins, Point, check_call, import_object
from titanrl.carriers.record import MAX_QUEUED
from titanrl.carriers.types import EvaluationResult, StepMetrics
from titanrl.config.sections import TRACKERS
from titanrl.metrics.reading import RunRecord, flat, read_metrics
from titanrl.metrics.steps import evaluation_metrics

if TYPE_CHECKING:  # checks in child processes need only the protocols
    from titanrl.metrics.console import Console
    from titanrl.metrics.run_directory import RunDirectory


PROJECT = "titanrl"
"""Project name for runs in W&B and trackio."""
FLUSH_S = 1.0
"""Interval in seconds at which metrics are flushed to disk, which limits what a killed run loses."""

EVALUATED_STEP = "evaluated_step"
"""Step of an evaluation in W&B, which is their horizontal axis there."""
SAMPLE_COLUMNS = ("prompt", "answer", "completion", "reward", "outcome")
"""Columns of the samples of an evaluation."""
MLFLOW_PARAMS, MLFLOW_METRICS, MLFLOW_CHARS = 100, 1000, 500
"""Most parameters and metrics of a request to MLflow, and the longest value of a parameter."""
CLOSE_S = 5.0
"""Seconds for which the end of a run waits for MLflow."""

EXPECTED = "class MyTracker: def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None)"


class Tracker(Protocol):
    """A destination for metrics. It runs in the controller; if it raises, it is dropped with a warning and the run continues.

    docs/howto/tracker.md has an example.
    """

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Record metrics of one step. The same step can be logged several times, each time with different metrics."""

    def close(self) -> None:
        """Write buffered metrics and finish the run."""


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also receives the recorded samples of evaluations."""

    def log_samples(self, step: int, name: str, rows: Sequence[Sequence[Any]], /) -> None:
        """Record samples of an evaluation after a step, one row of `SAMPLE_COLUMNS` each."""


class TrackerFactory(Protocol):
    """A class or function that returns a started tracker."""

    def __call__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None, /) -> Tracker:
        """Start a tracker.

        Args:
            run_dir: Run directory; its name is the run's name.
            config: The configuration as plain values.
            resume_step: Step that the run resumes from; None for a new run.
        """


class TensorBoardTracker:
    """Writes TensorBoard event files to `<run_dir>/tensorboard`, without torch, which the controller does not import."""

    module: ClassVar[str] = "tensorboard.summary.writer.event_file_writer"

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Open an event file, and hide the metrics that an earlier attempt logged after `resume_step`."""
        module = importlib.import_module(self.module)
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer = module.EventFileWriter(str(run_dir / "tensorboard"), flush_secs=FLUSH_S)
        if resume_step is not None:  # readers drop the events of later steps in earlier files
            self._add(resume_step + 1, file_version="brain.Event:2")
            self._add(resume_step + 1, session_log={"status": "START"})
        text = "\n".join(f"    {key}: {value}" for key, value in config.items())
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        value = {"tag": "config", "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}
        self._add(0, summary={"value": [value]})

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record one scalar per metric."""
        for name, value in values.items():
            self._add(step, summary={"value": [{"tag": name, "simple_value": float(value)}]})

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class RunTracker:
    """Common code for wandb and trackio, whose interfaces are similar.

    Neither can rewind to an earlier step. A resumed run therefore logs nothing up to the last step that the tracker has
    recorded: steps between the checkpoint and that step keep the values of the earlier attempt. `<run_dir>/<package>.json`
    stores the tracker's run id and that step.
    """

    module: ClassVar[str]

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Start a run named after the run directory, or continue the run recorded in it."""
        module = importlib.import_module(self.module)
        self._state_file = run_dir / f"{self.module}.json"
        is_known = resume_step is not None and self._state_file.exists()
        state: dict[str, Any] = {"id": None, "step": -1}
        if is_known:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
        self._first_step, self._step = state["step"] + 1, state["step"]
        self._is_wandb, self._table = self.module == "wandb", module.Table
        options: dict[str, Any] = {"project": PROJECT, "name": run_dir.name, "config": flat(config)}
        if self._is_wandb:
            # Otherwise wandb would capture the live display, which garbles the output of both.
            settings = module.Settings(console="off", quiet=True, x_transaction_log_flush_interval=FLUSH_S)
            self._run = module.init(**options, id=state["id"], resume="allow", dir=str(run_dir), settings=settings)
            for names in ("eval/*", "samples/*"):  # evaluations beside training end after later steps, which W&B must not drop
                self._run.define_metric(names, step_metric=EVALUATED_STEP)
        else:
            self._run = module.init(**options, resume="must" if is_known else "never", embed=False)
            if is_known and self._run.id != state["id"]:
                self._run.finish()
                raise ValueError(f"trackio resumes runs by name, and a newer run is also named {run_dir.name}")
        self._save(self._step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, unless an earlier attempt already recorded this step."""
        if step < self._first_step:
            return
        self._log(step, values)
        if step > self._step:
            # W&B writes a step when the next one begins; trackio writes it immediately.
            self._save(self._step if self._is_wandb else step)
            self._step = step

    def log_samples(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Record samples as a table, unless an earlier attempt already recorded this step."""
        if step >= self._first_step:
            table = self._table(columns=list(SAMPLE_COLUMNS), data=[list(map(_shown, row)) for row in rows])
            self._log(step, {f"samples/{name}": table})

    def close(self) -> None:
        """Upload or write the buffered metrics, and finish the run."""
        # The finish() of the module looks up the run in a context variable, which is not set in other asyncio tasks.
        self._run.finish()
        self._save(self._step)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._is_wandb:
            self._run.log(dict(values), step=step)
        elif any(name.startswith(("eval/", "samples/")) for name in values):
            self._run.log({**values, EVALUATED_STEP: step}, step=max(step, self._step), commit=False)
        else:
            self._run.log(dict(values), step=step)

    def _save(self, step: int) -> None:
        replace_text(self._state_file, json.dumps({"id": self._run.id, "step": step}))


class WandbTracker(RunTracker):
    """Logs to Weights & Biases."""

    module = "wandb"


class TrackioTracker(RunTracker):
    """Logs to trackio."""

    module = "trackio"


class MlflowTracker:
    """Logs to MLflow, at the server or store that `MLFLOW_TRACKING_URI` names.

    A thread sends the requests, so that a slow server does not delay the run. `<run_dir>/mlflow.json` says what the server has:
    the last step, which metrics of it, and when they were logged. A resumed run first sends what `metrics.jsonl` has since
    then. Of later steps, those that an earlier attempt sent keep its values, as in `RunTracker`.
    """

    module: ClassVar[str] = "mlflow"

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Start a run named after the run directory, or continue the run recorded in it."""
        module = importlib.import_module(self.module)
        self._client, self._metric = module.MlflowClient(), module.entities.Metric
        self._state_file = run_dir / f"{self.module}.json"
        self._state: dict[str, Any] = {"id": None, "step": -1, "names": [], "time": 0.0}
        missing: list[dict[str, Any]] = []
        if resume_step is not None and self._state_file.exists():
            self._state |= {"time": math.inf} | json.loads(self._state_file.read_text(encoding="utf-8"))
            self._client.update_run(self._state["id"], status="RUNNING")
            rows = run_dir / "metrics.jsonl"
            missing = [row for row in read_metrics(rows) if row["time"] > self._state["time"]] if rows.exists() else []
        else:
            found = self._client.get_experiment_by_name(PROJECT)
            experiment = self._client.create_experiment(PROJECT) if found is None else found.experiment_id
            self._state["id"] = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
            values = [(_mlflow_name(key), _shown(value)) for key, value in flat(config).items()]
            params = [module.entities.Param(key, str(value)[:MLFLOW_CHARS]) for key, value in values]
            for start in range(0, len(params), MLFLOW_PARAMS):
                self._client.log_batch(self._state["id"], params=params[start : start + MLFLOW_PARAMS])
            self._save()
        self._held_step, self._held_names = self._state["step"], frozenset(self._state["names"])
        self._requests: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(missing,), name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step, except those that the server has from an earlier attempt."""
        if step == self._held_step:
            values = {name: value for name, value in values.items() if name not in self._held_names}
        if step >= self._held_step:
            self._put(partial(self._send, step, dict(values), time.time()))

    def log_samples(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Send samples as a table among the artifacts, except those of steps that an earlier attempt sent."""
        if step > self._held_step:
            text = json.dumps({"columns": SAMPLE_COLUMNS, "data": [list(map(_shown, row)) for row in rows]})
            path = f"samples/{_mlflow_name(name)}/{step}.json"
            self._put(partial(self._client.log_text, self._state["id"], text, path))

    def close(self) -> None:
        """Send the rest and finish the run.

        Raises:
            TimeoutError: The server did not receive everything within `CLOSE_S`.
        """
        self._put(partial(self._client.set_terminated, self._state["id"]))
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not take {self._requests.qsize()} requests within {CLOSE_S:g} s")
        if self._error is not None:
            raise self._error

    def _put(self, request: Callable[[], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._requests.put_nowait(request)
        except queue.Full:
            raise TimeoutError(f"{MAX_QUEUED} requests wait for the server") from None

    def _run(self, missing: Sequence[dict[str, Any]]) -> None:
        try:
            for row in missing:
                step, _, logged = (row.pop(key) for key in ("step", "version", "time"))
                self._send(step, row, logged)
            while (request := self._requests.get()) is not None:
                request()
        except Exception as error:  # whatever the client raises; `log` or `close` raises it in the controller
            self._error = error

    def _send(self, step: int, values: Mapping[str, float], logged: float) -> None:
        metrics = [self._metric(_mlflow_name(name), value, round(logged * 1000), step) for name, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._state["id"], metrics=metrics[start : start + MLFLOW_METRICS])
        if step > self._state["step"]:
            self._state |= {"step": step, "names": []}
        if step == self._state["step"]:
            self._state["names"] += values
        self._state["time"] = logged
        self._save()

    def _save(self) -> None:
        replace_text(self._state_file, json.dumps(self._state))


class Trackers:
    """All trackers of a run. A tracker that raises is dropped with a warning, and the run continues."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None], given: Collection[str] = ()) -> None:
        """Keep started trackers by name, some of which the user has given as objects."""
        self._trackers = dict(trackers)
        self._warn = warn
        self._given = frozenset(given)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step in every tracker. Each gets a copy, because others read the values, too."""
        self._each(lambda tracker: tracker.log(step, dict(values)))

    @property
    def take_samples(self) -> bool:
        """True if a tracker receives samples of evaluations."""
        return any(isinstance(tracker, SampleTracker) for tracker in self._trackers.values())

    def log_samples(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Record samples of an evaluation in every tracker that receives them."""
        self._each(lambda tracker: tracker.log_samples(step, name, rows) if isinstance(tracker, SampleTracker) else None)

    def close(self, *, keep_given: bool = False) -> None:
        """Close every tracker; with `keep_given`, leave the objects open that the user passed in."""
        if keep_given:
            self._trackers = {name: tracker for name, tracker in self._trackers.items() if name not in self._given}
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker raises must not end the run
                del self._trackers[name]
                self._warn(_dropped(name, error))


class Recorder:
    """Sends metrics to `metrics.jsonl`, the trackers and the console."""

    def __init__(self, directory: "RunDirectory", trackers: Trackers, console: "Console") -> None:
        self.directory, self.console = directory, console
        self._trackers = trackers
        self._record = RunRecord(directory.path)
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
        if self._trackers.take_samples:
            version = float(result.version), float(result.version)
            hits = self._record.search(kind="evaluations", set=result.task, version=version)
            samples = [
                (hit.group.prompt, hit.group.answer, hit.completion.text, hit.completion.reward, hit.completion.outcome)
                for hit in hits
            ]
            self._trackers.log_samples(step, result.task, samples)
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

        If the run `resumes`, another recorder follows, for which tracker objects of the user stay open.
        """
        self._trackers.close(keep_given=resumes)
        self.directory.close()

    def _write(self, metrics: StepMetrics) -> None:
        self.directory.log(metrics)
        self._trackers.log(metrics.step, metrics.values)


def make_trackers(
    names: Iterable[str],
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    warn: Callable[[str], None],
    resume_step: int | None = None,
    plugins: Plugins | None = None,
) -> Trackers:
    """Start the trackers of `logging.loggers`, with the arguments of `TrackerFactory`.

    Args:
        names: Names of built-in trackers, and import paths of custom ones.
        run_dir: Run directory.
        config: The configuration as plain values.
        warn: Called with a message when a tracker is dropped.
        resume_step: Step that the run resumes from; None for a new run.
        plugins: User-defined objects; those with keys under `logging.loggers` replace the entries of `names`.

    Raises:
        ValueError: A tracker's package is not installed, or a custom tracker lacks a method.
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
            except Exception as error:  # for example, no account is set up or the server is unreachable
                warn(_dropped(name, error))
                continue
        else:
            given.add(unique)
        if plugin is not None:
            _check_methods(made, key, name)
        trackers[unique] = made
    return Trackers(trackers, warn, given)


def check_tracker(candidate: Any, *, key: str, name: str) -> None:
    """Raise `ValueError` unless an object is a tracker or a factory of trackers, with methods of the right signatures."""
    if _is_factory(candidate):
        check_call(candidate, TrackerFactory.__call__, key=key, name=name, expected=EXPECTED)
    if isinstance(candidate, type) or not _is_factory(candidate):
        _check_methods(candidate, key, name)


POINT = Point(
    key="logging.loggers",
    argument="trackers",
    protocol=TrackerFactory.__call__,
    expected=EXPECTED,
    checked=lambda tracker, plugin, config: check_tracker(tracker, key=plugin.key, name=plugin.name),
    in_controller=True,
)


def _shown(value: Any) -> Any:
    """Return a value as trackers can show it: a number, a text, or JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _mlflow_name(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)


def _is_factory(candidate: Any) -> bool:
    """Return True for a class, and for a callable that is not itself a tracker."""
    return isinstance(candidate, type) or (callable(candidate) and not hasattr(candidate, "log"))


def _check_methods(tracker: Any, key: str, name: str) -> None:
    is_bound = not isinstance(tracker, type)
    samples = [SampleTracker.log_samples] if issubclass(type(tracker) if is_bound else tracker, SampleTracker) else []
    protocol: Any
    for protocol in (Tracker.log, Tracker.close, *samples):
        method, expected = protocol.__name__, f"def {protocol.__name__}{inspect.signature(protocol)}"
        function = getattr(tracker, method, None)
        if not callable(function):
            raise ValueError(f"{key}: the tracker has no method {method} (got {name}). Write it as `{expected}`.")
        check_call(
            function if is_bound else partial(function, None), protocol, key=key, name=f"{name}.{method}", expected=expected
        )


def _dropped(name: str, error: Exception) -> str:
    return f"logging.loggers: {name} failed and will receive no more metrics ({type(error).__name__}: {error})"


def _built_in(name: str) -> Any:
    tracker = import_object(TRACKERS[name], key="logging.loggers")
    try:
        importlib.import_module(tracker.module)
    except ImportError as error:
        raise ValueError(
            f"logging.loggers: the package for {name} cannot be imported ({error}). "
            f"Run `pip install {name}`, or remove {name} from the list."
        ) from error
    return tracker


HOOK_EXPECTED = "class MyHook(titanrl.Hook)"


class HookError(TitanRLError):
    """A hook raised an exception; the message names the hook, and `__cause__` is its exception."""


class Hook:
    """Base class of callbacks around the steps of a run. Override the methods you need, as plain or `async` functions.

    `run` is the running `titanrl.GRPO`. `run.state.step` is the number of steps taken, `run.config` is the configuration, and
    `run.set_learning_rate(rate)` sets the learning rate from the next optimizer step on. An exception ends the run.
    docs/howto/hooks.md has an example.
    """

    def before_step(self, run: Any) -> Awaitable[None] | None:
        """Handle the start of a step, before it takes its batch."""

    def after_step(self, run: Any, metrics: StepMetrics) -> Awaitable[None] | None:
        """Handle the end of a step, after its metrics were recorded."""

    def after_evaluation(self, run: Any, result: EvaluationResult) -> Awaitable[None] | None:
        """Handle the result of an evaluation, after it was recorded."""

    def after_checkpoint(self, run: Any, folder: Path) -> Awaitable[None] | None:
        """Handle a checkpoint, after it is complete in `folder`."""


METHODS: Mapping[str, Callable[..., Any]] = {name: value for name, value in vars(Hook).items() if not name.startswith("_")}
"""Methods of a hook by name."""


class Hooks:
    """The hooks of a run, in configuration order."""

    def __init__(self, hooks: Sequence[tuple[str, Hook]]) -> None:
        """Wrap named hooks; error messages use the names."""
        self._hooks = tuple(hooks)
        self._caller: asyncio.Task[Any] | None = None

    @classmethod
    def of(cls, plugins: Plugins) -> Self:
        """Load the hooks of a run, and instantiate those given as classes; raise `HookError` if a constructor raises."""
        hooks = []
        for plugin in (plugin for key, plugin in plugins.items() if key.startswith("hooks.")):
            hook = plugin.load()
            with _named(plugin.name):
                hooks.append((plugin.name, hook() if isinstance(hook, type) else hook))
        return cls(hooks)

    @property
    def is_caller(self) -> bool:
        """True if a hook is running and has called the current function."""
        return self._caller is not None and self._caller is asyncio.current_task()

    async def before_step(self, run: object) -> None:
        """Call `before_step` of every hook; raise HookError if one raises."""
        await self._each("before_step", lambda hook: hook.before_step(run))

    async def after_step(self, run: object, metrics: StepMetrics) -> None:
        """Call `after_step` of every hook; raise HookError if one raises."""
        await self._each("after_step", lambda hook: hook.after_step(run, metrics))

    async def after_evaluation(self, run: object, result: EvaluationResult) -> None:
        """Call `after_evaluation` of every hook; raise HookError if one raises."""
        await self._each("after_evaluation", lambda hook: hook.after_evaluation(run, result))

    async def after_checkpoint(self, run: object, folder: Path) -> None:
        """Call `after_checkpoint` of every hook; raise HookError if one raises."""
        await self._each("after_checkpoint", lambda hook: hook.after_checkpoint(run, folder))

    async def _each(self, method: str, call: Callable[[Hook], Awaitable[None] | None]) -> None:
        self._caller = asyncio.current_task()
        try:
            for name, hook in self._hooks:
                with _named(f"{name}.{method}"):
                    result = call(hook)
                    if result is not None:
                        await result
        finally:
            self._caller = None


def check_hook(candidate: object, *, key: str, name: str) -> None:
    """Raise `ValueError` unless an object is a `Hook`, or a class of them, with known method names and valid signatures."""
    kind = candidate if isinstance(candidate, type) else type(candidate)
    if not issubclass(kind, Hook):
        raise ValueError(f"{key}: not a hook (got {name}, of type {type(candidate).__name__}). Write it as `{HOOK_EXPECTED}`.")
    if candidate is kind:
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            fix = "Give its arguments defaults, or pass an instance to GRPO(config, hooks=[...])."
            raise ValueError(f"{key}: the class must not require arguments: {error} (got {name}). {fix}") from error
    for method in dir(kind):
        if method.startswith(("before_", "after_")) and method not in METHODS:
            raise ValueError(f"{key}: hooks have no such method (got {name}.{method}). Choose one of {', '.join(METHODS)}.")
    for method, expected in METHODS.items():
        function = getattr(kind, method)
        if function is not expected:
            shown = f"def {method}{inspect.signature(expected)}"
            check_call(partial(function, None), expected, key=key, name=f"{name}.{method}", expected=shown)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Convert any exception raised in the body to a `HookError` that names the hook."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise HookError(f"hooks: {name} raised {type(error).__name__}: {error}") from error


HOOK_POINT = Point(
    key="hooks",
    argument="hooks",
    protocol=Hook,
    expected=HOOK_EXPECTED,
    checked=lambda hook, plugin, config: check_hook(hook, key=plugin.key, name=plugin.name),
    in_controller=True,
)
