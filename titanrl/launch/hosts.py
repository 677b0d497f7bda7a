"""The hosts of a run: this machine, several emulated on it, the nodes of a Slurm job, or the hosts of a launcher."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import monarch.actor
from monarch.actor import HostMesh, attach_to_workers
from monarch.config import configure
from monarch.job import ProcessJob

from titanrl import terminal
from titanrl.config.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.errors import FaultError, TitanRLError
from titanrl.launch.crew import Crew
from titanrl.launch.launcher_hosts import LauncherHosts
from titanrl.launch.leases import Say
from titanrl.launch.rendezvous import LauncherError
from titanrl.launch.slurm_host import PROGRAM
from titanrl.launch.slurm_hosts import SlurmHosts
from titanrl.launch.supervision import Supervisor
from titanrl.private_sockets import private_folder, private_sockets


class Job(Protocol):
    """Hosts that were acquired."""

    def kill(self) -> None:
        """Release them, with every process on them."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Host meshes by role."""

    trainer: HostMesh
    """Hosts of the trainer ranks."""
    generators: tuple[HostMesh, ...]
    """One host for each generator replica; replicas share hosts evenly. Empty for a fine-tuning that has its own allocation."""
    local: HostMesh
    """The controller's host, which also runs buffer, store and rollout workers."""
    job: Job | None
    """The allocation; None on this machine alone."""
    has_ended: Callable[[int], bool] = lambda replica: False
    """Function of a replica's number that returns True if the host of the replica is known to have ended."""
    are_alive: Callable[[], bool] = lambda: True
    """Function that returns True if every host is known to be alive."""

    def of_generator(self, replica: int) -> HostMesh:
        """Return the host for the processes of a replica: its own, or that of the next replica if it has ended.

        Raises:
            FaultError: All generator hosts have ended.
        """
        num_replicas = len(self.generators)
        for other in ((replica + step) % num_replicas for step in range(num_replicas)):
            if not self.has_ended(other):
                return self.generators[other]
        raise FaultError("all generator hosts have ended", f"generator_{replica}")

    def close(self) -> None:
        """Release the allocation. torchmonarch's host processes outlive the controller unless they are killed."""
        if self.job is not None:
            self.job.kill()


async def acquire_hosts(
    config: Config, device: DeviceKind, log_dir: Path, supervisor: Supervisor, *, say: Say, warn: Say
) -> Hosts:
    """Acquire the hosts of the configuration; wait in the scheduler's queue if there is one.

    Args:
        config: the run.
        device: kind of the devices.
        log_dir: folder of logs.
        supervisor: replaces the parts on hosts that end, or ends the run.
        say: tells the user what the start waits for.
        warn: tells the user that the scheduler ends the hosts.

    Raises:
        SlurmError: Slurm refused or ended the job.
        LauncherError: A host of the launcher has ended, or this process has no launcher.
    """
    hosts, replicas = config.hosts, config.generator.replicas
    meshes = {"trainers": hosts.trainer_hosts}
    if config.num_generator_ranks:
        meshes["generators"] = hosts.generator_hosts
    if hosts.kind == "slurm":
        slurm = SlurmHosts(config, device, meshes, log_dir, say)
        return await _network_hosts(config, device, slurm, supervisor, warn)
    if hosts.kind == "launcher":
        return await _network_hosts(config, device, _launcher_hosts(config, meshes, say), supervisor, warn)
    wait_for_stopped_processes()
    local = local_host()
    if hosts.kind == "local":
        return Hosts(local, (local,) * replicas, local, None)
    emulated = EmulatedHosts(meshes)
    placed = _placed(config, emulated.start(), local, emulated)
    return replace(
        placed,
        has_ended=lambda replica: emulated.has_ended("generators", replica % hosts.generator_hosts),
        are_alive=emulated.are_alive,
    )


