"""The section `hosts.kubernetes`: pods of a run on Kubernetes."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Seconds, Section

Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[kKMGTP]i?)?$")]
"""Amount of a resource in Kubernetes notation: "8", "500m", "64Gi"."""
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9][-.a-z0-9]*$", max_length=253)]
_RESERVED_FIELDS = ("containers", "volumes", "nodeSelector", "tolerations", "restartPolicy")
"""Pod fields that other keys or the run itself set."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Toleration(Section):
    """A node taint that the pods tolerate."""

    key: str | None = None
    """Key of the taint; null matches every key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` tolerates only `value`, `Exists` any value."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null matches every effect."""


class VolumeConfig(Section):
    """A volume that every pod of the run mounts."""

    claim: DnsName
    """Name of the persistent volume claim. All pods write to it, so its access mode must be ReadWriteMany."""
    mount_path: str
    """Absolute path of the volume in the pods."""
    read_only: bool = False
    """Mount the volume read-only."""


class KubernetesConfig(Section):
    """Pods of a run with `hosts.kind: kubernetes`: one per trainer and generator host, and one for the controller."""

    image: str | None = None
    """Container image of all pods, with TitanRL and its dependencies. Required."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of the image: `Always`, only if the node does not have it (`IfNotPresent`), or `Never`."""
    python: str = "python"
    """Python interpreter in the image."""
    namespace: DnsName | None = None
    """Namespace of the pods. Null uses the namespace of the controller's pod, else of the kubeconfig context, else
    `default`."""
    context: str | None = None
    """Kubeconfig context, for a controller outside the cluster; null uses the current context."""
    service_account: DnsName | None = None
    """Service account of the controller's pod. If null, `titanrl manifest` creates one with the permissions it needs."""
    node_selector: dict[str, str] = {}
    """Node labels that trainer and generator pods require."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Node taints that trainer and generator pods tolerate, each with `key`, `operator`, `value` and `effect`."""
    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Volumes of all pods, each with `claim` (a persistent volume claim), `mount_path` and `read_only`. The first volume is the
    working directory of the run, so `output_dir` and `cache_dir` are on it."""
    labels: dict[str, str] = {}
    """Additional labels of the resources and pods, for example of a queue."""
    env: dict[str, str] = {}
    """Additional environment variables of all pods."""
    cpu: Quantity | None = None
    """CPU cores that each trainer or generator pod requests; null requests none."""
    memory: Quantity | None = None
    """Memory that each trainer or generator pod requests, including `/dev/shm`; null requests none."""
    shared_memory: Quantity | None = None
    """Size limit of `/dev/shm` in each pod, which must hold two versions of the weights. Null limits it only by the pod's
    memory."""
    gpu_resource: str = "nvidia.com/gpu"
    """Accelerator resource, of which each pod requests `hosts.devices_per_host`. Not requested on CPU."""
    controller_cpu: Quantity | None = None
    """CPU cores that the controller's pod requests. It also runs the buffer and the weight store. Null requests none."""
    controller_memory: Quantity | None = None
    """Memory that the controller's pod requests; null requests none."""
    pod_spec: dict[str, Any] = {}
    """Additional fields in the spec of trainer and generator pods, such as `affinity` or `priorityClassName`. The controller's
    pod uses only `imagePullSecrets` and `securityContext` of them."""
    port: Annotated[int, Field(ge=1024, le=65534)] = 26600
    """TCP port of Monarch in each pod; the next port is used for its lease. The processes of the run use other ports, which the
    kernel chooses."""
    start_limit_s: Seconds = 3600.0
    """Maximum time in seconds until all pods are ready, including waiting for nodes and pulling the image."""
    keep: bool = False
    """Do not delete MonarchMesh resources that existed before the run, so that the next run finds their pods running."""
    keep_finished_s: Annotated[int, Field(ge=0, le=604_800)] = 300
    """Time in seconds before the Job of a finished controller is deleted. Pods of a killed controller are deleted with it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        paths = [volume.mount_path for volume in self.volumes]
        for path in paths:
            if not path.startswith("/") or ".." in PurePosixPath(path).parts or paths.count(path) > 1 or path == "/dev/shm":
                yield BrokenRule(
                    values={"volumes": path},
                    rule="each mount_path must be a unique absolute path without .., other than /dev/shm",
                    fix="correct mount_path",
                )
        for field in _RESERVED_FIELDS:
            if field in self.pod_spec:
                yield BrokenRule(
                    values={"pod_spec": field},
                    rule="the run sets this pod field itself",
                    fix="remove it, and use image, volumes, env, node_selector or tolerations of hosts.kubernetes",
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name) or name.startswith("TITANRL_"):
                yield BrokenRule(
                    values={"env": name},
                    rule="each name must consist of letters, digits and _, and must not start with a digit or TITANRL_",
                    fix="rename it",
                )
        for toleration in self.tolerations:
            if toleration.operator == "Exists" and toleration.value is not None:
                yield BrokenRule(
                    values={"tolerations": toleration.value},
                    rule="the operator Exists does not take a value",
                    fix="remove the value, or set operator to Equal",
                )
