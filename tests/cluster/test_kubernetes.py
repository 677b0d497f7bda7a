"""Runs on a small Kubernetes, whose pods are namespaces of this machine: `make test-cluster`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import network
from tests.cluster.conftest import SMALL
from tests.cluster.containers import API_ADDRESS, API_PORT, REPO, Machines
from tests.cluster.kubernetes import Kubernetes, make_certificate
from tests.cluster.network import Network
from titanrl.metrics.reading import read_metrics

DESK, DESK_ADDRESS = "desk", "10.78.0.2"
"""A machine outside the cluster that can reach its pods."""
PODS = (
    "hosts.kind=kubernetes",
    "hosts.trusted_network=true",
    "hosts.kubernetes.image=titan",
    "hosts.kubernetes.namespace=research",
    "hosts.kubernetes.volumes=[{claim: shared, mount_path: /mnt/titan}]",
    "hosts.kubernetes.keep_finished_s=2",
)
TWO_TRAINERS = ("trainer.parallelism.dp_shard=2",)
NAMED_S = 10.0
"""Seconds within which a dead pod must be named."""
START_S = 600.0
"""Seconds within which a run must have taken its first steps, even on a busy machine."""


class Lab:
    """The cluster, and a machine outside of it."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(f"titanrl{os.getpid()}k")
        self.machines = Machines(folder, self.network)
        self.cluster = Kubernetes(folder, self.machines)
        self.folder, self.shared = folder, folder / "claims" / "shared"
        self.shared.mkdir(parents=True)
        self.at_desk: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        make_certificate(self.folder, API_ADDRESS)
        self.network.start()
        self.network.add("api", API_ADDRESS, {})
        self.network.add(DESK, DESK_ADDRESS, {DESK: DESK_ADDRESS})
        self.cluster.start(API_ADDRESS, API_PORT, self.network.space("api"), self.folder)
        self.cluster.allow(
            "of the desk", [{"apiGroups": ["*", "monarch.pytorch.org", ""], "resources": RESOURCES, "verbs": VERBS}]
        )

    def stop(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not started
            self.cluster.stop()
        self.network.stop()

    def manifest(self, name: str, *overrides: str) -> str:
        """Return what `titanrl manifest` prints."""
        arguments = ["--config", "configs/quickstart.yaml", *SMALL, f"name={name}", *PODS, *overrides]
        command = [sys.executable, "-m", "titanrl.commands", "manifest", *arguments]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout

    def start_at_desk(self, program: str, name: str, *overrides: str) -> subprocess.Popen[bytes]:
        """Start `titanrl train` or `titanrl doctor` on the machine outside the cluster."""
        prepare = f"mount -t tmpfs tmpfs /mnt && mkdir /mnt/titan && mount --bind {self.shared} /mnt/titan && cd /mnt/titan"
        arguments = ["--config", f"{REPO}/configs/quickstart.yaml", *SMALL, f"name={name}", *PODS, *overrides]
        command = self.network.machine(DESK, sys.executable, "-m", "titanrl.commands", program, *arguments, prepare=prepare)
        environment = os.environ | {
            "PYTHONPATH": str(REPO),
            "PATH": network.PATH,
            "KUBECONFIG": str(self.cluster.kubeconfig("of the desk", self.folder)),
        }
        log = (self.folder / f"{name}.log").open("wb")
        self.at_desk.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        )
        return self.at_desk[-1]

    def doctor(self, name: str, *overrides: str) -> tuple[int, str]:
        """Run `titanrl doctor` on the machine outside the cluster; return its exit code and output."""
        code = self.start_at_desk("doctor", name, *overrides).wait(START_S)
        return code, self.log(name)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the metrics of the steps of a run so far."""
        metrics = self.shared / "runs" / name / "metrics.jsonl"
        return [row for row in read_metrics(metrics) if "reward/mean" in row] if metrics.exists() else []

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        file = self.shared / "runs" / name / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def controller(self, name: str) -> str:
        """Return the name of the controller's pod."""
        (pod,) = (one for one in self.cluster.names("Pod") if one.startswith(f"titanrl-{name}-"))
        return pod

    def phase(self, pod: str) -> str:
        """Return the phase of a pod; empty if it is gone."""
        return next((one["status"]["phase"] for one in self.cluster.objects("Pod") if one["metadata"]["name"] == pod), "")

    def log(self, name: str) -> str:
        """Return the output of a pod so far."""
        file = self.folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def assert_nothing_left(self) -> None:
        """Check that soon no resource is left, and no process in a pod."""
        left = ("MonarchMesh", "Pod", "Job")
        self.cluster.wait("end of everything", lambda: not any(self.cluster.objects(kind) for kind in left), 30)
        assert self.network.processes() == []


