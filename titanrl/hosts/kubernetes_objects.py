"""Kubernetes objects of a run: MonarchMesh resources, and the controller's Job with its permissions.

Monarch's `KubernetesJob` is not used: it cannot render objects without a cluster, and its pods' hosts outlive their controller.
The objects follow the schema of Monarch's operator 0.2 (`tests/cluster/monarchmesh_crd.json`).
"""

import re
from collections.abc import Mapping
from typing import Any

from titanrl.base.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.config.sections import KubernetesConfig
from titanrl.config.sizes import host_counts
from titanrl.hosts.holder import LISTEN, MODULE, POD_IP, TOKEN

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
Json = dict[str, Any]


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
    """Return the MonarchMesh of a role.

    Args:
        config: configuration of the run.
        device: kind of the pods' devices.
        role: `trainers` or `generators`.
        name: name of the resource.
        token: secret of the pods' leases.
        namespace: namespace of the resource.
        owner: entry of `ownerReferences`; Kubernetes deletes the resource with this object.
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
    """Return the objects of the controller: its Job, configuration, service account and permissions.

    Args:
        config: configuration of the run.
        text: the same configuration as YAML.
        namespace: namespace of the objects.
        resume: run directory to resume, as a path in the pods; None starts a new run.
        examines: whether the Job runs `titanrl doctor` on the run's hosts instead of the run.
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
    """Return the controller's service account, with the Role and RoleBinding for its namespace."""
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
        ["titanrl.cli", *command],
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
