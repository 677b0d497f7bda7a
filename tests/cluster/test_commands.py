"""A run on hosts that commands of a user's function hold, each with a separate network and name."""

import json
import os
import signal
from collections.abc import Sequence

import pytest

from tests.cluster.conftest import Start, assert_nothing_left
from tests.cluster.slurm import Cluster
from tests.cluster.test_slurm import curve


def within(rank: int, command: Sequence[str], *, prefixes: list[list[str]]) -> list[str]:
    """Return the command that runs another command on a node of the cluster."""
    return [*prefixes[rank], *command]


def settings(cluster: Cluster, *nodes: str) -> list[str]:
    prefixes = json.dumps([cluster.on(node) for node in nodes])
    return [f"hosts.kind={__name__}:within", f"hosts.options={{prefixes: {prefixes}}}", "hosts.trusted_network=true"]


@pytest.mark.cluster
def test_curve_on_hosts_of_commands_equals_one_machine(cluster: Cluster, start_run: Start) -> None:
    here = start_run("alone", on_cluster=False)
    code, output = here.finish()
    assert code == 0, output
    there = start_run("by_commands", *settings(cluster, "n1", "n2"))
    code, output = there.finish()
    assert code == 0, output
    assert "2 hosts (n1, n2)" in output
    assert len(curve(here)) == 4
    assert curve(there) == curve(here)
    assert_nothing_left(cluster, there)


@pytest.mark.cluster
def test_dead_host_of_a_command_is_replaced(cluster: Cluster, start_run: Start) -> None:
    two = ("generator.replicas=2", "hosts.generator_hosts=2", "num_steps=8", "rollout.num_workers=2")
    run = start_run("command_lost", *two, *settings(cluster, "n1", "n2", "n3"))
    run.wait_for_step(1)
    (holder,) = cluster.processes("titanrl.hosts.holder read 2")
    os.kill(int(holder.split()[0]), signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    (lost,) = run.events("host_lost")
    assert "host n3 (rank 2) exited or is unreachable" in lost["cause"]
    assert run.steps()[-1]["step"] == 8
    assert_nothing_left(cluster, run)
