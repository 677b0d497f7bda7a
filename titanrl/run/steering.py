"""Changes of a run while it runs: pauses, and other values of the keys that are marked `LIVE` in the configuration.

The configuration of a run is `config.yaml` with the changes made so far. `changes.json` in the run directory lists all changes,
each with the number of steps after which it was made. That is all a resume needs: a run that returns to step k starts with the
changes made before, and makes the later ones again at their steps, so that its curve equals the unbroken one.

A change takes effect between two steps, in the controller, before a step sends its first request, so no step mixes two values.
Weights of a mixture decide which prompts are admitted, and trainer and generators need one temperature for a batch. Both change
right before a publication: until then, the slots of synchronous training are all in use, so the first prompts that they affect
are the same in every attempt, and no token of the old temperature is left to train on.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from titanrl.base.control import Control, listen
from titanrl.base.files import replace_text
from titanrl.carriers.record import span
from titanrl.config.errors import BrokenRule, ConfigError, inline
from titanrl.config.load import Source, explain_rule, live_keys, with_values
from titanrl.config.schema import Config
from titanrl.metrics.reading import duration
from titanrl.run.checkpoints import RunPart, RunState

CHANGES_FILE = "changes.json"
"""File of a run directory with all changes, in the order in which they take effect."""
TEMPERATURE = "rollout.temperature"
AT_PUBLICATION = ("data.mixture.", TEMPERATURE)
"""Prefixes of the keys that change right before a publication."""


class Change(BaseModel):
    """A change of one key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Number of steps taken before the change; the next step is the first with the new value."""
    key: str
    value: Any
    before: Any
    """Value until the change."""
    configured: Any
    """Value in `config.yaml`."""
    by_hook: bool = False
    """True if a hook made it. The hook runs again after a resume, so the change is not repeated without it."""
    time: float
    """Time of the request, in Unix seconds."""


_CHANGES = TypeAdapter(list[Change])


class Steering:
    """Pauses of a run, and changes of its configuration."""

    def __init__(self, run: RunPart, changes: list[Change]) -> None:
        """Take over the changes of an earlier process (`repeated_changes`), and set the configuration after the last step."""
        self._run, self._base, self._changes = run, run.config, changes
        self._task: asyncio.Task[Any] | None = None
        self._is_pausing = False
        self._paused_at: float | None = None
        self._boundary, self._may_continue = asyncio.Event(), asyncio.Event()  # end the waits in `pause` and `wait`
        self._control: Control | None = None
        self.restore(run.state)

    # Start, resume and end

    def restore(self, state: RunState, *, forgets_later: bool = False) -> None:
        """Set the configuration of a run that continues after a step: with the changes made before it.

        With `forgets_later`, the run does not repeat the later changes.
        """
        published = state.published[-1] if state.published else state.version
        self._begun = state.step  # the last step that has begun
        self._published = state.step - (state.version - published)  # step of the last publication

        def is_made(change: Change) -> bool:
            # Evaluations between this step and the next one have the earlier value.
            return change.step < state.step or (change.step == state.step and change.key.startswith(AT_PUBLICATION))

        def is_kept(change: Change) -> bool:
            return is_made(change) or (change.step == state.step if change.by_hook else not forgets_later)

        changes = list(filter(is_kept, self._changes))
        made = list(filter(is_made, changes))
        self._changes = [*made, *(change for change in changes if not is_made(change))]
        self._num_made = len(made)  # the others follow in `_changes`
        self._run.config = self._started = with_values(self._base, {change.key: change.value for change in made})

    @property
    def base(self) -> Config:
        """Configuration without changes, which `config.yaml` has."""
        return self._base

    async def listen(self) -> None:
        """Answer `titanrl steer` from now on. If the file system cannot hold a socket, only warn.

        Also tell which changes a resumed run repeats.
        """
        for change in self._changes:
            self._run.console.note(f"repeating: {change.key} = {inline(change.value)} from step {change.step + 1} on")
        try:
            self._control = await listen(self._run.run_dir, self._answer)
        except OSError as error:
            self._run.console.warn(f"titanrl steer cannot reach this run: no socket in {self._run.run_dir} ({error.strerror})")

    def close(self) -> None:
        """Answer no more."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self._boundary.set()

    # Changes

    def set(self, values: Mapping[str, Any]) -> int:
        """Change keys between two steps; return the number of steps taken before the change.

        A user's change drops later changes of an earlier process to its keys, because the run takes another course from here.

        Raises:
            ConfigError: A key is not live, or a value is invalid.
        """
        run = self._run
        by_hook, steps = run.hooks.is_caller, {key: self._step_before(key) for key in values}
        pending = [change for change in self._changes[self._num_made :] if by_hook or change.key not in values]
        # Each step must have a valid configuration, with the changes that are pending, too: an invalid one would end the run.
        asked = [(change.step, change.key, change.value) for change in pending]
        asked = sorted([*asked, *((steps[key], key, values[key]) for key in values)], key=lambda row: row[0])
        changed = {due: with_values(run.config, {key: value for step, key, value in asked if step <= due}) for due, *_ in asked}
        self._check(changed[asked[-1][0]] if asked else run.config, values)
        changes = list[Change]()
        for key, step in steps.items():
            value, before, configured = (_plain(config.value_of(key)) for config in (changed[step], run.config, self._base))
            values_of = {"value": value, "before": before, "configured": configured}
            changes.append(Change(step=step, key=key, **values_of, by_hook=by_hook, time=round(time.time(), 3)))
        self._changes[self._num_made :] = sorted([*pending, *changes], key=lambda change: change.step)
        self.record()
        return max(steps.values(), default=run.state.step)

    def _step_before(self, key: str) -> int:
        """Return the number of steps taken before a change of a key that is requested now."""
        due = self._published + self._run.config.algorithm.updates_per_publish if key.startswith(AT_PUBLICATION) else 0
        return max(self._run.state.step, self._begun, due)

    def _check(self, changed: Config, values: Mapping[str, Any]) -> None:
        """Refuse what a running run cannot do, although it could be started with these values."""
        for key, value in values.items():
            rule, fix = "", f"resume the run with {key}={inline(value)}"
            if key.endswith(".learning_rate") and self._run.state.learning_rate is not None:
                rule = "run.set_learning_rate overrides the schedule, so this key would have no effect"
                fix = "call run.set_learning_rate(None) first"
            if key.startswith(AT_PUBLICATION) and not self._run.admits_prompts:
                rule = "only titanrl train, with a trainer, samples new prompts while it runs"
            if key == TEMPERATURE and (self._started.staleness_bound or self._started.replay.fraction):
                rule = "trainer and generators use one temperature, and tokens sampled with the old one may still be trained on"
                fix = f"resume the run with {key}={inline(value)}; a synchronous run without replay can change it while it runs"
            if key == TEMPERATURE and self._started.rollout.save:
                rule = "a dump has one temperature, because a run that trains on it divides all logits by the same value"
                fix = f"resume the run with {key}={inline(value)} and another rollout.save"
            if key.endswith("every_steps") and changed.num_evaluator_ranks > self._started.num_evaluator_ranks:
                rule = "asynchronous training evaluates between steps on a separate generator, which this run has not started"
            started = self._started.algorithm.entropy_target
            if key == "algorithm.entropy_target" and (value is None) != (started is None):
                rule = f"the trainer and the rollout workers were started with{'out' * (started is None)} an entropy target"
            if key.startswith("checkpoint.") and _saves_between(changed) and not _saves_between(self._started):
                rule = "checkpoints between two publications need the published weights, of which this run keeps no copy"
            if rule:
                raise ConfigError(explain_rule(BrokenRule({key: value}, rule, fix)))

    async def begin_step(self) -> None:
        """Make the changes that are due before the next step. Call this before the step reads the configuration."""
        self._begun = self._run.state.step + 1
        await self._make([change for change in self._due(self._run.state.step) if not change.key.startswith(AT_PUBLICATION)])

    async def begin_publication(self) -> None:
        """Make the changes for new prompts that are due. Call this at the end of a step, before it frees slots."""
        self._published = self._run.state.step + 1
        await self._make([change for change in self._due(self._published) if change.key.startswith(AT_PUBLICATION)])

    def _due(self, step: int) -> list[Change]:
        return [change for change in self._changes[self._num_made :] if change.step <= step]

    async def _make(self, due: list[Change]) -> None:
        if not due:
            return
        run = self._run
        step = self._published if due[0].key.startswith(AT_PUBLICATION) else run.state.step
        later = [change for change in self._changes[self._num_made :] if change not in due]
        made = [change if change.step == step else change.model_copy(update={"step": step}) for change in due]
        run.config = with_values(run.config, {change.key: change.value for change in made})
        self._changes[self._num_made :] = [*made, *later]
        self._num_made += len(made)
        if made != due:
            self.record()
        await run.apply_changes({change.key for change in made})
        directory = run.recorder.directory
        for change in made:
            fields = {"step": step, "key": change.key, "value": change.value}
            if not directory.has_event("set", **fields):  # a resumed run may have recorded it before
                directory.event("set", **fields, before=change.before, by="hook" if change.by_hook else "user")
            run.console.note(f"{change.key} = {inline(change.value)} from step {step + 1} on")

    def metrics(self) -> dict[str, float]:
        """Return the changed numbers that the step in progress uses, as metrics `set/KEY`."""
        made = {change.key: change.value for change in self._changes[: self._num_made] if change.step < self._begun}
        return {f"set/{key}": float(value) for key, value in made.items() if isinstance(value, int | float)}

    def record(self) -> None:
        """Write all changes, without those that a resumed run does not repeat."""
        path = self._run.run_dir / CHANGES_FILE
        if self._changes or path.exists():
            replace_text(path, _CHANGES.dump_json(self._changes, indent=1).decode() + "\n", durable=True)

    # Pauses

    async def pause(self) -> None:
        """Pause after the current step. Return when the run has paused or takes no more steps, or at once in its own task."""
        self._request_pause()
        if self._task is not None and self._task is not asyncio.current_task() and not self._run.is_in_step:
            await self._boundary.wait()

    def resume(self) -> None:
        """End a pause, or cancel the request for one."""
        self._is_pausing = False
        self._may_continue.set()
        self._boundary.set()

    def _request_pause(self) -> None:
        if not self._is_pausing:
            self._is_pausing = True
            self._may_continue.clear()
            self._boundary.clear()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Note that this task takes the steps in the body: `pause` does not wait in this task, and stops waiting at the end."""
        self._task = asyncio.current_task()
        try:
            yield
        finally:
            self._task = None
            self._boundary.set()

    @property
    def is_pausing(self) -> bool:
        """True if the next step must wait for the end of a pause."""
        return self._is_pausing

    async def wait(self) -> None:
        """Wait until the pause ends, or the run is asked to end."""
        run, step, started = self._run, self._run.state.step, time.perf_counter()
        run.recorder.directory.event("paused", step=step)
        run.console.note(f"paused after step {step}; continue with `titanrl steer {run.run_dir} resume` or run.resume()")
        run.console.current_phase("paused")
        self._paused_at = started
        self._boundary.set()
        try:
            with span("paused", "phase", step=step):
                if not await run.unless_ending(self._may_continue.wait()):
                    self._is_pausing = False  # otherwise `resume` did so, and another pause may have been requested since
        finally:
            self._paused_at = None
            run.console.current_phase(None)
        seconds = time.perf_counter() - started
        run.recorder.directory.event("continued", step=step, seconds=round(seconds, 3))
        run.console.note(f"continued after a pause of {duration(seconds)}")
        await run.after_pause()

    # Requests of other processes

    def status(self) -> dict[str, Any]:
        """Return the reply to a request; see `titanrl.base.control.steer`."""
        run = self._run
        state = "idle" if self._task is None else "training"
        if self._is_pausing:
            state = "pausing" if self._paused_at is None else "paused"
        if run.is_ending:
            state = "ending"
        step, num_steps = run.state.step, run.config.num_steps
        keys = {key: _plain(value) for key, value in live_keys(run.config).items()}
        later = [f"{each.key}={inline(each.value)} from step {each.step + 1} on" for each in self._changes[self._num_made :]]
        text = f"{state} after step {step} of {num_steps}{'; pending: ' if later else ''}{'; '.join(later)}"
        return {"step": step, "num_steps": num_steps, "state": state, "text": text, "keys": keys}

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        action, values = request.get("action"), request.get("values", {})
        if not isinstance(values, dict):
            raise TypeError(f"values: must be an object of keys and values (got {inline(values)}). See docs/howto/steer.md.")
        match action:
            case "status":
                return self.status()
            case "pause":
                self._request_pause()
                return {**self.status(), "text": f"the run pauses after step {max(self._run.state.step, self._begun)}"}
            case "resume":
                text = "the run continues" if self._is_pausing else "the run was not paused"
                self.resume()
                return {**self.status(), "text": text}
            case "set" if values:
                self.set(values)
                texts = dict[int, list[str]]()
                for key, value in values.items():
                    texts.setdefault(self._step_before(key), []).append(f"{key} = {inline(value)}")
                text = "; ".join(f"{', '.join(texts[step])} from step {step + 1} on" for step in sorted(texts))
                return {**self.status(), "text": text}
            case "set":
                raise ValueError("set: needs at least one key (got none). Write it like algorithm.learning_rate=2e-5.")
        raise ValueError(f"action: must be status, pause, resume or set (got {inline(action)}). See docs/howto/steer.md.")


def repeated_changes(config: Config, run_dir: Path, source: Source | None) -> list[Change]:
    """Return the changes that a resumed run repeats: all, except of keys to which the user has given another value."""
    named = {".".join(override.path) for override in source.overrides} if source is not None else set[str]()
    known = {key: _plain(value) for key, value in live_keys(config).items()}
    changes = [
        change
        for change in _read(run_dir / CHANGES_FILE)
        if change.key in known and change.key not in named and known[change.key] == change.configured
    ]
    with_values(config, {change.key: change.value for change in changes})
    return changes


def _read(path: Path) -> list[Change]:
    """Read the changes of a run; return none if it has none. Raise `ConfigError` if the file is damaged."""
    try:
        return _CHANGES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not a list of changes"
        fix = "Delete it to continue with the values of config.yaml"
        raise ConfigError(f"--resume: the changes made during the run cannot be read: {cause} (got {path}). {fix}.") from None


def _saves_between(config: Config) -> bool:
    """Return True if a run may save checkpoints between two publications; see `PastPolicies`."""
    saves = config.checkpoint.every_steps > 0 or config.checkpoint.on_interrupt
    return saves and config.algorithm.updates_per_publish > 1


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
