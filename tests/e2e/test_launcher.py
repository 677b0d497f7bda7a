"""Runs under a launcher, with two processes on this machine. `tests/cluster/test_launcher.py` uses separate hosts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import REPO, SMALL, Finished, shared_folder
from tests.ports import free_port
from titanrl.carriers.record import read_lines
from titanrl.metrics.reading import read_metrics

pytestmark = pytest.mark.timeout(1200)  # runs on a busy machine
LAUNCHER = ("hosts.kind=launcher", "hosts.trusted_network=true", "device=cpu")
PLATFORM = "platform"
"""Launcher that only sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that exit codes come from the commands."""


class Launched:
    """A run of two processes."""

    def __init__(self, run_dir: Path, launcher: str, arguments: list[str]) -> None:
        self.run_dir = run_dir
        port = str(free_port())
        program = ["-m", "titanrl.grpo", *arguments]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        if launcher == "torchrun":
            options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
            self.processes = [self._start([*torchrun, f"--node-rank={rank}", *program]) for rank in range(2)]
        elif launcher == "mpirun":
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
            self.processes = [self._start([*mpirun, *program])]
        else:
            self.processes = [self._start([sys.executable, *program], **environment, RANK=str(rank)) for rank in range(2)]
        self.descendants: set[psutil.Process] = set()

    def _start(self, command: list[str], **environment: str) -> "subprocess.Popen[str]":
        log = (self.run_dir.parent / f"{self.run_dir.name}.log").open("a")
        return subprocess.Popen(
            command, cwd=REPO, env=os.environ | environment, stdout=log, stderr=log, text=True, start_new_session=True
        )

    def output(self) -> str:
        return (self.run_dir.parent / f"{self.run_dir.name}.log").read_text()

    def steps(self) -> list[dict[str, Any]]:
        metrics = self.run_dir / "metrics.jsonl"
        return [row for row in read_metrics(metrics) if "reward/mean" in row] if metrics.exists() else []

    def restarts(self) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run_dir / "events.jsonl") if event["kind"] == "restart"]

    def wait_for(self, what: str, is_true: Callable[[], bool], timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert all(process.poll() is None for process in self.processes), f"ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s: {self.output()}"
            time.sleep(0.1)
        for process in self.processes:
            self.descendants |= {psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}

    def codes(self, timeout_s: float = 600) -> list[int]:
        for process in self.processes:
            process.wait(timeout_s)
        return [process.returncode for process in self.processes]

    def leftovers(self, timeout_s: float = 60) -> list[str]:
        _, alive = psutil.wait_procs(self.descendants, timeout=timeout_s)
        return [str(process) for process in alive]


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    folder, started = shared_folder(tmp_path_factory), list[Launched]()

    def start(name: str, launcher: str, *overrides: str) -> Launched:
        (folder / "runs").mkdir(exist_ok=True)
        places = [f"name={name}", f"output_dir={folder / 'runs'}", f"cache_dir={folder / 'cache'}"]
        arguments = ["--config", "configs/quickstart.yaml", *SMALL, *LAUNCHER, *places, *overrides]
        started.append(Launched(folder / "runs" / name, launcher, arguments))
        return started[-1]

    yield start
    for run in started:
        for process in run.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def curve(rows: list[dict[str, Any]]) -> list[tuple[int, float, float, float]]:
    return [(row["step"], row["reward/mean"], row["loss/total"], row["grad/norm"]) for row in rows]


def test_run_by_torchrun_matches_one_machine_and_ends_with_a_lost_host(launch: Launch, plain_run: Finished) -> None:
    run = launch("by_torchrun", "torchrun", "num_steps=5000", "faults.max_respawns=0")
    run.wait_for("step 4", lambda: len(run.steps()) >= 4)
    assert curve(run.steps()[:4]) == curve(plain_run.steps)
    at = time.monotonic()
    lost = psutil.Process(run.processes[1].pid)
    for process in [lost, *lost.children(recursive=True)]:
        process.kill()
    assert run.processes[0].wait(120) == 1
    assert time.monotonic() - at < 100
    # Both hosts have one name here, so the controller also sees the host's processes die, and the first of these ends the run.
    (lost_host,) = [event for event in read_lines(run.run_dir / "events.jsonl") if event["kind"] == "host_lost"]
    assert "(rank 1) exited or is unreachable" in lost_host["cause"]
    assert run.leftovers() == []


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (apt-get install openmpi-bin)")
def test_missing_model_ends_all_processes_of_mpirun_with_2(launch: Launch, tmp_path: Path) -> None:
    run = launch("no_model", "mpirun", "warm_start=null", f"model.path={tmp_path}/none")
    assert run.codes() == [2]
    assert f"{tmp_path}/none" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_run_restarts_on_the_same_hosts_and_obeys_a_signal_to_one_of_them(launch: Launch) -> None:
    options = ("num_steps=5000", "checkpoint.every_steps=1", "checkpoint.on_interrupt=true", "faults.max_respawns=3")
    run = launch("restarts", PLATFORM, *options)
    run.wait_for("step 2", lambda: len(run.steps()) >= 2)
    trainer = int((run.run_dir / "logs" / "trainer_0.pid").read_text().split()[0])
    os.kill(trainer, signal.SIGKILL)
    run.wait_for("restart", lambda: bool(run.restarts()))
    (restart,) = run.restarts()
    assert restart["part"] == "trainer"
    run.wait_for("2 more steps", lambda: len(run.steps()) >= restart["step"] + 2)
    os.killpg(run.processes[1].pid, signal.SIGTERM)
    assert run.codes() == [143, 143], run.output()
    assert "saved step" in run.output()
    steps = [row["step"] for row in run.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert run.leftovers() == []
