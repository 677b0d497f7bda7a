"""The sections `hosts` and `placement`: the machines of a run, and the hosts and CPU cores of each role."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Processes, Seconds, Section

_TIME_LIMIT = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
"""Time limits that sbatch accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_RESERVED_OPTIONS = frozenset(
    "--nodes -N --job-name -J --ntasks-per-node --ntasks -n --output -o --wrap --array -a".split()  # noqa: SIM905
)
"""Options of sbatch that the run itself sets."""


class SlurmConfig(Section):
    """Slurm job of a run with `hosts.kind: slurm`, with one task per trainer and generator host."""

    partition: str | None = None
    """Partition; null uses the cluster's default."""
    account: str | None = None
    """Account to charge; null uses your default account."""
    qos: str | None = None
    """Quality of service; null uses the default."""
    time_limit: str | None = None
    """Time limit, such as "24:00:00" or "2-12" (days-hours); null uses the partition's default."""
    exclusive: bool = True
    """Request exclusive nodes, which no other job shares."""
    cpus_per_host: Processes | None = None
    """CPU cores to request on each host; needed only on shared nodes."""
    memory_per_host: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory to request on each host, such as "200G"; "0" requests all memory."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 22222
    """TCP port of Monarch on each host. The processes of the run use other ports, which the kernel chooses."""
    queue_limit_s: Seconds | None = None
    """Maximum time in seconds to wait in the queue; null sets no limit."""
    notice_s: Annotated[float, Field(ge=30.0, le=86_400.0)] = 120.0
    """Time in seconds before the time limit at which the run shuts down as after SIGTERM. With `checkpoint.on_interrupt` it
    first saves a checkpoint."""
    requeue: bool = False
    """Requeue a job of `titanrl submit` at its time limit or when Slurm preempts it. It then resumes."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Additional options of sbatch, such as "--constraint=h100"."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            fix = 'write hours:minutes:seconds, such as "24:00:00", or days-hours, such as "2-12"'
            yield self.broken("time_limit", "must be a time limit in sbatch format", fix)
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                yield BrokenRule({"options": option}, "each item must be one option of sbatch", 'write it as "--name=value"')
            elif option.partition("=")[0].split()[0] in _RESERVED_OPTIONS:
                fix = "remove it; hosts.trainer_hosts and hosts.generator_hosts set the number of nodes"
                yield BrokenRule({"options": option}, "the run sets this option itself", fix)


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
                rule = "each mount_path must be a unique absolute path without .., other than /dev/shm"
                yield BrokenRule({"volumes": path}, rule, "correct mount_path")
        for field in _RESERVED_FIELDS:
            if field in self.pod_spec:
                fix = "remove it, and use image, volumes, env, node_selector or tolerations of hosts.kubernetes"
                yield BrokenRule({"pod_spec": field}, "the run sets this pod field itself", fix)
        for name in self.env:
            if not _VARIABLE.fullmatch(name) or name.startswith("TITANRL_"):
                rule = "each name must consist of letters, digits and _, and must not start with a digit or TITANRL_"
                yield BrokenRule({"env": name}, rule, "rename it")
        for toleration in self.tolerations:
            if toleration.operator == "Exists" and toleration.value is not None:
                fix = "remove the value, or set operator to Equal"
                yield BrokenRule({"tolerations": toleration.value}, "the operator Exists does not take a value", fix)


class HostsConfig(Section):
    """Hosts and accelerators of the run."""

    kind: Literal["local", "process", "slurm", "kubernetes", "launcher"] = "local"
    """Type of hosts. `local`: this machine only. `process`: several hosts emulated on this machine, for tests. `slurm`: nodes
    of a Slurm job. `kubernetes`: pods of a Kubernetes cluster. `launcher`: hosts on which torchrun, srun, mpirun or a platform
    starts this command, once on each."""
    trainer_hosts: Processes = 1
    """Number of hosts for the trainer ranks."""
    generator_hosts: Processes = 1
    """Number of hosts for the generator replicas."""
    devices_per_host: Processes = 8
    """Number of accelerators per host; ignored on CPU."""
    share_devices: bool = False
    """Place generator ranks on the trainer's accelerators, starting with the first. `false` gives each rank its own
    accelerator."""
    trusted_network: bool = False
    """Allow the hosts of a cluster to listen on the network. They do not authenticate connections: any program that can connect
    to them can execute code as you (docs/security.md). Required for `slurm`, `kubernetes` and `launcher`."""
    slurm: SlurmConfig = SlurmConfig()
    """Slurm job."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Kubernetes pods."""

    @property
    def across_machines(self) -> bool:
        """True if trainers and generators run on different machines, connected by a network."""
        return self.kind not in ("local", "process")


HostGroup = Literal["controller", "trainers", "generators"]
"""The controller's host, the trainer hosts, or the hosts of the generator replicas."""
Cpus = Annotated[str, Field(pattern=r"^(numa|split|\d+(-\d+)?(,\d+(-\d+)?)*)$")]
"""CPU cores of a role on each of its hosts: `numa`, `split`, or core numbers such as `0-7,16`."""
PerHost = Annotated[tuple[Processes, ...], Field(strict=False)]


class CpusConfig(Section):
    """CPU affinity of the processes of each role, on each host. `split` gives each process an equal share of the host's
    cores, `numa` the cores of one NUMA node. Core numbers such as `0-7,16` apply to all processes of the role. Null sets no
    affinity."""

    trainer: Cpus | None = None
    """Trainer ranks."""
    generator: Cpus | None = None
    """Generator ranks, including background evaluators and teachers."""
    rollout: Cpus | None = None
    """Rollout workers, with their storage shards and scoring processes."""
    store: Cpus | None = None
    """Process of the weight store and the buffer."""


class PlacementConfig(Section):
    """Hosts of each role. With `hosts.kind: local`, every role runs on this machine."""

    generator: Literal["generators", "trainers"] = "generators"
    """`generators`: replicas run on their own hosts. `trainers`: they run on the first `hosts.generator_hosts` trainer hosts,
    on the devices after those of the trainer ranks."""
    rollout: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Hosts of the rollout workers. A worker's storage shard and scoring processes run on the same host. `auto` uses
    `generators`, or `controller` if the run has no generators."""
    store: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Host of the buffer and the weight store, which hold no tokens: the first host of a group. `auto` uses `controller`, or
    `trainers` with `weights.transport: store`."""
    replicas_per_host: PerHost | None = None
    """Number of generator replicas on each of their hosts; null distributes them evenly."""
    workers_per_host: PerHost | None = None
    """Number of rollout workers on each of their hosts; null distributes them evenly."""
    cpus: CpusConfig = CpusConfig()
    """CPU cores of each role."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = None
    """Network interface, such as `eth0`, for collectives between ranks on several hosts (gloo and NCCL). Null lets each library
    choose."""
