"""Kubernetes pods as hosts of a run: create or find them, wait until they are ready, watch them, and release them.

The pods belong to MonarchMesh resources, which Monarch's operator implements. The controller connects to the pods, not the pods
to the controller: they can exist before it, and serve several controllers in turn. This module must not import Monarch; the
`kubernetes` package is optional, so it is imported where it is used.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from titanrl.base.errors import TitanRLError
from titanrl.config.device import DeviceKind
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.sections import KubernetesConfig
from titanrl.config.sizes import host_counts
from titanrl.hosts.holder import (
    BUSY,
    LISTEN,
    MODULE,
    POD_IP,
    SERVING,
    START,
    TOKEN,
    AcquiredHosts,
    Host,
    Leases,
    Order,
    broken_by_name,
    broken_by_remote_hosts,
    tcp,
)

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, ApiException

logger = logging.getLogger(__name__)

GROUP, VERSION, PLURAL = "monarch.pytorch.org", "v1alpha1", "monarchmeshes"
"""API group, version and plural name of the MonarchMesh resource."""
MESH_LABEL = "monarch.pytorch.org/mesh-name"
"""Label that the operator puts on the pods of a mesh."""
RUN_LABEL, ROLE_LABEL = "titanrl/run", "titanrl/role"
"""Labels on the objects of a run."""
POD_NAME = "TITANRL_POD_NAME"
"""Environment variable with the name of the controller's pod."""
CONFIG_FOLDER = "/run/titanrl"
"""Folder of the configuration in the controller's pod."""
GRACE_S = 60
"""Seconds from SIGTERM to SIGKILL for the controller, which may save a checkpoint first."""
HOST_GRACE_S = 10
"""The same for the other pods, which have nothing to save."""
MAX_NAME = 63
REPLY_S = 15.0
"""Limit for a response of the API server, in seconds."""
RELEASE_S = 5.0
"""Shorter limit for deletions, which delay the end of the run."""
WATCH_S = 300
"""Seconds after which a watch is reopened. The server sends nothing while nothing changes."""
RETRIES = 3
"""Attempts of a request that changes nothing, or that deletes."""
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
Json = dict[str, Any]
Object = Mapping[str, Any]
"""API object, as JSON."""


class KubernetesError(TitanRLError):
    """The cluster refused a request or did not respond, or pods do not start."""


class PodBusyError(KubernetesError):
    """A pod serves another run."""


# Objects, which follow the schema of Monarch's operator 0.2 (`tests/cluster/monarchmesh_crd.json`). Monarch's `KubernetesJob`
# is not used: it cannot render objects without a cluster, and its pods' hosts outlive their controller.


def mesh_name(run: str, role: str, suffix: str = "") -> str:
    """Return the name of a mesh. Monarch's operator only allows lower-case letters and digits."""
    tail = f"{role}{suffix}"
    letters = re.sub(r"[^a-z0-9]", "", run.lower())
    return f"{letters if letters[:1].isalpha() else f'run{letters}'}"[: MAX_NAME - len(tail) - len("-svc")] + tail


def object_name(run: str) -> str:
    """Return the name of the controller's objects: a DNS label."""
    text = re.sub(r"[^a-z0-9]+", "-", f"titanrl-{run.lower()}")
    return text[: MAX_NAME - 1].strip("-")


def mesh(
    config: Config, device: DeviceKind, role: str, name: str, token: str, *, namespace: str, owner: Json | None = None
) -> Json:
    """Return the MonarchMesh of a role, `trainers` or `generators`.

    `token` is the secret of the pods' leases. Kubernetes deletes the resource with its `owner`, an entry of `ownerReferences`.
    """
    kubernetes = config.hosts.kubernetes
    metadata: Json = {"name": name, "namespace": namespace, "labels": _labels(config, role)}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MonarchMesh",
        "metadata": metadata,
        "spec": {
            "replicas": host_counts(config)[role],
            "port": kubernetes.port,
            "podTemplate": {
                "metadata": {"labels": _labels(config, role)},
                "spec": _host_spec(kubernetes, token, 0 if device == "cpu" else config.hosts.devices_per_host),
            },
        },
    }


