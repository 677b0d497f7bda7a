"""Processes of a launcher as hosts of one session: Monarch's hosts are started, watched, and stopped with the session."""

import asyncio
from collections.abc import Callable

from monarch.actor import HostMesh, enable_transport

from titanrl.hosts.host_meshes import attach_meshes, first_rank
from titanrl.hosts.identities import new_identities
from titanrl.hosts.launcher.crew import Crew
from titanrl.hosts.launcher.host import START, STOP, UP
from titanrl.hosts.launcher.rendezvous import LauncherError
from titanrl.hosts.launcher.world import is_loopback
from titanrl.hosts.leases import Host, Leases, OnLost, Say
from titanrl.hosts.patience import match_timeouts_to_leases
from titanrl.processes.private_sockets import private_sockets


class LauncherHosts:
    """Hosts on the processes that a launcher has started; trainer hosts come first."""

    def __init__(self, crew: Crew, meshes: dict[str, int], start_s: float, say: Say) -> None:
        """Start nothing yet.

        Args:
            crew: connections to the launcher's processes.
            meshes: number of hosts by mesh name.
            start_s: limit for the start of Monarch's hosts, in seconds.
            say: called with a message for the user that lists the hosts.
        """
        self._crew, self._meshes, self._start_s, self._say = crew, meshes, start_s, say
        self._leases = Leases(crew.world.size, self._on_lost, self._on_ending, self._on_line)
        self._identities: list[str] = []
        self._addresses: dict[int, str] = {}
        self._changed = asyncio.Event()
        self.on_lost: OnLost = lambda name, cause: None
        """Called when a host is lost."""
        self.on_ending: Callable[[str], None] = lambda cause: None
        """Called with the cause when the launcher terminates a host."""

    async def start(self) -> dict[str, HostMesh]:
        """Start Monarch's hosts, and return their meshes.

        Raises:
            LauncherError: A host exited or did not start.
        """
        count = sum(self._meshes.values())
        self._identities = new_identities(count)
        try:
            # Before the first use of Monarch. If all hosts are on this machine, none needs to listen on the network.
            enable_transport("ipc" if is_loopback(self._crew.address) else "tcp")
            match_timeouts_to_leases()
            if gone := [str(rank) for rank in range(count) if rank not in self._crew.connections]:
                raise LauncherError(
                    f"hosts.kind: the hosts of rank {', '.join(gone)} exited (got launcher). Restart the launcher."
                )
            for host, connection in self._crew.connections.values():
                await self._leases.adopt(host, connection.dup())
            for rank, identity in enumerate(self._identities):
                self._crew.send(rank, f"{START} {identity}")
            await self._wait(count)
            with private_sockets():
                return self._attach()
        except BaseException:  # including interrupts
            self.kill()
            raise

    def kill(self) -> None:
        """Stop Monarch's hosts, and every process on them. The launcher's processes wait for the next session."""
        self._leases.close()
        for rank in self._leases.lost:
            self._crew.connections.pop(rank, None)
        for rank in self._crew.connections:
            self._crew.send(rank, STOP)

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host exited or became unreachable."""
        return first_rank(self._meshes, mesh) + number in self._leases.lost

    def are_alive(self) -> bool:
        """Return True if every host holds its lease."""
        return not self._leases.lost

    async def _wait(self, count: int) -> None:
        """Wait until Monarch runs on every host."""
        deadline = asyncio.get_running_loop().time() + self._start_s
        while len(self._addresses) < count:
            if self._leases.lost:
                names = ", ".join(self._leases.hosts[rank].node for rank in sorted(self._leases.lost))
                raise LauncherError(f"hosts.kind: {names} exited during startup (got launcher). Read the output there.")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                missing = [host.node for rank, host in sorted(self._leases.hosts.items()) if rank not in self._addresses]
                raise LauncherError(
                    f"timeouts.start_s: Monarch did not start on {', '.join(missing)} (got {self._start_s:g}). Raise the limit."
                ) from None

    def _attach(self) -> dict[str, HostMesh]:
        addresses = [address for _, address in sorted(self._addresses.items())]
        meshes = attach_meshes(self._meshes, addresses)
        nodes = ", ".join(host.node for _, host in sorted(self._leases.hosts.items()))
        self._say(f"{len(addresses)} hosts of the launcher ({nodes})")
        return meshes

    def _on_line(self, host: Host, line: bytes) -> None:
        word, _, value = line.decode().strip().partition(" ")
        if word == UP and value.startswith(f"{self._identities[host.rank]}@"):  # not from an earlier session
            self._addresses[host.rank] = value
            self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._changed.set()
        self.on_lost(host.name, f"host {host.node} (rank {host.rank}) exited or is unreachable")

    def _on_ending(self, host: Host) -> None:
        self.on_ending(f"the launcher terminates host {host.node} (rank {host.rank})")
