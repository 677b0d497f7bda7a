"""The hosts of a run: this machine, hosts emulated on it, Slurm nodes, hosts of a launcher, or Kubernetes pods.

`acquire_hosts` returns `Hosts`, which maps roles to hosts.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch._src.job.service_identity import allocate_service_proc_ids  # importing monarch.job would load a web server
from monarch.actor import HostMesh, attach_to_workers, enable_transport
from monarch.config import configure

from titanrl.base import terminal
from titanrl.base.choices import DeviceKind
from titanrl.base.errors import FaultError, TitanRLError
from titanrl.config.schema import Config
from titanrl.config.sizes import HostPlace, host_counts, replica_place, store_place, worker_place
from titanrl.hosts.emulated import EmulatedHosts
from titanrl.hosts.kubernetes import KubernetesHosts
from titanrl.hosts.launcher import Crew, LauncherError, LauncherHosts
from titanrl.hosts.leases import LOST_S, Say
from titanrl.hosts.slurm import SlurmHosts
from titanrl.launch.supervision import Supervisor
from titanrl.processes.private_sockets import private_sockets

POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
"""Environment variable with the interval of torchmonarch's polls; `configure` does not know it."""
POLL_S = 5
"""Interval of the polls in seconds. A shorter one notices a dead process earlier, but each poll leaves 10 kB per mesh in the
controller's memory."""


class Provider(Protocol):
    """A kind of hosts: how it gets Monarch's host onto machines. Ranks count the hosts of all meshes, in their order."""

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Acquire the hosts, and start Monarch's hosts with these identities; return `identity@address` by rank.

        The caller calls `kill` afterwards, even if this fails.
        """

    def kill(self) -> None:
        """Kill every process on the hosts, and release them. A second call does nothing."""

    def has_ended(self, rank: int) -> bool:
        """Return True if a host exited or became unreachable."""

    def are_alive(self) -> bool:
        """Return True if every host is known to be alive."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Assignment of roles to the acquired hosts."""

    config: Config
    """Configuration of the run, which defines the placement of each role."""
    local: HostMesh
    """The controller's host."""
    provider: Provider | None
    """The allocation; None if the run only uses this machine directly."""
    meshes: Mapping[str, HostMesh] = field(default_factory=dict)
    """Host meshes by name (`trainers`, `generators`); empty if the controller's host is the only one."""

    @property
    def trainer(self) -> HostMesh:
        """Hosts of the trainer ranks."""
        return self.meshes.get("trainers", self.local)

    @property
    def store(self) -> HostMesh:
        """Host of the replay buffer and the weight store."""
        return self._first_alive([store_place(self.config)], "store")

    def of_generator(self, replica: int) -> HostMesh:
        """Return the host for a replica's processes. If it is lost, return the host of the next replica.

        Raises:
            FaultError: All generator hosts are lost.
        """
        return self._first_alive(self._replica_places(replica), f"generator_{replica}")

    def of_worker(self, worker: int) -> HostMesh:
        """Return the host for a rollout worker's process. If it is lost, return the host of a generator replica.

        Raises:
            FaultError: All of these hosts are lost.
        """
        return self._first_alive([worker_place(self.config, worker), *self._replica_places(worker)], f"rollout_{worker}")

    def _replica_places(self, first: int) -> list[HostPlace]:
        count = self.config.generator.replicas if self.config.num_generator_ranks else 0
        return [replica_place(self.config, (first + step) % count) for step in range(count)]

    def _first_alive(self, places: Sequence[HostPlace | None], role: str) -> HostMesh:
        for place in places:
            if place is None or not self.meshes:
                return self.local
            mesh, number = place
            if self.provider is None or not self.provider.has_ended(first_rank(host_counts(self.config), mesh) + number):
                return self.meshes[mesh].slice(hosts=number)
        raise FaultError("all hosts for this role are lost", role)

    def are_alive(self) -> bool:
        """Return True if every host is known to be alive."""
        return self.provider is None or self.provider.are_alive()

    def close(self) -> None:
        """Release the allocation, and kill torchmonarch's host processes, which would otherwise outlive the controller."""
        if self.provider is not None:
            self.provider.kill()


