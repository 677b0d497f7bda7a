"""Open a run's files and trackers, for a new run, a resumed run, and a run that rolls back to a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanrl.base.plugins import Plugins
from titanrl.config import Config, recorded_config
from titanrl.data.selection import record_data
from titanrl.metrics.console import Console
from titanrl.metrics.record import Recorder
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import make_trackers
from titanrl.run.progress import Resumable, checkpoint_dir, set_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """State from which a run begins to record."""

    kind: Literal["start", "resume", "restart"]
    """`start`: new run; `resume`: run of an earlier process; `restart`: run of this process, from its last checkpoint."""
    found: Resumable
    """State to continue from, and unusable checkpoints."""

    @property
    def step(self) -> int | None:
        """Step after which recorded lines are dropped; None for a new run, 0 without a checkpoint to restart from."""
        return None if self.kind == "start" else self.found.state.step


def open_recorder(config: Config, run_dir: Path, beginning: Beginning, console: Console, plugins: Plugins) -> Recorder:
    """Open the run directory and start the trackers.

    Lines of later steps are dropped from the files, and later checkpoints are renamed (`set_aside`).
    """
    state, step = beginning.found.state, beginning.step
    directory = RunDirectory(
        run_dir,
        resume_step=step,
        resume_index=state.next_index,
        resume_in_flight=state.in_flight,
        resume_rates=state.num_rates,
        resume_published=state.published[-1] if state.published else state.version + bool(state.step),
        warn=console.warn,
    )
    if step is not None:
        _set_aside(directory, step, beginning, console)
    directory.write_config(recorded_config(config))
    if beginning.kind != "restart":
        record_data(run_dir, beginning.found.selections)
    if beginning.kind != "restart":  # the restart event is recorded once the processes run
        directory.event(beginning.kind, step=state.step)
    trackers = make_trackers(
        config.logging.loggers,
        run_dir,
        config.model_dump(mode="json"),
        warn=console.warn,
        resume_step=step,
        plugins=plugins,
    )
    return Recorder(directory, trackers, console)


def _set_aside(directory: RunDirectory, step: int, beginning: Beginning, console: Console) -> None:
    """Set later checkpoints aside, warn about unusable ones, and add the event of the checkpoint at `step` if it is missing."""
    kept = set_aside(directory.checkpoints, step)
    found = "; ".join(f"{name}: {reason}" for name, reason in beginning.found.unusable.items())
    if found:
        console.warn(
            f"{'--resume' if beginning.kind == 'resume' else 'restart'}: continuing from step {step}, the newest intact "
            f"checkpoint ({found}). Renamed newer ones to {', '.join(kept)}."
        )
    folder = checkpoint_dir(directory.checkpoints, step)
    if folder.exists() and not directory.has_event("checkpoint", step=step):  # the run died between checkpoint and event
        directory.event("checkpoint", step=step, path=str(folder))
