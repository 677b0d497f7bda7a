"""A Slurm cluster for the tests of this folder, and runs on it."""

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

from tests.cluster.slurm import CONTROLLER, Cluster, missing
from titanrl.metrics.reading import read_metrics

REPO = Path(__file__).parents[2]
SMALL = (
    "device=cpu",
    "num_steps=4",
    "warm_start.num_steps=60",  # enough for groups with different rewards
    "warm_start.num_long_only_steps=40",
    "evaluation.num_prompts=32",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "logging.console=plain",
)
SLURM = ("hosts.kind=slurm", "hosts.trusted_network=true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give runs on the hosts, which share the cores of one machine, more than the usual limit of a test."""
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(1800))


@dataclass
class ClusterRun:
    """A command that runs on the cluster."""

    process: subprocess.Popen[str]
    run_dir: Path
    started: float

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps so far."""
        metrics = self.run_dir / "metrics.jsonl"
        return [row for row in read_metrics(metrics) if "reward/mean" in row] if metrics.exists() else []

    def wait_for_step(self, step: int, timeout_s: float = 600) -> None:
        """Wait until a step has finished."""
        deadline = time.monotonic() + timeout_s
        while not any(row["step"] >= step for row in self.steps()):
            assert self.process.poll() is None, f"the run ended before step {step}: {self.finish()[1]}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s"
            time.sleep(0.1)

    def finish(self, timeout_s: float = 600) -> tuple[int, str]:
        """Wait until the command exits; return exit code and output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        file = self.run_dir / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


Start = Callable[..., ClusterRun]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the cluster once for all tests."""
    if reason := missing():
        pytest.skip(f"a Slurm cluster on this machine {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def start_run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts a small quick start, with the controller on Slurm's controller node or on this machine."""
    folder, started = tmp_path_factory.getbasetemp(), list[ClusterRun]()
    environment = cluster.environment | {"PYTHONPATH": str(REPO)}

    def start(name: str, *overrides: str, command: tuple[str, ...] = ("train",), on_cluster: bool = True) -> ClusterRun:
        places = (f"name={name}", f"output_dir={folder / 'runs'}", f"cache_dir={folder / 'cache'}")
        arguments = ["--config", "configs/quickstart.yaml", *SMALL, *places, *(SLURM if on_cluster else ()), *overrides]
        program = [sys.executable, "-m", "titanrl.commands", *command, *arguments]
        process = subprocess.Popen(
            cluster.on(CONTROLLER, *program) if on_cluster else program,
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(ClusterRun(process, folder / "runs" / name, time.monotonic()))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
    if jobs := cluster.jobs():  # of a failed test, which must not fail the following ones
        cluster.slurm("scancel", *(job.split()[0] for job in jobs))
        cluster.wait_until_idle()


def assert_nothing_left(cluster: Cluster, run: ClusterRun, timeout_s: float = 20) -> None:
    """Check that within `timeout_s`, no process of a run is left on any node, and no job."""
    deadline = time.monotonic() + timeout_s
    while left := [*cluster.jobs(), *cluster.processes("titanrl.hosts.holder", str(run.run_dir))]:
        assert time.monotonic() < deadline, f"left after {timeout_s:g} s: {left}"
        time.sleep(0.2)