def _launcher_hosts(config: Config, meshes: dict[str, int], say: Say) -> LauncherHosts:
    if Crew.current is None:
        raise LauncherError(
            "hosts.kind: only the commands train, sft and distill run under a launcher (got launcher). "
            "Set it to local, process or slurm."
        )
    return LauncherHosts(Crew.current, meshes, config.timeouts.start_s, say)


async def _network_hosts(
    config: Config, device: DeviceKind, network: SlurmHosts | LauncherHosts, supervisor: Supervisor, warn: Say
) -> Hosts:
    network.on_lost = partial(supervisor.lose_host, is_replaceable=device == "cpu")  # a full host has no accelerators to spare
    network.on_ending = partial(_end_with_hosts, supervisor, config.hosts.kind, warn)
    acquired = await network.start()
    return replace(
        _placed(config, acquired, local_host(), network),
        has_ended=lambda replica: network.has_ended("generators", replica % config.hosts.generator_hosts),
        are_alive=network.are_alive,
    )


def _end_with_hosts(supervisor: Supervisor, kind: str, warn: Say, cause: str) -> None:
    """End the run as a signal does, so that it can save; a session in another program has no handler and fails."""
    if terminal.is_ending():  # most schedulers signal this process, too, and a second signal would end it at once
        return
    warn(cause)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)
    else:
        supervisor.fail(TitanRLError(f"hosts.{kind}: {cause}"))


def wait_for_stopped_processes() -> None:
    """Let torchmonarch give up no process that is suspended or busy, for runs whose processes are all on this machine.

    If all processes were suspended together (Ctrl-Z), each would conclude that the others are gone. Here none can outlive the
    controller, and the end of a process is noticed without a timeout. A process that is stopped is for the watchdog to report;
    torchmonarch would give it up as crashed after 30 s.
    """
    patience = {"supervision_watchdog_timeout": "30d", "message_delivery_timeout": "30d", "get_actor_state_max_idle": "30d"}
    configure(mesh_orphan_timeout="30d", **patience)


def _placed(config: Config, acquired: dict[str, HostMesh], local: HostMesh, job: Job) -> Hosts:
    """Spread the replicas over the generator hosts."""
    one_each: tuple[HostMesh, ...] = ()
    if config.num_generator_ranks:
        generators, count = acquired["generators"], config.hosts.generator_hosts
        one_each = tuple(generators.slice(hosts=replica % count) for replica in range(config.generator.replicas))
    return Hosts(acquired["trainers"], one_each, local, job)


def local_host() -> HostMesh:
    """Return this machine as a host. Only this user can connect to its processes.

    Raises:
        OpenSocketsError: That cannot be ensured, and the environment does not allow to start regardless.
    """
    with private_sockets():
        return monarch.actor.this_host()


class EmulatedHosts:
    """Hosts that are processes of this machine; they end with this process."""

    def __init__(self, meshes: dict[str, int]) -> None:
        """Start nothing yet.

        Args:
            meshes: number of hosts by the name of their mesh.
        """
        self._meshes = meshes
        self._folder = private_folder()
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}  # by mesh and number

    def start(self) -> dict[str, HostMesh]:
        """Start the hosts; return their meshes."""
        return {name: self._start(name, count) for name, count in self._meshes.items()}

    def kill(self) -> None:
        """Kill the hosts; the kernel then kills every process on them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._folder.delete()

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host has ended."""
        return self._processes[mesh, number].poll() is not None

    def are_alive(self) -> bool:
        """Return True if no host has ended."""
        return all(process.poll() is None for process in self._processes.values())

    def _start(self, name: str, count: int) -> HostMesh:
        identities = ProcessJob._allocate_service_proc_ids(count)
        addresses = [f"{identity}@ipc://{self._folder.path / name}-{host}" for host, identity in enumerate(identities)]
        for number, address in enumerate(addresses):
            command = [sys.executable, "-c", PROGRAM, address, str(os.getpid())]
            self._processes[name, number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        return attach_to_workers(name=name, ca="trust_all_connections", workers=addresses)
