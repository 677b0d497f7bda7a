"""Checkpoints and evaluations of a run, which are due after steps.

Checkpoints: the controller's state, when one is complete, and when a run resumes or restarts from one. Evaluations: their
schedule, those beside training, the best policy, and early stopping.
"""

import asyncio
import contextlib
import json
import math
import operator
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titanrl.base.errors import FaultError, StoppedError
from titanrl.base.files import DamagedError, Digests, check_folder, commit_folder, replace_text, uncommit_folder
from titanrl.carriers.types import TOLERANCE, EvaluationResult
from titanrl.config.algorithm import ADVANTAGES
from titanrl.config.device import Device
from titanrl.config.errors import BrokenRule, ConfigError, inline
from titanrl.config.schema import Config
from titanrl.config.sections import FaultsConfig
from titanrl.data.entries import Selection
from titanrl.data.examples import Examples
from titanrl.launch.supervision import PartDiedError, StallError
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import JOB_SCRIPT
from titanrl.metrics.steps import PhaseTimer, evaluation_metrics
from titanrl.metrics.trackers import Hooks, Recorder
from titanrl.processes.children import RespawnLimitError, Respawns

if TYPE_CHECKING:
    from titanrl.session.session import Session

STATE_FILE = "controller.json"
SETTINGS_FILE = "settings.yaml"
"""Copy of the run's `config.yaml` in a checkpoint. The one in the run directory may be edited."""
MAX_VALUE = 200
"""Maximum length of a recorded value in a message."""
_NEEDS_ADAPTERS = "adapters are loaded into adapters of the same kind"
SAVED_WITH: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "algorithm.optimizer": ("another optimizer has no such state", operator.eq),
    "algorithm.ema_decay": ("it has no moving average", lambda before, now: before is not None or now is None),
    "algorithm.advantage": ("it has no critic", lambda before, now: _has_critic(before) or not _has_critic(now)),
    "trainer.lora": (_NEEDS_ADAPTERS, lambda before, now: (before is None) == (now is None)),
    "trainer.lora.rank": (_NEEDS_ADAPTERS, operator.eq),
    "trainer.lora.alpha": ("another alpha would make it another policy", operator.eq),
    "trainer.lora.targets": (_NEEDS_ADAPTERS, lambda before, now: sorted(before) == sorted(now)),
    "name": ("a resumed run keeps it", operator.eq),
    "output_dir": ("a resumed run stays there", lambda before, now: Path(before or now).absolute() == Path(now).absolute()),
    "warm_start": ("it precedes the first step", lambda before, now: not now or (bool(before) and {**now, **before} == now)),
    "trainer.expert_bias_rate": ("the bias of experts is part of it, or is not", lambda before, now: bool(before) == bool(now)),
}
"""Keys that a checkpoint must have been saved with: a reason, and a function that returns whether it fits, of the recorded and
the configured value."""
DEFAULTS = {"algorithm.optimizer": "adamw"}
"""Values of keys that earlier versions did not record, if not null."""
STRICT = ConfigDict(strict=True, extra="forbid")
"""Validation of the state: unknown keys and values of other types are errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Cumulative work of a run since its first step, over all processes and attempts. Each step adds its batch's work."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    prompts: int = 0
    """Prompts whose groups were trained on, or were discarded before a batch that was trained on."""
    rollouts: int = 0
    """Completions of these prompts, including those without a reward."""
    environment_steps: int = 0
    """Turns of the policy in an environment, for these prompts."""
    generated_tokens: int = 0
    """Tokens sampled for these completions."""
    trained_tokens: int = 0
    """Tokens in the losses of optimizer steps. Tokens of a replayed group count once per batch."""

    def plus(self, **more: int) -> Self:
        """Return the counts increased by `more`, given by field name."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        return {
            "count/prompts": self.prompts,
            "count/rollouts": self.rollouts,
            "count/environment_steps": self.environment_steps,
            "count/generated_tokens": self.generated_tokens,
            "count/trained_tokens": self.trained_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's state in a checkpoint: the progress of the run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int
    """Steps taken."""
    version: int
    """Policy version."""
    next_index: int
    """First position in the prompts, or in the examples, that no batch has passed. In a checkpoint with groups, the first
    position that was not admitted."""
    next_example: int | None = None
    """First position in the examples of `examples` that no step has passed; None before the first step with them."""
    learning_rate: float | None = None
    """Learning rate that overrides the schedule; None follows the schedule."""
    num_rates: int = 0
    """Number of times that this override has changed."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus that `algorithm.entropy_target` adapts; None before the first step."""
    entropy: float | None = None
    """Entropy of the policy in the last step, in nats, with `algorithm.entropy_target`."""
    in_flight: tuple[int, ...] = ()
    """Positions before `next_index` whose groups were being generated; a resumed run samples them again."""
    published: tuple[int, ...] = ()
    """Last published versions, the newest last; if empty, `version` was published."""
    num_held: int = 0
    """Groups trained on since the last publication, which still occupy slots."""
    num_skipped: int = 0
    """Consecutive optimizer steps that were skipped."""
    evaluated_step: int = -1
    """Last step after which the policy was evaluated; -1 if it never was."""
    compared_step: int = -1
    """Last step whose evaluation was compared with the best one; -1 if none was."""
    best_metric: str | None = None
    """Metric that was compared; None if none was, or in checkpoints of earlier versions."""
    best_value: float | None = None
    """Best value of `evaluation.best_metric` so far; None if there is none."""
    best_step: int = -1
    """Step after which the policy reached the best value; -1 if there is none."""
    num_without_better: int = 0
    """Number of evaluations since the best value."""
    counts: Counts = Counts()
    """Work since the first step."""


