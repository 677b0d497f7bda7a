"""Restarts: which faults cause one, their limits, and the checkpoint they continue from."""

import re
import time
from pathlib import Path

import pytest

from titanrl.base.errors import FaultError
from titanrl.base.files import DamagedError
from titanrl.config.sections import FaultsConfig
from titanrl.launch.supervision import ActorDiedError, DeadlineError, StallError
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.run.checkpoints import RunState, complete_checkpoint
from titanrl.run.restarts import Restart, Restarts, newest_checkpoint
from titanrl.trainer.agreement import RankError
from titanrl.trainer.replicas import DriftError

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
    assert 0.0 <= event.pop("seconds") < 1.0  # type: ignore[operator]
    assert event == {"part": "trainer", "cause": "trainer_0 (process 77) exited", "step": 37, "from_step": 30}

    requested = Restart(fault=None, step=1, from_step=None, started=time.perf_counter())
    assert requested.warning("") == "restart requested; at step 1: continuing from the beginning, as there is no checkpoint yet"
    assert requested.event()["from_step"] == 0


def test_run_without_a_checkpoint_starts_over_unless_it_had_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-2"
    folder.mkdir(parents=True)
    assert newest_checkpoint(tmp_path, had_one=False) is None
    with pytest.raises(DamagedError, match=re.escape("restart: no intact checkpoint (got ")):
        newest_checkpoint(tmp_path, had_one=True)

    (folder / ".metadata").write_text("")
    complete_checkpoint(tmp_path / "checkpoints", RunState(step=2, version=2, next_index=16), {})
    newest = newest_checkpoint(tmp_path, had_one=True)
    assert newest is not None
    assert newest.state.step == 2
