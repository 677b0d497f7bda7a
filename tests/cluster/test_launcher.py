"""Runs that torchrun and srun start on several hosts, each with separate network, name, processes and shared memory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import REPO, SMALL, Start, assert_nothing_left
from tests.cluster.slurm import CONTROLLER, Cluster
from tests.cluster.test_slurm import NAMED_S, TWO_TRAINERS, curve
from titanrl.metrics.reading import read_metrics

LAUNCHER = ("hosts.kind=launcher", "hosts.trusted_network=true")
LIMIT_S = 600.0


@dataclass
class Launched:
    """The processes of a launcher: one for each host with torchrun, one in all with srun."""

    processes: list["subprocess.Popen[bytes]"]
    run_dir: Path

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Process of rank 0."""
        return self.processes[0]

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps so far."""
        metrics = self.run_dir / "metrics.jsonl"
        return [row for row in read_metrics(metrics) if "reward/mean" in row] if metrics.exists() else []

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has finished."""
        deadline = time.monotonic() + LIMIT_S
        while not any(row["step"] >= step for row in self.steps()):
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def codes(self) -> list[int]:
        """Wait until all processes exit; return the exit codes by rank."""
        return [process.wait(LIMIT_S) for process in self.processes]

    def output(self) -> str:
        """Return everything that the hosts have printed."""
        return "".join(file.read_text() for file in sorted(self.run_dir.parent.glob(f"{self.run_dir.name}.*.out")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        events = map(json.loads, (self.run_dir / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["kind"] == kind]


Launch = Callable[..., Launched]


@pytest.fixture
def launch(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that starts a small quick start with torchrun on nodes, or with srun."""
    folder, started = tmp_path_factory.getbasetemp(), list["subprocess.Popen[bytes]"]()

    def popen(log: Path, command: list[str]) -> None:
        environment = cluster.environment | {"PYTHONPATH": str(REPO)}
        started.append(
            subprocess.Popen(
                command, cwd=REPO, env=environment, stdout=log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
            )
        )

    def start(name: str, *overrides: str, nodes: tuple[str, ...] = ("n1", "n2"), by: str = "torchrun") -> Launched:
        (folder / "runs").mkdir(exist_ok=True)
        places = (f"name={name}", f"output_dir={folder / 'runs'}", f"cache_dir={folder / 'cache'}")
        program = ["-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *SMALL, *places, *LAUNCHER, *overrides]
        first = len(started)
        if by == "srun":
            srun = ["srun", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--mpi=none", sys.executable]
            popen(folder / "runs" / f"{name}.srun.out", cluster.on(CONTROLLER, *srun, *program))
        else:
            options = [f"--nnodes={len(nodes)}", "--nproc-per-node=1", f"--master-addr={nodes[0]}", "--master-port=29511"]
            for rank, node in enumerate(nodes):
                torchrun = [sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={rank}"]
                popen(folder / "runs" / f"{name}.{node}.out", cluster.machine(node, *torchrun, *program))
        return Launched(started[first:], folder / "runs" / name)

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.cluster
def test_curve_on_two_torchrun_hosts_equals_one_machine(cluster: Cluster, start_run: Start, launch: Launch) -> None:
    here = start_run("one", on_cluster=False)
    code, output = here.finish()
    assert code == 0, output
    there = launch("two")
    assert there.codes() == [0, 0], there.output()
    assert "2 hosts of the launcher (n1, n2)" in there.output()
    assert len(curve(here)) == 4
    assert curve(there) == curve(here)
    assert_nothing_left(cluster, there)


@pytest.mark.cluster
def test_curve_on_three_torchrun_hosts_equals_one_machine(cluster: Cluster, start_run: Start, launch: Launch) -> None:
    here = start_run("one_sharded", *TWO_TRAINERS, on_cluster=False)
    code, output = here.finish()
    assert code == 0, output
    there = launch("three", *TWO_TRAINERS, "hosts.trainer_hosts=2", nodes=("n1", "n2", "n3"))
    assert there.codes() == [0, 0, 0], there.output()
    assert curve(there) == curve(here)
    assert_nothing_left(cluster, there)


@pytest.mark.cluster
def test_srun_starts_the_run_on_its_nodes(cluster: Cluster, launch: Launch) -> None:
    run = launch("by_srun", by="srun")
    assert run.codes() == [0], run.output()
    assert len(run.steps()) == 4
    assert_nothing_left(cluster, run)


@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["killed", "unplugged"])
def test_dead_host_is_named(cluster: Cluster, launch: Launch, fault: str) -> None:
    run = launch(f"host_{fault}", "num_steps=5000", "faults.max_respawns=0")
    run.wait_for_step(1)
    at = time.time()
    try:
        if fault == "killed":
            run.processes[1].kill()
        else:
            cluster.pull_cable("n2")
        run.process.wait(60)
    finally:
        cluster.plug_in("n2")
    (event,) = run.events("host_lost")
    assert event["time"] - at < NAMED_S
    assert (event["host"], event["ranks"]) == ("n2", ["generator_0_0", "rollout_0_0"])
    assert run.process.returncode != 0
    assert "host n2 (rank 1) exited or is unreachable" in run.output()
    if fault == "unplugged":
        assert run.processes[1].wait(90) != 0
    assert_nothing_left(cluster, run, timeout_s=60)


@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["killed", "unplugged"])
def test_losing_the_first_host_ends_the_others(cluster: Cluster, launch: Launch, fault: str) -> None:
    run = launch(f"first_{fault}", "num_steps=5000")
    run.wait_for_step(1)
    try:
        if fault == "killed":
            run.process.kill()
        else:
            cluster.pull_cable("n1")
        assert run.processes[1].wait(90) != 0  # without a sign of life, after 60 s
    finally:
        cluster.plug_in("n1")
    if fault == "unplugged":
        assert run.process.wait(90) != 0
    assert_nothing_left(cluster, run)