FIRST = RunState(step=0, version=0, next_index=0)
"""State before the first step."""
_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """The newest intact checkpoint of a run, or the state before its first step, and the data that `Run.check` found."""

    state: RunState
    """State to continue from."""
    unusable: Mapping[str, str]
    """Reasons why newer checkpoints cannot be used (incomplete or damaged), by folder name."""
    selections: tuple[Selection, ...] = ()
    """Rows of the run's prompts or examples by use."""
    examples: Examples | None = None
    """Supervised examples of the run; None if it uses none."""
    remarks: tuple[str, ...] = ()
    """Accepted changes of the data since the run was started."""


class RunPart(Protocol):
    """The part of a `titanrl.run.run.Run` that its `Checkpoints`, `Evaluations` and `Steering` use."""

    config: Config
    state: RunState
    hooks: Hooks
    console: Console
    device: Device
    timer: PhaseTimer
    run_dir: Path
    admits_prompts: bool

    @property
    def session(self) -> "Session":
        """The running processes."""

    @property
    def recorder(self) -> Recorder:
        """Files and trackers."""

    @property
    def is_ending(self) -> bool:
        """True if the run was asked to end."""

    @property
    def ends_early(self) -> bool:
        """True if training should stop before its last step."""

    @property
    def settings(self) -> str:
        """Text of `config.yaml`."""

    @property
    def is_in_step(self) -> bool:
        """True in the task of the step in progress."""

    def note(self, **changes: Any) -> None:
        """Update fields of the state."""

    def alone(self, verb: str) -> AbstractAsyncContextManager[None]:
        """Refuse a call while another task takes a step, evaluates, saves or exports."""

    async def unless_ending(self, work: Coroutine[Any, Any, object]) -> bool:
        """Await work, and cancel it if the run is asked to end; return True if it finished."""

    async def save_parts(self, folder: Path) -> None:
        """Start writing the trainer's files, and those of the loop, such as the buffer's groups, to a checkpoint's folder."""

    async def finish_parts(self) -> None:
        """Wait until the files of the loop are on disk."""

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return the evaluation sets, and the number of steps after which each is due."""

    async def evaluate(self, name: str | None = None) -> EvaluationResult | float | None:
        """Evaluate a set with the newest weights, and record the result."""

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate sets while training continues, and append each result."""

    async def apply_changes(self, keys: Collection[str]) -> None:
        """Send changed values to the processes that use them."""

    async def after_pause(self) -> None:
        """Prepare the next step after a pause."""


