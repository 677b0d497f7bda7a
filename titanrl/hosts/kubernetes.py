"""Kubernetes pods as hosts of a run: create or find them, wait until they are ready, watch them, and release them.

The pods belong to MonarchMesh resources, which Monarch's operator implements. The controller connects to the pods, not the pods
to the controller: they can exist before it, and serve several controllers in turn. This module must not import Monarch; the
`kubernetes` package is optional, so it is imported where it is used.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.hosts.holder import BUSY, SERVING, tcp
from titanrl.hosts.kubernetes_objects import GROUP, MESH_LABEL, PLURAL, POD_NAME, VERSION, Json, mesh, mesh_name, token_of
from titanrl.hosts.leases import START, Host, Leases, OnLost, Say
from titanrl.hosts.machine_rules import broken_by_name, broken_by_remote_hosts

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, ApiException, Configuration

logger = logging.getLogger(__name__)

REPLY_S = 15.0
"""Limit for a response of the API server, in seconds."""
RELEASE_S = 5.0
"""Shorter limit for deletions, which delay the end of the run."""
WATCH_S = 300
"""Seconds after which a watch is reopened. The server sends nothing while nothing changes."""
RETRY_S = 1.0
"""Seconds before a failed watch is reopened."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the namespace and credentials of a pod."""
STATUS_S = 2.0
"""Limit in seconds for querying why a pod was lost, so that the report is not delayed."""
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
OnPods = Callable[[dict[str, Json]], None]
"""Called with all pods of a mesh, by name, whenever one changes."""


class KubernetesError(TitanRLError):
    """The cluster refused a request or did not respond, or pods do not start."""


class PodBusyError(KubernetesError):
    """A pod serves another run."""


# Rules


