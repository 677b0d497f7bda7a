"""Search for the checkpoint that a run resumes from."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from titanrl.base.files import commit_folder, digests_of, uncommit_folder
from titanrl.config import ConfigError
from titanrl.run.checkpoints import STATE_FILE, Counts, RunState, complete_checkpoint, resumable, set_aside


def state_of(step: int) -> RunState:
    return RunState(step=step, version=step, next_index=8 * step)


def write_checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    (folder / ".metadata").write_bytes(b"tensors")
    complete_checkpoint(run_dir / "checkpoints", state_of(step), digests_of(folder, [folder / "__0_0.distcp"]))
    return folder


def test_newest_intact_checkpoint_is_used(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_checkpoint(tmp_path, step)
    found = resumable(tmp_path)
    assert (found.state, found.unusable) == (state_of(10), {})


def test_state_survives_a_round_trip(tmp_path: Path) -> None:
    counts = Counts(prompts=40, rollouts=320, generated_tokens=5000).plus(prompts=2, trained_tokens=12_345_678_901)
    state = replace(
        state_of(5), in_flight=(33, 37), published=(2, 4), num_held=8, num_skipped=1, evaluated_step=4, counts=counts
    )
    folder = write_checkpoint(tmp_path, 5)
    uncommit_folder(folder)
    complete_checkpoint(folder.parent, state, {})
    assert resumable(tmp_path).state == state
    assert state.counts.metrics() == {
        "count/prompts": 42,
        "count/rollouts": 320,
        "count/environment_steps": 0,
        "count/generated_tokens": 5000,
        "count/trained_tokens": 12_345_678_901,
    }


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[300] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def write_state(content: object) -> Callable[[Path], None]:
    """Write a state and a matching list of files, as if the writer had a bug."""

    def write(folder: Path) -> None:
        (folder / STATE_FILE).write_text(json.dumps(content))
        uncommit_folder(folder)
        commit_folder(folder, {})

    return write


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "__0_0.distcp has other bytes than were written"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / STATE_FILE).unlink(), "controller.json is missing"),
        (lambda folder: (folder / STATE_FILE).write_bytes(b""), "controller.json has 0 bytes"),
        (lambda folder: os.truncate(folder / STATE_FILE, 20), "controller.json has 20 bytes"),
        (
            lambda folder: (folder / STATE_FILE).write_bytes(bytes((folder / STATE_FILE).stat().st_size)),
            "controller.json has other bytes than were written",
        ),
        (uncommit_folder, "commit.json is missing, so writing was not finished"),
        (write_state({"step": 3, "version": 3, "next_index": 24, "learning_rate": None}), "not the state of step 4"),
        (write_state({"step": 4, "version": "4", "next_index": 32, "learning_rate": None}), "not the state of step 4"),
        (write_state([4]), "not the state of step 4"),
        (write_state({"step": 4, "version": 4, "next_index": 32, "counts": {"prompts": "4"}}), "not the state of step 4"),
    ],
)
def test_damaged_checkpoint_is_named_and_the_previous_one_used(
    damage: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, 2)
    damage(write_checkpoint(tmp_path, 4))
    found = resumable(tmp_path)
    assert found.state == state_of(2)
    assert reason in found.unusable["step-4"]


def test_error_without_an_intact_checkpoint_lists_all(tmp_path: Path) -> None:
    flip_a_byte(write_checkpoint(tmp_path, 2))
    uncommit_folder(write_checkpoint(tmp_path, 4))
    (tmp_path / "checkpoints" / "step-x").mkdir()
    with pytest.raises(ConfigError) as raised:
        resumable(tmp_path)
    assert str(raised.value) == (
        f"--resume: no intact checkpoint (got {tmp_path}; step-4: commit.json is missing, so writing was not finished; "
        "step-2: __0_0.distcp has other bytes than were written (SHA-256)). Give the directory of a run that saved one."
    )


def test_newer_checkpoints_are_set_aside_once(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    assert set_aside(checkpoints, 2) == ["unusable-4", "unusable-6"]
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-8")
    assert set_aside(checkpoints, 2) == ["unusable-8"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "unusable-8"]
