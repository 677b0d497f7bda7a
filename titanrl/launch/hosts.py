"""The hosts of a run: this machine, several emulated on it, or a Slurm allocation."""

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
    """The controller's host, which also runs buffer, store and rollout workers."""
    job: JobTrait | None
    """The allocation; None on this machine alone."""

    def close(self) -> None:
        """Release the allocation. torchmonarch's host processes outlive the controller unless they are killed."""
        if self.job is not None:
            self.job.kill()


def acquire_hosts(config: Config) -> Hosts:
    """Acquire the hosts of the configuration; wait in the scheduler's queue if there is one."""
    hosts, replicas = config.hosts, config.generator.replicas
    local = this_host()
    if hosts.kind == "local":
        return Hosts(local, (local,) * replicas, local, None)
    meshes = {"trainers": hosts.trainer_hosts, "generators": hosts.generator_hosts}
    job = ProcessJob(meshes) if hosts.kind == "process" else slurm_job(config, meshes)
    # The next run would reuse a cached allocation, with this run's processes still in it.
    state: Any = job.state(cached_path=None)
    one_each = tuple(state.generators.slice(hosts=replica % hosts.generator_hosts) for replica in range(replicas))
    return Hosts(state.trainers, one_each, local, job)


def slurm_job(config: Config, meshes: dict[str, int]) -> SlurmJob:
    """Return a Slurm job with the devices of each host; `hosts.slurm` overrides its options."""
    options: dict[str, Any] = {"job_name": f"titanrl-{config.name}", "gpus_per_node": config.hosts.devices_per_host}
    return SlurmJob(meshes, **(options | config.hosts.slurm))