def token_of(resource: Mapping[str, Any]) -> str:
    """Return the secret of a MonarchMesh's pods; empty if TitanRL did not create the resource."""
    containers = resource["spec"]["podTemplate"].get("spec", {}).get("containers", ())
    variables = containers[0].get("env", ()) if containers else ()
    return next((str(one["value"]) for one in variables if one["name"] == TOKEN and "value" in one), "")


def controller(config: Config, text: str, namespace: str, resume: str | None = None, *, examines: bool = False) -> list[Json]:
    """Return the objects of the controller: its Job, configuration (`text` as YAML), service account and permissions.

    `resume` is the run directory to resume, as a path in the pods. With `examines`, the Job runs `titanrl doctor` on the hosts.
    """
    kubernetes, name = config.hosts.kubernetes, object_name(f"{config.name}-doctor" if examines else config.name)
    account = kubernetes.service_account or name
    objects = [] if kubernetes.service_account is not None else _rights(name, namespace)
    objects += [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"run.yaml": text}}]
    source = ["--config", f"{CONFIG_FOLDER}/run.yaml"] if resume is None else ["--resume", resume]
    objects.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {
                "backoffLimit": 0,
                "ttlSecondsAfterFinished": kubernetes.keep_finished_s,
                "template": {
                    "metadata": {"labels": _labels(config, "controller")},
                    "spec": _controller_spec(kubernetes, name, account, ["doctor" if examines else config.program, *source]),
                },
            },
        }
    )
    for one in objects:
        one["metadata"] |= {"namespace": namespace, "labels": _labels(config, "controller")}
    return objects


def _labels(config: Config, role: str) -> dict[str, str]:
    return {**config.hosts.kubernetes.labels, RUN_LABEL: object_name(config.name), ROLE_LABEL: role}


def _rights(name: str, namespace: str) -> list[Json]:
    api = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {
            "apiVersion": f"{api}/v1",
            "kind": "Role",
            "metadata": {"name": name},
            "rules": [
                {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "create", "patch", "delete"]},
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
            ],
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    ]


def _host_spec(kubernetes: KubernetesConfig, token: str, num_devices: int) -> Json:
    """Return the spec of a trainer or generator pod. The pod gets no access to the API."""
    amounts = {"cpu": kubernetes.cpu, "memory": kubernetes.memory, kubernetes.gpu_resource: num_devices or None}
    container = _container(
        kubernetes,
        [MODULE, LISTEN, str(kubernetes.port + 1)],
        {TOKEN: token, POD_IP: "status.podIP"},
        {key: str(amount) for key, amount in amounts.items() if amount is not None},
    )
    container["ports"] = [
        {"name": "monarch", "containerPort": kubernetes.port},
        {"name": "lease", "containerPort": kubernetes.port + 1},
    ]
    container["readinessProbe"] = {"tcpSocket": {"port": kubernetes.port + 1}, "periodSeconds": 2}
    spec: Json = {
        **kubernetes.pod_spec,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": HOST_GRACE_S,
        "containers": [container],
        "volumes": _volumes(kubernetes),
    }
    if kubernetes.node_selector:
        spec["nodeSelector"] = kubernetes.node_selector
    if kubernetes.tolerations:
        spec["tolerations"] = [one.model_dump(exclude_none=True) for one in kubernetes.tolerations]
    return spec


def _controller_spec(kubernetes: KubernetesConfig, name: str, account: str, command: list[str]) -> Json:
    amounts = {"cpu": kubernetes.controller_cpu, "memory": kubernetes.controller_memory}
    container = _container(
        kubernetes,
        ["titanrl.commands", *command],
        {POD_NAME: "metadata.name"},
        {key: amount for key, amount in amounts.items() if amount is not None},
    )
    container["volumeMounts"].append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    return {
        "serviceAccountName": account,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [*_volumes(kubernetes), {"name": "config", "configMap": {"name": name}}],
        **{key: value for key, value in kubernetes.pod_spec.items() if key in ("imagePullSecrets", "securityContext")},
    }


