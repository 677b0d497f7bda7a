"""Rank 0's connections to the processes of a launcher, for the lifetime of the command.

Each session starts and stops Monarch's hosts, and a restarted run opens another session. The connections stay open in between,
so that the other processes wait for the next session and finally receive the exit code.
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
from titanrl.hosts.launcher.host import END, FAILED
from titanrl.hosts.launcher.rendezvous import Controller, LauncherError, publish
from titanrl.hosts.launcher.world import World, own_address
from titanrl.hosts.leases import Host, Leases
from titanrl.hosts.slurm.node import CONTROLLER, TOKEN

END_S = 10.0
"""Seconds that `end` waits for the other processes to exit, including ones that have not connected yet."""


class Crew:
    """Connections to all processes of a launcher. Use it in a `with` statement."""

    current: "Crew | None" = None
    """The crew of this process, used by its sessions."""

    def __init__(self, world: World, timeout_s: float) -> None:
        """Listen for the other processes, and publish the address of this one.

        Args:
            world: processes of the launcher.
            timeout_s: limit for the launcher's store, in seconds.

        Raises:
            LauncherError: The address of rank 0 is unknown here, or the store fails.
        """
        self.world, self.code = world, 1
        address = own_address(world)
        if not address:
            raise LauncherError(
                f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown on "
                f"{socket.gethostname()}). Correct it, or the name server."
            )
        self.address = address
        """Address at which the other hosts can reach this one."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=world.size + 16)
        self._leases = Leases(world.size, self._on_lost, self._on_lost, self._on_line)
        self.controller = Controller(f"{address}:{self._listener.getsockname()[1]}", self._leases.token)
        """Address and secret with which the hosts connect."""
        self._has_waited = False
        self._own_host: subprocess.Popen[bytes] | None = None
        self._reported: dict[int, str] = {}  # each host's problem by rank; empty if it is ready
        self._changed = asyncio.Event()
        self.connections: dict[int, tuple[Host, socket.socket]] = {}
        """Hosts and their connections, by rank."""
        self._store = publish(world, self.controller, address, timeout_s)

    def __enter__(self) -> Self:
        """Use these hosts for the sessions of this process."""
        Crew.current = self
        return self

    def __exit__(self, *error: object) -> None:
        """Send the exit code `code` to the other processes, and wait until they have exited."""
        Crew.current = None
        self.end(self.code)

    def gather(self, timeout_s: float) -> None:
        """Start the host of rank 0, and wait until every process has connected and is ready.

        Raises:
            ConfigError: A process reported a problem.
            LauncherError: A process exited, or did not connect in time.
        """
        command = [sys.executable, "-m", "titanrl.hosts.launcher.host"]
        environment = os.environ | {CONTROLLER: self.controller.address, TOKEN: self.controller.token}
        self._own_host = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        asyncio.run(self._gather(timeout_s))
        if problems := [f"{self._name(rank)}: {text}" for rank, text in sorted(self._reported.items()) if text]:
            raise ConfigError(*problems)
        self._has_waited = True  # from now on, a missing host has exited

    def send(self, rank: int, line: str) -> None:
        """Send a message to a host. Do nothing if the host has exited."""
        with contextlib.suppress(OSError):
            self.connections[rank][1].sendall(f"{line}\n".encode())

    def end(self, code: int) -> None:
        """Send the exit code to every other process, and wait until they have exited.

        This includes processes that have not connected yet, unless `gather` has already waited for them.
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
            while len(self._reported) < self.world.size and not any(self._reported.values()):
                if self._leases.lost:
                    names = ", ".join(self._name(rank) for rank in sorted(self._leases.lost))
                    raise LauncherError(
                        f"hosts.kind: {names} exited before the run started (got launcher). Read the output there."
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
                        f"(got {timeout_s:g}). Read the launcher's output, and allow all ports between the hosts."
                    ) from None
        finally:
            kept = [host for host in self._leases.hosts.values() if host.rank not in self._leases.lost]
            self.connections = {host.rank: (host, self._leases.connection(host.rank)) for host in kept}
            self._leases.close()

    def _latecomers(self, number: int, deadline: float) -> list[socket.socket]:
        """Accept connections of processes that have not connected yet; each connects as soon as it knows the address."""
        found: list[socket.socket] = []
        while len(found) < number and (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with contextlib.suppress(OSError):
                found.append(self._listener.accept()[0])
        return found

    def _on_line(self, host: Host, line: bytes) -> None:
        self._reported[host.rank] = line.removeprefix(FAILED).decode().strip() if line.startswith(FAILED) else ""
        self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._leases.lost.add(host.rank)  # including a host that is being terminated
        self._changed.set()

    def _name(self, rank: int) -> str:
        return f"{self._leases.hosts[rank].node} (rank {rank})"


def _wait_for_ends(connections: list[socket.socket], deadline: float) -> None:
    """Wait until the peers have closed their connections."""
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