RESOURCES, VERBS = ["monarchmeshes", "pods"], ["get", "list", "watch", "create", "patch", "delete"]


@pytest.fixture(scope="module")
def started_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := network.missing("ip", "unshare", "openssl", packages="iproute2 util-linux openssl"):
        pytest.skip(f"pods on this machine {reason}")
    lab = Lab(tmp_path_factory.mktemp("kubernetes"))
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


@pytest.fixture
def lab(started_lab: Lab) -> Iterator[Lab]:
    """The lab; a failed test leaves no run behind, which would slow down the following ones."""
    yield started_lab
    for process in started_lab.at_desk:
        process.kill()
        process.wait()
    started_lab.at_desk.clear()
    started_lab.cluster.clear()


def curve(rows: list[dict[str, Any]]) -> list[tuple[int, float, float, float]]:
    return [(row["step"], row["reward/mean"], row["loss/total"], row["grad/norm"]) for row in rows]


@pytest.mark.cluster
def test_curve_in_pods_equals_one_machine(lab: Lab) -> None:
    manifest = lab.manifest("there", *TWO_TRAINERS, "hosts.trainer_hosts=2")
    lab.cluster.apply(manifest)
    pod = lab.controller("there")
    lab.cluster.wait("end of the run", lambda: lab.phase(pod) in ("Succeeded", "Failed", ""), START_S)
    assert len(lab.steps("there")) == 4, lab.log(pod)
    assert "Kubernetes: 3 pods (theretrainers-0 on node1, theretrainers-1 on node2, theregenerators-0 on node1)" in lab.log(pod)
    assert "POST" not in " ".join(lab.cluster.requests), "the controller uses the resources of the manifest"
    assert lab.cluster.codes[pod] == 0, lab.log(pod)
    lab.assert_nothing_left()
    places = (f"output_dir={lab.shared}/runs", f"cache_dir={lab.shared}/cache", "name=here")
    command = [
        sys.executable,
        "-m",
        "titanrl.commands",
        "train",
        "--config",
        "configs/quickstart.yaml",
        *SMALL,
        *TWO_TRAINERS,
        *places,
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(lab.steps("there")) == curve(lab.steps("here"))


@pytest.mark.cluster
def test_dead_pod_is_named_with_its_processes(lab: Lab) -> None:
    lab.cluster.apply(lab.manifest("dead", "num_steps=5000", "faults.max_respawns=0"))
    pod = lab.controller("dead")
    wait_until(lambda: bool(lab.steps("dead")), START_S, lambda: lab.log(pod))
    at = time.time()
    lab.cluster.kill("deadtrainers-0")
    lab.cluster.wait("end of the run", lambda: lab.phase(pod) in ("Failed", ""), 60)
    assert lab.cluster.codes[pod] == 1, lab.log(pod)
    (event,) = lab.events("dead", "host_lost")
    assert event["time"] - at < NAMED_S
    assert (event["host"], event["ranks"]) == ("deadtrainers-0", ["trainer_0"])
    assert "pod deadtrainers-0 on node1 exited or is unreachable" in lab.log(pod)
    assert "on it: trainer_0" in lab.log(pod)
    lab.assert_nothing_left()


@pytest.mark.cluster
def test_unplugged_pod_is_named(lab: Lab) -> None:
    overrides = ("hosts.trainer_hosts=2", *TWO_TRAINERS)
    manifest = list(yaml.safe_load_all(lab.manifest("unplugged", *overrides)))
    (container,) = manifest[-1]["spec"]["template"]["spec"]["containers"]
    arguments = ["device=cpu", "name=unplugged", *PODS, *overrides]
    container["command"] = ["python", "-u", "-m", "tests.hosts.pods", "wait", *arguments]
    container["workingDir"] = str(REPO)  # the program holds the hosts without a run
    lab.cluster.apply(yaml.safe_dump_all(manifest))
    pod = lab.controller("unplugged")
    wait_until(lambda: "actors: 3" in lab.log(pod), 60, lambda: lab.log(pod))
    at = time.monotonic()
    lab.network.pull_cable("unpluggedtrainers-1")
    wait_until(lambda: "lost: " in lab.log(pod), 60, lambda: lab.log(pod))
    assert time.monotonic() - at < NAMED_S
    assert "pod unpluggedtrainers-1 on node2 exited or is unreachable" in lab.log(pod)
    lab.cluster.wait("end of the controller", lambda: lab.phase(pod) in ("Succeeded", ""), 30)
    lab.assert_nothing_left()


@pytest.mark.cluster
def test_run_continues_with_new_pods(lab: Lab) -> None:
    lab.cluster.apply(lab.manifest("again", "num_steps=60"))
    pod = lab.controller("again")
    wait_until(lambda: len(lab.steps("again")) >= 3, START_S, lambda: lab.log(pod))
    lab.cluster.kill("againtrainers-0")
    lab.cluster.wait("end of the run", lambda: lab.phase(pod) in ("Succeeded", "Failed", ""), START_S)
    assert lab.cluster.codes[pod] == 0, lab.log(pod)
    (event,) = lab.events("again", "host_lost")
    assert event["host"] == "againtrainers-0"
    assert max(row["step"] for row in lab.steps("again")) == 60
    lab.assert_nothing_left()


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, None)])
def test_signaled_controller_leaves_nothing_behind(lab: Lab, number: signal.Signals, code: int | None) -> None:
    name = f"signal{int(number)}"
    lab.cluster.apply(lab.manifest(name, "num_steps=5000"))
    pod = lab.controller(name)
    wait_until(lambda: bool(lab.steps(name)), START_S, lambda: lab.log(pod))
    assert len(lab.cluster.names("MonarchMesh")) == 2
    lab.cluster.signal(pod, number)
    lab.cluster.wait("end of the controller", lambda: lab.phase(pod) in ("Failed", ""), 60)
    lab.assert_nothing_left()
    assert [event["code"] for event in lab.events(name, "end")] == ([] if code is None else [code])