def broken_by_kubernetes(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine or in this pod, which will run its controller."""
    if config.hosts.kind != "kubernetes":
        return
    yield from broken_by_pods(config)
    if missing_package():
        rule = "kubernetes needs the package kubernetes, which is not installed"
        yield BrokenRule({"hosts.kind": "kubernetes"}, rule, "pip install kubernetes")
    fix = "correct /etc/hosts, or start the controller in a pod of the cluster, with titanrl manifest"
    yield from broken_by_name(config, "pods", fix)


def broken_by_pods(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on any machine."""
    kubernetes = config.hosts.kubernetes
    yield from broken_by_remote_hosts(config, "pods")
    if kubernetes.image is None:
        rule = "pods need an image that contains TitanRL and its dependencies"
        yield BrokenRule({"hosts.kubernetes.image": None}, rule, "set hosts.kubernetes.image")
    if not kubernetes.volumes:
        rule = "pods need a volume to share the run directory, model and data"
        fix = "set it to a persistent volume claim with the access mode ReadWriteMany"
        yield BrokenRule({"hosts.kubernetes.volumes": []}, rule, fix)


# States of pods, computed from API objects by pure functions


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


# The hosts


class KubernetesHosts:
    """Pods of MonarchMesh resources. Existing resources with the names of `titanrl manifest` are used; others are created."""

    def __init__(
        self,
        config: Config,
        device: DeviceKind,
        meshes: dict[str, int],
        say: Say,
        leases: Leases | None = None,
        *,
        keep: bool | None = None,
    ) -> None:
        """Request nothing yet.

        Args:
            config: configuration of the run.
            device: kind of the pods' devices.
            meshes: number of hosts by mesh name.
            say: called with a message for the user about what startup is waiting for.
            leases: leases that hold the pods; by default, leases that report lost pods to the run.
            keep: whether to keep existing resources when the run ends; None uses `hosts.kubernetes.keep`.
        """
        self._config, self._device, self._meshes, self._say = config, device, meshes, say
        self._keeps = config.hosts.kubernetes.keep if keep is None else keep
        self._leases = leases or Leases(sum(meshes.values()), self._on_lost, self._on_ending)
        self._api: Api | None = None
        self._names: dict[str, str] = {}  # resource names, by mesh
        self._owned: set[str] = set()  # names of the resources to delete with the run
        self._adopted: dict[str, Json | None] = {}  # the ones of them that existed before, with their new owner
        self._pods: list[tuple[str, PodState]] = []  # role and state, by rank
        self._terminated: set[int] = set()  # ranks of the pods that Kubernetes terminated with SIGTERM
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_acquired = False
        self._said = ""  # last message about what startup is waiting for
        self.on_lost: OnLost = lambda name, cause: None
        """Called when a host is lost."""

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Create or find the pods, and start Monarch's hosts in them. See `Provider`.

        Raises:
            KubernetesError: The cluster refused a request, or the pods did not start.
        """
        await self.acquire()
        port, pods = self._config.hosts.kubernetes.port, [state for _, state in self._pods]
        addresses = [f"{identity}@{tcp(pod.ip, port)}" for identity, pod in zip(identities, pods, strict=True)]
        for rank, address in enumerate(addresses):
            self._leases.send(rank, f"{START} {address}")
        self._is_acquired = True
        names = [f"{pod.name} on {pod.node}" if pod.node else pod.name for pod in pods]
        self._say(f"Kubernetes: {len(pods)} pods ({', '.join(names)})")
        return addresses

    async def acquire(self) -> None:
        """Create or find the pods, and acquire their leases. The caller must call `kill`, even if this fails.

        Raises:
            KubernetesError: The cluster refused a request, or the pods did not start.
        """
        tokens = await self._requested()
        ready = await self._ready()
        self._pods = [(role, ready[role][index]) for role, number in self._meshes.items() for index in range(number)]
        port, own = self._config.hosts.kubernetes.port + 1, f"{self._config.name}@{socket.gethostname()}"
        try:
            await asyncio.gather(
                *(
                    hold_pod(self._leases, rank, pod, port, f"{tokens[role]} {own}")
                    for rank, (role, pod) in enumerate(self._pods)
                )
            )
        except PodBusyError:
            await asyncio.to_thread(self._leave)
            raise
        await self._leases.all_held()

    def kill(self) -> None:
        """Kill every process of the run in the pods, and release them. A second call does nothing."""
        self._is_acquired = False
        self._leases.close()
        for task in self._tasks:
            task.cancel()
        owned, self._owned = self._owned, set()
        for name in owned:
            assert self._api is not None
            try:
                self._api.delete_mesh(name)
            except KubernetesError as error:
                logger.warning("%s MonarchMesh %s remains until the controller's pod is deleted", error, name)

    def has_ended(self, rank: int) -> bool:
        """Return True if a host exited or became unreachable."""
        return rank in self._leases.lost

    def are_alive(self) -> bool:
        """Return True if every host holds its lease."""
        return self._is_acquired and not self._leases.lost

    async def _requested(self) -> dict[str, str]:
        """Find or create the resources; return the secret of each mesh's pods."""
        requesting = asyncio.ensure_future(asyncio.to_thread(self._request))  # each of its API calls has a time limit
        try:
            return await asyncio.shield(requesting)
        except asyncio.CancelledError:  # wait for a resource that is being created, so that it can be deleted
            await asyncio.gather(requesting, return_exceptions=True)
            raise

    def _request(self) -> dict[str, str]:
        """Find or create each resource. This blocks, so it runs in a thread."""
        kubernetes, name = self._config.hosts.kubernetes, self._config.name
        self._api = Api(kubernetes.namespace, kubernetes.context)
        owner, tokens, suffix = self._api.owner(), {}, secrets.token_hex(3)
        for role in self._meshes:
            found = self._api.mesh(mesh_name(name, role))
            if found is not None and "deletionTimestamp" not in found["metadata"]:
                tokens[role] = self._adopt(role, found, owner)
                continue
            # Pods of an earlier resource of the same name may still be terminating, so a new one gets a unique name.
            self._names[role] = mesh_name(name, role, suffix)
            self._owned.add(self._names[role])
            tokens[role] = secrets.token_hex(16)
            space = self._api.namespace
            body = mesh(self._config, self._device, role, self._names[role], tokens[role], namespace=space, owner=owner)
            self._api.create_mesh(body)
        return tokens

    def _adopt(self, role: str, found: Json, owner: Json | None) -> str:
        """Use an existing resource, and take ownership of it unless it is kept; return the secret of its pods."""
        assert self._api is not None
        metadata, spec = found["metadata"], found["spec"]
        name, token = metadata["name"], token_of(found)
        others = [one["name"] for one in metadata.get("ownerReferences", ()) if owner is None or one["uid"] != owner["uid"]]
        if others:
            raise KubernetesError(
                f"name: MonarchMesh {name} belongs to {others[0]}, the controller of another run with this name "
                f"(got {self._config.name}). Wait until that run has finished, or change name."
            )
        for key, value, needed in (
            (f"hosts.{role[:-1]}_hosts", spec["replicas"], self._meshes[role]),
            ("hosts.kubernetes.port", spec.get("port", self._config.hosts.kubernetes.port), self._config.hosts.kubernetes.port),
        ):
            if value != needed:
                raise KubernetesError(
                    f"{key}: MonarchMesh {name} has {value}, but the run needs {needed} (got {needed}). "
                    f"Delete the MonarchMesh, or apply the output of titanrl manifest again."
                )
        if not token:
            raise KubernetesError(
                f"name: MonarchMesh {name} was not created by titanrl manifest (got {self._config.name}). Change name."
            )
        self._names[role] = name
        if not self._keeps:
            self._owned.add(name)
            self._adopted[name] = owner
            if owner is not None:
                self._api.own_mesh(name, [owner], metadata["resourceVersion"])
        return token

    def _leave(self) -> None:
        """Give up the ownership of resources that another run uses. This blocks, so it runs in a thread."""
        assert self._api is not None
        self._owned -= self._adopted.keys()
        for name, owner in self._adopted.items():
            if owner is not None:
                self._api.own_mesh(name, [])

    async def _ready(self) -> dict[str, dict[int, PodState]]:
        """Wait until every pod accepts connections; return their states by mesh and index."""
        limit_s = self._config.hosts.kubernetes.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._wait()
        except TimeoutError:
            raise KubernetesError(
                f"hosts.kubernetes.start_limit_s: the pods were not ready in time: {self._said or 'no reply from the cluster'} "
                f"(got {limit_s:g}). Raise the limit, or request fewer resources."
            ) from None

    async def _wait(self) -> dict[str, dict[int, PodState]]:
        """Watch the pods until all are ready; return their states by mesh and index."""
        assert self._api is not None
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[tuple[str, dict[str, Json] | KubernetesError]]()
        states: dict[str, dict[int, PodState]] = {}

        def tell(role: str) -> Callable[[dict[str, Json] | KubernetesError], None]:
            return lambda change: _from_thread(loop, changes, (role, change))

        watches: list[PodWatch] = []
        try:
            for role, name in self._names.items():
                watches.append(self._api.watch(name, tell(role), tell(role)))
            self._say(f"waiting for the pods of MonarchMesh {', '.join(self._names.values())} in {self._api.namespace}")
            while True:
                role, change = await changes.get()
                if isinstance(change, KubernetesError):
                    raise change
                states[role] = current(change.values(), self._meshes[role])
                if self._is_ready(states):
                    return states
        finally:
            for watch in watches:
                watch.close()

    def _is_ready(self, states: dict[str, dict[int, PodState]]) -> bool:
        """Return True if all pods are ready; else tell the user what they are waiting for, if that has changed."""
        waits = []
        for role, number in self._meshes.items():
            for state in states.get(role, {}).values():
                if state.is_hopeless:
                    raise KubernetesError(
                        f"hosts.kubernetes: pod {state.name} does not start (got {state.problem}). "
                        f"Read kubectl describe pod {state.name}, and correct the image or the pods' settings."
                    )
            waits.append(progress(self._names[role], number, states.get(role, {})))
        if len(states) < len(self._meshes):  # the pods of other meshes have not been listed yet
            return False
        said = "; ".join(text for text in waits if text)
        if said and said != self._said:
            self._say(f"waiting for pods: {said}")
        self._said = said
        return not said

    def _on_ending(self, host: Host) -> None:
        self._terminated.add(host.rank)

    def _on_lost(self, host: Host) -> None:
        task = asyncio.create_task(self._report_lost(host))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_lost(self, host: Host) -> None:
        """Report a lost host, with the reason if Kubernetes knows it."""
        role, state = self._pods[host.rank]
        cause = "Kubernetes terminated it" if host.rank in self._terminated else ""
        try:
            async with asyncio.timeout(STATUS_S):
                cause = await self._end_of(state, self._names[role])
        except (KubernetesError, TimeoutError) as error:
            logger.warning("the state of pod %s is unknown: %r", host.node, error)
        place = f" on {state.node}" if state.node else ""
        text = f"; {cause}" if cause else ""
        self.on_lost(host.name, f"pod {host.node}{place} exited or is unreachable{text}")

    async def _end_of(self, state: PodState, mesh: str) -> str:
        """Wait until Kubernetes reports why a pod ended, which can be after its connection closed; return the reason."""
        assert self._api is not None
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[dict[str, Json] | KubernetesError]()
        tell = partial(_from_thread, loop, changes)
        watch = self._api.watch(mesh, tell, tell)
        try:
            while True:
                pods = await changes.get()
                if isinstance(pods, KubernetesError):
                    raise pods
                if cause := end_of(pods.get(state.name), state.uid):
                    return cause
        finally:
            watch.close()


def _from_thread(loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[Any]", item: object) -> None:
    """Put an item into a queue of the event loop, unless the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)


async def hold_pod(leases: Leases, rank: int, pod: PodState, port: int, greeting: str) -> None:
    """Acquire the lease of a pod.

    Args:
        leases: leases of the run.
        rank: rank of the pod among the hosts.
        pod: the pod.
        port: port of its lease.
        greeting: secret of the pod, and name of this controller, without spaces.

    Raises:
        PodBusyError: The pod serves another run.
        KubernetesError: The pod cannot be reached, or refused the connection.
    """
    try:
        reply, reader, writer = await leases.reach(pod.ip, port, greeting)
    except (OSError, TimeoutError, ValueError) as error:
        raise KubernetesError(
            f"hosts.kubernetes.port: the controller cannot reach port {port} of pod {pod.name} at {pod.ip} "
            f"(got {error!r}). Allow all TCP between the pods of the run in network policies and firewalls."
        ) from None
    word, _, name = reply.partition(" ")
    if word == BUSY:
        raise PodBusyError(f"name: pod {pod.name} serves another run (got {name}). End that run, or change name.")
    if word != SERVING:
        raise KubernetesError(
            f"hosts.kubernetes: pod {pod.name} refused this run, which has the wrong secret. Delete its MonarchMesh."
        )
    leases.take(Host(rank=rank, node=pod.name, name=name), reader, writer)


# Requests to the API. Each call blocks, but has a time limit.


def missing_package() -> str:
    """Return an error message if the `kubernetes` package is missing; empty if it is installed."""
    if find_spec("kubernetes") is not None:
        return ""
    return (
        "hosts.kind: kubernetes needs the package kubernetes, which is not installed (got kubernetes). pip install kubernetes"
    )


def in_cluster() -> bool:
    """Return True if this process runs in a pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.exists()


class Api:
    """Client of the API, for one namespace."""

    def __init__(self, namespace: str | None, context: str | None) -> None:
        """Read the credentials of the pod, or from the kubeconfig file; open no connection yet.

        Args:
            namespace: namespace of the run; None uses the namespace of the pod or of the context.
            context: context in the kubeconfig file; None uses the current one.

        Raises:
            KubernetesError: There are no credentials.
        """
        client, default = _client(context)
        self.namespace = namespace or default
        """Namespace of all objects."""
        from kubernetes import client as kubernetes

        self._pods, self._custom = kubernetes.CoreV1Api(client), kubernetes.CustomObjectsApi(client)
        self._host = client.configuration.host
        self._where: Json = {"group": GROUP, "version": VERSION, "namespace": self.namespace, "plural": PLURAL}

    def mesh(self, name: str) -> Json | None:
        """Return a MonarchMesh; None if it does not exist."""
        found: Json | None = self._request(
            f"get MonarchMesh {name}", self._custom.get_namespaced_custom_object, name=name, **self._where
        )
        return found

    def create_mesh(self, body: Json) -> None:
        """Create a MonarchMesh."""
        what = f"create MonarchMesh {body['metadata']['name']}"
        if self._request(what, self._custom.create_namespaced_custom_object, body=body, **self._where) is None:
            raise KubernetesError(
                f"hosts.kind: the cluster at {self._host} has no MonarchMesh resources (got kubernetes). "
                "Install Monarch's operator (docs/howto/kubernetes.md)."
            )

    def own_mesh(self, name: str, owners: list[Json], version: str | None = None) -> None:
        """Set the owners of a MonarchMesh, which Kubernetes deletes with them.

        With `version`, the request fails if the resource has changed since that version.
        """
        body = {"metadata": {"ownerReferences": owners} | ({} if version is None else {"resourceVersion": version})}
        self._request(
            f"patch MonarchMesh {name}", self._custom.patch_namespaced_custom_object, name=name, body=body, **self._where
        )

    def delete_mesh(self, name: str) -> None:
        """Delete a MonarchMesh. Do nothing if it does not exist."""
        delete = self._custom.delete_namespaced_custom_object
        self._request(f"delete MonarchMesh {name}", delete, limit_s=RELEASE_S, name=name, **self._where)

    def owner(self) -> Json | None:
        """Return the pod of this process as an `ownerReferences` entry; None outside the cluster."""
        if not in_cluster():
            return None
        name = os.environ.get(POD_NAME, socket.gethostname())
        pod = self._request(f"get pod {name}", self._pods.read_namespaced_pod, name=name, namespace=self.namespace)
        if pod is None:
            logger.warning(
                "there is no pod %s; set %s to the name of this pod, so that resources are deleted with it", name, POD_NAME
            )
            return None
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}

    def watch(self, mesh: str, on_pods: OnPods, on_error: Callable[[KubernetesError], None]) -> "PodWatch":
        """Follow the pods of a mesh in a thread, until the returned watch is closed."""
        return PodWatch(self._pods, self._request, self.namespace, mesh, on_pods, on_error)

    def _request(self, what: str, call: Callable[..., Any], *, limit_s: float = REPLY_S, **arguments: Any) -> Any:
        """Call the API; return the object as JSON, or None if it does not exist.

        Raises:
            KubernetesError: The server refused the request or did not respond.
        """
        from kubernetes.client import ApiClient, ApiException
        from urllib3.exceptions import HTTPError

        try:
            return ApiClient().sanitize_for_serialization(call(**arguments, _request_timeout=limit_s))
        except ApiException as error:
            if error.status == 404:
                return None
            raise KubernetesError(refusal(what, self.namespace, error)) from None
        except HTTPError as error:
            raise KubernetesError(
                f"hosts.kubernetes: the API server at {self._host} did not respond to {what!r} (got {error}). "
                "Check the cluster and the context in the kubeconfig file."
            ) from None


class PodWatch:
    """Watch on the pods of a mesh, in a thread."""

    def __init__(
        self,
        pods: Any,
        request: Callable[..., Any],
        namespace: str,
        mesh: str,
        on_pods: OnPods,
        on_error: Callable[[KubernetesError], None],
    ) -> None:
        """Start the thread, in which `on_pods` and `on_error` are called."""
        from kubernetes.watch import Watch

        self._pods, self._request, self._on_pods, self._on_error = pods, request, on_pods, on_error
        self._selection = {"namespace": namespace, "label_selector": f"{MESH_LABEL}={mesh}"}
        self._watch = Watch()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name=f"pods of {mesh}", daemon=True).start()

    def close(self) -> None:
        """Signal the thread to exit; do not wait for it."""
        self._is_closed.set()
        self._watch.stop()

    def _run(self) -> None:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        while not self._is_closed.is_set():
            try:
                self._follow()
            except KubernetesError as error:
                self._on_error(error)
                return
            except (ApiException, HTTPError, OSError, ValueError, LookupError, AttributeError) as error:  # connection lost
                if not self._is_closed.wait(RETRY_S):
                    logger.info("reopening the watch of pods: %r", error)

    def _follow(self) -> None:
        """List the pods, then apply changes until the watch ends."""
        listed = self._request("list pods", self._pods.list_namespaced_pod, **self._selection)
        pods = {pod["metadata"]["name"]: pod for pod in listed["items"]}
        self._on_pods(dict(pods))
        options = {"resource_version": listed["metadata"].get("resourceVersion"), "timeout_seconds": WATCH_S}
        limits = {"_request_timeout": (REPLY_S, WATCH_S + REPLY_S), "deserialize": False}
        changes = self._watch.stream(self._pods.list_namespaced_pod, **self._selection, **options, **limits)
        for change in changes:
            if self._is_closed.is_set():
                return
            pod = change["object"]
            if change["type"] == "ERROR":
                return  # the resource version is too old
            if change["type"] == "DELETED":
                pods.pop(pod["metadata"]["name"], None)
            else:
                pods[pod["metadata"]["name"]] = pod
            self._on_pods(dict(pods))


