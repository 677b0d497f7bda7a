"""The hosts of a run: this machine, hosts emulated on it, Slurm nodes, hosts of a launcher, or Kubernetes pods.

`acquire_hosts` returns `Hosts`, which maps roles to hosts.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import monarch.actor
from monarch.actor import HostMesh, attach_to_workers
from monarch.config import configure

from titanrl.base import terminal
from titanrl.base.choices import DeviceKind
from titanrl.base.errors import FaultError, TitanRLError
from titanrl.config.placement import HostPlace, host_counts, replica_place, store_place, worker_place
from titanrl.config.schema import Config
from titanrl.hosts.identities import new_identities
from titanrl.hosts.kubernetes.hosts import KubernetesHosts
from titanrl.hosts.launcher.crew import Crew
from titanrl.hosts.launcher.hosts import LauncherHosts
from titanrl.hosts.launcher.rendezvous import LauncherError
from titanrl.hosts.leases import Say
from titanrl.hosts.slurm.hosts import SlurmHosts
from titanrl.hosts.slurm.node import PROGRAM
from titanrl.launch.supervision import Supervisor
from titanrl.processes.private_sockets import private_sockets
from titanrl.processes.temporary import private_folder


class Job(Protocol):
    """An allocation of hosts."""

    def kill(self) -> None:
        """Kill every process on the hosts, and release them."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Assignment of roles to the acquired hosts."""

    config: Config
    """Configuration of the run, which defines the placement of each role."""
    local: HostMesh
    """The controller's host."""
    job: Job | None
    """The allocation; None if the run only uses this machine directly."""
    meshes: Mapping[str, HostMesh] = field(default_factory=dict)
    """Host meshes by name (`trainers`, `generators`); empty if the controller's host is the only one."""
    has_ended: Callable[[str, int], bool] = lambda mesh, number: False
    """Function that returns True if a host, given by mesh name and index, is known to be lost."""
    are_alive: Callable[[], bool] = lambda: True
    """Function that returns True if every host is known to be alive."""

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
            if not self.has_ended(*place):
                return self.meshes[place[0]].slice(hosts=place[1])
        raise FaultError("all hosts for this role are lost", role)

    def close(self) -> None:
        """Release the allocation, and kill torchmonarch's host processes, which would otherwise outlive the controller."""
        if self.job is not None:
            self.job.kill()


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
    if hosts.kind == "slurm":
        slurm = SlurmHosts(config, device, meshes, log_dir, say)
        return await _network_hosts(config, device, slurm, supervisor, warn)
    if hosts.kind == "launcher":
        return await _network_hosts(config, device, _launcher_hosts(config, meshes, say), supervisor, warn)
    if hosts.kind == "kubernetes":
        return await _network_hosts(config, device, KubernetesHosts(config, device, meshes, say), supervisor, warn)
    wait_for_stopped_processes()
    local = local_host()
    if hosts.kind == "local":
        return Hosts(config, local, None)
    emulated = EmulatedHosts(meshes)
    acquired = emulated.start()
    return Hosts(config, local, emulated, acquired, has_ended=emulated.has_ended, are_alive=emulated.are_alive)


def _launcher_hosts(config: Config, meshes: dict[str, int], say: Say) -> LauncherHosts:
    if Crew.current is None:
        raise LauncherError(
            "hosts.kind: only the commands train, sft and distill run under a launcher (got launcher). "
            "Set it to local, process, slurm or kubernetes."
        )
    return LauncherHosts(Crew.current, meshes, config.timeouts.start_s, say)


async def _network_hosts(
    config: Config, device: DeviceKind, network: SlurmHosts | LauncherHosts | KubernetesHosts, supervisor: Supervisor, warn: Say
) -> Hosts:
    network.on_lost = partial(supervisor.lose_host, is_replaceable=device == "cpu")  # other hosts have no free accelerators
    if not isinstance(network, KubernetesHosts):
        network.on_ending = partial(_end_with_hosts, supervisor, config.hosts.kind, warn)
    acquired = await network.start()
    return Hosts(config, local_host(), network, acquired, has_ended=network.has_ended, are_alive=network.are_alive)


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


class EmulatedHosts:
    """Hosts emulated by processes of this machine, which exit with this process."""

    def __init__(self, meshes: dict[str, int]) -> None:
        """Start nothing yet.

        Args:
            meshes: number of hosts by mesh name.
        """
        self._meshes = meshes
        self._folder = private_folder()
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}  # by mesh and number

    def start(self) -> dict[str, HostMesh]:
        """Start the hosts; return their meshes."""
        return {name: self._start(name, count) for name, count in self._meshes.items()}

    def kill(self) -> None:
        """Kill the hosts. The kernel then kills every process on them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._folder.delete()

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host has exited."""
        return self._processes[mesh, number].poll() is not None

    def are_alive(self) -> bool:
        """Return True if no host has exited."""
        return all(process.poll() is None for process in self._processes.values())

    def _start(self, name: str, count: int) -> HostMesh:
        identities = new_identities(count)
        addresses = [f"{identity}@ipc://{self._folder.path / name}-{host}" for host, identity in enumerate(identities)]
        for number, address in enumerate(addresses):
            command = [sys.executable, "-c", PROGRAM, address, str(os.getpid())]
            self._processes[name, number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        return attach_to_workers(name=name, ca="trust_all_connections", workers=addresses)
