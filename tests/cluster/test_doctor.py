"""`titanrl doctor --config` on three hosts, one of which has a real problem with its files, packages, limits or network."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import REPO
from tests.cluster.network import firewall
from tests.cluster.slurm import CONTROLLER, PREFIX, Cluster

NODES = ("n1", "n2", "n3")
OPTIONS = ("device=cpu", "hosts.trusted_network=true", "hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2")
LIMIT_S = 120.0

Verdict = tuple[int, list[str], dict[str, Any]]
"""Exit code, lines of the verdict, and the complete report."""


@pytest.fixture
def doctor(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Verdict]]:
    """Return a function that examines three hosts; `prepare` changes one of them beforehand."""
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
        out, err = subprocess.PIPE, (tmp_path / "errors").open("ab")
        process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=out, stderr=err, text=True)
        started.append(process)
        return process

    def examine(*overrides: str, prepare: Mapping[str, str] | None = None, by: str = "torchrun") -> Verdict:
        environment = cluster.environment | {"PYTHONPATH": str(REPO)}
        program = ["-m", "titanrl.commands", "doctor", "--json", "--config", "quickstart", *OPTIONS, *overrides]
        program += [f"output_dir={tmp_path}/runs"]
        if by == "slurm":
            rank_0 = run(cluster.on(CONTROLLER, sys.executable, *program, "hosts.kind=slurm"), environment)
        else:
            program += ["hosts.kind=launcher"]
            variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29512"}
            for rank, node in enumerate(NODES):
                command = cluster.machine(node, sys.executable, *program, prepare=(prepare or {}).get(node, "true"))
                run(command, environment | variables | {"RANK": str(rank)})
            rank_0 = started[0]
        output, _ = rank_0.communicate(timeout=LIMIT_S)
        codes = {process.wait(LIMIT_S) for process in started}
        assert len(codes) == 1, f"the ranks end with {codes}: {(tmp_path / 'errors').read_text()}"
        assert output, (tmp_path / "errors").read_text()
        found = json.loads(output)
        lines = [f"{problem['host']}: {problem['what']}" for problem in found["problems"] if problem["level"] == "error"]
        return rank_0.returncode, lines, found

    yield examine
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.cluster
@pytest.mark.parametrize("by", ["torchrun", "slurm"])
def test_healthy_hosts_are_ready(doctor: Callable[..., Verdict], by: str) -> None:
    code, lines, found = doctor(by=by)
    assert (code, lines) == (0, [])
    assert [host["node"] for host in found["hosts"]] == list(NODES)
    pairs = {(link["source"], link["target"]) for link in found["links"]}
    assert {(a, b) for a in NODES for b in NODES if a != b} <= pairs
    assert all(link["bytes_per_s"] > 1e6 for link in found["links"])
    assert all(abs(host["clock_s"]) < 1 for host in found["hosts"])  # one kernel, one clock


@pytest.mark.cluster
def test_different_torch_version_on_one_host_is_named(doctor: Callable[..., Verdict], tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch-1.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    code, lines, found = doctor(prepare={"n2": f"export PYTHONPATH={fake.parent}:$PYTHONPATH"})
    version = found["hosts"][0]["report"]["versions"]["torch"]
    assert (code, lines) == (1, [f"n2: torch 1.0.0, but n1, n3 have {version}"])


@pytest.mark.cluster
def test_missing_model_on_one_host_is_named(doctor: Callable[..., Verdict], tmp_path: Path) -> None:
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    shutil.copy(REPO / "configs" / "quickstart.yaml", model / "config.yaml")
    hidden = f"mount -t tmpfs tmpfs {model.parent}"
    code, lines, _ = doctor("warm_start=null", f"model.path={model}", prepare={"n3": hidden})
    assert (code, lines) == (1, ["n3: model.path is missing"])


@pytest.mark.cluster
def test_output_dir_not_shared_with_one_host_is_named(doctor: Callable[..., Verdict], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, lines, _ = doctor(prepare={"n2": f"mount -t tmpfs tmpfs {tmp_path}/runs"})
    assert code == 1
    assert lines == ["n2: output_dir is not shared with the controller: a file that the controller wrote there is not visible"]


@pytest.mark.cluster
def test_closed_ports_of_one_host_are_named(doctor: Callable[..., Verdict]) -> None:
    with firewall(f"{PREFIX}-n3", "--syn", "-j", "DROP"):
        code, lines, _ = doctor()
    assert (code, lines) == (1, ["n3: its TCP ports are closed for n1, n2 (no answer)"])


@pytest.mark.cluster
def test_closed_port_of_monarch_is_named(doctor: Callable[..., Verdict]) -> None:
    with firewall(f"{PREFIX}-n2", "--dport", "22222", "-j", "REJECT", "--reject-with", "tcp-reset"):
        code, lines, _ = doctor(by="slurm")
    closed = "n2: port 22222 (hosts.slurm.port) is closed for ctl (controller), n1, n3 (Connection refused)"
    assert (code, lines) == (1, [closed])


@pytest.mark.cluster
def test_too_little_memory_on_one_host_is_named(doctor: Callable[..., Verdict]) -> None:
    groups = Path("/sys/fs/cgroup/memory")
    if not (groups / "memory.limit_in_bytes").exists():
        pytest.skip("needs cgroups of version 1, to limit the memory of a host")
    group = groups / f"{PREFIX}-n2"
    group.mkdir()
    # The /sys of a network namespace has no cgroups.
    mounted = f"mount -t tmpfs tmpfs {groups.parent}; mkdir {groups}; mount -t cgroup -o memory cgroup {groups}"
    try:
        (group / "memory.limit_in_bytes").write_text(str(480 << 20))
        code, lines, _ = doctor(prepare={"n2": f"{mounted}; echo $$ > {group}/cgroup.procs"})
    finally:
        group.rmdir()
    (line,) = lines
    assert code == 1
    assert line.startswith("n2: 503.3 MB of memory (the memory limit of its cgroup), but its roles (trainer) need ")
