"""Pod states, computed from API objects."""

from typing import Any

import pytest

from titanrl.hosts.kubernetes.pod_state import current, end_of, pod_state, progress

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
