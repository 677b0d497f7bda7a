"""Leases of the hosts of an allocation: one TCP connection from each host to the controller, open as long as both live.

The kernel reports the end of either side, also of a machine that lost its power or its network, so that neither side asks.
A host without its controller ends, so no allocation outlives a controller that was killed.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LOST_S = 5
"""Seconds without any sign of life after which a host is lost."""
CONTROLLER_LOST_S = 60
"""The same for the controller, whose network may pause."""
GREETING_S = 10.0
"""Limit for the first message of a connection, which a program that is no host may never send."""
MAX_GREETING = 1024
ENDING = b"ending\n"
"""Message of a host that Slurm has told to end."""


class OnLine(Protocol):
    """Receives a message of a host."""

    def __call__(self, host: "Host", line: bytes) -> None:
        """Handle the line, in the event loop."""


class OnHost(Protocol):
    """Receives an event of a host."""

    def __call__(self, host: "Host") -> None:
        """Handle the event, in the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host that holds its lease.

    Example: `Host(rank=1, node="n2", name="n2.cluster")`
    """

    rank: int
    """Number of the host in its allocation."""
    node: str
    """Name by which the scheduler knows it."""
    name: str
    """Name that the machine gives itself, as its processes do."""


def greeting(token: str, host: Host) -> bytes:
    """Return the first message of a host."""
    return f"{token} {host.rank} {host.node} {host.name}\n".encode()


def keep_alive(connection: socket.socket, limit_s: int) -> None:
    """Let the kernel close a connection whose other side has not answered for some seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limit_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_s * 1000)


class Leases:
    """The controller's side: accepts the hosts, and notices their ends."""

    def __init__(self, num_hosts: int, on_lost: OnHost, on_ending: OnHost, on_line: OnLine = lambda host, line: None) -> None:
        """Listen to nothing yet.

        Args:
            num_hosts: number of hosts.
            on_lost: called when a host has ended, or cannot be reached.
            on_ending: called when the scheduler has told a host to end.
            on_line: called with every other message.
        """
        self._num_hosts, self._on_lost, self._on_ending, self._on_line = num_hosts, on_lost, on_ending, on_line
        self.token = secrets.token_hex(16)
        """Secret that the hosts present."""
        self.hosts: dict[int, Host] = {}
        """Hosts that have connected, by rank."""
        self.lost: set[int] = set()
        """Ranks of those that have ended since."""
        self._all_held = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._holders: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._adopted: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def open(self, name: str) -> str:
        """Listen on the interface of a name of this machine; return the address for the hosts.

        Raises:
            OSError: The name is not that of an interface.
        """
        family, _, _, _, address = (await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM))[0]
        listener = socket.create_server((str(address[0]), 0), family=family)
        await self.serve(listener)
        return f"{name}:{listener.getsockname()[1]}"

    async def serve(self, listener: socket.socket) -> None:
        """Accept hosts on a listening socket, which these leases close."""
        self._server = await asyncio.start_server(self._hold, sock=listener)

    async def adopt(self, host: Host, connection: socket.socket) -> None:
        """Continue the lease of a host, which other leases have accepted, on a copy of its connection."""
        self.take(host, *await asyncio.open_connection(sock=connection))

    def take(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the lease of a host on a connection that exists."""
        self._writers.add(writer)
        self._adopted.append(asyncio.create_task(self._keep(host, reader, writer)))

    def tell(self, rank: int, line: bytes) -> None:
        """Send a message to a host that holds its lease."""
        self._holders[rank].write(line)

    def connection(self, rank: int) -> socket.socket:
        """Return a copy of the connection of a host, which stays open when these leases end."""
        copy: socket.socket = self._holders[rank].get_extra_info("socket").dup()
        return copy

    async def all_held(self) -> None:
        """Wait until every host has connected."""
        await self._all_held.wait()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return [rank for rank in range(self._num_hosts) if rank not in self.hosts]

    def close(self) -> None:
        """End every lease, so that the hosts end. Their ends are not reported."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the lease of a host until the connection ends."""
        self._writers.add(writer)
        try:
            host = await self._greeted(reader)
            if host is not None:
                await self._keep(host, reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _keep(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of a host until its lease ends."""
        keep_alive(writer.get_extra_info("socket"), LOST_S)
        self.hosts[host.rank], self._holders[host.rank] = host, writer
        if not self.missing:
            self._all_held.set()
        await self._until_end(reader, host)
        if not self._is_closed:
            self.lost.add(host.rank)
            self._on_lost(host)

    async def _greeted(self, reader: asyncio.StreamReader) -> Host | None:
        """Return the host that has connected; None if it is none of this allocation."""
        try:
            async with asyncio.timeout(GREETING_S):  # Python 3.11's wait_for can lose a cancellation
                line = await reader.readuntil(b"\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None
        words = line[:MAX_GREETING].decode(errors="replace").split()
        if len(words) != 4 or not hmac.compare_digest(words[0].encode(), self.token.encode()):
            return None
        rank = int(words[1]) if words[1].isdecimal() else self._num_hosts
        return Host(rank=rank, node=words[2], name=words[3]) if rank in self.missing else None

    async def _until_end(self, reader: asyncio.StreamReader, host: Host) -> None:
        try:
            while line := await reader.readline():
                if self._is_closed:
                    continue
                if line == ENDING:
                    self._on_ending(host)
                else:
                    self._on_line(host, line)
        except (OSError, ValueError, asyncio.CancelledError):  # the connection was lost, a line has no end, or the loop ends
            return


async def hold_lease(address: str, token: str, host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect a host to its controller.

    Raises:
        OSError: The controller cannot be reached.
    """
    name, _, port = address.rpartition(":")
    reader, writer = await asyncio.wait_for(asyncio.open_connection(name, int(port)), GREETING_S)
    keep_alive(writer.get_extra_info("socket"), CONTROLLER_LOST_S)
    writer.write(greeting(token, host))
    await writer.drain()
    return reader, writer


Say = Callable[[str], None]
"""Tells the user something, in one line."""
