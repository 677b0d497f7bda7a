"""Where a run stands, next to each checkpoint, so that it can go on from there."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

STATE_FILE = "controller.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's part of a checkpoint."""

    step: int
    """Steps taken."""
    version: int
    """Policy version."""
    next_index: int
    """First prompt of the stream that the run has not used yet."""


def write_state(checkpoints: Path, state: RunState) -> None:
    """Complete a checkpoint: it counts only once this file is in it, and the trainer's `.metadata`, which it writes last."""
    path = checkpoint_dir(checkpoints, state.step) / STATE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(state)))
    partial.replace(path)


def latest_state(checkpoints: Path) -> RunState | None:
    """The state of the newest whole checkpoint, if there is one."""
    whole = [path for path in checkpoints.glob(f"step-*/{STATE_FILE}") if path.with_name(".metadata").is_file()]
    states = [RunState(**json.loads(path.read_text())) for path in whole]
    return max(states, key=lambda state: state.step, default=None)


def checkpoint_dir(checkpoints: Path, step: int) -> Path:
    """Folder of a step's checkpoint, as torchtitan's manager names it."""
    return checkpoints / f"step-{step}"


def free_run_dir(wanted: Path) -> Path:
    """`wanted`, or if a run is there already the first free of `wanted-2`, `wanted-3`, ...: nothing is overwritten."""
    if not (wanted / "metrics.jsonl").exists():
        return wanted
    taken = [
        int(match[1])
        for path in wanted.parent.iterdir()
        if (match := re.fullmatch(re.escape(wanted.name) + r"-(\d+)", path.name))
    ]
    return wanted.with_name(f"{wanted.name}-{max([1, *taken]) + 1}")
