"""The section of a configuration that says how a run gets its hosts from Kubernetes."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Seconds, Section

Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[kKMGTP]i?)?$")]
"""Amount of a resource, as Kubernetes writes it: "8", "500m", "64Gi"."""
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9][-.a-z0-9]*$", max_length=253)]
_OWN_FIELDS = ("containers", "volumes", "nodeSelector", "tolerations", "restartPolicy")
"""Fields of a pod that other keys or the run itself set."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Toleration(Section):
    """Taint of nodes on which the pods may run all the same."""

    key: str | None = None
    """Key of the taint; null means every key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Exists` tolerates every value."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null means every effect."""


class VolumeConfig(Section):
    """Volume that every pod of the run mounts."""

    claim: DnsName
    """Name of the persistent volume claim. All pods write to it, so its access mode must be ReadWriteMany."""
    mount_path: str
    """Absolute path of the volume in the pods."""
    read_only: bool = False
    """Let no pod write to it."""


class KubernetesConfig(Section):
    """Pods of a run with `hosts.kind: kubernetes`: one on each trainer and generator host, and the controller's."""

    image: str | None = None
    """Image of all pods, with TitanRL and its packages. Required."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Condition on which a node pulls the image."""
    python: str = "python"
    """Interpreter in the image."""
    namespace: DnsName | None = None
    """Namespace; null takes that of the controller's pod, or of the context, or `default`."""
    context: str | None = None
    """Context of the kubeconfig file, for a controller outside of the cluster; null takes the current one."""
    service_account: DnsName | None = None
    """Service account of the controller's pod. With null, `titanrl manifest` makes one, with its rights."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes for trainer and generator pods."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Taints of nodes on which trainer and generator pods may run, each with `key`, `operator` (`Equal` or `Exists`), `value`
    and `effect`."""
    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Volumes of all pods, each with `claim`, the name of a persistent volume claim, `mount_path`, and `read_only`. The first
    one is the folder in which the run starts, so `output_dir` and `cache_dir` are on it."""
    labels: dict[str, str] = {}
    """Further labels of the resources and their pods, such as that of a queue."""
    env: dict[str, str] = {}
    """Further environment variables of all pods."""
    cpu: Quantity | None = None
    """CPU cores of a trainer or generator pod; null requests none."""
    memory: Quantity | None = None
    """Memory of a trainer or generator pod, with its `/dev/shm`; null requests none."""
    shared_memory: Quantity | None = None
    """Limit of `/dev/shm` in each pod, which has to hold two versions of the weights. With null, it is the pod's memory."""
    gpu_resource: str = "nvidia.com/gpu"
    """Kind of accelerator, of which a pod requests `hosts.devices_per_host`; none on CPU."""
    controller_cpu: Quantity | None = None
    """CPU cores of the controller's pod, which also runs buffer and store; null requests none."""
    controller_memory: Quantity | None = None
    """Memory of the controller's pod; null requests none."""
    pod_spec: dict[str, Any] = {}
    """Further fields of the spec of trainer and generator pods, such as `affinity` or `priorityClassName`. The controller's pod
    gets only `imagePullSecrets` and `securityContext`."""
    port: Annotated[int, Field(ge=1024, le=65534)] = 26600
    """TCP port of Monarch in each pod; that of its lease is the next one. The run's processes take further ports, which the
    kernel chooses."""
    start_limit_s: Seconds = 3600.0
    """Longest wait for the pods: for nodes, the image, and the start of the container."""
    keep: bool = False
    """Leave MonarchMesh resources that existed before the run as they are, so that the next run finds its pods running."""
    keep_finished_s: Annotated[int, Field(ge=0, le=604_800)] = 300
    """Seconds for which the controller's Job stays after its end. Pods of a controller that was killed go with it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        paths = [volume.mount_path for volume in self.volumes]
        for path in paths:
            if not path.startswith("/") or ".." in PurePosixPath(path).parts or paths.count(path) > 1 or path == "/dev/shm":
                yield BrokenRule(
                    values={"volumes": path},
                    rule="each mount_path must be an absolute path of its own, other than /dev/shm",
                    fix="correct mount_path",
                )
        for field in _OWN_FIELDS:
            if field in self.pod_spec:
                yield BrokenRule(
                    values={"pod_spec": field},
                    rule="the run sets this field of a pod itself",
                    fix="remove it; image, volumes, env, node_selector and tolerations are keys of hosts.kubernetes",
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name) or name.startswith("TITANRL_"):
                yield BrokenRule(
                    values={"env": name}, rule="each must be the name of an environment variable of yours", fix="rename it"
                )
        for toleration in self.tolerations:
            if toleration.operator == "Exists" and toleration.value is not None:
                yield BrokenRule(
                    values={"tolerations": toleration.value},
                    rule="the operator Exists takes no value",
                    fix="remove the value, or set operator to Equal",
                )