class Checkpoints:
    """Writes the checkpoints of a run, at most one at a time.

    The trainer's files and those of the loop (`Run.save_parts`) are started between two steps. On an accelerator they are
    written while training continues; the checkpoint is complete once `commit.json` lists them.
    """

    def __init__(self, run: RunPart) -> None:
        self._run = run
        self._saving: asyncio.Task[Path] | None = None
        self.saved_step = run.state.step
        """Steps of the newest complete checkpoint."""

    async def save(self) -> Path:
        """Write a checkpoint and return its folder; see `Run.save`."""
        await self.finish()
        while True:
            with contextlib.suppress(PartDiedError):  # retry without the dead worker, whose groups are sampled again
                return await self._save()

    async def _save(self) -> Path:
        run = self._run
        with run.timer.phase("checkpoint"):
            await run.session.weights.ready()
            run.state = replace(run.state, version=run.session.trainer.version)
            folder = checkpoint_dir(run.recorder.directory.checkpoints, run.state.step)
            uncommit_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)  # remnants of a killed attempt
            await run.save_parts(folder)
            self._saving = asyncio.create_task(self._complete(run.state), name="complete checkpoint")
            if run.device.kind == "cpu":
                await asyncio.wait({self._saving})
        if self._saving.done():
            await self.finish()
        return folder

    async def _complete(self, state: RunState) -> Path:
        """Wait until the files of a checkpoint are on disk, commit it, and return its folder."""
        digests = await self._run.session.trainer.finish_checkpoint(state.step)
        await self._run.finish_parts()
        directory = self._run.recorder.directory
        await asyncio.to_thread(directory.flush_to_disk)
        await asyncio.to_thread(complete_checkpoint, directory.checkpoints, state, digests, self._run.settings)
        self.saved_step = state.step
        return checkpoint_dir(directory.checkpoints, state.step)

    async def finish_if_done(self) -> None:
        """Call `finish` if the files of the checkpoint in progress are on disk."""
        if self._saving is not None and self._saving.done():
            await self.finish()

    async def finish(self) -> None:
        """Wait for a checkpoint in progress, record it, and call the hooks; do nothing if there is none."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            folder = await saving
        except PartDiedError:  # a rollout worker died while its shard was being written
            await self.save()
            return
        self._run.recorder.directory.event("checkpoint", step=self.saved_step, path=str(folder))
        await self._run.hooks.after_checkpoint(self._run, folder)

    async def settle(self) -> None:
        """Give a checkpoint in progress a quarter of `timeouts.close_s` to finish, then cancel it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await asyncio.wait({saving}, timeout=self._run.config.timeouts.close_s / 4)
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)


def complete_checkpoint(checkpoints: Path, state: RunState, digests: Digests, settings: str) -> None:
    """Write the controller's state and the list of files with digests, which completes a checkpoint; see `titanrl.base.files`.

    `digests` are those of the trainer's files, which are on disk; the digests of other files are computed here. `settings` is
    the text of `config.yaml`.
    """
    folder = checkpoint_dir(checkpoints, state.step)
    replace_text(folder / SETTINGS_FILE, settings, durable=True)
    replace_text(folder / STATE_FILE, json.dumps(asdict(state)), durable=True)
    commit_folder(folder, digests)


def newest_version(run_dir: Path) -> int | None:
    """Return the policy version in the newest checkpoint of a run, whose files are not read; None if there is no checkpoint."""
    for step, folder in sorted(_checkpoint_dirs(run_dir / "checkpoints"), reverse=True):
        with contextlib.suppress(DamagedError):
            return _read_state(folder / STATE_FILE, step).version
    return None


def resumable(run_dir: Path, step: int | None = None) -> Resumable:
    """Return the newest intact checkpoint of a run directory; every file is read and compared with its digest.

    For a submitted run that has no checkpoint yet, return the state before its first step. With `step`, only the checkpoint
    after this step is considered.

    Raises:
        ConfigError: There is no intact checkpoint.
    """
    unusable: dict[str, str] = {}
    for number, folder in sorted(_checkpoint_dirs(run_dir / "checkpoints"), reverse=True):
        if step is not None and number != step:
            continue
        try:
            check_folder(folder, needs=(STATE_FILE, ".metadata"))
            return Resumable(state=_read_state(folder / STATE_FILE, number), unusable=unusable)
        except DamagedError as error:
            unusable[folder.name] = str(error)
    if step is not None:
        saved = ", ".join(str(number) for number, _ in sorted(_checkpoint_dirs(run_dir / "checkpoints"))) or "none"
        found = unusable.get(f"step-{step}", f"the run has no checkpoint of this step; it has {saved}")
        raise ConfigError(f"--step: {found} (got {step}). Choose another step.")
    if not unusable and (run_dir / JOB_SCRIPT).is_file():
        return Resumable(state=FIRST, unusable={})
    found = "".join(f"; {name}: {reason}" for name, reason in unusable.items())
    raise ConfigError(f"--resume: no intact checkpoint (got {run_dir}{found}). Give the directory of a run that saved one.")


