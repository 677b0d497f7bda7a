"""Pod states, computed from Kubernetes API objects by pure functions."""

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
"""Waiting reasons of a container that do not resolve with time."""
INDEX = "apps.kubernetes.io/pod-index"
"""Label with the index of a pod in its mesh."""

Object = Mapping[str, Any]
"""API object, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of a pod.

    Example: `PodState(name="t-0", uid="7c1e", number=0, ip="", node="", is_ready=False, problem="Pending", is_hopeless=False)`
    """

    name: str
    """Name of the pod."""
    uid: str
    """Unique id of the pod, which a replacement with the same name does not share."""
    number: int
    """Index in its mesh."""
    ip: str
    """IP address; empty if not assigned yet."""
    node: str
    """Node; empty if not scheduled yet."""
    is_ready: bool
    """True if the pod accepts connections."""
    problem: str
    """Reason why the pod is waiting or failed; empty if it is ready."""
    is_hopeless: bool
    """True if the problem will not resolve with time."""


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
    """Return the states of a mesh's pods by index. Pods that are being deleted, or beyond `replicas`, are left out."""
    states = (pod_state(pod) for pod in pods if not _is_going(pod))
    return {state.number: state for state in states if 0 <= state.number < replicas}


def progress(mesh: str, replicas: int, states: Mapping[int, PodState]) -> str:
    """Return a line about what the pods of a mesh are waiting for; empty if all are ready."""
    waiting = [state for _, state in sorted(states.items()) if not state.is_ready]
    missing = replicas - len(states)
    if not waiting and missing <= 0:
        return ""
    if not states:
        return f"MonarchMesh {mesh} has no pods yet; Monarch's operator creates them"
    reasons: dict[str, list[str]] = {}
    for state in waiting:
        reasons.setdefault(state.problem, []).append(state.name)
    texts = [f"{', '.join(names)}: {problem}" for problem, names in reasons.items()]
    texts += [f"{missing} of {replicas} pods do not exist yet"] if missing > 0 else []
    return f"MonarchMesh {mesh}: {'; '.join(texts)}"


def end_of(pod: Object | None, uid: str) -> str:
    """Return the reason why a pod ended; empty if Kubernetes does not know it.

    Args:
        pod: the pod that currently has the name; None if there is none.
        uid: unique id of the pod that ended.
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
    """Return why a pod is not ready, and True if that will not resolve with time."""
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
    """Return the index of a pod from its label, or from the end of its name, because the label is new in Kubernetes 1.28."""
    text = (metadata.get("labels") or {}).get(INDEX) or metadata["name"].rpartition("-")[2]
    return int(text) if text.isdecimal() else -1
