"""A hook that kills processes of its run. The file `NAME.kill` beside the run directory lists roles, moments and steps.

Example: `trainer:after_step:1 store:after_step:3`
"""

import os
import signal
from pathlib import Path
from typing import Any

import psutil

import titanrl
from titanrl.carriers.types import EvaluationResult, StepMetrics


class Killer(titanrl.Hook):
    """Kills each process once, although a restart creates the hook again and repeats the step."""

    def before_step(self, run: Any) -> None:
        """Kill the processes that are due before a step."""
        self._kill(run, "before_step")

    def after_step(self, run: Any, metrics: StepMetrics) -> None:
        """Kill the processes that are due after a step."""
        self._kill(run, "after_step")

    def after_evaluation(self, run: Any, result: EvaluationResult) -> None:
        """Kill the processes that are due after an evaluation."""
        self._kill(run, "after_evaluation")

    def after_checkpoint(self, run: Any, folder: Path) -> None:
        """Kill the processes that are due after a checkpoint."""
        self._kill(run, "after_checkpoint")

    def _kill(self, run: Any, moment: str) -> None:
        killed = run.run_dir / "killed.txt"
        for wanted in run.run_dir.with_name(f"{run.run_dir.name}.kill").read_text().split():
            role, when, step = wanted.split(":")
            if (when, int(step)) == (moment, run.state.step) and wanted not in (killed.read_text() if killed.exists() else ""):
                with killed.open("a") as file:
                    file.write(f"{wanted}\n")
                os.kill(pid_of(run.run_dir, role), signal.SIGKILL)


def pid_of(run_dir: Path, role: str) -> int:
    """Return the id of a role's first process, or of an emulated host, as in `host-generators-1`."""
    if not role.startswith("host-"):
        return int((run_dir / "logs" / f"{role}_0.pid").read_text().split()[0])
    address = f"/{role.removeprefix('host-')}"
    (host,) = [child for child in psutil.Process().children() if any(part.endswith(address) for part in child.cmdline())]
    return host.pid


def after_the_batch_was_taken(group: titanrl.GroupRewards) -> list[float]:
    """Return the rewards minus their mean; kill the rollout workers, which store the tokens of the first batch.

    The environment variable `KILL_RUN` names the run directory.
    """
    run_dir = Path(os.environ["KILL_RUN"])
    if not (run_dir / "killed.txt").exists():
        (run_dir / "killed.txt").touch()
        for number in (0, 1):
            os.kill(pid_of(run_dir, f"rollout_{number}"), signal.SIGKILL)
    mean = sum(group.rewards) / len(group.rewards)
    return [reward - mean for reward in group.rewards]