def broken_by_checkpoint(config: Config, recorded: Mapping[str, Any], step: int) -> Iterator[BrokenRule]:
    """Yield the keys with which a run cannot continue its checkpoint: the saved state would not fit, or mean another policy.

    `recorded` are the values with which it was saved.
    """
    values = config.model_dump(mode="json")
    for key, (what, fits) in SAVED_WITH.items():
        before, now = _value(recorded, key), _value(values, key)
        is_nested = key.startswith("trainer.lora.") and None in (_value(recorded, "trainer.lora"), values["trainer"]["lora"])
        if not is_nested and not fits(before, now):
            values_now = {key: now}
            if isinstance(before, Mapping) and isinstance(now, Mapping):  # name only the keys that differ
                before = {name: value for name, value in before.items() if value != now.get(name)}
                values_now = {f"{key}.{name}": now.get(name) for name in before}
            shown = inline(before, MAX_VALUE)
            rule = f"the checkpoint of step {step} was saved with {shown}, and {what}"
            fix = f"restore these values of {key}" if isinstance(before, Mapping) else f"set {key} to {shown}"
            yield BrokenRule(values_now, rule, f"{fix}, or start a new run from an exported model (model.path)")
    yield from _broken_by_reference(config, recorded, step)


def _broken_by_reference(config: Config, recorded: Mapping[str, Any], step: int) -> Iterator[BrokenRule]:
    """Yield a rule if the weights before the first step are still used, but would be those from before the warm start."""
    users = {
        "distill.teacher.policy": config.distill is not None and config.distill.teacher.policy == "initial",
        "algorithm.kl.reference": config.algorithm.kl.coef > 0 and config.algorithm.kl.reference == "initial",
    }
    used = [key for key, is_used in users.items() if is_used]
    if used and config.warm_start is None and recorded.get("warm_start") is not None:
        rule = f"the checkpoint of step {step} was saved with a warm start, which made the weights that {used[0]} names"
        yield config.broken(f"warm_start {used[0]}", rule, "leave warm_start as it was")


def _has_critic(advantage: str) -> bool:
    return advantage in ADVANTAGES and ADVANTAGES[advantage].traits.has_critic


def _value(values: Any, key: str) -> Any:
    """Return the value of a nested key; the default if it is missing, as in the record of an earlier version."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return DEFAULTS.get(key) if values is None else values


def newest_checkpoint(run_dir: Path, *, had_one: bool) -> Resumable | None:
    """Return the newest intact checkpoint of a run; None if it never had one, `DamagedError` if it has none left."""
    try:
        return resumable(run_dir)
    except ConfigError as error:
        if had_one:
            raise DamagedError(f"restart: {str(error).removeprefix('--resume: ')}") from None
        return None


def set_aside(checkpoints: Path, after_step: int) -> list[str]:
    """Rename the checkpoints after a step to `unusable-<step>`, return the new names, and delete the ones of earlier calls.

    A run that continues from the step would otherwise count them among its newest checkpoints, and delete intact ones instead.
    """
    for earlier in checkpoints.glob("unusable-*"):
        shutil.rmtree(earlier)
    later = [(step, folder) for step, folder in sorted(_checkpoint_dirs(checkpoints)) if step > after_step]
    return [folder.rename(checkpoints / f"unusable-{step}").name for step, folder in later]


def _checkpoint_dirs(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    for path in checkpoints.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name, re.ASCII)
        if match and path.is_dir():
            yield int(match[1]), path


def _read_state(path: Path, step: int) -> RunState:
    try:
        state = _STATE.validate_json(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {type(error).__name__}") from error
    except ValidationError as error:
        raise DamagedError(f"{path.name} is not the state of step {step}") from error
    if state.step != step:
        raise DamagedError(f"{path.name} is not the state of step {step}")
    return state


def checkpoint_dir(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, as torchtitan's manager names it."""
    return checkpoints / f"step-{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart in progress."""

    fault: FaultError | None
    """Fault that caused it; None if the user requested it."""
    step: int
    """Steps taken before the restart."""
    from_step: int | None
    """Step of the checkpoint that the run continues from; None if it starts from the beginning."""
    started: float
    """Start time, on the clock of `time.perf_counter`."""

    def warning(self, budget: str) -> str:
        """Return the message for the user. `budget` is the result of `Restarts.count`, or empty."""
        cause = "restart requested" if self.fault is None else str(self.fault)
        source = "from the beginning, as there is no checkpoint yet" if self.from_step is None else ""
        source = source or f"from the checkpoint of step {self.from_step}"
        return f"{cause}; at step {self.step}: continuing {source}" + (f" ({budget})" if budget else "")

    def event(self) -> dict[str, object]:
        """Return the fields of the restart's event; its duration ends now."""
        return {
            "part": None if self.fault is None else self.fault.part,
            "cause": "requested" if self.fault is None else str(self.fault),
            "step": self.step,
            "from_step": self.from_step or 0,
            "seconds": round(time.perf_counter() - self.started, 3),
        }