@pytest.mark.cluster
def test_controller_outside_the_cluster_creates_and_deletes_pods(lab: Lab) -> None:
    process = lab.start_at_desk("train", "outside", "num_steps=5000")
    wait_until(lambda: bool(lab.steps("outside")) or process.poll() is not None, START_S, lambda: lab.log("outside"))
    assert process.poll() is None, lab.log("outside")
    assert len(lab.cluster.names("MonarchMesh")) == 2
    lab.machines.signal(process, signal.SIGINT)
    assert process.wait(60) == 130
    lab.assert_nothing_left()


@pytest.mark.cluster
def test_doctor_examines_pods_and_names_a_closed_port(lab: Lab) -> None:
    overrides = (*TWO_TRAINERS, "hosts.trainer_hosts=2")
    lab.cluster.apply(lab.manifest("whole", *overrides, "--doctor"))
    pod = lab.controller("whole")
    lab.cluster.wait("end of the doctor", lambda: lab.phase(pod) in ("Succeeded", "Failed", ""), START_S)
    assert lab.cluster.codes[pod] == 0, lab.log(pod)
    assert lab.log(pod).splitlines()[-1] == "Ready: the hosts fit this configuration."
    lab.assert_nothing_left()
    meshes = [one for one in yaml.safe_load_all(lab.manifest("closed", *overrides)) if one["kind"] == "MonarchMesh"]
    lab.cluster.apply(yaml.safe_dump_all(meshes))
    lab.cluster.wait("pods", lambda: sum("podIP" in one["status"] for one in lab.cluster.objects("Pod")) == 3, START_S)
    refused = ("--dport", "26600", "-j", "REJECT", "--reject-with", "tcp-reset")
    with network.firewall(lab.network.space("closedtrainers-1"), *refused):
        code, text = lab.doctor("closed", *overrides)
    assert code == 1, text
    sources = "closedgenerators-0, closedtrainers-0, desk (controller)"
    port = "port 26600 (hosts.kubernetes.port)"
    assert f"closedtrainers-1: {port} is closed for {sources} (Connection refused). Allow TCP between the hosts" in text
    assert lab.cluster.names("MonarchMesh") == ["closedgenerators", "closedtrainers"], "they are left as they were"
    for name in lab.cluster.names("MonarchMesh"):
        lab.cluster.delete("MonarchMesh", name)
    lab.assert_nothing_left()


def wait_until(is_true: Callable[[], bool], limit_s: float, log: Callable[[], str]) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {log()}"
        time.sleep(0.2)
