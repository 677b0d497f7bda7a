"""Search for the checkpoint that a run resumes from; which faults cause a restart, and their limits."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from titanrl.base.errors import DriftError, FaultError, RankError
from titanrl.base.files import DamagedError, commit_folder, digests_of, uncommit_folder
from titanrl.config import ConfigError
from titanrl.config.sections import FaultsConfig
from titanrl.launch.supervision import ActorDiedError, DeadlineError, StallError
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.run.checkpoints import (
    STATE_FILE,
    Counts,
    Restart,
    Restarts,
    RunState,
    complete_checkpoint,
    newest_checkpoint,
    resumable,
    set_aside,
)


def state_of(step: int) -> RunState:
    return RunState(step=step, version=step, next_index=8 * step)


def write_checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    (folder / ".metadata").write_bytes(b"tensors")
    complete_checkpoint(run_dir / "checkpoints", state_of(step), digests_of(folder, [folder / "__0_0.distcp"]), "")
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
    complete_checkpoint(folder.parent, state, {}, "")
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


DEATH = ActorDiedError("trainer_0 (process 77) exited", "trainer")


def restarts(**faults: object) -> Restarts:
    config = FaultsConfig.model_validate(faults)
    return Restarts(config, Respawns(config))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("fault", [DEATH, StallError("trainer rank 0 was stopped"), RankError("rank 1"), DriftError("norm")])
def test_faults_are_found_in_groups_and_causes(fault: FaultError) -> None:
    found = restarts()
    assert found.fault_in(fault, None) is fault
    assert found.fault_in(ExceptionGroup("warm start", [ValueError(), ExceptionGroup("", [fault])]), None) is fault
    assert found.fault_in(caused(RuntimeError("a hook raised"), fault), None) is fault
    assert found.fault_in(RuntimeError("the writer of the weights has ended"), fault) is fault
    assert fault.part == "trainer"


def test_other_errors_end_the_run() -> None:
    assert restarts().fault_in(ValueError("bug"), None) is None
    assert restarts().fault_in(DeadlineError("no reply"), None) is None
    assert restarts().fault_in(RespawnLimitError("too many"), DEATH) is None
    assert restarts(max_respawns=0).fault_in(DEATH, DEATH) is None
    stall = StallError("trainer rank 0 was stopped")
    assert restarts(on_stall="abort").fault_in(stall, stall) is None
    assert restarts(on_stall="abort").fault_in(DEATH, None) is DEATH


def test_restarts_without_progress_are_limited_regardless_of_time() -> None:
    found = restarts(max_respawns=2, respawn_window_s=0.01)
    for step in (0, 5, 3, 6, 6):
        assert found.count(DEATH, step).endswith("of 2 replacements")
        time.sleep(0.02)
    with pytest.raises(RespawnLimitError, match=r"2 restarts did not get the run past step 4 .*Last cause: trainer_0"):
        found.count(DEATH, 4)


def test_restarts_and_replacements_share_a_limit() -> None:
    config = FaultsConfig(max_respawns=2)
    respawns = Respawns(config)
    respawns.add("generator_0", "killed")
    found = Restarts(config, respawns)
    assert found.count(DEATH, 1) == "2 of 2 replacements"
    with pytest.raises(RespawnLimitError, match="generator_0 1 times, trainer 1 times"):
        found.count(DEATH, 2)


def test_warning_and_event_state_where_the_run_continues() -> None:
    restart = Restart(fault=DEATH, step=37, from_step=30, started=time.perf_counter())
    expected = "trainer_0 (process 77) exited; at step 37: continuing from the checkpoint of step 30 (1 of 5 replacements)"
    assert restart.warning("1 of 5 replacements") == expected
    event = restart.event()
    assert 0.0 <= event.pop("seconds") < 60.0  # type: ignore[operator]
    assert event == {"part": "trainer", "cause": "trainer_0 (process 77) exited", "step": 37, "from_step": 30}

    requested = Restart(fault=None, step=1, from_step=None, started=time.perf_counter())
    assert requested.warning("") == "restart requested; at step 1: continuing from the beginning, as there is no checkpoint yet"
    assert requested.event()["from_step"] == 0


def test_run_without_a_checkpoint_starts_over_unless_it_had_one(tmp_path: Path) -> None:
    uncommit_folder(write_checkpoint(tmp_path, 3))
    assert newest_checkpoint(tmp_path, had_one=False) is None
    with pytest.raises(DamagedError, match=re.escape("restart: no intact checkpoint (got ")):
        newest_checkpoint(tmp_path, had_one=True)
    write_checkpoint(tmp_path, 2)
    newest = newest_checkpoint(tmp_path, had_one=True)
    assert newest.state.step == 2
