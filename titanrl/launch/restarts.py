"""Restarts of a run from its last checkpoint: which faults they answer, how many are allowed, and what is reported."""

import time
from dataclasses import dataclass
from pathlib import Path

from titanrl.config.errors import ConfigError
from titanrl.config.faults import FaultsConfig
from titanrl.errors import FaultError
from titanrl.files import DamagedError
from titanrl.launch.progress import Resumable, resumable
from titanrl.launch.respawns import RespawnLimitError, Respawns


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart that has begun."""

    fault: FaultError | None
    """Its cause; None if the user has requested it."""
    step: int
    """Steps taken before it."""
    from_step: int | None
    """Step of the checkpoint that the run continues from; None if it begins again."""
    started: float
    """Time of its begin, on the clock of `time.perf_counter`."""

    def warning(self, budget: str) -> str:
        """Return what the user needs to know; `budget` says which one of how many it is, if it counts."""
        cause = "restart requested" if self.fault is None else str(self.fault)
        source = "from the beginning, as there is no checkpoint yet" if self.from_step is None else ""
        source = source or f"from the checkpoint of step {self.from_step}"
        return f"{cause}; at step {self.step}: continuing {source}" + (f" ({budget})" if budget else "")

    def event(self) -> dict[str, object]:
        """Return the fields of its event; it ends now."""
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
        """Start without restarts; `respawns` counts the replacements of single parts, too."""
        self._config, self._respawns = config, respawns
        self._furthest, self._num_in_vain = -1, 0

    def fault_in(self, error: BaseException, ended_by: FaultError | None) -> FaultError | None:
        """Return the fault that an error is due to; None if a restart does not help.

        Args:
            error: exception of a step, an evaluation, or another action of the run.
            ended_by: death or stall that has ended the requests of the session.
        """
        if isinstance(error, RespawnLimitError) or not self._config.max_respawns:
            return None
        from titanrl.launch.stalls import StallError  # imports monarch

        fault = _first_fault(error) or ended_by
        return None if isinstance(fault, StallError) and self._config.on_stall == "abort" else fault

    def count(self, fault: FaultError, step: int) -> str:
        """Count a restart; return which one of how many it is, as text.

        Args:
            fault: its cause.
            step: steps taken before the fault.

        Raises:
            RespawnLimitError: There were too many in the window, or too many that have brought the run no further.
        """
        limit = self._config.max_respawns
        if step > self._furthest:
            self._furthest, self._num_in_vain = step, 0
        if self._num_in_vain >= limit:
            raise RespawnLimitError(
                f"faults.max_respawns: {self._num_in_vain} restarts have not brought the run past step {step} (got {limit}). "
                f"Last cause: {fault}"
            )
        self._respawns.add(fault.part, str(fault))
        self._num_in_vain += 1
        return f"{self._respawns.num_recent} of {limit} replacements"


def newest_checkpoint(run_dir: Path, *, had_one: bool) -> Resumable | None:
    """Return the newest whole checkpoint of a run that is to restart; None if there has never been one.

    Args:
        run_dir: its folder.
        had_one: a checkpoint was whole earlier.

    Raises:
        DamagedError: None is whole any more.
    """
    try:
        return resumable(run_dir)
    except ConfigError as error:
        if had_one:
            raise DamagedError(f"restart: {str(error).removeprefix('--resume: ')}") from None
        return None


def _first_fault(error: BaseException | None) -> FaultError | None:
    """Return the error itself, one of its group, or one of its causes, if that is a fault."""
    while error is not None and not isinstance(error, FaultError):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(_first_fault, error.exceptions)), None)
        error = error.__cause__
    return error
