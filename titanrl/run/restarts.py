"""Restarts from the last checkpoint: which errors cause one, how many are allowed, and what is reported."""

import time
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.errors import FaultError
from titanrl.base.files import DamagedError
from titanrl.config.errors import ConfigError
from titanrl.config.sections import FaultsConfig
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.run.checkpoints import Resumable, resumable


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
        """Return the fault that caused an error; None if the error is not recoverable by a restart.

        Args:
            error: exception of a step, an evaluation, or another action of the run.
            ended_by: death or stall that failed all requests of the session.
        """
        if isinstance(error, RespawnLimitError) or not self._config.max_respawns:
            return None
        from titanrl.launch.supervision import StallError  # imports monarch

        fault = _first_fault(error) or ended_by
        return None if isinstance(fault, StallError) and self._config.on_stall == "abort" else fault

    def count(self, fault: FaultError, step: int) -> str:
        """Count a restart after a fault that followed `step` steps; return its number and the limit as text.

        Raises:
            RespawnLimitError: There were too many restarts within the window, or too many without progress.
        """
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


def newest_checkpoint(run_dir: Path, *, had_one: bool) -> Resumable | None:
    """Return the newest intact checkpoint of a run that restarts; None if it has never had one.

    Raises:
        DamagedError: The run had an intact checkpoint, but no longer has one.
    """
    try:
        return resumable(run_dir)
    except ConfigError as error:
        if had_one:
            raise DamagedError(f"restart: {str(error).removeprefix('--resume: ')}") from None
        return None


def _first_fault(error: BaseException | None) -> FaultError | None:
    """Return the first `FaultError` among an error, its causes, and the exceptions of groups; None if there is none."""
    while error is not None and not isinstance(error, FaultError):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(_first_fault, error.exceptions)), None)
        error = error.__cause__
    return error