def _container(
    kubernetes: KubernetesConfig, module: list[str], variables: Mapping[str, str], amounts: Mapping[str, str]
) -> Json:
    """Return the container of a pod. A variable whose value starts with `status.` or `metadata.` gets that field of the pod."""
    env: list[Json] = [{"name": key, "value": value} for key, value in kubernetes.env.items()]
    for key, value in variables.items():
        is_field = value.startswith(("status.", "metadata."))
        env.append(
            {"name": key, "valueFrom": {"fieldRef": {"fieldPath": value}}} if is_field else {"name": key, "value": value}
        )
    container: Json = {
        "name": "titanrl",
        "image": kubernetes.image,
        "imagePullPolicy": kubernetes.image_pull_policy,
        "command": [kubernetes.python, "-u", "-m", *module],
        "env": env,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if kubernetes.volumes:
        container["workingDir"] = kubernetes.volumes[0].mount_path
    for number, volume in enumerate(kubernetes.volumes):
        mount: Json = {"name": f"volume-{number}", "mountPath": volume.mount_path}
        container["volumeMounts"].append({**mount, "readOnly": True} if volume.read_only else mount)
    if amounts:
        container["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    return container


def _volumes(kubernetes: KubernetesConfig) -> list[Json]:
    """Return the volumes of a pod, including one for /dev/shm, because a container's default has only 64 MB."""
    memory: Json = {"medium": "Memory"}
    if kubernetes.shared_memory is not None:
        memory["sizeLimit"] = kubernetes.shared_memory
    claims: list[Json] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}}
        for number, volume in enumerate(kubernetes.volumes)
    ]
    return [{"name": "shm", "emptyDir": memory}, *claims]


# Rules