async def acquire_hosts(
    config: Config, device: DeviceKind, log_dir: Path, supervisor: Supervisor, *, say: Say, warn: Say
) -> Hosts:
    """Acquire the hosts that a configuration requests; wait in the scheduler's queue if necessary.

    Args:
        config: configuration of the run.
        device: kind of the hosts' devices.
        log_dir: folder for logs.
        supervisor: notified of lost hosts; replaces the roles on them, or fails the run.
        say: called with a message for the user about what startup is waiting for.
        warn: called with a message for the user when the scheduler terminates the hosts.

    Raises:
        SlurmError: Slurm refused or ended the job.
        LauncherError: A host of the launcher died, or no launcher started this process.
        KubernetesError: The cluster refused a request, or the pods do not start.
    """
    hosts, meshes = config.hosts, host_counts(config)
    if not hosts.across_machines:
        wait_for_stopped_processes()
        local = local_host()
        if hosts.kind == "local":
            return Hosts(config, local, None)
        emulated = EmulatedHosts(meshes)
        acquired = await start_hosts(emulated, meshes)
        return Hosts(config, local, emulated, acquired)
    provider: SlurmHosts | KubernetesHosts | LauncherHosts
    if hosts.kind == "kubernetes":
        provider = KubernetesHosts(config, device, meshes, say)
    else:
        if hosts.kind == "slurm":
            provider = SlurmHosts(config, device, sum(meshes.values()), log_dir, say)
        else:
            provider = _launcher_hosts(config, say)
        provider.on_ending = partial(_end_with_hosts, supervisor, hosts.kind, warn)
    provider.on_lost = partial(supervisor.lose_host, is_replaceable=device == "cpu")  # other hosts have no free accelerators
    try:
        # Before the first use of Monarch. If all hosts are on this machine, none needs to listen on the network.
        on_this_machine = isinstance(provider, LauncherHosts) and provider.are_on_this_machine
        enable_transport("ipc" if on_this_machine else "tcp")
        match_timeouts_to_leases()
        acquired = await start_hosts(provider, meshes)
    except BaseException:  # including interrupts: no allocation may outlive a failed start
        provider.kill()
        raise
    return Hosts(config, local_host(), provider, acquired)


def _launcher_hosts(config: Config, say: Say) -> LauncherHosts:
    if Crew.current is None:
        raise LauncherError(
            "hosts.kind: only the commands train, sft and distill run under a launcher (got launcher). "
            "Set it to local, process, slurm or kubernetes."
        )
    return LauncherHosts(Crew.current, config.timeouts.start_s, say)


def first_rank(counts: Mapping[str, int], mesh: str) -> int:
    """Return the rank of a mesh's first host, given the number of hosts per mesh."""
    names = list(counts)
    return sum(counts[name] for name in names[: names.index(mesh)])


async def start_hosts(provider: Provider, counts: Mapping[str, int]) -> dict[str, HostMesh]:
    """Start the hosts, given their number per mesh; attach to them, and return the meshes, which are ranges in rank order."""
    identities = [str(identity) for identity in allocate_service_proc_ids(sum(counts.values()))]  # as Monarch's job classes do
    addresses, meshes = await provider.start(identities), {}
    with private_sockets():
        for name, count in counts.items():
            first = first_rank(counts, name)
            meshes[name] = attach_to_workers(name=name, ca="trust_all_connections", workers=addresses[first : first + count])
    return meshes


def match_timeouts_to_leases() -> None:
    """Make torchmonarch report a lost host as early as its lease does, and keep this process alive despite lost messages.

    By default, torchmonarch reports a lost host a minute later, when its roles have already been replaced. It also terminates
    this process 30 s after a message to a dead host, although the run has continued without that host.

    Only torchmonarch notices the death of a process on another host, so it polls these processes.
    """
    configure(get_proc_state_max_idle=f"{LOST_S}s", get_actor_state_max_idle=f"{LOST_S}s", message_delivery_timeout="30d")
    if os.environ.get(POLL) == "1h":  # the user has not set another interval than `titanrl` does
        os.environ[POLL] = f"{POLL_S}s"
        reload_config_from_env()


def _end_with_hosts(supervisor: Supervisor, kind: str, warn: Say, cause: str) -> None:
    """End the run like a signal, so that it can save. A session in another program has no signal handler, so it fails."""
    if terminal.is_ending():  # most schedulers also signal this process, and a second signal would end it immediately
        return
    warn(cause)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)
    else:
        supervisor.fail(TitanRLError(f"hosts.{kind}: {cause}"))


def wait_for_stopped_processes() -> None:
    """Turn off torchmonarch's timeouts for suspended or busy processes; for runs on this machine only.

    If all processes are suspended together (Ctrl-Z), each would conclude that the others are dead. On one machine the timeouts
    are unnecessary: no process outlives the controller, and pidfds report exits. The watchdog reports a stopped process, which
    torchmonarch would treat as crashed after 30 s.
    """
    patience = {"supervision_watchdog_timeout": "30d", "message_delivery_timeout": "30d", "get_actor_state_max_idle": "30d"}
    configure(mesh_orphan_timeout="30d", **patience)


def local_host() -> HostMesh:
    """Return this machine as a host. Only the current user can connect to its processes.

    Raises:
        OpenSocketsError: The sockets cannot be made private, and the environment does not permit open ones.
    """
    with private_sockets():
        return monarch.actor.this_host()
