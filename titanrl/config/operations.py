"""The sections of a configuration that say how a run is operated: checkpoints, deadlines, records and hosts."""

from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.choices import ConsoleMode
from titanrl.config.kubernetes import KubernetesConfig
from titanrl.config.registry import TRACKERS
from titanrl.config.section import CountOrZero, OrImportPath, Processes, Seconds, Section, StepsOrZero
from titanrl.config.slurm import SlurmConfig


class CheckpointConfig(Section):
    """Checkpoints for resuming a run."""

    every_steps: StepsOrZero = 50
    """Number of steps between checkpoints; 0 writes one only at the end."""
    keep_last: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    """Number of checkpoints to keep; older ones are deleted."""
    on_interrupt: bool = False
    """Save a checkpoint when a signal interrupts the run, after the running step, if that takes at most 10 seconds."""


class TimeoutsConfig(Section):
    """Deadlines. Every wait has one, and its error names the wait."""

    start_s: Seconds = 600.0
    """Limit until every process has started and loaded its model or data."""
    step_s: Seconds = 1800.0
    """Limit for one trainer call, and for one batch of rollouts."""
    sync_s: Seconds = 600.0
    """Limit for one weight push or pull."""
    close_s: Seconds = 16.0
    """Limit for an orderly shutdown, half for actors and half for their processes. Remaining processes are then killed."""


class LoggingConfig(Section):
    """Console output and records."""

    console: ConsoleMode = "auto"
    """`auto` shows a live table on a terminal and prints plain lines elsewhere."""
    rollouts_per_step: CountOrZero = 2
    """Number of groups per step written to `rollouts.jsonl`."""
    loggers: Annotated[tuple[Annotated[str, OrImportPath(tuple(TRACKERS))], ...], Field(strict=False)] = ()
    """Experiment trackers to use in addition to `metrics.jsonl`: built-in ones, each of which requires its package, or import
    paths of your own (docs/howto/tracker.md)."""


class HostsConfig(Section):
    """Placement of the process meshes on hosts."""

    kind: Literal["local", "process", "slurm", "kubernetes", "launcher"] = "local"
    """`local`: this machine. `process`: several emulated hosts on this machine. `slurm`: nodes of a Slurm job.
    `kubernetes`: pods of a Kubernetes cluster. `launcher`: hosts on each of which torchrun, srun, mpirun or a platform starts
    this command once."""
    trainer_hosts: Processes = 1
    """Number of hosts of the trainer mesh."""
    generator_hosts: Processes = 1
    """Number of hosts of the generator replicas."""
    devices_per_host: Processes = 8
    """Number of accelerators per host; ignored on CPU."""
    share_devices: bool = False
    """Place generator ranks on the trainer's accelerators, starting with the first. Otherwise each rank has its own."""
    trusted_network: bool = False
    """Allow hosts that listen on the network, as those of a cluster do, without authentication. A program that can connect to
    them can execute code as you (docs/security.md)."""
    slurm: SlurmConfig = SlurmConfig()
    """Job that Slurm is asked for."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Pods that Kubernetes is asked for."""

    @property
    def across_machines(self) -> bool:
        """True if trainers and generators have machines of their own, which reach each other over the network."""
        return self.kind not in ("local", "process")
