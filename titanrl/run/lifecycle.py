"""Lifecycle of a run: startup, restarts after faults, and shutdown, for any kind of loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from titanrl.base.choices import Program
from titanrl.base.errors import FaultError, describe
from titanrl.base.files import DamagedError
from titanrl.base.loading import loading
from titanrl.base.plugins import Plugins
from titanrl.checks.extensions import plugins_of, with_declared_traits, with_objects
from titanrl.checks.preflight import policy_notes, preflight
from titanrl.config import Config, ConfigError, Source
from titanrl.config.device import resolve_device
from titanrl.config.errors import BrokenRules
from titanrl.config.explain import explain_rule
from titanrl.config.load import check_program
from titanrl.config.sizes import notes
from titanrl.data.selection import Selection, check_recorded
from titanrl.launch.roles import Roles
from titanrl.launch.run_lock import RunLock, claim_new_run, claim_run
from titanrl.metrics.console import Console
from titanrl.metrics.hooks import Hooks
from titanrl.metrics.outcome import last_lines, relative, summarize
from titanrl.metrics.phases import PhaseTimer
from titanrl.metrics.record import Recorder
from titanrl.processes.children import Respawns
from titanrl.run.progress import FIRST, Resumable, resumable
from titanrl.run.recording import Beginning, open_recorder
from titanrl.run.restarts import Restart, Restarts, newest_checkpoint

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts
    from titanrl.session.sampling import SamplingClient
    from titanrl.session.session import Session
    from titanrl.session.training import TrainingClient


class Lifecycle:
    """Base class that starts, restarts and stops a run, independent of its loop."""

    program: Program = "train"
    """Subcommand of `titanrl` that runs the loop."""
    purpose = "Train a policy with GRPO."
    """Description of the subcommand."""
    with_data = False
    """True if the loop uses prompts from the section `data`, which `preflight` then checks."""

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
            objects: User-defined objects that replace built-in ones, by the argument names in `titanrl.checks.extensions`.

        Raises:
            ConfigError: A file or device named by the configuration is missing, or it is for another subcommand.
        """
        expect_config(self, config)
        check_program(config, self.program, source)
        self.config = config = with_objects(config, objects)
        self._plugins = plugins_of(config, objects)
        self.console = console or Console(config.logging.console, total_steps=config.num_steps, title=config.name)
        lock = None if resume is None else claim_run(resume)
        try:
            self.console.phase(
                "check", "model, data and rewards" if resume is None else f"{relative(resume)}, model, data and rewards"
            )
            self._found = self.check(
                config,
                resume=resume,
                source=source,
                plugins=self._plugins,
                meanwhile=_import_heavy_packages,
                accepts_changed_data=accepts_changed_data,
            )
        except BaseException:  # including interrupts, because a live display hides the cursor
            self.console.close()
            if lock is not None:
                lock.release()
            raise
        self.state = self._found.state
        self._lock: RunLock = lock or claim_new_run(config.run_dir)
        self.run_dir = self._lock.path.resolve()
        self.config = config = with_declared_traits(config, self._plugins)
        self._hooks = Hooks.of(self._plugins)
        self.device = resolve_device(config.device)
        self._is_resumed = resume is not None
        self._resume_step = self.state.step or None  # the first job of `titanrl submit` resumes a run without checkpoints
        self._saved_step = self.state.step
        self._saving: asyncio.Task[Path] | None = None
        self._ending = asyncio.Event()
        self.is_training = False
        """True while `train` takes steps, during which `end_after_step` has an effect."""
        self._timer = PhaseTimer(on_change=self.console.current_phase)
        self._session: Session | None = None
        self._recorder: Recorder | None = None
        self._closing: asyncio.Task[None] | None = None
        self._respawns = Respawns(config.faults)
        self._restarts = Restarts(config.faults, self._respawns)
        self._restart: Restart | None = None
        self._kept: Parts | None = None

    @classmethod
    def check(
        cls,
        config: Config,
        *,
        resume: Path | None = None,
        source: Source | None = None,
        plugins: Plugins | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        accepts_changed_data: bool = False,
    ) -> Resumable:
        """Check that a run can start or be resumed, without starting or writing anything. A start and `--dry-run` both do this.

        Args:
            config: Configuration of the run.
            resume: Directory of the run to resume; None for a new one.
            source: Source of the configuration, which lets messages name lines and overrides.
            plugins: User-defined objects; by default those named in the configuration.
            meanwhile: Function to call while child processes check data and user-defined objects.
            accepts_changed_data: True to resume a run although its data have changed.

        Returns:
            The state to continue from.

        Raises:
            ConfigError: The run cannot start.
        """
        plugins = plugins_of(config, {}) if plugins is None else plugins
        found = Resumable(state=FIRST, unusable={}) if resume is None else resumable(resume)
        selections = preflight(
            config,
            source,
            plugins=plugins,
            training=config.train,
            sampling=config.rollout.replay is None,
            rollouts=cls.with_data,
            is_resumed=resume is not None,
            meanwhile=meanwhile,
        )
        try:
            with_declared_traits(config, plugins)
        except BrokenRules as error:
            raise ConfigError(*(explain_rule(rule, source) for rule in error.broken)) from None
        remarks = [] if resume is None else check_recorded(resume, selections, accepts_changes=accepts_changed_data)
        return replace(found, selections=selections, remarks=tuple(remarks))

    def report(self, selections: Sequence[Selection], remarks: Sequence[str]) -> None:
        """Print the rows that are left out of the data, as a warning if they are most, and accepted changes of the data."""
        for found in selections:
            for text in found.messages():
                (self.console.warn if found.is_mostly_left_out else self.console.note)(text)
        for remark in remarks:
            self.console.warn(remark)

    def roles(self) -> Roles:
        """Return the roles that the loop needs."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare the loop after the policy was loaded. An override must call `resume` to load a resumed run's checkpoint."""
        await self.resume()

    async def start(self) -> Self:
        """Start all processes, load or warm-start the policy, and prepare the loop."""
        _import_heavy_packages()
        for note in (*notes(self.config), *policy_notes(self.config)):
            self.console.note(note)
        self.report(self._found.selections, self._found.remarks)
        self._open_recorder("resume" if self._is_resumed else "start")
        await self._with_restarts()
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
        await self._roll_back(cause or self._session_fault)
        await self._with_restarts()

    async def _with_restarts(self, work: Callable[[], Awaitable[None]] | None = None) -> None:
        """Open a session if there is none, then await `work`. After a fault, roll back and repeat, within `config.faults`."""
        while True:
            try:
                if self._session is None and not self._ending.is_set():
                    await self._unless_ending(self._open())
                return None if work is None else await work()
            except Exception as error:  # a fault may surface as any exception of a dependent request
                fault = self._restarts.fault_in(error, self._session_fault)
                if fault is None:
                    raise
                await self._roll_back(fault, self._restarts.count(fault, self.state.step))

    async def _unless_ending(self, work: Coroutine[Any, Any, object]) -> bool:
        """Await work, and cancel it if the run is asked to end. Return True if the work finished."""
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
        """Stop the processes, and roll state and files back to the newest complete checkpoint, or to the start of the run.

        Args:
            fault: Fault to record, if any.
            budget: Text about the remaining restarts, for the warning.
        """
        # Generators that fail the next attempt as well must not be kept for a third one.
        keeps_generators = self._restart is None or (
            fault is not None and not fault.part.startswith(("generator", "evaluator"))
        )
        self._record_restart(has_failed=True)  # an earlier attempt that did not finish, if any
        started, reached = time.perf_counter(), self.state.step
        await self._settle_checkpoint()
        await self._close_session(keeps_generators=keeps_generators)
        newest = await asyncio.to_thread(newest_checkpoint, self.run_dir, had_one=self._saved_step > 0)
        self._resume_step = (newest and newest.state.step) or None
        self._found = newest or self._found
        self.state, self._saved_step = self._found.state, self._found.state.step
        self._hooks = Hooks.of(self._plugins)
        self._timer.take()  # discard the timings of the lost step
        self.recorder.close(resumes=True)
        self._open_recorder("restart")
        self._restart = Restart(fault=fault, step=reached, from_step=self._resume_step, started=started)
        self.console.warn(self._restart.warning(budget))

    def _record_restart(self, *, has_failed: bool = False) -> None:
        """Record the restart in progress, if any."""
        restart, self._restart = self._restart, None
        if restart is not None:
            self.recorder.directory.event("restart", **restart.event(), failed=has_failed)

    def _open_recorder(self, kind: Literal["start", "resume", "restart"]) -> None:
        beginning = Beginning(kind=kind, found=self._found)
        self._recorder = open_recorder(self.config, self.run_dir, beginning, self.console, self._plugins)

    @property
    def _session_fault(self) -> FaultError | None:
        return None if self._session is None else self._session.fault

    async def _open(self) -> None:
        """Open a session, load the policy, and prepare the loop."""
        from titanrl.session.session import SessionSetup, open_session  # imports torch; a dry run does not need it

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

    async def resume(self) -> None:
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

        Args:
            code: Exit code of the run, for its last event.
            cause: Reason for the end of the run, if the code is not 0.
        """
        await self._settle_checkpoint()
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

    async def _settle_checkpoint(self) -> None:
        """Give a checkpoint in progress a quarter of `timeouts.close_s` to finish, then cancel it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await asyncio.wait({saving}, timeout=self.config.timeouts.close_s / 4)
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    async def _close_session(self, *, keeps_generators: bool = False) -> None:
        """Stop all processes, except generators if `keeps_generators`.

        The shutdown continues if this call is cancelled; the next call then waits for it.
        """
        if self._session is not None:
            session, self._session = self._session, None
            closing = self._stop_for_restart(session) if keeps_generators else session.close()
            self._closing = asyncio.create_task(closing, name="close session")
        if self._closing is not None:
            await asyncio.shield(self._closing)
            self._closing = None
        if self._kept is not None and not (keeps_generators and self._kept.can_keep_generators):
            kept, self._kept = self._kept, None
            self._closing = asyncio.create_task(self._close_kept(kept), name="close generators")
            await asyncio.shield(self._closing)
            self._closing = None

    async def _stop_for_restart(self, session: "Session") -> None:
        self._kept = await session.stop_for_restart()

    async def _close_kept(self, kept: "Parts") -> None:
        for problem in await kept.close(self.config.timeouts.close_s):
            self.console.warn(f"while closing: {problem}")

    @property
    def ends_early(self) -> bool:
        """True if training should stop before its last step."""
        return False

    def summarize(self, *, code: int = 0, cause: str = "") -> None:
        """Write the report of a stopped run, and print its summary.

        Args:
            code: Exit code of the run.
            cause: Reason for the end of the run, if the code is not 0.
        """
        num_steps = self.state.version if self.ends_early else self.config.num_steps
        outcome = summarize(self.run_dir, code=code, cause=cause, num_steps=num_steps, max_staleness=self.config.max_staleness)
        self.console.done(last_lines(self.run_dir, outcome, command=f"titanrl {self.program}"))

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
        assert self._session is not None, "the run has not started"
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
        assert self._recorder is not None, "the run has not started"
        return self._recorder

    @property
    def num_unsaved_steps(self) -> int:
        """Steps taken since the last checkpoint."""
        return self.state.step - self._saved_step


def expect_config(run: object, config: object) -> None:
    """Raise a `TypeError` if a path, a mapping or anything else was given as the configuration."""
    if not isinstance(config, Config):
        name = type(run).__name__
        raise TypeError(f"{name}: expected a Config (got {type(config).__name__}). Load it: {name}(load_config('run.yaml'))")


def _import_heavy_packages() -> None:
    """Import torch and the other packages needed by `Lifecycle.start`, which takes seconds."""
    with loading():
        import titanrl.session.session  # noqa: F401
