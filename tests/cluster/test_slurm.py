"""Runs on a Slurm cluster of three nodes: `make test-cluster`."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import ClusterRun, Start, assert_nothing_left
from tests.cluster.slurm import Cluster

TWO_TRAINERS = ("trainer.parallelism.dp_shard=2",)
NAMED_S = 10.0
"""Seconds within which a dead host must be named."""


def curve(run: ClusterRun) -> list[tuple[int, float, float, float]]:
    return [(row["step"], row["reward/mean"], row["loss/total"], row["grad/norm"]) for row in run.steps()]


@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["killed", "unplugged"])
def test_dead_host_is_named_with_its_processes(cluster: Cluster, start_run: Start, fault: str) -> None:
    run = start_run(fault, "num_steps=5000", "faults.max_respawns=0")
    run.wait_for_step(1)
    _, node = (run.run_dir / "logs" / "trainer_0.pid").read_text().split()
    at = time.time()
    try:
        (cluster.kill_node if fault == "killed" else cluster.pull_cable)(node)
        code, output = run.finish()
    finally:
        if fault == "unplugged":
            cluster.plug_in(node)
        else:
            cluster.start_node(node)
    (event,) = run.events("host_lost")
    assert event["time"] - at < NAMED_S
    assert (event["host"], event["ranks"]) == (node, ["trainer_0"])
    assert code == 1
    assert f"host {node} exited or is unreachable" in output
    assert "on it: trainer_0" in output
    assert_nothing_left(cluster, run, timeout_s=90)
    cluster.wait_until_idle()


@pytest.mark.cluster
def test_submitted_run_ends_its_job(cluster: Cluster, start_run: Start) -> None:
    run = start_run("submitted", command=("submit",))
    code, output = run.finish()
    assert code == 0, output
    wait_until(lambda: not cluster.jobs(), 600)
    log = "".join(file.read_text() for file in Path(run.run_dir, "logs").glob("slurm_[0-9]*.log"))
    assert len(run.steps()) == 4, log
    (end,) = run.events("end")
    assert end["code"] == 0
    assert_nothing_left(cluster, run)


@pytest.mark.cluster
def test_cancelled_job_shuts_the_run_down_cleanly(cluster: Cluster, start_run: Start) -> None:
    run = start_run("cancelled", "num_steps=500")
    run.wait_for_step(1)
    cluster.slurm("scancel", cluster.jobs()[0].split()[0])
    code, output = run.finish()
    assert code == 143, output
    assert "Slurm terminates job" in output
    assert_nothing_left(cluster, run)


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signaled_controller_leaves_no_process_and_no_job(
    cluster: Cluster, start_run: Start, number: signal.Signals, code: int
) -> None:
    run = start_run(f"signal_{number}", "num_steps=500")
    run.wait_for_step(1)
    os.kill(run.process.pid, number)
    assert run.finish()[0] == code
    assert_nothing_left(cluster, run)


@pytest.mark.cluster
def test_requeued_run_resumes(cluster: Cluster, start_run: Start) -> None:
    options = ("hosts.slurm.requeue=true", "checkpoint.on_interrupt=true", "num_steps=400")
    run = start_run("requeued", *options, command=("submit",))
    assert run.finish()[0] == 0
    wait_until(lambda: len(run.steps()) > 2, 600)
    job = cluster.jobs()[0].split()[0]
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    wait_until(lambda: bool(run.events("resume")[1:]), 600)  # Slurm delays a requeued job by two minutes
    saved = run.events("resume")[-1]["step"]
    assert saved > 2
    wait_until(lambda: run.steps()[-1]["step"] > saved, 600)
    cluster.slurm("scancel", job)
    assert_nothing_left(cluster, run, timeout_s=60)


@pytest.mark.cluster
def test_interrupt_in_the_queue_cancels_the_job(cluster: Cluster, start_run: Start) -> None:
    cluster.slurm("scontrol", "update", "NodeName=n[1-3]", "State=DRAIN", "Reason=test")
    try:
        run = start_run("queued")
        wait_until(lambda: any("PENDING" in job for job in cluster.jobs()), 60)
        time.sleep(1)
        os.kill(run.process.pid, signal.SIGINT)
        code, output = run.finish()
        assert code == 130, output
        assert "waiting for Slurm job" in output
        assert_nothing_left(cluster, run)
    finally:
        cluster.slurm("scontrol", "update", "NodeName=n[1-3]", "State=RESUME")


@pytest.mark.cluster
def test_refused_job_is_an_error_without_leftovers(cluster: Cluster, start_run: Start) -> None:
    run = start_run("refused", "hosts.slurm.partition=nowhere")
    code, output = run.finish()
    assert code == 1
    assert "hosts.slurm: sbatch refused the job" in output
    assert "invalid partition specified: nowhere" in output
    assert_nothing_left(cluster, run)


@pytest.mark.cluster
def test_curve_on_three_nodes_equals_one_machine(cluster: Cluster, start_run: Start) -> None:
    here = start_run("here", *TWO_TRAINERS, on_cluster=False)
    code, output = here.finish()
    assert code == 0, output
    places = (
        "hosts.trainer_hosts=2",
        "placement.interface=eth0",
        "placement.cpus.trainer=numa",
        "placement.cpus.rollout=split",
    )
    there = start_run("there", *TWO_TRAINERS, *places)
    code, output = there.finish()
    assert code == 0, output
    assert "3 hosts (n1, n2, n3)" in output
    assert len(curve(there)) == 4
    assert curve(there) == curve(here)
    assert {row["sync/network_bytes"] for row in here.steps()} == {0.0}
    assert all(row["sync/network_bytes"] == row["sync/bytes"] for row in there.steps()), "the generator's host receives it once"
    assert_nothing_left(cluster, there)


@pytest.mark.cluster
def test_missing_network_interface_is_named(cluster: Cluster, start_run: Start) -> None:
    run = start_run("run", *TWO_TRAINERS, "hosts.trainer_hosts=2", "placement.interface=eth9")
    code, output = run.finish()
    assert code == 1, output
    assert "Unable to find address for: eth9 (raised in trainer_" in output
    assert_nothing_left(cluster, run)


def wait_until(is_true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.2)
