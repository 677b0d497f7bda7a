"""A run: start, steps, restarts after faults, and the end, for any kind of loop.

A loop (`titanrl.grpo`, `titanrl.sft`, `titanrl.distill`) is a subclass that defines `prepare`, `roles`, `begin`, `train_step`
and `evaluate`. The run has its evaluations, checkpoints and restarts as objects, and calls the loop:

    init    check the configuration, the machine and the data, lock the run directory, `prepare`
    start   open a session, load the policy, `begin`
    train   evaluate what is due; then `step`, evaluate, save, until the last step
    fault   stop the processes, return to the newest checkpoint, open a session, `begin`, continue to train
    stop    settle the checkpoint in progress, stop the processes, record the end

`state.step` counts the steps taken. `state.version` leaves out those whose optimizer steps were all skipped: it is the version
of the policy. Evaluations and checkpoints are due after steps, and a run ends at a version.

The last part opens the files and trackers that record the run, and sends its records to other systems.
"""

import asyncio
import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from titanrl.base.arguments import check_count, check_number, check_type
from titanrl.base.errors import FaultError, TitanRLError, describe
from titanrl.base.files import DamagedError, replace_text
from titanrl.base.plugins import Plugins, loading
from titanrl.carriers.record import HOST, RecordFile, close_timeline, open_timeline, span, span_bytes
from titanrl.carriers.types import DoubleArray, EvaluationResult, OptimUpdate, StepMetrics
from titanrl.config.device import resolve_device
from titanrl.config.errors import BrokenRules, ConfigError, inline
from titanrl.config.load import Source, check_program, config_of_run, explain_rule, parse, read_source, recorded_config
from titanrl.config.schema import Config, Program
from titanrl.config.sections import LoggingConfig
from titanrl.config.sizes import notes
from titanrl.data.entries import check_recorded, record_data
from titanrl.launch.extensions import plugins_of, with_declared_traits, with_objects
from titanrl.launch.preflight import broken_by_saved_model, policy_notes, preflight, read_examples
from titanrl.launch.roles import Roles, needed
from titanrl.metrics.console import Console
from titanrl.metrics.reading import RunRecord, flat
from titanrl.metrics.report import conclude, relative, run_html
from titanrl.metrics.run_directory import RunDirectory, RunLock, claim_new_run, claim_run
from titanrl.metrics.steps import PhaseTimer
from titanrl.metrics.trackers import Hooks, Recorder, make_trackers
from titanrl.processes.children import Respawns
from titanrl.processes.templates import BASE, close_early, start_early
from titanrl.run.checkpoints import (
    FIRST,
    SETTINGS_FILE,
    Checkpoints,
    Evaluations,
    Restart,
    Restarts,
    Resumable,
    broken_by_checkpoint,
    checkpoint_dir,
    is_due,
    newest_checkpoint,
    resumable,
    set_aside,
)
from titanrl.run.steering import Steering, repeated_changes

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts
    from titanrl.metrics import otlp
    from titanrl.serving import runs
    from titanrl.session.sampling import SamplingClient
    from titanrl.session.session import Session
    from titanrl.session.training import TrainingClient

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Folder in which the driver lists the GPUs of this machine."""
Kind = Literal["start", "resume", "restart"]
"""`start`: new run; `resume`: run of an earlier process; `restart`: run of this process, from its last checkpoint."""
HUGE_REWARD = 1e6
"""Absolute reward from which rewards are considered the likely cause of non-finite gradients."""
NOT_STARTED = "the run has not started, or has been closed. Use `async with run:`, or call `await run.start()` first."


class NonFiniteGradientError(TitanRLError):
    """Training cannot continue, because too many consecutive steps had non-finite gradients."""


class Run:
    """Base class of the loops. `async with` starts a run and closes it."""

    program: Program = "train"
    """Subcommand of `titanrl` that runs the loop."""
    purpose = "Train a policy with GRPO."
    """Description of the subcommand."""
    with_data = False
    """True if the loop uses prompts from the section `data`, which `preflight` then checks."""
    admits_prompts = False
    """True if weights of a mixture and the temperature can change during the run. The loop then calls
    `steering.begin_publication` before a publication frees slots."""

    @classmethod
    def for_config(cls, config: Config) -> "type[Run]":
        """Return the class that runs a configuration: this class or another loop."""
        return cls

    def __init__(
        self,
        config: Config,
        *,
        resume: Path | None = None,
        console: Console | None = None,
        source: Source | None = None,
        accepts_changed_data: bool = False,
        **objects: object,
    ) -> None:
        """Run all checks that are possible before a process starts, and lock the run directory.

        Args:
            config: Configuration of the run.
            resume: Directory of the run to resume; None creates a new one.
            console: Progress display; created from `config.logging` by default.
            source: Source of the configuration, which lets messages name lines and overrides.
            accepts_changed_data: True to resume a run although its data have changed.
            objects: User-defined objects that replace built-in ones, by the argument names in `titanrl.launch.extensions`.

        Raises:
            ConfigError: A file or device named by the configuration is missing, or it is for another subcommand.
            TypeError: The configuration is something else, such as a path.
        """
        self.since = time.time()
        """Time from which the recorded spans of this process count, in Unix seconds."""
        name = type(self).__name__
        check_type(name, config, Config, "a Config", f"Load it: {name}(load_config('run.yaml')).")
        check_program(config, self.program, source)
        self.config = config = with_objects(config, objects)
        self._plugins = plugins_of(config, objects)
        self.console = console or Console(config.logging.console, total_steps=config.num_steps, title=config.name)
        with contextlib.ExitStack() as undo:  # also after an interrupt, because a live display hides the cursor
            undo.callback(self.console.close)
            undo.callback(close_early)
            if resume is not None:
                self._lock: RunLock = claim_run(resume)
                undo.callback(self._lock.release)
            self.console.phase(
                "check", "model, data and rewards" if resume is None else f"{relative(resume)}, model, data and rewards"
            )
            self._found = self.check(
                config,
                resume=resume,
                source=source,
                plugins=self._plugins,
                meanwhile=partial(_start_imports, config),
                on_phase=self.console.phase,
                accepts_changed_data=accepts_changed_data,
            )
            self.state = self._found.state
            if resume is None:
                self._lock = claim_new_run(config.run_dir)
                undo.callback(self._lock.abandon)
            self.run_dir = self._lock.path.resolve()
            self.config = config = with_declared_traits(config, self._plugins)
            self.hooks = Hooks.of(self._plugins)
            """User-defined callbacks."""
            self.device = resolve_device(config.device)
            self._is_resumed = resume is not None
            # Step of the checkpoint to load. The first job of `titanrl submit` resumes a run without checkpoints.
            self._resume_step = self.state.step or None
            self.checkpoints = Checkpoints(self)
            self.evaluations = Evaluations(self)
            self._ending = asyncio.Event()
            self.is_training = False
            """True while `train` takes steps or restarts after a fault, during which `end_after_step` has an effect."""
            self.timer = PhaseTimer(on_change=self.console.current_phase)
            """Seconds of the current step by phase."""
            self._session: Session | None = None
            self._running: tuple[str, asyncio.Task[Any] | None] | None = None  # call in progress, and its task
            self._left: asyncio.Task[StepMetrics] | None = None  # step of a cancelled call
            self._is_idle = asyncio.Event()
            self._is_idle.set()
            self._recorder: Recorder | None = None
            self._telemetry: Telemetry | None = None
            self._closing: asyncio.Task[None] | None = None
            self._respawns = Respawns(config.faults)
            self._restarts = Restarts(config.faults, self._respawns)
            self._restart: Restart | None = None  # in progress, from the rollback until the loop has begun
            self._kept: Parts | None = None  # generators of the closed session, for the next one
            self.steering = Steering(self, [] if resume is None else repeated_changes(config, resume, source))
            """Pauses, and changes of the configuration."""
            self.prepare()
            undo.pop_all()

    @classmethod
    def check(
        cls,
        config: Config,
        *,
        resume: Path | None = None,
        source: Source | None = None,
        plugins: Plugins | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        on_phase: Callable[[str, str], object] = lambda name, detail: None,
        accepts_changed_data: bool = False,
    ) -> Resumable:
        """Check that a run can start or be resumed, without starting or writing anything. A start and `--dry-run` both do this.

        The arguments are those of the class, and:

        Args:
            plugins: User-defined objects; by default those named in the configuration.
            meanwhile: Function to call while child processes check data and user-defined objects.
            on_phase: Called with name and detail of a phase that may take long.

        Returns:
            The state to continue from.

        Raises:
            ConfigError: The run cannot start.
        """
        cls.check_loop(config, resume, source)
        plugins = plugins_of(config, {}) if plugins is None else plugins
        found = Resumable(state=FIRST, unusable={}) if resume is None else resumable_with(config, resume, source)
        selections = preflight(
            config,
            source,
            plugins=plugins,
            training=config.train,
            sampling=config.rollout.replay is None,
            rollouts=cls.with_data,
            run_dir=resume,
            meanwhile=meanwhile,
        )
        try:
            with_declared_traits(config, plugins)
        except BrokenRules as error:
            raise ConfigError(*(explain_rule(rule, source) for rule in error.broken)) from None
        if config.example_set is not None:
            on_phase("read examples", str(config.example_set.path))
            found = replace(found, examples=(examples := read_examples(config, source)))
            selections = (*selections, *examples.selections)
        remarks = [] if resume is None else check_recorded(resume, selections, accepts_changes=accepts_changed_data)
        remarks = [*found.remarks, *remarks]
        if resume is not None:
            repeated_changes(config, resume, source)
        return replace(found, selections=selections, remarks=tuple(remarks))

    # What a loop defines

    @classmethod
    def check_loop(cls, config: Config, resume: Path | None, source: Source | None) -> None:
        """Check what only this loop requires; see `check`."""

    def prepare(self) -> None:
        """Create what the loop needs before a process starts. An exception abandons the run directory of a new run."""

    def roles(self) -> Roles:
        """Return the roles that the loop needs."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare the loop after the policy was loaded. An override must call `load_checkpoint`, which a resumed run needs."""
        await self.load_checkpoint()

    async def train_step(self) -> StepMetrics:
        """Take one training step, advance `state`, and return the metrics of the step."""
        raise NotImplementedError

    async def apply_changes(self, keys: Collection[str]) -> None:
        """Send changed values of `config` to the processes that use them. Loops override this for keys of other processes."""

    async def after_pause(self) -> None:
        """Prepare the next step after a pause."""

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return the evaluation sets, and the number of steps after which each is due."""
        return {name: eval_set.every_steps for name, eval_set in self.config.evaluation_sets.items()}

    async def evaluate(self, name: str | None = None) -> EvaluationResult | float | None:
        """Evaluate a set with the newest weights, and record the result; see `Evaluations.measure`.

        A supervised loop returns the loss on held-out examples, or None if there are none.
        """
        raise NotImplementedError

    async def sample_beside_training(self, names: Sequence[str], version: int, results: list[EvaluationResult]) -> None:
        """Evaluate sets with the last published version while training continues, and append each result.

        Raises:
            StoppedError: The evaluating generator stopped.
            PartDiedError: The evaluating generator died.
        """
        raise NotImplementedError

    async def save_parts(self, folder: Path) -> None:
        """Start writing a checkpoint. Loops override this to add their own files to the folder."""
        await self.session.trainer.save_checkpoint(self.state.step)

    async def finish_parts(self) -> None:
        """Wait until the files added by the loop are on disk."""

    @property
    def ends_early(self) -> bool:
        """True if training should stop before its last step: the last `evaluation.patience` evaluations were no better."""
        patience = self.config.evaluation.patience
        is_same = self.state.best_metric in (None, self.config.evaluation.best_metric)  # else resumed with another one
        return patience is not None and is_same and self.state.num_without_better >= patience

    # Steps

    async def step(self) -> StepMetrics:
        """Take one training step, record and return its metrics.

        If the call is cancelled, such as by a notebook's stop button, the step continues. The next call waits for it, and
        raises its error.

        Raises:
            TitanRLError: The run has not started, or another task takes a step or evaluates.
        """
        await self._settle()
        self._check_alone("step")

        async def step() -> StepMetrics:
            with span("step", "phase", step=self.state.step + 1):
                await self.hooks.before_step(self)
                await self.steering.begin_step()
                metrics = await self.train_step()
                await self.hooks.after_step(self, metrics)
            return metrics

        stepping = asyncio.create_task(step(), name="step")
        self._hold("step", stepping)
        stepping.add_done_callback(lambda _: self._release())
        return await self._finished(stepping)

    async def _finished(self, stepping: asyncio.Task[StepMetrics]) -> StepMetrics:
        try:
            return await asyncio.shield(stepping)
        except asyncio.CancelledError:
            self._left = None if stepping.done() else stepping
            raise

    async def _settle(self) -> None:
        """Wait for the step of a cancelled call."""
        left, self._left = self._left, None
        if left is not None:
            await self._finished(left)

    async def _cancel_step(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def alone(self, verb: str) -> AsyncIterator[None]:
        """Wait for the step of a cancelled call; refuse `verb` while another task takes a step, evaluates, saves or exports.

        The requests of both would mix.

        Raises:
            TitanRLError: Another task does, or the run has not started.
        """
        if not self.is_in_step:  # a step would wait for itself
            await self._settle()
        self._check_alone(verb)
        if self._running is not None:  # as a hook does in its step
            yield
            return
        self._hold(verb, asyncio.current_task())
        try:
            yield
        finally:
            self._release()

    def _check_alone(self, verb: str) -> None:
        if self._session is None:
            raise TitanRLError(f"run.{verb}: {NOT_STARTED}")
        if self._running is not None and not self.is_in_step:
            raise TitanRLError(f"run.{verb}: run.{self._running[0]} is in progress in another task. Await it first.")

    @property
    def is_in_step(self) -> bool:
        """True in the task of the step or evaluation in progress, such as in a hook."""
        return self._running is not None and self._running[1] is asyncio.current_task()

    def _hold(self, verb: str, task: asyncio.Task[Any] | None) -> None:
        self._running = verb, task
        self._is_idle.clear()

    def _release(self) -> None:
        self._running = None
        self._is_idle.set()

    async def train(self, num_steps: int | None = None) -> None:
        """Train until the policy reaches version `num_steps`, with evaluations and checkpoints.

        After a fault, training continues from the last checkpoint; see `restart`.

        Args:
            num_steps: Version to reach; the configuration's `num_steps` by default.
        """
        with self.steering.training():
            await self._with_restarts(partial(self.take_steps, self.config.num_steps if num_steps is None else num_steps))

    async def take_steps(self, num_steps: int) -> None:
        """Train as `train` does, but raise faults instead of restarting."""
        check_count("num_steps", num_steps, "Give the version to reach.", least=0)
        decay = (self.config.sft or self.config.algorithm).lr_decay
        if num_steps > self.config.num_steps and decay != "constant" and self.state.learning_rate is None:
            self.console.warn(
                f"the learning rate is 0 from step {self.config.num_steps + 1} on, because lr_decay is {decay} and num_steps "
                f"was {self.config.num_steps}: load the configuration with num_steps={num_steps}, or call set_learning_rate"
            )
        await self._settle()
        self.is_training = True
        if self.state.version >= num_steps:
            self.console.note(f"nothing to train: the policy has version {self.state.version}, and num_steps is {num_steps}")
        await self.evaluations.run_due(is_last=self._is_last(num_steps))
        while self.state.version < num_steps and not (self.ends_early or self.is_ending):
            if self.steering.is_pausing:
                await self.steering.wait()
                continue
            if not self._is_idle.is_set():  # another task evaluates, within deadlines of its own
                await self._wait_until_idle()
                continue
            await self.step()
            await self.evaluations.run_due(is_last=self._is_last(num_steps))
            if is_due(self.state.step, self.config.checkpoint.every_steps) or self._is_last(num_steps):
                await self._wait_until_idle()
                await self.checkpoints.save()
            else:
                await self.checkpoints.finish_if_done()
        if self.is_ending and self.num_unsaved_steps:
            await self.checkpoints.save()
        self.is_training = False
        await self.checkpoints.finish()

    async def _wait_until_idle(self) -> None:
        """Wait until no other task evaluates, saves or exports, unless the run is asked to end."""
        if not self._is_idle.is_set():
            with span("wait for another task", "wait"):
                await self.unless_ending(self._is_idle.wait())

    async def pause(self) -> None:
        """Pause `train` after the current step, and return once it has paused.

        Processes stay alive, and asynchronous generation continues until the buffer is full. If `train` does not run, it pauses
        before its first step, and this returns at once; so it does in a hook, where the step in progress waits for the hook.
        """
        await self.steering.pause()

    def resume(self) -> None:
        """Continue a paused run."""
        self.steering.resume()

    def set(self, key: str, value: Any) -> int:
        """Change a key of the configuration that is marked as live (docs/config.md) from the next step on.

        The change is recorded, and repeated at the same step when the run is resumed or restarted from an earlier one.

        Returns:
            The first step with the new value.

        Raises:
            ConfigError: The key cannot be changed during the run, or the value is invalid.
        """
        return self.steering.set({key: value}) + 1

    def end_after_step(self) -> None:
        """Make `train` save a checkpoint and return after the current step.

        A running evaluation is abandoned; a resumed run repeats it.
        """
        self._ending.set()

    @property
    def is_ending(self) -> bool:
        """True after `end_after_step`."""
        return self._ending.is_set()

    def _is_last(self, num_steps: int) -> bool:
        return self.state.version == num_steps or self.ends_early

    def note(self, **changes: Any) -> None:
        """Update fields of the state. Updates before the first step also survive a restart from the start of the run."""
        self.state = replace(self.state, **changes)
        if self.state.step == 0:
            self._found = replace(self._found, state=replace(self._found.state, **changes))

    async def start_and_train(self) -> None:
        """Execute the complete run: start, train, and export the model."""

        async def train_and_export() -> None:
            await self.train()
            if self.config.train and not self.is_ending:
                await self._export()

        await self.start()
        await self._with_restarts(train_and_export)

    async def save(self) -> Path:
        """Write a checkpoint that `--resume` can continue from, and return its folder.

        On an accelerator, the files are written while training continues. The checkpoint is complete, and hooks are called,
        only before a later step, at the latest before the next checkpoint; until then, do not read the folder.
        """
        async with self.alone("save"):
            return await self.checkpoints.save()

    async def export(self) -> Path:
        """Export the policy as a Hugging Face directory with configuration and tokenizer, and return its path."""
        async with self.alone("export"):
            return await self._export()

    async def _export(self) -> Path:
        target = self.recorder.directory.checkpoints / "final"
        with span("export", "phase"):
            await self.checkpoints.finish()
            await self.session.weights.ready()
            await self.session.trainer.export_model(target)
        if self.config.trainer.expert_bias_rate:
            self.console.warn(
                "trainer.expert_bias_rate: the exported model has no bias of experts, so its routers choose others"
            )
        return target

    def set_learning_rate(self, learning_rate: float | None) -> None:
        """Set the learning rate from the next optimizer step on, overriding the schedule.

        The change is recorded as an event, and survives a resume.

        Args:
            learning_rate: New rate; None returns to the schedule.

        Raises:
            TypeError: The rate is not a number.
            ValueError: The rate is negative or not finite.
        """
        if learning_rate is not None:
            fix = "Give a rate such as 1e-6, or None for the schedule."
            check_number("set_learning_rate", learning_rate, fix, least=0.0)
            learning_rate = float(learning_rate)
        self.note(learning_rate=learning_rate, num_rates=self.state.num_rates + 1)
        state = self.state
        self.recorder.directory.event("learning_rate", step=state.step, value=learning_rate, number=state.num_rates)

    def count_skipped(self, update: OptimUpdate, rewards: DoubleArray | None = None) -> None:
        """Count consecutive optimizer steps in which policy or critic was skipped because of non-finite gradients.

        Call it for each optimizer step, before `state.step` counts the batch. Raise `NonFiniteGradientError` after more than
        `algorithm.max_skipped_steps` of them. Its message names huge `rewards` of the batch as the cause.
        """
        if not (update.skipped or update.critic.get("critic/skipped")):
            if self.state.num_skipped:
                self.state = replace(self.state, num_skipped=0)
            return
        model, norm, rate = "policy", "grad/norm", "algorithm.learning_rate"
        grad_norm = update.grad_norm
        if not update.skipped:
            model, norm, rate = "critic", "critic/grad_norm", "algorithm.critic.learning_rate"
            grad_norm = update.critic[norm]
        largest_reward = 0.0 if rewards is None else float(np.abs(rewards).max())
        self.state = replace(self.state, num_skipped=self.state.num_skipped + 1)
        event = {"step": self.state.step + 1, "model": model, "grad_norm": grad_norm, "largest_reward": largest_reward}
        self.recorder.directory.event("skipped_step", **event)
        if self.state.num_skipped == 1:
            self.console.warn(f"step {self.state.step + 1} is skipped: the gradient of the {model} is not finite")
        limit = self.config.algorithm.max_skipped_steps
        if self.state.num_skipped > limit:
            advice = f"Lower {rate}; {norm} in metrics.jsonl shows where it began."
            if self.state.version == 0:
                advice = "No step had a finite one, so the learning rate is not the cause: check the loss and the model."
            if largest_reward >= HUGE_REWARD:
                advice = (
                    f"The rewards reach {largest_reward:g}, and gradients grow with them: return smaller numbers from "
                    "data.rewards, or set a smaller weight there."
                )
            raise NonFiniteGradientError(
                f"algorithm.max_skipped_steps: {self.state.num_skipped} steps in a row had a non-finite gradient of the "
                f"{model} (got {limit}). {advice}"
            )

    # Start, restart and end

    async def start(self) -> Self:
        """Start all processes, load or warm-start the policy, and prepare the loop."""
        _import_heavy_packages()
        for note in (*notes(self.config), *policy_notes(self.config)):
            self.console.note(note)
        for found in self._found.selections:
            for text in found.messages():
                (self.console.warn if found.is_mostly_left_out else self.console.note)(text)
        for remark in self._found.remarks:
            self.console.warn(remark)
        self._open_recorder("resume" if self._is_resumed else "start")
        await self.steering.listen()
        await self._with_restarts()
        if self._is_resumed and self._session is not None:
            # Not earlier: however this start ends, the next resume must not continue with values that never started.
            record_settings(self.steering.base, self.run_dir, self._found)
            self.steering.record()
        return self

    async def restart(self, cause: FaultError | None = None) -> None:
        """Restart the processes, and continue from the newest complete checkpoint, exactly as `--resume` does.

        Surviving generators keep their engines, which take longest to start, but drop their requests and weights.

        Steps after the checkpoint are repeated, and their lines are removed from the run's files. Without a checkpoint, the run
        starts over. `session`, `training` and `sampling` return new clients afterwards.

        `train` restarts automatically after a fault. A custom loop may call this after a step has raised a `FaultError`.

        Args:
            cause: Fault to record; by default the one that stopped the session, if any.
        """
        if self._recorder is None:
            raise TitanRLError(f"run.restart: {NOT_STARTED}")
        await self._roll_back(cause or self._session_fault)
        await self._with_restarts()

    async def _with_restarts(self, work: Callable[[], Awaitable[None]] | None = None) -> None:
        """Open a session if there is none, then await `work`. After a fault, roll back and repeat, within `config.faults`.

        Once the run is asked to end, no session is opened, so `work` must then send no requests.
        """
        while True:
            try:
                if self._session is None and not self.is_ending:
                    with span("start the processes", "phase"):
                        await self.unless_ending(self._open())
                return None if work is None else await work()
            except Exception as error:  # a fault may surface as any exception of a dependent request
                fault = self._restarts.fault_in(error, self._session_fault)
                if fault is None:
                    raise
                await self._roll_back(fault, self._restarts.count(fault, self.state.step))

    async def unless_ending(self, work: Coroutine[Any, Any, object]) -> bool:
        """Await work, and cancel it if the run is asked to end. Return True if it finished; raise what it raises."""
        working, ending = asyncio.create_task(work), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            working.cancel()
            ending.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def _roll_back(self, fault: FaultError | None, budget: str = "") -> None:
        """Stop the processes, and roll state and files back to the newest complete checkpoint, or to the start of the run."""
        # Generators that fail the next attempt as well must not be kept for a third one.
        keeps_generators = self._restart is None or (
            fault is not None and not fault.part.startswith(("generator", "evaluator"))
        )
        self._record_restart(has_failed=True)  # an earlier attempt that did not finish, if any
        started, reached = time.perf_counter(), self.state.step
        await self._cancel_step()
        await self.checkpoints.settle()
        await self._close_session(keeps_generators=keeps_generators)
        newest = await asyncio.to_thread(newest_checkpoint, self.run_dir, had_one=self.checkpoints.saved_step > 0)
        self._resume_step = (newest and newest.state.step) or None
        self._found = newest or self._found
        self.state, self.checkpoints.saved_step = self._found.state, self._found.state.step
        self.steering.restore(self.state, forgets_later=fault is None)
        self.hooks = Hooks.of(self._plugins)  # those given as classes forget the lost steps
        self.timer.take()  # discard the timings of the lost step
        self.recorder.close(resumes=True)
        self._open_recorder("restart")
        self._restart = Restart(fault=fault, step=reached, from_step=self._resume_step, started=started)
        self.console.warn(self._restart.warning(budget))

    def _record_restart(self, *, has_failed: bool = False) -> None:
        restart, self._restart = self._restart, None
        if restart is not None:
            self.recorder.directory.event("restart", **restart.event(), failed=has_failed)

    def _open_recorder(self, kind: Kind) -> None:
        self._recorder = open_recorder(self.steering.base, self.run_dir, kind, self._found, self.console, self._plugins)
        if kind != "restart":
            self._telemetry = Telemetry(self.config.logging, self.run_dir, self.console, since=self.since)
            open_timeline(self.run_dir, "controller", span_bytes(self.config), is_server=False, since=self.since)

    @property
    def _session_fault(self) -> FaultError | None:
        return None if self._session is None else self._session.fault

    async def _open(self) -> None:
        from titanrl.launch.assembly import SessionSetup
        from titanrl.session.session import open_session  # imports torch; a dry run does not need it

        config, console, roles = self.config, self.console, self.roles()
        started = {
            f"trainer x{config.trainer.parallelism.world_size}": roles.trainer,
            f"generator x{config.generator.num_ranks}": roles.generators,
        }
        console.phase("start", ", ".join(text for text, is_started in started.items() if is_started))
        setup = SessionSetup(
            config=config,
            run_dir=self.run_dir,
            console=console,
            roles=roles,
            plugins=self._plugins,
            on_event=lambda kind, **fields: self.recorder.directory.event(kind, **fields),
            first_index=self.state.next_index,
            respawns=self._respawns,
            kept=self._kept,
        )
        self._session = await open_session(setup)
        self._kept = None  # the session owns them now
        await self._session.load()
        await self.begin()
        self._record_restart()

    async def load_checkpoint(self) -> None:
        """Load the checkpoint to resume from, if there is one."""
        if self._resume_step is not None:
            version = await self.session.trainer.load_checkpoint(self._resume_step)
            if version != self.state.version:
                raise DamagedError(
                    f"--resume: the trainer's state of step {self._resume_step} has version {version} (got {self.run_dir}). "
                    f"The controller's has {self.state.version}; restore the files of one checkpoint."
                )

    async def close(self, error: BaseException | None = None) -> None:
        """Stop all processes, write the report, and print the locations of the results. A second call does nothing.

        Args:
            error: Exception that ended the run, recorded as the cause; None after success.
        """
        code, cause = (0, "") if error is None else (1, describe(error))
        was_open = self._recorder is not None
        await self.stop(code=code, cause=cause)
        if was_open:
            self.summarize(code=code, cause=cause)

    async def stop(self, *, code: int = 0, cause: str = "") -> None:
        """Stop all processes and close all files, in any state of the run. A second call does nothing.

        The last event of the run has its exit code, and the cause of its end if the code is not 0. `close` then calls
        `summarize`; the command calls both itself, to limit the time of each.
        """
        self.steering.close()
        with span("stop the processes", "phase"):
            await self._cancel_step()
            await self.checkpoints.settle()
            await self._close_session()
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            try:
                recorder.directory.event("end", code=code, cause=cause)
                recorder.close()
            except OSError as error:  # such as a full disk; the caller reports why the run ended
                self.console.warn(f"the end of the run is not recorded: {error}")
        self.console.close()
        self._lock.release()

    async def _close_session(self, *, keeps_generators: bool = False) -> None:
        """Stop all processes, except generators if `keeps_generators`.

        The shutdown continues if this call is cancelled; the next call then waits for it.
        """
        await self.evaluations.close()
        if self._session is not None:
            session, self._session = self._session, None

            async def stop() -> None:
                self._kept = await session.stop_for_restart()

            self._closing = asyncio.create_task(stop() if keeps_generators else session.close(), name="close session")
        if self._closing is not None:
            await asyncio.shield(self._closing)
            self._closing = None
        if self._kept is not None and not (keeps_generators and self._kept.can_keep_generators):
            kept, self._kept = self._kept, None

            async def close() -> None:
                for problem in await kept.close(self.config.timeouts.close_s):
                    self.console.warn(f"while closing: {problem}")

            self._closing = asyncio.create_task(close(), name="close generators")
            await asyncio.shield(self._closing)
            self._closing = None

    def summarize(self, *, code: int, cause: str) -> None:
        """Write the report of a stopped run, and print its summary; `code` and `cause` are those of `stop`."""
        num_steps = self.state.version if self.ends_early else self.config.num_steps
        settings = {"num_steps": num_steps, "max_staleness": self.config.max_staleness}
        with span("write the report", "phase"):
            outcome = conclude(self.run_dir, code=code, cause=cause, command=f"titanrl {self.program}", **settings)
        if self._telemetry is not None:
            with span("send telemetry", "phase"):
                self._telemetry.flush()
        close_timeline()
        if self._telemetry is not None:
            self._telemetry.close()
        self.console.done(outcome)

    async def __aenter__(self) -> Self:
        """Start the run; close it if startup fails."""
        try:
            return await self.start()
        except BaseException as error:  # including interrupts
            await self.close(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run, and record an exception of the body as the cause."""
        await self.close(error)

    @property
    def session(self) -> "Session":
        """Session with the running processes and their clients."""
        if self._session is None:
            raise TitanRLError(f"run: {NOT_STARTED}")
        return self._session

    @property
    def training(self) -> "TrainingClient":
        """Client of the trainer, for training on custom data between two steps."""
        return self.session.training

    @property
    def sampling(self) -> "SamplingClient":
        """Client of the generators, which samples with the newest published version."""
        return self.session.sampling

    @property
    def recorder(self) -> Recorder:
        """Destination of metrics and events."""
        if self._recorder is None:
            raise TitanRLError(f"run: {NOT_STARTED}")
        return self._recorder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.name}: {self.steering.status()['text']}, in {relative(self.run_dir)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows for the run: its state, its curves so far, and the last samples."""
        return run_html(self._shown, f"{type(self).__name__} {self.run_dir.name}", self.steering.status()["text"])

    @cached_property
    def _shown(self) -> RunRecord:
        return RunRecord(self.run_dir)

    @cached_property
    def settings(self) -> str:
        """Text of `config.yaml`, which each checkpoint keeps, too."""
        return recorded_config(self.steering.base)

    @property
    def num_unsaved_steps(self) -> int:
        """Steps taken since the last checkpoint."""
        return self.state.step - self.checkpoints.saved_step


def resumable_with(config: Config, run_dir: Path, source: Source | None) -> Resumable:
    """Return what `resumable` does, with a remark on settings that differ from those of the checkpoint, except of overrides.

    Raise `ConfigError` also if the configuration does not fit the checkpoint.
    """
    found = resumable(run_dir)
    if not found.state.step:
        return found
    settings = checkpoint_dir(run_dir / "checkpoints", found.state.step) / SETTINGS_FILE
    saved = read_source(settings if settings.exists() else config_of_run(run_dir)).values  # earlier versions wrote none
    found_with = config, saved, found.state.step
    if broken := [*broken_by_checkpoint(*found_with), *broken_by_saved_model(*found_with)]:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))
    named = [".".join(override.path) for override in source.overrides] if source is not None else []
    before, now = flat(saved) if settings.exists() else {}, flat(parse(recorded_config(config))[0])
    changed = [
        f"{key} is {inline(value)} instead of {inline(saved_value)}"
        for key in sorted(before.keys() | now.keys() if before else ())
        if (value := now.get(key)) != (saved_value := before.get(key))
        and {} not in (value, saved_value)  # then the keys within it differ
        and not any(f"{key}.".startswith(f"{name}.") for name in named)
    ]
    if not changed:
        return found
    text = f"settings differ from those that the checkpoint of step {found.state.step} was saved with"
    return replace(found, remarks=(f"{text}: {', '.join(changed)}",))


def _start_imports(config: Config) -> None:
    """Start the template that those of all roles are forked from, and import what `Run.start` needs."""
    if config.hosts.kind == "local":
        start_early(*needed(config, resolve_device(config.device), Roles())[BASE])
    _import_heavy_packages()


def _import_heavy_packages() -> None:
    """Import torch and the other packages needed by `Run.start`, which takes seconds."""
    with loading():
        import titanrl.session.session  # noqa: F401


# Records of a run: its files and trackers, and the threads that send them to other systems


def open_recorder(config: Config, run_dir: Path, kind: Kind, found: Resumable, console: Console, plugins: Plugins) -> Recorder:
    """Open the run directory and start the trackers, to continue from the state that was found.

    Lines of later steps are dropped from the files, and later checkpoints are renamed (`set_aside`).
    """
    state = found.state
    step = None if kind == "start" else state.step  # 0 without a checkpoint to restart from
    directory = RunDirectory(
        run_dir,
        resume_step=step,
        resume_version=state.version,
        resume_index=state.next_index,
        resume_in_flight=state.in_flight,
        resume_rates=state.num_rates,
        # Distillation, without `published`, records a version in the step that trains it; GRPO publishes the last one again.
        resume_published=state.published[-1] if state.published else state.version + bool(state.step),
        warn=console.warn,
    )
    if step is not None:
        kept = set_aside(directory.checkpoints, step)
        if found.unusable:
            console.warn(
                f"{'--resume' if kind == 'resume' else 'restart'}: continuing from step {step}, the newest intact checkpoint "
                f"({'; '.join(f'{name}: {reason}' for name, reason in found.unusable.items())}). "
                f"Renamed newer ones to {', '.join(kept)}."
            )
        folder = checkpoint_dir(directory.checkpoints, step)
        if folder.exists() and not directory.has_event("checkpoint", step=step):  # the run died before it recorded the event
            directory.event("checkpoint", step=step, path=str(folder))
    if kind == "start":
        record_settings(config, run_dir, found)
    if kind != "restart":  # the restart event is recorded once the processes run
        directory.event(kind, step=state.step)
        RecordFile(run_dir, "starts", "controller", config.logging.record_bytes // 100).append((start_of(kind), {}))
    trackers = make_trackers(
        config.logging.loggers,
        run_dir,
        config.model_dump(mode="json"),
        warn=console.warn,
        resume_step=step,
        plugins=plugins,
    )
    return Recorder(directory, trackers, console)


def record_settings(config: Config, run_dir: Path, found: Resumable) -> None:
    """Write the configuration that the run uses from now on, and the digests of its data."""
    replace_text(run_dir / "config.yaml", recorded_config(config), durable=True)
    record_data(run_dir, found.selections)


def start_of(kind: Kind) -> dict[str, Any]:
    """Return the record of a start: when, how and where this process runs; docs/record.md describes the fields."""
    packages = [path.stem.rpartition("-") for entry in sys.path for path in Path(entry).glob("*.dist-info")]
    models = [re.findall(r"^Model:\s*(.*)", file.read_text(), re.MULTILINE) for file in NVIDIA.glob("*/information")]
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "time": time.time(),
        "kind": kind,
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "host": HOST,
        "pid": os.getpid(),
        "system": platform.platform(),
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": [name for found in models for name in found],
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version for name, _, version in sorted(packages)},
    }


def _commit() -> str | None:
    """Return the commit of the current directory, with `-dirty` if files have changed; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Telemetry:
    """The threads of the controller that read the files of a run for other systems. Without keys for them, there are none."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, console: Console, *, since: float) -> None:
        """Start the threads that the configuration asks for. Spans from before a time are of an earlier process of the run."""
        self._server: runs.MetricsServer | None = None
        if logging.metrics_port is not None:
            from titanrl.serving.runs import MetricsServer  # imports uvicorn, which other runs do not need

            self._server = MetricsServer(run_dir, logging.metrics_host, logging.metrics_port)
            console.note(f"metrics for Prometheus: {self._server.url}/metrics")
        self._exporter: otlp.Exporter | None = None
        if logging.otlp_endpoint is not None:
            from titanrl.metrics.otlp import Exporter, FileSink, HttpSink  # needs packages of an extra

            try:
                to = logging.otlp_endpoint
                sink = HttpSink(to) if to.startswith(("http://", "https://")) else FileSink(Path(to).expanduser())
            except OSError as error:
                raise TitanRLError(f"logging.otlp_endpoint: cannot be written ({error}). Name another file.") from error
            self._exporter = Exporter(run_dir, sink, since=since, warn=console.warn)

    def flush(self) -> None:
        """Send what is recorded, when the other processes have ended, and stop serving."""
        if self._server is not None:
            self._server.close()
        if self._exporter is not None:
            self._exporter.flush()

    def close(self) -> None:
        """Send the last spans of this process, and end the threads. A second call does nothing."""
        if self._exporter is not None:
            self._exporter.close()
