"""The sections for operating a run: checkpoints, time limits, logging and hosts."""

from typing import Annotated, Literal

from pydantic import Field

from titanrl.base.choices import ConsoleMode
from titanrl.config.kubernetes import KubernetesConfig
from titanrl.config.registry import TRACKERS
from titanrl.config.section import CountOrZero, OrImportPath, Processes, Seconds, Section, StepsOrZero
from titanrl.config.slurm import SlurmConfig


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every_steps: StepsOrZero = 50
    """Number of steps between checkpoints; 0 saves only at the end."""
    keep_last: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    """Number of checkpoints to keep; older ones are deleted."""
    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    """Dtype of the weights in exported models, such as `checkpoints/final`. `base` uses that of the weights in `model.path`."""
    on_interrupt: bool = False
    """Save a checkpoint when a signal interrupts the run, after the current step, if that takes at most 10 seconds."""


class TimeoutsConfig(Section):
    """Time limits. Every wait has one; when it expires, the run ends with an error that names the wait."""

    start_s: Seconds = 600.0
    """Time limit in seconds for all processes to start and load their model or data. Raise it for large models on slow
    storage."""
    step_s: Seconds = 1800.0
    """Time limit in seconds for one trainer call, and for one batch of rollouts. Raise it for long completions or large
    batches."""
    sync_s: Seconds = 600.0
    """Time limit in seconds for one push or pull of the weights."""
    close_s: Seconds = 16.0
    """Time limit in seconds for an orderly shutdown, half of it for actors and half for their processes. Processes that remain
    are killed."""


class LoggingConfig(Section):
    """Console output, rollout records and experiment trackers."""

    console: ConsoleMode = "auto"
    """Console output: `live` table, `plain` lines or `off`. `auto` uses `live` on a terminal and `plain` elsewhere."""
    rollouts_per_step: CountOrZero = 2
    """Number of groups per step to write to `rollouts.jsonl`."""
    loggers: Annotated[tuple[Annotated[str, OrImportPath(tuple(TRACKERS))], ...], Field(strict=False)] = ()
    """Experiment trackers, in addition to `metrics.jsonl`. Each built-in tracker requires the package of the same name. Or
    import paths of custom trackers (docs/howto/tracker.md)."""


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