def refusal(what: str, namespace: str, error: "ApiException") -> str:
    """Return the error message for a request that the API server refused."""
    fix = {
        401: "Log in to the cluster again.",
        403: "Give the service account of the controller the Role that `titanrl manifest` prints.",
        409: "Another controller may have changed it; restart the run.",
    }.get(error.status, "Correct hosts.kubernetes.")
    reason = _reason(error)
    return f"hosts.kubernetes: the cluster refuses to {what} in namespace {namespace} (got {error.status}: {reason}). {fix}"


def _reason(error: "ApiException") -> str:
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return " ".join(str(message).split())


def _client(context: str | None) -> "tuple[ApiClient, str]":
    """Return a client, and the default namespace of its credentials."""
    if problem := missing_package():
        raise KubernetesError(problem)
    from kubernetes import client, config

    configuration: Configuration = client.Configuration()
    try:
        if in_cluster():
            config.load_incluster_config(configuration)
            namespace = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        else:
            config.load_kube_config(context=context, client_configuration=configuration)
            contexts, active = config.list_kube_config_contexts()
            named: Mapping[str, Any] = next((one for one in contexts if one["name"] == context), active)
            namespace = named["context"].get("namespace") or "default"
    except (config.ConfigException, OSError) as error:
        raise KubernetesError(
            f"hosts.kubernetes.context: found no credentials for a cluster (got {context!r}: {error}). "
            "Start the run in a pod of the cluster, or set KUBECONFIG."
        ) from None
    return client.ApiClient(configuration), namespace
