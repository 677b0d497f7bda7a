"""Kubernetes: checks before a run, states of pods computed from API objects, and leases over loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from titanrl.config import ConfigError, load_config
from titanrl.hosts.holder import ENDING, Host, Leases, tcp
from titanrl.hosts.kubernetes import (
    Api,
    KubernetesError,
    PodState,
    broken_by_kubernetes,
    broken_by_pods,
    current,
    end_of,
    hold_pod,
    pod_state,
    progress,
)

GOOD = (
    "device=cpu",
    "hosts.kind=kubernetes",
    "hosts.trusted_network=true",
    "hosts.kubernetes.image=titan",
    "hosts.kubernetes.volumes=[{claim: shared, mount_path: /mnt/titan}]",
)


def rules(*overrides: str) -> list[str]:
    return [rule.rule for rule in broken_by_kubernetes(load_config("configs/quickstart.yaml", [*GOOD, *overrides]))]


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.holder.addresses_of", lambda name: ["10.0.0.7"])


@pytest.mark.usefixtures("in_pod")
def test_pod_can_start_a_run() -> None:
    assert rules() == []


@pytest.mark.usefixtures("in_pod")
@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("device=auto", "the pods may have a different one"),
        ("hosts.trusted_network=false", "can execute code as you"),
        ("hosts.kubernetes.image=null", "pods need an image"),
        ("hosts.kubernetes.volumes=[]", "pods need a volume to share the run directory, model and data"),
    ],
)
def test_missing_setting_is_named(override: str, rule: str) -> None:
    (found,) = rules(override)
    assert rule in found


@pytest.mark.usefixtures("in_pod")
def test_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.kubernetes.find_spec", lambda name: None)
    assert rules() == ["kubernetes needs the package kubernetes, which is not installed"]


def test_name_that_pods_cannot_reach_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.holder.addresses_of", lambda name: ["127.0.1.1"])
    (rule,) = rules()
    assert rule.endswith("it resolves to 127.0.1.1")


def test_pods_need_an_image_a_volume_and_a_trusted_network() -> None:
    assert len(list(broken_by_pods(load_config("quickstart", ["hosts.kind=kubernetes"])))) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory=64 GB", "hosts.kubernetes.memory"),
        ("volumes=[{claim: a, mount_path: mnt}]", "absolute path"),
        ("volumes=[{claim: a, mount_path: /mnt}, {claim: b, mount_path: /mnt}]", "a unique absolute path"),
        ("volumes=[{claim: a, mount_path: /dev/shm}]", "other than /dev/shm"),
        ("pod_spec={containers: []}", "the run sets this pod field itself"),
        ("env={TITANRL_TOKEN: x}", "must not start with a digit or TITANRL_"),
        ("tolerations=[{key: gpu, operator: Exists, value: x}]", "the operator Exists does not take a value"),
        ("tolerations=[{key: gpu, effect: Never}]", "NoSchedule"),
        ("port=80", "1,024"),
    ],
)
def test_wrong_setting_is_an_error_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("configs/quickstart.yaml", [*GOOD, f"hosts.kubernetes.{override}"])
    assert message in str(error.value)
    assert "hosts.kubernetes" in str(error.value)


def test_arena_cannot_reach_other_pods() -> None:
    with pytest.raises(ConfigError, match="arena is shared memory of one host"):
        load_config("configs/quickstart.yaml", [*GOOD, "weights.transport=arena"])


Json = dict[str, Any]
READY = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.7", "phase": "Running"}


def pod(status: Json, *, name: str = "trainers-1", deleted: bool = False) -> Json:
    metadata: Json = {"name": name, "uid": "one", "labels": {"apps.kubernetes.io/pod-index": name[-1]}}
    return {
        "metadata": metadata | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}),
        "spec": {"nodeName": "n1"},
        "status": status,
    }


def waiting(reason: str, message: str | None = None) -> Json:
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def test_ready_pod_has_its_address_and_number() -> None:
    state = pod_state(pod(READY))
    assert (state.is_ready, state.ip, state.number, state.node, state.problem) == (True, "10.0.0.7", 1, "n1", "")


def test_index_without_the_label_comes_from_the_name() -> None:
    one = pod(READY, name="trainers-12")
    del one["metadata"]["labels"]
    assert pod_state(one).number == 12


@pytest.mark.parametrize(
    ("status", "problem", "is_hopeless"),
    [
        (waiting("ContainerCreating"), "ContainerCreating", False),
        (waiting("ErrImagePull", "no such\nimage"), "ErrImagePull (no such image)", False),
        (waiting("ImagePullBackOff", "no such image"), "ImagePullBackOff (no such image)", True),
        (waiting("CrashLoopBackOff"), "CrashLoopBackOff", True),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
                ],
            },
            "Unschedulable (0/4 nodes are available)",
            False,
        ),
        ({"phase": "Running"}, "not ready yet", False),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"},
            "Evicted (The node was low on memory)",
            True,
        ),
        ({}, "Pending", False),
    ],
)
def test_problem_of_a_pod_quotes_kubernetes(status: Json, problem: str, is_hopeless: bool) -> None:
    state = pod_state(pod(status))
    assert (state.is_ready, state.problem, state.is_hopeless) == (False, problem, is_hopeless)


def test_pods_being_deleted_are_ignored() -> None:
    assert current([pod(READY, deleted=True), pod(READY, name="trainers-0")], 2).keys() == {0}


def test_pods_of_a_larger_mesh_are_ignored() -> None:
    assert current([pod(READY, name="trainers-0"), pod(READY, name="trainers-2")], 2).keys() == {0}


def test_progress_groups_pods_by_what_they_wait_for() -> None:
    creating = waiting("ContainerCreating")
    states = current([pod(creating, name="t-0"), pod(creating, name="t-1"), pod(READY, name="t-2")], 4)
    assert progress("t", 4, states) == "MonarchMesh t: t-0, t-1: ContainerCreating; 1 of 4 pods do not exist yet"
    assert progress("t", 2, {}) == "MonarchMesh t has no pods yet; Monarch's operator creates them"
    assert progress("t", 1, current([pod(READY, name="t-0")], 1)) == ""


def test_ended_pod_has_a_reason() -> None:
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    assert end_of(None, "one") == "the pod was deleted"
    assert end_of(pod(READY), "another") == "the pod was deleted"
    assert end_of(pod({"containerStatuses": [{"state": killed}]}), "one") == "OOMKilled, exit code 137"
    restarted = {"containerStatuses": [{"state": {"running": {}}, "lastState": killed}]}
    assert end_of(pod(restarted), "one") == "OOMKilled, exit code 137"
    assert end_of(pod({"reason": "Evicted", "message": "low on memory"}), "one") == "Evicted (low on memory)"
    assert end_of(pod(READY, deleted=True), "one") == "the pod is being deleted"
    assert end_of(pod(READY), "one") == ""


POD = PodState(name="trainers-1", uid="one", number=1, ip="127.0.0.1", node="n1", is_ready=True, problem="", is_hopeless=False)
HOST = Host(rank=1, node="trainers-1", name="host-1")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Held:
    """A controller's lease of a pod."""

    def __init__(self, port: int) -> None:
        self.lost, self.ending = asyncio.Queue[Host](), asyncio.Queue[Host]()
        self.leases = Leases(2, self.lost.put_nowait, self.ending.put_nowait)
        self._port = port

    async def hold(self) -> None:
        await hold_pod(self.leases, 1, POD, self._port, "secret run@desk")


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[Held]:
    """Serve like a pod."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    held = Held(server.sockets[0].getsockname()[1])
    try:
        yield held
    finally:
        held.leases.close()
        server.close()


def replying(text: str, *later: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"secret run@desk\n"
        writer.write(text.encode())
        for message in later:
            writer.write(message)
        await writer.drain()
        if later:
            writer.close()
        else:
            await reader.read()

    return answer


@pytest.mark.parametrize("message", [b"", ENDING])
async def test_lost_pod_is_reported_with_its_host_name(message: bytes) -> None:
    async with served(replying("serving host-1\n", message)) as held:
        await held.hold()
        assert await asyncio.wait_for(held.lost.get(), 60) == HOST
        assert held.leases.lost == {1}
        assert [held.ending.get_nowait() for _ in range(held.ending.qsize())] == [HOST] * bool(message)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("busy other@desk\n", r"serves another run \(got other@desk\)"),
        ("", "refused this run"),
        ("GET /\n", "refused this run"),
    ],
)
async def test_pod_that_refuses_raises(reply: str, message: str) -> None:
    async with served(replying(reply, b"")) as held:
        with pytest.raises(KubernetesError, match=message):
            await held.hold()


async def test_unreachable_pod_raises() -> None:
    with pytest.raises(KubernetesError, match=r"cannot reach port 1 of pod trainers-1 at 127\.0\.0\.1"):
        await Held(1).hold()


async def test_expired_token_of_a_login_is_renewed_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = tmp_path / "login"
    login.write_text(f"""#!/bin/sh
echo >> {tmp_path}/logins
n=$(wc -l < {tmp_path}/logins)
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": \
{{"token": "token-'$n'", "expirationTimestamp": "2026-01-01T00:00:00Z"}}}}'
""")
    login.chmod(0o700)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(login), "interactiveMode": "Never"}}
    content = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "research"}}],
        "clusters": [{"name": "lab", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": user}],
    }
    (tmp_path / "config").write_text(json.dumps(content))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    api = await Api.open(None, None)
    assert api.namespace == "research"
    tokens = [await api._client.configuration.get_api_key_with_prefix("BearerToken") for _ in range(2)]
    await api.close()
    assert [str(token) for token in tokens] == ["Bearer token-2", "Bearer token-3"]


def test_addresses_of_both_families_use_monarchs_notation() -> None:
    assert tcp("10.0.0.7", 26600) == "tcp://10.0.0.7:26600"
    assert tcp("fd00::7", 26600) == "tcp://[fd00::7]:26600"
