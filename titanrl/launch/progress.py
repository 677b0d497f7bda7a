"""The controller's part of a checkpoint, and the choice of a run directory."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from titanrl.config.errors import ConfigError

STATE_FILE = "controller.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's state: how far a run has come."""

    step: int
    """Steps taken."""
    version: int
    """Policy version."""
    next_index: int
    """First position of the prompt stream that no batch has passed."""


def write_state(checkpoints: Path, state: RunState) -> None:
    """Complete a checkpoint: it is valid only with this file and the trainer's `.metadata`, which are written last."""
    path = checkpoint_dir(checkpoints, state.step) / STATE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(state)))
    partial.replace(path)


def latest_state(checkpoints: Path) -> RunState | None:
    """Return the state of the newest complete checkpoint, or None."""
    complete = [path for path in checkpoints.glob(f"step-*/{STATE_FILE}") if path.with_name(".metadata").is_file()]
    states = [RunState(**json.loads(path.read_text())) for path in complete]
    return max(states, key=lambda state: state.step, default=None)


def resumable_state(run_dir: Path) -> RunState:
    """Return the state of a run directory's newest complete checkpoint.

    Raises:
        ConfigError: there is none.
    """
    state = latest_state(run_dir / "checkpoints")
    if state is None:
        raise ConfigError(f"--resume: no complete checkpoint (got {run_dir}). Give the directory of a run that saved one.")
    return state


def checkpoint_dir(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, as torchtitan's manager names it."""
    return checkpoints / f"step-{step}"


def free_run_dir(wanted: Path) -> Path:
    """Return `wanted`, or `wanted-<n>` with the next free number if it holds a run; no run is overwritten."""
    if not (wanted / "metrics.jsonl").exists():
        return wanted
    taken = [
        int(match[1])
        for path in wanted.parent.iterdir()
        if (match := re.fullmatch(re.escape(wanted.name) + r"-(\d+)", path.name))
    ]
    return wanted.with_name(f"{wanted.name}-{max([1, *taken]) + 1}")
