"""Rank 0's connections to the hosts of a launcher, from the start of the command to its end.

Sessions come and go (a run that restarts opens another one), and with each of them Monarch's hosts. The connections stay, so
that the other processes wait for the next session, and learn the exit code.
"""

import asyncio
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from typing import Self

from titanrl.config.errors import ConfigError
from titanrl.launch.launcher.host import END, FAILED
from titanrl.launch.launcher.rendezvous import Controller, LauncherError, publish
from titanrl.launch.launcher.world import World, own_address
from titanrl.launch.leases import Host, Leases
from titanrl.launch.slurm.node import CONTROLLER, TOKEN

END_S = 10.0
"""Longest wait for the other processes to end, or to come in order to learn that there is no run."""


class Crew:
    """The hosts of a launcher, as rank 0 holds them. Use it in a `with` statement."""

    current: "Crew | None" = None
    """That of this process, for its sessions."""

    def __init__(self, world: World, timeout_s: float) -> None:
        """Listen, start the host of rank 0, and tell the others where this process is.

        Args:
            world: processes of the launcher.
            timeout_s: limit for the launcher's store.

        Raises:
            LauncherError: This process cannot be reached at the address of rank 0.
        """
        self.world, self.code = world, 1
        address = own_address(world)
        if not address:
            raise LauncherError(
                f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown on "
                f"{socket.gethostname()}). Correct it, or the name server."
            )
        self.address = address
        """Address at which the other hosts reach this one."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=world.size + 16)
        self._leases = Leases(world.size, self._on_lost, self._on_lost, self._on_line)
        self.controller = Controller(f"{address}:{self._listener.getsockname()[1]}", self._leases.token)
        """Address and secret that the hosts need."""
        self._has_waited = False
        self._own_host: subprocess.Popen[bytes] | None = None
        self._told: dict[int, str] = {}  # problems of the hosts, empty if there is none, by rank
        self._changed = asyncio.Event()
        self.connections: dict[int, tuple[Host, socket.socket]] = {}
        """Hosts and their connections, by rank."""
        self._store = publish(world, self.controller, address, timeout_s)

    def __enter__(self) -> Self:
        """Make these hosts those of this process's sessions."""
        Crew.current = self
        return self

    def __exit__(self, *error: object) -> None:
        """Send the exit code `code` to the other processes, and wait until they have ended."""
        Crew.current = None
        self.end(self.code)

    def gather(self, timeout_s: float) -> None:
        """Wait until every process has connected and can take part.

        Raises:
            ConfigError: One cannot.
            LauncherError: One has ended, or has not come in time.
        """
        command = [sys.executable, "-m", "titanrl.launch.launcher.host"]
        environment = os.environ | {CONTROLLER: self.controller.address, TOKEN: self.controller.token}
        self._own_host = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        asyncio.run(self._gather(timeout_s))
        if problems := [f"{self._name(rank)}: {text}" for rank, text in sorted(self._told.items()) if text]:
            raise ConfigError(*problems)
        self._has_waited = True  # a host that is missing later has ended

    def send(self, rank: int, line: str) -> None:
        """Send a message to a host. A host that has ended is no failure."""
        with contextlib.suppress(OSError):
            self.connections[rank][1].sendall(f"{line}\n".encode())

    def end(self, code: int) -> None:
        """Send the exit code to every other process, and wait until they have ended.

        Those that have not connected yet are waited for, too, unless they had their time.
        """
        deadline = time.monotonic() + END_S
        connections = [connection for _, connection in self.connections.values()]
        missing = self.world.size - len(connections) - (self._own_host is None)
        connections += [] if self._has_waited else self._latecomers(missing, deadline)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.sendall(f"{END} {code}\n".encode())
        _wait_for_ends(connections, deadline)
        if self._own_host is not None:
            self._own_host.kill()
            self._own_host.wait()
        self._listener.close()

    async def _gather(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        await self._leases.serve(self._listener.dup())
        deadline, said = loop.time() + timeout_s, -1
        try:
            while len(self._told) < self.world.size and not any(self._told.values()):
                if self._leases.lost:
                    names = ", ".join(self._name(rank) for rank in sorted(self._leases.lost))
                    raise LauncherError(
                        f"hosts.kind: {names} ended before the run began (got launcher). Read the output there."
                    )
                if len(self._leases.hosts) != said:
                    said = len(self._leases.hosts)
                    print(f"waiting for the launcher's hosts: {said} of {self.world.size} have connected", flush=True)
                self._changed.clear()
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
                except TimeoutError:
                    self._has_waited = True
                    ranks = ", ".join(map(str, self._leases.missing))
                    raise LauncherError(
                        f"timeouts.start_s: rank {ranks} has not connected to {self.controller.address} "
                        f"(got {timeout_s:g}). Read the launcher's output, and let the network pass all ports between hosts."
                    ) from None
        finally:
            kept = [host for host in self._leases.hosts.values() if host.rank not in self._leases.lost]
            self.connections = {host.rank: (host, self._leases.connection(host.rank)) for host in kept}
            self._leases.close()

    def _latecomers(self, number: int, deadline: float) -> list[socket.socket]:
        """Accept the processes that have not connected yet; each waits at this socket as soon as it has found it."""
        found: list[socket.socket] = []
        while len(found) < number and (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with contextlib.suppress(OSError):
                found.append(self._listener.accept()[0])
        return found

    def _on_line(self, host: Host, line: bytes) -> None:
        self._told[host.rank] = line.removeprefix(FAILED).decode().strip() if line.startswith(FAILED) else ""
        self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._leases.lost.add(host.rank)  # also one that was told to end
        self._changed.set()

    def _name(self, rank: int) -> str:
        return f"{self._leases.hosts[rank].node} (rank {rank})"


def _wait_for_ends(connections: list[socket.socket], deadline: float) -> None:
    """Wait until the other sides have closed their connections."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    try:
                        ended = not key.fileobj.recv(4096)
                    except ConnectionError:
                        ended = True
                    if ended:
                        selector.unregister(key.fileobj)
    for connection in connections:
        connection.close()
