"""States of pods, from objects of the API of Kubernetes: pure functions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HOPELESS = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)
"""Reasons of a waiting container that more time does not cure."""
INDEX = "apps.kubernetes.io/pod-index"
"""Label with the number of a pod in its mesh."""

Object = Mapping[str, Any]
"""An object of the API, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of a pod.

    Example: `PodState(name="t-0", uid="7c1e", number=0, ip="", node="", is_ready=False, problem="Pending", is_hopeless=False)`
    """

    name: str
    """Name of the pod."""
    uid: str
    """Identity of the pod, which its replacement of the same name does not have."""
    number: int
    """Number in its mesh."""
    ip: str
    """Address; empty before it has one."""
    node: str
    """Node; empty before it has one."""
    is_ready: bool
    """True if it takes connections."""
    problem: str
    """Reason to wait, or of its failure; empty if it is ready."""
    is_hopeless: bool
    """True if waiting does not help."""


def pod_state(pod: Object) -> PodState:
    """Return the state of a pod."""
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = _condition(status, "Ready").get("status") == "True"
    problem, is_hopeless = ("", False) if ready else _problem(status)
    return PodState(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        number=_number(metadata),
        ip=status.get("podIP", ""),
        node=pod.get("spec", {}).get("nodeName", ""),
        is_ready=ready and not _is_going(pod),
        problem=problem,
        is_hopeless=is_hopeless,
    )


def current(pods: Iterable[Object], replicas: int) -> dict[int, PodState]:
    """Return the states of the pods of a mesh that are not being deleted, by their number, which is below `replicas`."""
    states = (pod_state(pod) for pod in pods if not _is_going(pod))
    return {state.number: state for state in states if 0 <= state.number < replicas}


def progress(mesh: str, replicas: int, states: Mapping[int, PodState]) -> str:
    """Return what the pods of a mesh wait for, in one line; empty if all are ready."""
    waiting = [state for _, state in sorted(states.items()) if not state.is_ready]
    missing = replicas - len(states)
    if not waiting and missing <= 0:
        return ""
    if not states:
        return f"MonarchMesh {mesh} has no pods yet; Monarch's operator makes them"
    reasons: dict[str, list[str]] = {}
    for state in waiting:
        reasons.setdefault(state.problem, []).append(state.name)
    texts = [f"{', '.join(names)}: {problem}" for problem, names in reasons.items()]
    texts += [f"{missing} of {replicas} pods do not exist yet"] if missing > 0 else []
    return f"MonarchMesh {mesh}: {'; '.join(texts)}"


def end_of(pod: Object | None, uid: str) -> str:
    """Return why a pod has ended, as far as Kubernetes knows; empty if it does not.

    Args:
        pod: the pod that has its name now; None if there is none.
        uid: identity of the pod that has ended.
    """
    if pod is None or pod["metadata"].get("uid", "") != uid:
        return "the pod was deleted"
    status = pod.get("status", {})
    if status.get("reason"):  # such as Evicted, or NodeLost
        return _with_message(status["reason"], status.get("message"))
    for container in status.get("containerStatuses", ()):
        for state in (container.get("state", {}), container.get("lastState", {})):
            if ended := state.get("terminated"):
                return f"{_with_message(ended.get('reason', 'ended'), ended.get('message'))}, exit code {ended.get('exitCode')}"
    return "the pod is being deleted" if _is_going(pod) else ""


def _problem(status: Object) -> tuple[str, bool]:
    """Return what a pod that is not ready waits for, and whether waiting does not help."""
    if status.get("phase") in ("Failed", "Succeeded"):
        return _with_message(status.get("reason") or status["phase"], status.get("message")), True
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if waiting := container.get("state", {}).get("waiting"):
            reason = waiting.get("reason", "waiting")
            return _with_message(reason, waiting.get("message")), reason in HOPELESS
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _with_message(scheduled.get("reason", "Pending"), scheduled.get("message")), False
    return ("not ready yet", False) if status.get("phase") == "Running" else (status.get("phase", "Pending"), False)


def _with_message(reason: str, message: str | None) -> str:
    return f"{reason} ({' '.join(message.split())})" if message else reason


def _condition(status: Object, kind: str) -> Object:
    return next((one for one in status.get("conditions") or () if one.get("type") == kind), {})


def _is_going(pod: Object) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None


def _number(metadata: Object) -> int:
    """Return the number of a pod: its label, or the end of its name, because the label is new in Kubernetes 1.28."""
    text = (metadata.get("labels") or {}).get(INDEX) or metadata["name"].rpartition("-")[2]
    return int(text) if text.isdecimal() else -1
