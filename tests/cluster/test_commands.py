"""A run on hosts that commands of a user's function hold, each with a separate network and name."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import REPO, Start, assert_nothing_left
from tests.cluster.network import PATH
from tests.cluster.slurm import Cluster
from tests.cluster.test_slurm import curve


def within(rank: int, command: Sequence[str], *, prefixes: list[list[str]]) -> list[str]:
    """Return the command that runs another command on a node of the cluster."""
    return [*prefixes[rank], *command]


def ssh(rank: int, command: Sequence[str], *, nodes: list[str], options: list[str], folder: str) -> list[str]:
    """Return the command that runs another command on a node with OpenSSH, as in `docs/howto/hosts.md`."""
    return ["ssh", "-o", "BatchMode=yes", *options, nodes[rank], f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"]


@pytest.fixture
def ssh_settings(cluster: Cluster, tmp_path: Path) -> Iterator[list[str]]:
    """Start OpenSSH's server on two nodes; return the overrides of a run on them."""
    if shutil.which("sshd", path=PATH) is None:
        pytest.skip("needs sshd (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    server = ["Port=2222", f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/user.pub", "StrictModes=no", "UsePAM=no"]
    client = ["Port=2222", f"IdentityFile={tmp_path}/user", "StrictHostKeyChecking=no", f"UserKnownHostsFile={tmp_path}/known"]
    program = [str(shutil.which("sshd", path=PATH)), "-D", "-e", "-f", "/dev/null", *(f"-o{option}" for option in server)]
    log = (tmp_path / "sshd.log").open("wb")
    servers = [subprocess.Popen(cluster.on(node, *program), stderr=log, start_new_session=True) for node in ("n1", "n2")]
    deadline = time.monotonic() + 20
    while (tmp_path / "sshd.log").read_text().count("listening") < 2:
        assert time.monotonic() < deadline, (tmp_path / "sshd.log").read_text()
        time.sleep(0.1)
    options = {"nodes": ["n1", "n2"], "options": [f"-o{option}" for option in client], "folder": str(REPO)}
    try:
        yield [f"hosts.kind={__name__}:ssh", f"hosts.options={json.dumps(options)}", "hosts.trusted_network=true"]
    finally:
        for process in servers:
            process.terminate()
            process.wait()
        log.close()


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
def test_run_over_ssh(cluster: Cluster, start_run: Start, ssh_settings: list[str]) -> None:
    run = start_run("by_ssh", *ssh_settings)
    code, output = run.finish()
    assert code == 0, output
    assert len(curve(run)) == 4
    assert_nothing_left(cluster, run)


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
