"""Every kind of fault of every kind of process in every phase; one run takes many faults in succession.

The result is written to the file in the environment variable `FAULT_MATRIX`. `FAULT_CELLS` selects cells by a substring.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import sample_figures
from benchmarks.machine import describe_machine
from benchmarks.victims import NewEvents, Victim, is_recovery, victims
from tests.e2e.conftest import REPO, Command, Finished, Start
from tests.e2e.fault_matrix import Cell, cells
from titanrl.launch.supervision import WARM_UP
from titanrl.metrics.reading import read_metrics

INJECTION = Path(__file__).parent / "injection"
COMMON = (
    "num_steps=100000",
    "generator.replicas=2",
    "rollout.num_workers=2",
    "checkpoint.every_steps=4",
    "checkpoint.on_interrupt=true",
    "evaluation.every_steps=6",
    "evaluation.num_prompts=16",
    "logging.rollouts_per_step=8",
    "logging.console=off",
    "algorithm.learning_rate=1e-7",  # thousands of steps must not take the signal from the groups
    "faults.max_respawns=10000",
    "sandbox.groups_per_process=64",  # a zygote that does nothing is missed within seconds
    "faults.min_stall_s=5",
    "faults.stall_factor=3",  # of the first replies, which take seconds
    "data.rewards={answer: reasoning_gym, fault: {function: fault_reward:score, weight: 0.0}}",
)
SETTINGS = {"sync": (), "async": ("max_staleness=1",)}
ENVIRONMENT = (
    "data.environment={function: fault_reward.environment:Task, num_processes: 2, step_timeout_s: 5}",
    "evaluation.num_prompts=0",  # the metrics of steps do not count failed episodes of evaluations
)
HIT_LIMIT_S, OUTCOME_LIMIT_S, PROGRESS_LIMIT_S = 60.0, 120.0, 120.0
"""Time limits in seconds for a fault to happen, for its outcome, and for the next step."""
START_LIMIT_S = 600.0
"""Time limit in seconds for the start of a run until a fault or the first step; its imports take minutes on a busy machine."""
WITHIN = {"forward/backward": 0.03, "evaluation": 0.1, "rollout": 0.01}
"""Seconds from the start of a phase to a fault that need not happen on the thread of an endpoint."""
ENDS = ("kill -9", "segfault", "os._exit")
"""Faults that terminate a process."""

CONTINUES_S = 8.0
"""Seconds after a fault; a step after them shows that the fault terminated nothing."""
TAIL_BYTES = 1 << 17
"""Number of bytes at the end of `metrics.jsonl` that contain the last step."""
NOTICES = ("fault", "stall", "scorer_error", "respawn", "restart", "end")
"""Events that show that a run has detected a fault."""


def wait_for(found: Callable[[], Any], limit_s: float) -> Any:
    """Poll until a result is available; return None after the limit."""
    limit = time.monotonic() + limit_s
    while not (result := found()) and time.monotonic() < limit:
        time.sleep(0.02)
    return result


class Matrix:
    """A run that is hit repeatedly, and resumed whenever it ends."""

    def __init__(self, start_run: Start, name: str, folder: Path, settings: tuple[str, ...]) -> None:
        """Copy the fault-injection code into a folder; `start` starts the run."""
        self._start_run, self._name, self._settings = start_run, name, settings
        self.folder = folder / name
        shutil.copytree(INJECTION, self.folder)
        self._environment = {"PYTHONPATH": f"{self.folder}:{REPO}"}
        self.rows: list[dict[str, Any]] = []
        self.command: Command
        self._number = 0
        self._new: NewEvents
        self._seen: list[dict[str, Any]] = []

    def start(self, *, resume: bool = False) -> None:
        """Start the run, or resume it."""
        settings = () if resume else self._settings
        self.command = self._start_run(self._name, *settings, resume=resume, **self._environment)
        self._new = NewEvents(self.run_dir)

    @property
    def run_dir(self) -> Path:
        """Run directory."""
        return self.command.run_dir

    @property
    def has_ended(self) -> bool:
        """True if the command has exited."""
        return self.command.process.poll() is not None

    def progress(self) -> float:
        """Return the time of the last recorded step."""
        file = self.run_dir / "metrics.jsonl"
        if not file.exists():
            return 0.0
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - TAIL_BYTES))
            rows = [_decode(line) for line in lines]
        return max((row["time"] for row in rows if row is not None and "reward/mean" in row), default=0.0)

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last fault was requested, possibly with earlier ones."""
        self._seen += self._new.read()
        return self._seen

    def wait_for_progress(self, since: float, limit_s: float = PROGRESS_LIMIT_S) -> bool:
        """Wait for a step after a given time; return False if none is recorded."""
        wait_for(lambda: self.has_ended or self.progress() > since, limit_s)
        return self.progress() > since

    def hit(self, cell: Cell) -> None:
        """Cause the fault of a cell, and record its outcome."""
        begun, self._seen = time.time(), []
        self._number += 1
        limit_s = START_LIMIT_S if cell.phase == "start" else HIT_LIMIT_S
        if not cell.is_own:
            wait_for(lambda: self.has_ended or self._candidates(cell), limit_s)
        victim = next(iter(sorted(self._candidates(cell), key=lambda victim: victim.part)), None)
        is_aimed = victim is not None and (not cell.is_own or cell.part == "scoring")
        siblings = set() if victim is None else victim.siblings()
        can_delay = cell.part != "environment" and cell.fault not in ("busy loop", "unpicklable exception", "out of memory")
        order = {
            "id": self._number,
            "point": cell.trigger,
            "fault": cell.fault,
            "pid": victim.process.pid if victim is not None and is_aimed else None,
            "role": cell.part if cell.is_own else "",
            "delay_s": WITHIN.get(cell.phase, 0.0) if can_delay else 0.0,
        }
        ordered = self._order(order)
        hit = {"time": ordered} if cell.trigger == "reward" else self._wait_for_hit(limit_s)
        if hit is None:
            outcome = {"outcome": "not hit", "noticed_s": None, "recovered_s": None, "text": ""}
        else:
            part = victim.part if victim is not None and is_aimed else Path(hit["log"]).stem.rpartition("_")[0]
            outcome = (
                self._environment_outcome(hit["time"])
                if cell.part == "environment"
                else self._outcome(cell, hit["time"], part, victim, siblings)
            )
        for name in ("command.json", "taken.json"):
            (self.folder / "fault_reward" / name).unlink(missing_ok=True)
        place = {"mode": cell.mode, "part": cell.part, "fault": cell.fault, "phase": cell.phase}
        self.rows.append({**place, **outcome, "total_s": time.time() - begun})
        print(json.dumps(self.rows[-1]), flush=True)
        if outcome["outcome"] in ("not hit", "hangs"):  # the next faults need a run that works
            self.command.process.kill()
            self.command.finish()
            self.rerun()

    def _candidates(self, cell: Cell) -> list[Victim]:
        return [victim for victim in victims(self.run_dir) if victim.kind == cell.part]

    def _order(self, order: Mapping[str, Any]) -> float:
        folder = self.folder / "fault_reward"
        (folder / "hit.json").unlink(missing_ok=True)
        (folder / "command.tmp").write_text(json.dumps(order))
        (folder / "command.tmp").rename(folder / "command.json")
        return time.time()

    def _wait_for_hit(self, limit_s: float) -> dict[str, Any] | None:
        file = self.folder / "fault_reward" / "hit.json"
        wait_for(lambda: file.exists() or self.has_ended, limit_s)
        return json.loads(file.read_text()) if file.exists() else None

    def _outcome(self, cell: Cell, hit_at: float, part: str, victim: Victim | None, siblings: set[int]) -> dict[str, Any]:
        """Wait until the part has recovered or the run has ended; then wait for the next step."""

        def recovered() -> float | None:
            times = [event["time"] for event in self.events() if is_recovery(event, part, hit_at)]
            if cell.part == "scoring" and victim is not None and victim.process.is_gone and victim.siblings() - siblings:
                times.append(time.time())
            return min(times, default=None)

        def settled() -> bool:
            return self.has_ended or recovered() is not None or (cell.fault not in (*ENDS, "SIGSTOP") and self._goes_on(hit_at))

        wait_for(settled, OUTCOME_LIMIT_S)
        at = recovered()
        seen = [event for event in self.events() if event["time"] >= hit_at]
        noticed_s = min([event["time"] - hit_at for event in seen if event["kind"] in NOTICES], default=None)
        if self.has_ended:
            return self._ended(hit_at, noticed_s)
        outcome, text = "restarted", next((event["cause"] for event in seen if "cause" in event), "")
        if at is None:
            outcome = "continues" if self.progress() > hit_at + CONTINUES_S else "hangs"
        elif not self.wait_for_progress(at):
            if self.has_ended:
                return self._ended(hit_at, noticed_s)
            outcome = "hangs"
        elif not any(event["kind"] == "restart" for event in seen):
            outcome = "replaced"
        recovered_s = None if at is None else at - hit_at
        return {"outcome": outcome, "noticed_s": noticed_s, "recovered_s": recovered_s, "text": text}

    def _environment_outcome(self, hit_at: float) -> dict[str, Any]:
        """Wait for the step whose metrics count the failed and restarted episode."""

        def counted() -> dict[str, Any] | None:
            rows = read_metrics(self.run_dir / "metrics.jsonl")
            return next((row for row in rows if row["time"] > hit_at and num_failures(row) > 0), None)

        wait_for(lambda: self.has_ended or counted(), OUTCOME_LIMIT_S)
        if self.has_ended:
            return self._ended(hit_at, None)
        if (row := counted()) is None:
            return {"outcome": "hangs", "noticed_s": None, "recovered_s": None, "text": ""}
        return {"outcome": "retried", "noticed_s": None, "recovered_s": row["time"] - hit_at, "text": ""}

    def _goes_on(self, hit_at: float) -> bool:
        """Return True if the run continues long after a fault that terminated nothing, without a detected stall."""
        acts = any(event["kind"] in ("stall", "fault") and event["time"] >= hit_at for event in self.events())
        return not acts and self.progress() > hit_at + CONTINUES_S

    def _ended(self, hit_at: float, noticed_s: float | None) -> dict[str, Any]:
        """Return the outcome of a run that ended, and resume it."""
        ended, finished = time.time(), self.command.finish()
        text = (finished.output.splitlines() or [""])[-1]
        outcome = "ended by name" if finished.code == 1 and text.startswith("error: ") else f"exit code {finished.code}"
        self.rerun()
        return {"outcome": outcome, "noticed_s": noticed_s, "recovered_s": ended - hit_at, "text": text}

    def rerun(self) -> None:
        """Resume the ended run, and wait until it has learned its deadlines."""
        since = time.time()
        self.start(resume=True)
        for _ in range(WARM_UP + 1):
            if not self.wait_for_progress(since, START_LIMIT_S):
                if not self.has_ended:  # it may go on for a hundred thousand steps
                    self.command.process.kill()
                raise AssertionError(f"the resumed run took no step: {self.command.finish().output}")
            since = self.progress()

    def finish(self) -> Finished:
        """Stop the run with a checkpoint."""
        self.command.process.send_signal(signal.SIGINT)
        return self.command.finish()


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def num_failures(row: Mapping[str, Any]) -> float:
    """Return the number of episodes of a step whose environment failed."""
    failed = row.get("episode/environment_error_frac", 0.0) + row.get("episode/timeout_frac", 0.0)
    return float(failed * row.get("episode/count", 0.0))


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Write cells to the file of the matrix, replacing earlier results."""
    if "FAULT_MATRIX" not in os.environ:
        return
    file = Path(os.environ["FAULT_MATRIX"])
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text())["cells"] if file.exists() else []
    kept = {(row["mode"], row["part"], row["fault"], row["phase"]): row for row in [*known, *rows]}
    file.write_text(json.dumps({"machine": describe_machine(), "cells": list(kept.values())}, indent=2) + "\n")


def selected(wanted: list[Cell]) -> list[Cell]:
    """Return the cells to run."""
    text = os.environ.get("FAULT_CELLS", "")
    names = [f"{cell.mode} {cell.part} {cell.fault} {cell.phase}" for cell in wanted]
    return [cell for cell, name in zip(wanted, names, strict=True) if all(word in name for word in text.split(","))]


def surprises(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the unexpected outcomes."""
    expected = {
        "generator": {"replaced"},
        "rollout": {"replaced"},
        "scoring": {"replaced", "continues"},
        "zygote": {"replaced"},
        "template": {"replaced"},
        "evaluator": {"replaced"},
        "environment": {"retried"},
    }
    always = {"busy loop", "unpicklable exception", "out of memory"}
    odd = []
    for row in rows:
        fine = expected.get(row["part"], {"restarted"}) | (
            {"replaced", "ended by name", "restarted", "continues"} if row["fault"] in always else set()
        )
        if row["phase"] == "start":
            fine = fine | {"ended by name"}
        if row["outcome"] not in fine:
            odd.append(row)
    return odd


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", list(SETTINGS))
def test_faults_in_every_phase_lose_no_sample(start_run: Start, plain_run: Finished, tmp_path: Path, mode: str) -> None:
    if not (wanted := [cell for cell in selected(cells(mode)) if cell.part != "environment"]):
        pytest.skip("no such cells")
    matrix = Matrix(start_run, f"faults-{mode}", tmp_path, (*plain_run.as_start, *COMMON, *SETTINGS[mode]))
    matrix.start()
    matrix.command.wait_for_step(5)  # after the first checkpoint
    for cell in wanted:
        matrix.hit(cell)
        write_rows(matrix.rows)
    finished = matrix.finish()
    assert finished.code == 130, finished.output
    trained = Counter(json.loads(line)["index"] for line in (finished.run_dir / "advantages.jsonl").read_text().splitlines())
    assert max(trained.values()) == 1, "a prompt was trained on twice"
    if mode == "async":  # only then a checkpoint has all groups
        figures = sample_figures(finished.run_dir, finished.steps[-1])
        assert (figures["samples_lost"], figures["samples_duplicated"]) == (0, 0), figures
    assert max(row["staleness/max"] for row in finished.steps) <= len(SETTINGS[mode])
    assert surprises(matrix.rows) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_environment_fault_costs_only_its_episode(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    if not (wanted := [cell for cell in selected(cells("async")) if cell.part == "environment"]):
        pytest.skip("no such cells")
    matrix = Matrix(start_run, "faults-environment", tmp_path, (*plain_run.as_start, *COMMON, *SETTINGS["async"], *ENVIRONMENT))
    matrix.start()
    matrix.command.wait_for_step(5)
    for cell in wanted:
        matrix.hit(cell)
        write_rows(matrix.rows)
    finished = matrix.finish()
    assert finished.code == 130, finished.output
    failed = sum(map(num_failures, finished.steps))
    assert failed == pytest.approx(len(wanted)), "each fault costs one episode, which starts again"
    figures = sample_figures(finished.run_dir, finished.steps[-1])
    assert (figures["samples_lost"], figures["samples_duplicated"]) == (0, 0), figures
    assert surprises(matrix.rows) == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_faults_at_start_end_the_run_and_are_named(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    rows = []
    for number, cell in enumerate(selected(cells("async", at_start=True))):
        matrix = Matrix(start_run, f"start-{number}", tmp_path, (*plain_run.as_start, *COMMON, *SETTINGS["async"]))
        matrix.rerun = lambda: None  # type: ignore[method-assign]
        matrix.start()
        matrix.hit(cell)
        if not matrix.has_ended:
            matrix.finish()
        rows += matrix.rows
        write_rows(matrix.rows)
    assert surprises(rows) == []