class Restarts:
    """Decides whether a run restarts after an error."""

    def __init__(self, config: FaultsConfig, respawns: Respawns) -> None:
        """Start without restarts; `respawns` is shared with the replacements of single parts."""
        self._config, self._respawns = config, respawns
        self._furthest, self._num_fruitless = -1, 0

    def fault_in(self, error: BaseException, ended_by: FaultError | None) -> FaultError | None:
        """Return the fault that caused an error of the run; None if the error is not recoverable by a restart.

        `ended_by` is the death or stall that failed all requests of the session.
        """
        if isinstance(error, RespawnLimitError) or not self._config.max_respawns:
            return None
        fault = _first_fault(error) or ended_by
        return None if isinstance(fault, StallError) and self._config.on_stall == "abort" else fault

    def count(self, fault: FaultError, step: int) -> str:
        """Count a restart after a fault that followed `step` steps; return its number and the limit as text."""
        limit = self._config.max_respawns
        if step > self._furthest:
            self._furthest, self._num_fruitless = step, 0
        if self._num_fruitless >= limit:
            raise RespawnLimitError(
                f"faults.max_respawns: {self._num_fruitless} restarts did not get the run past step {step} (got {limit}). "
                f"Last cause: {fault}"
            )
        self._respawns.add(fault.part, str(fault))
        self._num_fruitless += 1
        return f"{self._respawns.num_recent} of {limit} replacements"


def _first_fault(error: BaseException | None) -> FaultError | None:
    """Return the first `FaultError` among an error, its causes, and the exceptions of groups; None if there is none."""
    while error is not None and not isinstance(error, FaultError):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(_first_fault, error.exceptions)), None)
        error = error.__cause__
    return error


BEST = "best"
"""Folder of the exported model with the best evaluation, in the checkpoint folder."""


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


class Evaluations:
    """Evaluates a run when its sets are due, keeps the best policy, and counts the evaluations since it.

    All sets are due before the first step and at the end. In asynchronous training, sets due in between run beside training
    (`Run.sample_beside_training`); otherwise training waits for them (`Run.evaluate`).
    """

    def __init__(self, run: RunPart) -> None:
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
        is_last, step = is_last or run.ends_early, run.state.step  # if training has ended early, all sets are due
        due = [name for name, every in run.evaluation_sets().items() if is_last or step == 0 or is_due(step, every)]
        must_run = due and step != run.state.evaluated_step and not run.is_ending
        if must_run and await run.unless_ending(self._evaluate_all(due, is_last=is_last)):
            run.note(evaluated_step=step)
        if run.ends_early and not ended_early:
            best = run.state.best_step
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
        if run.state.best_metric not in (None, evaluation.best_metric):  # the run was resumed with another one
            run.note(best_value=None, best_step=-1, num_without_better=0)
        elif step <= run.state.compared_step:  # an interrupt between two sets, after which both are evaluated again
            return
        run.note(compared_step=step, best_metric=evaluation.best_metric)
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
