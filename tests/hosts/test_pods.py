"""Pods as hosts, with a small API server whose pods are processes of this machine. `tests/cluster` isolates them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.cluster.containers import REPO, Processes
from tests.cluster.kubernetes import Kubernetes
from titanrl.commands.jobs import objects, text_of
from titanrl.config import load_config
from titanrl.hosts.kubernetes import RUN_LABEL

NAMED_S = 30.0
"""Seconds within which a lost pod is named, even on a busy machine; without a watch, it would be found after a minute."""
PODS = (
    "device=cpu",
    "hosts.kind=kubernetes",
    "hosts.trusted_network=true",
    "hosts.trainer_hosts=2",
    "trainer.parallelism.dp_shard=2",
    "hosts.kubernetes.image=titan",
    "hosts.kubernetes.volumes=[{claim: shared, mount_path: /mnt/titan}]",
)
RIGHTS = next(one["rules"] for one in objects(load_config("configs/quickstart.yaml", PODS), "") if one["kind"] == "Role")
"""Permissions of the controller: the Role that `titanrl manifest` prints."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    cluster = Kubernetes(tmp_path, Processes(tmp_path))
    cluster.start()
    cluster.allow("mine", RIGHTS)
    yield cluster
    cluster.stop()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster: Kubernetes) -> Iterator[Start]:
    """Return a function that starts the program that acquires the hosts."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, *overrides: str, token: str = "mine") -> subprocess.Popen[str]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "KUBECONFIG": str(cluster.kubeconfig(token))}
        command = [sys.executable, "-m", "tests.hosts.pods", mode, *PODS, *overrides]
        process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[str]) -> str:
    output = process.stdout.read()  # `communicate` would miss the lines that were read ahead
    process.wait(120)
    return output


def test_lost_pods_are_named_within_seconds_and_all_are_deleted_with_the_run(cluster: Kubernetes, start: Start) -> None:
    process = start("wait2")
    lines = iter(process.stdout.readline, "")
    begin = "".join(until(lines, "actors: 3"))
    assert "waiting for the pods of MonarchMesh quickstarttrainers" in begin
    assert "Kubernetes: 3 pods (quickstarttrainers" in begin, begin
    (victim,) = (name for name in cluster.names("Pod") if name.endswith("-1"))
    killed = time.monotonic()
    cluster.kill(victim)
    lost = until(lines, "lost: ")[-1]
    assert time.monotonic() - killed < NAMED_S
    assert f"pod {victim} on node2 exited or is unreachable; Error, exit code 137" in lost
    assert "states: False True False" in until(lines, "states: ")[-1]
    victim = next(name for name in cluster.names("Pod") if "generators" in name)
    deleted = time.monotonic()
    cluster.delete("Pod", victim)
    lost = until(lines, "lost: ")[-1]
    assert time.monotonic() - deleted < NAMED_S
    assert f"pod {victim} on node1 exited" in lost
    assert "the pod is being deleted" in lost or "the pod was deleted" in lost
    assert finish(process).rstrip().endswith("killed")
    assert_no_pods(cluster)


EXAMINED = ["quickstarttrainers", "quickstarttrainers", "quickstartgenerators"]
MESHES = ["quickstartgenerators", "quickstarttrainers"]


def test_pods_of_a_manifest_serve_one_run_after_the_other_until_one_does_not_keep_them(
    cluster: Kubernetes, start: Start, tmp_path: Path
) -> None:
    apply_meshes(cluster)
    first = start("wait")
    until(iter(first.stdout.readline, ""), "actors: 3")
    assert "serves another run (got quickstart@" in finish(start("examine", f"output_dir={tmp_path}/runs"))
    assert first.poll() is None
    assert cluster.names("MonarchMesh") == MESHES
    assert cluster.names("Pod") == ["quickstartgenerators-0", "quickstarttrainers-0", "quickstarttrainers-1"]
    first.send_signal(signal.SIGKILL)
    first.wait()
    logs = [cluster.folder / f"{name}.log" for name in cluster.names("Pod")]
    cluster.wait("free pods", lambda: all("ended serving" in log.read_text() for log in logs), 60)
    assert_examined(finish(start("examine", *unready(tmp_path))))
    assert cluster.names("MonarchMesh") == MESHES
    assert "actors: 3" in finish(start("once", "hosts.kubernetes.keep=true")), "the pods serve a run afterwards"
    assert cluster.names("MonarchMesh") == MESHES
    log = (cluster.folder / "quickstartgenerators-0.log").read_text()
    assert log.count("ended serving quickstart@") == 3, "the killed run, the examination and the last run"
    assert log.count("waits for a controller") == 1, "the pod was not started again"
    assert "actors: 3" in finish(start("once"))
    assert not any(one.startswith("POST") for one in cluster.requests)
    assert_no_pods(cluster)


def unready(folder: Path) -> tuple[str, ...]:
    return (f"output_dir={folder}/runs", f"model.path={folder}/none", "warm_start=null")


def assert_examined(output: str) -> None:
    """Check that the doctor examined every pod and found the missing model on each."""
    found = json.loads(output.partition("checkup: ")[2])
    names = [host["node"] for host in found["hosts"]]
    assert [name[:-2].rstrip("0123456789abcdef") for name in names] == EXAMINED
    assert [host["needs"]["roles"] for host in found["hosts"]] == ["controller, trainer", "trainer", "rollout, generators"]
    assert {host["report"]["versions"]["torchmonarch"] for host in found["hosts"]} == {version("torchmonarch")}
    assert len(found["links"]) == 6
    assert all(link["closed"] == {} and link["bytes_per_s"] > 0 for link in found["links"])
    problems = [
        (one["host"], one["what"]) for one in found["problems"] if one["fix"] != "Check its network"
    ]  # of a busy machine
    assert problems == [(name, "model.path is missing") for name in names]


def assert_no_pods(cluster: Kubernetes) -> None:
    cluster.wait("no pods", lambda: not cluster.objects("Pod") and not cluster.objects("MonarchMesh"), 60)


def test_missing_image_is_named_with_its_pod(cluster: Kubernetes, start: Start) -> None:
    output = finish(start("once", "hosts.kubernetes.image=missing/titan"))
    assert 'ImagePullBackOff (Back-off pulling image "missing/titan")' in output
    assert "error: hosts.kubernetes: pod quickstart" in output
    assert cluster.objects("MonarchMesh") == []


def test_pods_that_start_too_slowly_are_reported_with_their_state(cluster: Kubernetes, start: Start) -> None:
    slow = "hosts.kubernetes.python=sleep"  # it ends at once, and again
    output = finish(start("once", slow, "hosts.kubernetes.start_limit_s=2.0"))
    assert "hosts.kubernetes.start_limit_s: the pods were not ready in time: MonarchMesh quickstart" in output
    assert cluster.objects("MonarchMesh") == []


def test_missing_permission_is_named(cluster: Kubernetes, start: Start) -> None:
    cluster.allow("weak", [RIGHTS[1]])
    output = finish(start("once", token="weak"))
    assert "the cluster refuses to get MonarchMesh quickstarttrainers in namespace research (got 403" in output
    assert "Give the service account of the controller the Role that `titanrl manifest` prints." in output


def test_resources_of_another_size_and_of_another_run_are_refused(cluster: Kubernetes, start: Start) -> None:
    apply_meshes(cluster, "hosts.trainer_hosts=1")
    output = finish(start("once"))
    assert "hosts.trainer_hosts: MonarchMesh quickstarttrainers has 1, but the run needs 2" in output
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "titanrl-quickstart-abcde", "uid": "another"}
    cluster.patch("MonarchMesh", "quickstarttrainers", {"metadata": {"ownerReferences": [owner]}})
    assert "MonarchMesh quickstarttrainers belongs to titanrl-quickstart-abcde" in finish(start("once"))
    assert cluster.names("MonarchMesh") == MESHES, "they stay"


def apply_meshes(cluster: Kubernetes, *overrides: str) -> None:
    config = load_config("configs/quickstart.yaml", [*PODS, *overrides])
    meshes = [one for one in objects(config, "") if one["kind"] == "MonarchMesh"]
    assert all(one["metadata"]["labels"][RUN_LABEL] == "titanrl-quickstart" for one in meshes)
    cluster.apply(text_of(meshes))
    assert len(list(yaml.safe_load_all(text_of(meshes)))) == 2


def until(lines: Iterator[str], mark: str) -> list[str]:
    """Return the lines up to and including the first that contains a mark."""
    seen = []
    for line in lines:
        seen.append(line)
        if mark in line:
            return seen
    raise AssertionError(f"no line with {mark!r}: {''.join(seen)}")
