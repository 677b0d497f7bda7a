"""The machines of a run: this one, several emulated on this one, or Slurm's."""

from dataclasses import dataclass
from typing import Any

from monarch.actor import HostMesh, this_host
from monarch.job import JobTrait, ProcessJob, SlurmJob

from titanrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Hosts:
    """Host meshes by role."""

    trainer: HostMesh
    """Hosts of the trainer ranks."""
    generators: tuple[HostMesh, ...]
    """One host for each generator replica; replicas share hosts evenly."""
    local: HostMesh
    """The controller's own machine, where buffer, store and rollout workers run."""
    job: JobTrait | None
    """What holds the machines, if they are not just this one."""

    def close(self) -> None:
        """Give the machines back. torchmonarch's workers outlive the controller unless they are killed."""
        if self.job is not None:
            self.job.kill()


def acquire_hosts(config: Config) -> Hosts:
    """Get the machines that `hosts` asks for; waits in the queue of a scheduler."""
    hosts, replicas = config.hosts, config.generator.replicas
    local = this_host()
    if hosts.kind == "local":
        return Hosts(local, (local,) * replicas, local, None)
    meshes = {"trainers": hosts.trainer_hosts, "generators": hosts.generator_hosts}
    job = ProcessJob(meshes) if hosts.kind == "process" else slurm_job(config, meshes)
    # A cached allocation would be reused by the next run, with this run's processes still in it.
    state: Any = job.state(cached_path=None)
    one_each = tuple(state.generators.slice(hosts=replica % hosts.generator_hosts) for replica in range(replicas))
    return Hosts(state.trainers, one_each, local, job)


def slurm_job(config: Config, meshes: dict[str, int]) -> SlurmJob:
    """A Slurm job with the devices each host has; `hosts.slurm` has the last word."""
    options: dict[str, Any] = {"job_name": f"titanrl-{config.name}", "gpus_per_node": config.hosts.devices_per_host}
    return SlurmJob(meshes, **(options | config.hosts.slurm))
