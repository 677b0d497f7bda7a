"""Runs that are killed at random moments, some during a checkpoint, and resumed until they finish."""

import contextlib
import hashlib
import random
import signal
import time
from collections.abc import Set
from pathlib import Path

import pytest

from tests.e2e.conftest import Command, Finished, Start
from tests.e2e.exactly_once import OVERLAPPING, check_every_prompt_once, check_files

NUM_KILLS = 5
NUM_STEPS = "num_steps=60"
COMMON = (NUM_STEPS, "checkpoint.every_steps=2", "evaluation.every_steps=8", "evaluation.num_prompts=16")
SETTINGS = {
    "sync": (),
    "sync-interval": (
        "algorithm.updates_per_publish=2",
        "algorithm.proximal=interval_start",
        "algorithm.correction.weight=token",
        "replay={fraction: 0.5, capacity: 16, max_age: 4}",
        "checkpoint.every_steps=3",
    ),
    "async": ("max_staleness=1", "logging.rollouts_per_step=8"),
    "async-window": (*OVERLAPPING, "checkpoint.every_steps=3"),
}
VARYING = ("time", "time/", "perf/", "sync/", "buffer/", "group/generate_s", "group/score_s", "episode/environment_s")


def kill(command: Command, rng: random.Random, *, in_checkpoint: bool) -> None:
    """Kill the controller at a random moment after a checkpoint is complete, or while the next one is being written."""
    checkpoints = command.run_dir / "checkpoints"
    deadline = time.monotonic() + 180
    known = set(checkpoints.glob("step-*/commit.json"))
    stale = set[int]()
    for path in checkpoints.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a starting run renames the incomplete checkpoint of its predecessor
            stale.add(path.stat().st_ino)

    def is_due() -> bool:
        whole = set(checkpoints.glob("step-*/commit.json"))
        if not in_checkpoint:
            return bool(whole - known)
        return bool(whole) and any(is_being_written(path, stale) for path in checkpoints.glob("step-*"))

    while not is_due():
        assert command.process.poll() is None, command.finish().output
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(0.0 if in_checkpoint else rng.random())
    command.process.send_signal(signal.SIGKILL)
    command.finish()


def is_being_written(checkpoint: Path, stale: Set[int]) -> bool:
    """Return True if a checkpoint is incomplete and new. It may be renamed or deleted meanwhile."""
    try:
        is_new = checkpoint.stat().st_ino not in stale
        return is_new and not (checkpoint / "commit.json").exists() and any(checkpoint.iterdir())
    except FileNotFoundError:
        return False


def weights(run_dir: Path) -> dict[str, str]:
    files = (run_dir / "checkpoints" / "final").glob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def curve(run: Finished) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(VARYING)} for row in run.steps]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_kills_at_random_moments_change_nothing(start_run: Start, plain_run: Finished, kind: str) -> None:
    settings = (*plain_run.as_start, *COMMON, *SETTINGS[kind])
    rng = random.Random(kind)
    command = start_run(f"killed-anywhere-{kind}", *settings)
    num_in_checkpoint = 2 if kind == "async-window" else 1  # five of all twenty
    places = [place < num_in_checkpoint for place in range(NUM_KILLS)]
    rng.shuffle(places)
    for in_checkpoint in places:
        kill(command, rng, in_checkpoint=in_checkpoint)
        command = start_run(f"killed-anywhere-{kind}", resume=True)
    killed = command.finish()
    assert killed.code == 0, killed.output
    check_files(killed)
    if kind.startswith("async"):
        check_every_prompt_once(killed)
        return
    plain = start_run(f"not-killed-{kind}", *settings).finish()
    assert plain.code == 0, plain.output
    assert curve(killed) == curve(plain)
    assert killed.evaluations() == plain.evaluations()
    assert weights(killed.run_dir) == weights(plain.run_dir)
