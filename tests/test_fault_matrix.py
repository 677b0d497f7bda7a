"""The cells and table of the fault matrix, and the counts of the fault benchmark."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.chaos import sample_figures
from benchmarks.victims import Victim, is_recovery, process_of, victims
from tests.e2e.fault_matrix import FAULTS, MODES, PARTS, PHASES, SIGNALS, Cell, cells, rendered
from titanrl.metrics.run_directory import append_line
from titanrl.replay.groups import BufferState


def test_every_cell_runs_or_has_a_reason() -> None:
    every = {Cell(mode, part, fault, phase) for mode in MODES for part in PARTS for fault in FAULTS for phase in PHASES}
    run = [cell for mode in MODES for at_start in (False, True) for cell in cells(mode, at_start=at_start)]
    assert len(run) == len(set(run))
    assert all(cell.reason_against() for cell in every - set(run))
    helpers = {"zygote", "template"}  # they run no code of the run
    own_code = set(PARTS) - {"evaluator"} - helpers  # that of an evaluator is that of a generator
    assert {(cell.part, cell.fault) for cell in run} >= {(part, fault) for part in own_code for fault in FAULTS}
    for part in {"evaluator"} | helpers:
        assert {cell.fault for cell in run if cell.part == part} == set(SIGNALS)


def test_table_has_outcomes_and_reasons() -> None:
    row = {"mode": "async", "part": "store", "fault": "kill -9", "phase": "push", "outcome": "restarted"}
    machine = {"cores": 2, "processor": "Sample", "commit": "abc"}
    text = rendered({"machine": machine, "cells": [{**row, "noticed_s": 0.04, "recovered_s": 9.96}]})
    (line,) = [line for line in text.split("Asynchronous")[1].splitlines() if line.startswith("| kill -9 | store")]
    assert (
        line
        == "| kill -9 | store process | not run | not run | not run | restarted 0.0 / 10.0 s | not run | not run | not run |"
    )
    assert "| kill -9 | scoring process | forked later | not run | idle |" in text
    assert text.endswith("Measured on 2 cores of an Sample, commit abc.")


def state(**changes: Any) -> BufferState:
    return BufferState(**{"next_index": 7, "in_flight": (5, 6), "drops": {}, "has_scored": True, "memory": None, **changes})


def write_run(run_dir: Path, trained: list[int], saved: BufferState) -> None:
    for index in trained:
        append_line(run_dir / "advantages.jsonl", {"step": 1, "index": index, "version": 0, "advantages": []})
    groups = run_dir / "checkpoints/step-3/groups"
    groups.mkdir(parents=True)
    (groups / "records.pkl").write_bytes(pickle.dumps(saved))


def test_lost_and_duplicate_samples_are_counted(tmp_path: Path) -> None:
    append_line(tmp_path / "events.jsonl", {"time": 1.0, "kind": "drop", "step": 1, "groups": 1, "reason": "no signal"})
    write_run(tmp_path, [0, 1, 1, 3], state())  # 2 was dropped, 4 is lost
    figures = sample_figures(tmp_path, {"step": 3, "count/prompts": 5})
    assert figures == {
        "samples": 7,
        "samples_dropped": 1,
        "samples_lost": 1,
        "samples_duplicated": 1,
        "samples_miscounted": 0,
    }


def test_recovery_is_a_replacement_or_a_restart() -> None:
    respawn = {"time": 10.0, "kind": "respawn", "part": "generator_0"}
    assert is_recovery(respawn, "generator_0", 9.0)
    assert not is_recovery(respawn, "generator_1", 9.0)
    assert not is_recovery(respawn, "generator_0", 11.0)
    assert is_recovery({"time": 10.0, "kind": "restart", "step": 3, "failed": False}, "generator_1", 9.0)
    assert not is_recovery({"time": 10.0, "kind": "restart", "step": 3, "failed": True}, "generator_1", 9.0)


def test_victims_are_found_by_their_pid_files(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (tmp_path / "logs/generator_1_0.pid").write_text(f"{child.pid} host")
        (tmp_path / "logs/controller_0.pid").write_text(f"{os.getpid()} host")
        (tmp_path / "logs/store_0.pid").write_text("")  # being written
        (victim,) = victims(tmp_path)
        assert victim == Victim("generator", "generator_1", victim.process)
        assert victim.process.parent == os.getpid()
        assert victim.hit(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert victim.process.is_gone
    assert not victim.hit(signal.SIGKILL)
    assert process_of(child.pid) is None
    assert victims(tmp_path) == []