def broken_by_kubernetes(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine or in this pod, which will run its controller."""
    yield from broken_by_pods(config)
    if find_spec("kubernetes") is None:
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
    """State of a pod."""

    name: str
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
    """Return the state of a pod. Its index is in a label that is new in Kubernetes 1.28, and at the end of its name."""
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = _condition(status, "Ready").get("status") == "True"
    problem, is_hopeless = ("", False) if ready else _problem(status)
    number = (metadata.get("labels") or {}).get(INDEX) or metadata["name"].rpartition("-")[2]
    return PodState(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        number=int(number) if number.isdecimal() else -1,
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
    """Return why the pod with a unique id ended, given the pod that now has its name; empty if Kubernetes does not know it."""
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


# The hosts


class KubernetesHosts(AcquiredHosts):
    """Pods of MonarchMesh resources. Existing resources with the names of `titanrl manifest` are used; others are created."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._keeps = order.config.hosts.kubernetes.keep or order.leases is not None  # existing resources, when the run ends
        self._api: Api
        self._releasing = contextlib.AsyncExitStack()
        self._names: dict[str, str] = {}  # resource names, by mesh
        self._owned: set[str] = set()  # names of the resources to delete with the run
        self._adopted: dict[str, Json | None] = {}  # the ones of them that existed before, with their new owner
        self._pods: list[tuple[str, PodState]] = []  # role and state, by rank
        self._terminated: set[int] = set()  # ranks of the pods that Kubernetes terminated with SIGTERM
        self._said = ""  # last message about what startup is waiting for

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Create or find the pods, and start Monarch's hosts in them; see `Provider`."""
        await self.acquire()
        port, pods = self._config.hosts.kubernetes.port, [state for _, state in self._pods]
        addresses = [f"{identity}@{tcp(pod.ip, port)}" for identity, pod in zip(identities, pods, strict=True)]
        for rank, address in enumerate(addresses):
            self.leases.send(rank, f"{START} {address}")
        names = [f"{pod.name} on {pod.node}" if pod.node else pod.name for pod in pods]
        self._say(f"Kubernetes: {len(pods)} pods ({', '.join(names)})")
        return addresses

    async def acquire(self) -> None:
        """Create or find the pods, and acquire their leases; see `AcquiredHosts`."""
        kubernetes = self._config.hosts.kubernetes
        self._api = await Api.open(kubernetes.namespace, kubernetes.context)
        self._releasing.push_async_callback(self._api.close)
        self._releasing.push_async_callback(self._delete_owned)
        requesting = asyncio.ensure_future(self._request())  # each of its API calls has a time limit
        try:
            tokens = await asyncio.shield(requesting)
        except asyncio.CancelledError:  # wait for a resource that is being created, so that it can be deleted
            await asyncio.gather(requesting, return_exceptions=True)
            raise
        try:
            async with asyncio.timeout(kubernetes.start_limit_s):
                ready = await self._ready()
        except TimeoutError:
            raise KubernetesError(
                f"hosts.kubernetes.start_limit_s: the pods were not ready in time: {self._said or 'no reply from the cluster'} "
                f"(got {kubernetes.start_limit_s:g}). Raise the limit, or request fewer resources."
            ) from None
        self._pods = [(role, ready[role][index]) for role, number in self._meshes.items() for index in range(number)]
        port, own = kubernetes.port + 1, f"{self._config.name}@{socket.gethostname()}"
        try:
            await asyncio.gather(
                *(
                    hold_pod(self.leases, rank, pod, port, f"{tokens[role]} {own}")
                    for rank, (role, pod) in enumerate(self._pods)
                )
            )
        except PodBusyError:  # leave the resources to the other run
            self._owned -= self._adopted.keys()
            for name, owner in self._adopted.items():
                if owner is not None:
                    await self._api.own_mesh(name, [])
            raise
        await self.leases.all_held()

    async def kill(self) -> None:
        """Kill every process of the run in the pods, and release them. A second call does nothing."""
        self.close()
        await self._releasing.aclose()

    async def _delete_owned(self) -> None:
        for name in self._owned:
            try:
                await self._api.delete_mesh(name)
            except KubernetesError as error:
                logger.warning("%s MonarchMesh %s remains until the controller's pod is deleted", error, name)

    async def _request(self) -> dict[str, str]:
        """Find or create each resource; return the secret of its pods, by mesh."""
        owner, tokens, suffix = await self._api.owner(), {}, secrets.token_hex(3)
        for role in self._meshes:
            found = await self._api.mesh(mesh_name(self._config.name, role))
            if found is not None and "deletionTimestamp" not in found["metadata"]:
                tokens[role] = await self._adopt(role, found, owner)
                continue
            # Pods of an earlier resource of the same name may still be terminating, so a new one gets a unique name.
            name = self._names[role] = mesh_name(self._config.name, role, suffix)
            self._owned.add(name)
            tokens[role] = secrets.token_hex(16)
            body = mesh(self._config, self._device, role, name, tokens[role], namespace=self._api.namespace, owner=owner)
            await self._api.create_mesh(body)
        return tokens

    async def _adopt(self, role: str, found: Json, owner: Json | None) -> str:
        """Use an existing resource, and take ownership of it unless it is kept; return the secret of its pods."""
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
                await self._api.own_mesh(name, [owner], metadata["resourceVersion"])
        return token

    async def _ready(self) -> dict[str, dict[int, PodState]]:
        """Watch the pods until all accept connections; return their states by mesh and index."""
        self._say(f"waiting for the pods of MonarchMesh {', '.join(self._names.values())} in {self._api.namespace}")
        async with contextlib.aclosing(self._api.pods(self._names.values())) as changes:
            while True:
                pods = await anext(changes)
                states = {
                    role: current((pod for pod in pods.values() if pod["metadata"]["labels"][MESH_LABEL] == name), number)
                    for (role, name), number in zip(self._names.items(), self._meshes.values(), strict=True)
                }
                for state in (state for found in states.values() for state in found.values()):
                    if state.is_hopeless:
                        raise KubernetesError(
                            f"hosts.kubernetes: pod {state.name} does not start (got {state.problem}). "
                            f"Read kubectl describe pod {state.name}, and correct the image or the pods' settings."
                        )
                waits = [progress(self._names[role], number, states[role]) for role, number in self._meshes.items()]
                said = "; ".join(text for text in waits if text)
                if not said:
                    return states
                if said != self._said:
                    self._say(f"waiting for pods: {said}")
                self._said = said

    def _on_line(self, host: Host, line: bytes) -> None:
        """Ignore the replies to `start`."""

    def _on_ending(self, host: Host) -> None:
        self._terminated.add(host.rank)

    def _on_lost(self, host: Host) -> None:
        self._later(self._report_lost(host))

    async def _report_lost(self, host: Host) -> None:
        role, state = self._pods[host.rank]
        cause = "Kubernetes terminated it" if host.rank in self._terminated else ""
        try:
            async with asyncio.timeout(STATUS_S), contextlib.aclosing(self._api.pods([self._names[role]])) as changes:
                async for pods in changes:  # Kubernetes may know the reason only after the connection has closed
                    if found := end_of(pods.get(state.name), state.uid):
                        cause = found
                        break
        except (KubernetesError, TimeoutError) as error:
            logger.warning("the state of pod %s is unknown: %r", host.node, error)
        place = f" on {state.node}" if state.node else ""
        text = f"; {cause}" if cause else ""
        self.on_lost(host.name, f"pod {host.node}{place} exited or is unreachable{text}")


async def hold_pod(leases: Leases, rank: int, pod: PodState, port: int, greeting: str) -> None:
    """Acquire the lease of a pod, the host `rank`. The greeting has the pod's secret, and the name of this controller."""
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


# Requests to the API


def in_cluster() -> bool:
    """Return True if this process runs in a pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.exists()


class Api:
    """Client of the API, for one namespace. Each request raises `KubernetesError` if it is refused or gets no reply in time."""

    def __init__(self, client: "ApiClient", namespace: str) -> None:
        from kubernetes.aio.client import CoreV1Api, CustomObjectsApi

        self.namespace = namespace
        """Namespace of all objects."""
        self._client, self._pods, self._custom = client, CoreV1Api(client), CustomObjectsApi(client)
        self._where: Json = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    @classmethod
    async def open(cls, namespace: str | None, context: str | None) -> Self:
        """Read the credentials of the pod, or of a context in the kubeconfig file; open no connection yet.

        Without a namespace, use that of the pod or of the context.

        Raises:
            KubernetesError: There are no credentials.
        """
        from kubernetes.aio import client, config

        configuration = client.Configuration(retries=RETRIES)
        try:
            if in_cluster():
                config.load_incluster_config(configuration)
                default = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            else:
                loader = await config.load_kube_config(context=context, client_configuration=configuration)
                configuration.refresh_api_key_hook = loader.load_and_set  # tokens of a login expire during a run
                contexts, active = config.list_kube_config_contexts()
                named: Mapping[str, Any] = next((one for one in contexts if one["name"] == context), active)
                default = named["context"].get("namespace") or "default"
        except (config.ConfigException, OSError) as error:
            raise KubernetesError(
                f"hosts.kubernetes.context: found no credentials for a cluster (got {context!r}: {error}). "
                "Start the run in a pod of the cluster, or set KUBECONFIG."
            ) from None
        return cls(client.ApiClient(configuration), namespace or default)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def mesh(self, name: str) -> Json | None:
        """Return a MonarchMesh; None if it does not exist."""
        get = self._custom.get_namespaced_custom_object
        found: Json | None = await self._request(f"get MonarchMesh {name}", get, name=name, **self._where)
        return found

    async def create_mesh(self, body: Json) -> None:
        """Create a MonarchMesh."""
        what = f"create MonarchMesh {body['metadata']['name']}"
        if await self._request(what, self._custom.create_namespaced_custom_object, body=body, **self._where) is None:
            raise KubernetesError(
                f"hosts.kind: the cluster at {self._client.configuration.host} has no MonarchMesh resources (got kubernetes). "
                "Install Monarch's operator (docs/howto/kubernetes.md)."
            )

    async def own_mesh(self, name: str, owners: list[Json], version: str | None = None) -> None:
        """Set the owners of a MonarchMesh, which Kubernetes deletes with them.

        With `version`, the request fails if the resource has changed since that version.
        """
        body = {"metadata": {"ownerReferences": owners} | ({} if version is None else {"resourceVersion": version})}
        patch = self._custom.patch_namespaced_custom_object
        await self._request(f"patch MonarchMesh {name}", patch, name=name, body=body, **self._where)

    async def delete_mesh(self, name: str) -> None:
        """Delete a MonarchMesh. Do nothing if it does not exist."""
        delete = self._custom.delete_namespaced_custom_object
        await self._request(f"delete MonarchMesh {name}", delete, limit_s=RELEASE_S, name=name, **self._where)

    async def owner(self) -> Json | None:
        """Return the pod of this process as an `ownerReferences` entry; None outside the cluster."""
        if not in_cluster():
            return None
        name = os.environ.get(POD_NAME, socket.gethostname())
        pod = await self._request(f"get pod {name}", self._pods.read_namespaced_pod, name=name, namespace=self.namespace)
        if pod is None:
            logger.warning(
                "there is no pod %s; set %s to the name of this pod, so that resources are deleted with it", name, POD_NAME
            )
            return None
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}

    async def pods(self, meshes: Iterable[str]) -> AsyncGenerator[dict[str, Json]]:
        """Yield all pods of some meshes by name, at first and whenever one changes, without an end."""
        from aiohttp import ClientError

        selection: Json = {"namespace": self.namespace, "label_selector": f"{MESH_LABEL} in ({','.join(meshes)})"}
        while True:
            listed = await self._request("list pods", self._pods.list_namespaced_pod, **selection)
            pods: dict[str, Json] = {pod["metadata"]["name"]: pod for pod in listed["items"]}
            yield pods
            try:
                async with asyncio.timeout(REPLY_S):
                    response = await self._pods.list_namespaced_pod_without_preload_content(
                        **selection,
                        watch=True,
                        resource_version=listed["metadata"].get("resourceVersion"),
                        timeout_seconds=WATCH_S,
                        _request_timeout=WATCH_S + REPLY_S,
                    )
                with contextlib.closing(response):
                    async for line in response.content:
                        change = json.loads(line)
                        if change["type"] == "ERROR":
                            break  # the resource version is too old
                        pod = change["object"]
                        pods.pop(pod["metadata"]["name"], None)
                        if change["type"] != "DELETED":
                            pods[pod["metadata"]["name"]] = pod
                        yield pods
            except (ClientError, OSError, TimeoutError, ValueError, LookupError) as error:  # the connection was lost
                logger.info("reopening the watch of pods: %r", error)
                await asyncio.sleep(RETRY_S)

    async def _request(self, what: str, call: Callable[..., Any], *, limit_s: float = REPLY_S, **arguments: Any) -> Any:
        """Call the API; return the object as JSON, or None if it does not exist."""
        from aiohttp import ClientError
        from kubernetes.aio.client import ApiException

        try:
            return self._client.sanitize_for_serialization(await call(**arguments, _request_timeout=limit_s))
        except ApiException as error:
            if error.status == 404:
                return None
            raise KubernetesError(refusal(what, self.namespace, error)) from None
        except (ClientError, OSError, TimeoutError) as error:
            raise KubernetesError(
                f"hosts.kubernetes: the API server at {self._client.configuration.host} did not respond to {what!r} "
                f"(got {str(error) or repr(error)}). Check the cluster and the context in the kubeconfig file."
            ) from None


def refusal(what: str, namespace: str, error: "ApiException") -> str:
    """Return the error message for a request that the API server refused."""
    fix = {
        401: "Log in to the cluster again.",
        403: "Give the service account of the controller the Role that `titanrl manifest` prints.",
        409: "Another controller may have changed it; restart the run.",
    }.get(error.status, "Correct hosts.kubernetes.")
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    reason = " ".join(str(message).split())
    return f"hosts.kubernetes: the cluster refuses to {what} in namespace {namespace} (got {error.status}: {reason}). {fix}"
