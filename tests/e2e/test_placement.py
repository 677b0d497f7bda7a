"""Runs on several emulated hosts: each role on its host, the same curve as on one machine, weights once per host."""

import os

import psutil
import pytest

from tests.e2e.conftest import Command, Finished, Start
from titanrl.processes.bootstrap import NAME

SAME = ("trainer.parallelism.dp_shard=2", "rollout.num_workers=2", "num_steps=12")
"""Overrides of every run of the first test."""


def curve(run: Finished) -> list[tuple[float, ...]]:
    """Return the metrics of each step that depend on every token and every weight."""
    assert run.code == 0, run.output
    return [(row["reward/mean"], row["loss/policy"], row["grad/norm"], row["mismatch/logprob_abs_max"]) for row in run.steps]


def host_of(command: Command, role: str, rank: int = 0) -> str:
    """Return mesh and index of the emulated host that started a process, or its stand-in if it is a fork of a template."""
    hosts = [child for child in psutil.Process(command.process.pid).children() if "monarch_host" in " ".join(child.cmdline())]
    name = f"{role}_{rank}"
    (host,) = [host for host in hosts if any(child.environ().get(NAME) == name for child in host.children(recursive=True))]
    return host.cmdline()[3].rpartition("/")[2]


def received(run: Finished) -> list[float]:
    """Return the share of the weights that generators received over the network, for each version."""
    return [row["sync/network_bytes"] / row["sync/bytes"] for row in run.steps if "sync/bytes" in row]


@pytest.mark.slow
def test_every_placement_reproduces_the_curve_of_one_machine(start_run: Start, plain_run: Finished) -> None:
    one = start_run("one-machine", *plain_run.as_start, *SAME).finish()
    assert set(received(one)) == {0.0}
    hosts = ("hosts={kind: process, trainer_hosts: 2}", "placement.store=trainers", "placement.cpus.rollout=split")
    command = start_run("spread", *plain_run.as_start, *SAME, *hosts)
    command.wait_for_step(1)
    places = {role: host_of(command, role) for role in ("generator_0", "rollout_0", "rollout_1", "store")}
    trainers = [host_of(command, "trainer", rank) for rank in (0, 1)]
    cores = sorted(os.sched_getaffinity(0))
    shares = [command.process_of(f"rollout_{number}").cpu_affinity() for number in (0, 1)]
    spread = command.finish()
    assert trainers == ["trainers-0", "trainers-1"]
    assert places == {
        "generator_0": "generators-0",
        "rollout_0": "generators-0",
        "rollout_1": "generators-0",
        "store": "trainers-0",
    }
    assert shares == [cores[: len(cores) // 2], cores[len(cores) // 2 :]]
    assert curve(spread) == curve(one)
    assert set(received(spread)) == {1.0}
    beside = start_run("beside", *plain_run.as_start, *SAME, hosts[0], "placement.generator=trainers").finish()
    assert curve(beside) == curve(one)
    (share,) = set(received(beside))
    assert 0.4 < share < 0.6, "the rank on the generator's host is read from its arena"


@pytest.mark.slow
def test_each_generator_host_receives_each_version_once(start_run: Start, plain_run: Finished) -> None:
    hosts = "hosts={kind: process, generator_hosts: 2}"
    replicas = ("generator.replicas=3", "placement.replicas_per_host=[2,1]", "rollout.num_workers=2")
    command = start_run("two-generator-hosts", *plain_run.as_start, hosts, *replicas, "num_steps=12")
    command.wait_for_step(1)
    roles = ("generator_0", "generator_1", "generator_2", "rollout_0", "rollout_1")
    places = [host_of(command, role) for role in roles]
    run = command.finish()
    assert run.code == 0, run.output
    assert places == ["generators-0", "generators-0", "generators-1", "generators-0", "generators-1"]
    assert set(received(run)) == {2.0}
