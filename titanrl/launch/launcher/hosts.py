"""Hosts of a launcher, for one session: Monarch's hosts are started, watched, and stopped with the session."""

import asyncio
from collections.abc import Callable

from monarch.actor import HostMesh, attach_to_workers, enable_transport

from titanrl.launch.identities import new_identities
from titanrl.launch.launcher.crew import Crew
from titanrl.launch.launcher.host import START, STOP, UP
from titanrl.launch.launcher.rendezvous import LauncherError
from titanrl.launch.launcher.world import is_loopback
from titanrl.launch.leases import Host, Leases, Say
from titanrl.launch.patience import leave_lost_hosts_to_leases
from titanrl.launch.slurm.hosts import OnLost
from titanrl.private_sockets import private_sockets


class LauncherHosts:
    """Hosts of the processes that a launcher has started; trainer hosts come first."""

    def __init__(self, crew: Crew, meshes: dict[str, int], start_s: float, say: Say) -> None:
        """Start nothing yet.

        Args:
            crew: connections to the hosts.
            meshes: number of hosts by the name of their mesh.
            start_s: limit for the start of Monarch's hosts.
            say: tells the user which hosts there are.
        """
        self._crew, self._meshes, self._start_s, self._say = crew, meshes, start_s, say
        self._leases = Leases(crew.world.size, self._on_lost, self._on_ending, self._on_line)
        self._identities: list[str] = []
        self._addresses: dict[int, str] = {}
        self._changed = asyncio.Event()
        self.on_lost: OnLost = lambda name, cause: None
        """Told of each host that ends while the run uses it."""
        self.on_ending: Callable[[str], None] = lambda cause: None
        """Told when the launcher ends a host."""

    async def start(self) -> dict[str, HostMesh]:
        """Start Monarch's hosts, and return their meshes.

        Raises:
            LauncherError: A host has ended, or does not start.
        """
        count = sum(self._meshes.values())
        self._identities = new_identities(count)
        try:
            # Before the first use of Monarch. If all hosts are this machine, none needs to listen on the network.
            enable_transport("ipc" if is_loopback(self._crew.address) else "tcp")
            leave_lost_hosts_to_leases()
            if gone := [str(rank) for rank in range(count) if rank not in self._crew.connections]:
                raise LauncherError(f"hosts.kind: the hosts of rank {', '.join(gone)} have ended (got launcher). Start again.")
            for host, connection in self._crew.connections.values():
                await self._leases.adopt(host, connection.dup())
            for rank, identity in enumerate(self._identities):
                self._crew.send(rank, f"{START} {identity}")
            await self._wait(count)
            with private_sockets():
                return self._attach()
        except BaseException:  # an interrupt, too
            self.kill()
            raise

    def kill(self) -> None:
        """Stop Monarch's hosts, with every process on them. The launcher's processes wait for the next session."""
        self._leases.close()
        for rank in self._leases.lost:
            self._crew.connections.pop(rank, None)
        for rank in self._crew.connections:
            self._crew.send(rank, STOP)

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host has ended, or cannot be reached."""
        first = sum(list(self._meshes.values())[: list(self._meshes).index(mesh)])
        return first + number in self._leases.lost

    def are_alive(self) -> bool:
        """Return True if every host holds its lease."""
        return not self._leases.lost

    async def _wait(self, count: int) -> None:
        """Wait until Monarch runs on every host."""
        deadline = asyncio.get_running_loop().time() + self._start_s
        while len(self._addresses) < count:
            if self._leases.lost:
                names = ", ".join(self._leases.hosts[rank].node for rank in sorted(self._leases.lost))
                raise LauncherError(f"hosts.kind: {names} has ended at the start (got launcher). Read the output there.")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                missing = [host.node for rank, host in sorted(self._leases.hosts.items()) if rank not in self._addresses]
                raise LauncherError(
                    f"timeouts.start_s: Monarch has not started on {', '.join(missing)} (got {self._start_s:g}). Raise it."
                ) from None

    def _attach(self) -> dict[str, HostMesh]:
        addresses = [address for _, address in sorted(self._addresses.items())]
        meshes, first = {}, 0
        for mesh, number in self._meshes.items():
            meshes[mesh] = attach_to_workers(name=mesh, ca="trust_all_connections", workers=addresses[first : first + number])
            first += number
        nodes = ", ".join(host.node for _, host in sorted(self._leases.hosts.items()))
        self._say(f"{len(addresses)} hosts of the launcher ({nodes})")
        return meshes

    def _on_line(self, host: Host, line: bytes) -> None:
        word, _, value = line.decode().strip().partition(" ")
        if word == UP and value.startswith(f"{self._identities[host.rank]}@"):  # not of a session before
            self._addresses[host.rank] = value
            self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._changed.set()
        self.on_lost(host.name, f"host {host.node} (rank {host.rank}) has ended, or its network has")

    def _on_ending(self, host: Host) -> None:
        self.on_ending(f"the launcher ends host {host.node} (rank {host.rank})")
