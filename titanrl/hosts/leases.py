"""Host leases: one TCP connection between each host and the controller, open as long as both are alive.

The kernel reports when the peer dies or its machine loses power or network, so neither side polls. A host stops serving when
it loses its controller, so no allocation outlives a killed controller. Who connects depends on the kind of hosts: a host that
connects first sends `token rank node name`; one that listens first receives its controller's greeting. From then on, all kinds
exchange the same lines:

| sender | line | meaning |
|---|---|---|
| host | `ready`, or `failed` with a reason | first of these lines |
| controller | `start identity[@address]` | start Monarch's host; the host replies `up identity@address` |
| controller | `stop` | kill Monarch's host |
| controller | a request of `titanrl doctor` as JSON | the reply is a line of JSON (`titanrl.hosts.holder`) |
| controller | `end` with an exit code | stop serving |
| host | `ending` | the scheduler terminates the host |

All kinds of hosts on other machines share the leases, the classes on top of them, and some rules. This module must not import
Monarch.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.sizes import host_counts

logger = logging.getLogger(__name__)

MODULE = "titanrl.hosts.holder"
"""Program that holds a host."""
CONNECT, READ, LISTEN = "connect", "read", "listen"
"""First argument of the program. A rank may follow `connect`, except on Slurm nodes, and follows `read`, which takes the
controller's address and secret from a line of standard input. A port follows `listen`."""
CONTROLLER, TOKEN = "TITANRL_CONTROLLER", "TITANRL_TOKEN"
"""Environment variables with the address of the controller's leases, and their secret."""
LOST_S = 5
"""Seconds without any sign of life after which a host is considered lost."""
CONTROLLER_LOST_S = 60
"""The same for the controller, whose network may pause."""
GREETING_S = 10.0
"""Limit in seconds for the first message of a connection; a client that is not a host may never send one."""
MAX_GREETING = 1024
START, STOP, END = "start", "stop", "end"
"""First words of the controller's lines."""
UP = "up"
"""First word of the reply to `start`."""
READY, FAILED, ENDING = b"ready\n", b"failed ", b"ending\n"
"""Lines of a host; the reason follows `failed`."""
Say = Callable[[str], None]
"""Shows the user one line of text."""
OnLost = Callable[[str, str], None]
"""Called when a host is lost, with the host name that the machine reports and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host that holds its lease."""

    rank: int
    """Index of the host in its allocation."""
    node: str
    """Name of the host in the scheduler."""
    name: str
    """Host name that the machine and its processes report."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Address (`10.0.0.1:40123`) of a controller's leases, and the secret that hosts must send."""

    address: str
    token: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a host that connects to this controller."""
        return {CONTROLLER: self.address, TOKEN: self.token}


def holder_command(rank: int | None = None, mode: str = CONNECT) -> list[str]:
    """Return the command that holds a host for the controller in `Controller.variables`; without a rank, a Slurm node."""
    return [sys.executable, "-m", MODULE, mode, *([] if rank is None else [str(rank)])]


OnHost = Callable[[Host], None]
OnLine = Callable[[Host, bytes], None]


def keep_alive(writer: asyncio.StreamWriter, limit_s: int) -> None:
    """Let the kernel close a connection after `limit_s` seconds without a response from the peer."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limit_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_s * 1000)


class Leases:
    """Leases that the controller holds: accepts the hosts' connections, and detects when a host is lost."""

    def __init__(self, num_hosts: int, on_lost: OnHost, on_ending: OnHost, on_line: OnLine = lambda host, line: None) -> None:
        """Create leases without a listening socket; see `open`, `serve` and `take`.

        `on_lost` is called when a host exited or became unreachable, `on_ending` when its scheduler terminates it, and
        `on_line` with every other message.
        """
        self._num_hosts, self._on_lost, self._on_ending, self._on_line = num_hosts, on_lost, on_ending, on_line
        self.token = secrets.token_hex(16)
        """Secret that hosts must send to get a lease."""
        self.hosts: dict[int, Host] = {}
        """Hosts that have connected, by rank, including lost ones."""
        self.lost: set[int] = set()
        """Ranks of the hosts that were lost."""
        self._all_held = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._holders: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._adopted: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def open(self, name: str) -> str:
        """Listen on the interface to which a host name of this machine resolves; return `name:port`, the address for hosts."""
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        family, _, _, _, address = next((each for each in found if not is_loopback(str(each[4][0]))), found[0])
        listener = socket.create_server((str(address[0]), 0), family=family)
        await self.serve(listener)
        return f"{name}:{listener.getsockname()[1]}"

    async def serve(self, listener: socket.socket) -> None:
        """Accept hosts on a listening socket, and take ownership of it."""
        self._server = await asyncio.start_server(self._hold, sock=listener)

    def take(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the lease of a host on an established connection; abort the connection if these leases are closed."""
        if self._is_closed:
            writer.transport.abort()
            return
        self._writers.add(writer)
        self._adopted.append(asyncio.create_task(self._keep(host, reader, writer)))

    async def reach(self, address: str, port: int, greeting: str) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a host that waits for its controller; return the first line of its reply, and the connection to `take`.

        Raise `OSError`, `TimeoutError` or, if the line is too long, `ValueError`.
        """
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(address, port)
            self._writers.add(writer)
            try:
                if self._is_closed:
                    raise ConnectionAbortedError("the leases are closed")
                keep_alive(writer, LOST_S)
                writer.write(f"{greeting}\n".encode())
                return (await reader.readline()).decode(errors="replace").strip(), reader, writer
            except BaseException:  # including the timeout
                self._writers.discard(writer)
                writer.transport.abort()
                raise

    def send(self, rank: int, line: str) -> None:
        """Send a line to a host that holds its lease."""
        self._holders[rank].write(f"{line}\n".encode())

    def end(self, code: int) -> None:
        """Make every host that holds its lease stop serving with an exit code."""
        for rank in self.hosts.keys() - self.lost:
            self.send(rank, f"{END} {code}")

    def connection(self, rank: int) -> socket.socket:
        """Return a duplicate of a host's connection, which stays open when these leases close."""
        copy: socket.socket = self._holders[rank].get_extra_info("socket").dup()
        return copy

    async def all_held(self) -> None:
        """Wait until every host has connected."""
        await self._all_held.wait()

    @property
    def missing(self) -> list[int]:
        """Ranks of the hosts that have not connected yet."""
        return [rank for rank in range(self._num_hosts) if rank not in self.hosts]

    def close(self) -> None:
        """Close every lease without calling `on_lost`, so that the hosts exit. Duplicates from `connection` stay open."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check the token of a connection, and hold the host's lease until the connection closes.

        Close the connection without a reply if the token is wrong, or if the rank ever had a lease.
        """
        self._writers.add(writer)
        line = b""
        try:
            # Other programs may connect, too, and send nothing or something else.
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(GREETING_S):  # Python 3.11's wait_for can lose a cancellation
                    line = await reader.readuntil(b"\n")
            words = line.decode(errors="replace").split()
            is_complete = len(words) == 4 and len(line) <= MAX_GREETING and not self._is_closed
            if is_complete and hmac.compare_digest(words[0].encode(), self.token.encode()):
                rank = int(words[1]) if words[1].isdecimal() else self._num_hosts
                if rank in self.missing:
                    await self._keep(Host(rank=rank, node=words[2], name=words[3]), reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _keep(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of a host until its connection closes."""
        keep_alive(writer, LOST_S)
        self.hosts[host.rank], self._holders[host.rank] = host, writer
        if not self.missing:
            self._all_held.set()
        try:
            while line := await reader.readline():
                if self._is_closed:
                    continue
                if line == ENDING:
                    self._on_ending(host)
                else:
                    self._on_line(host, line)
        except asyncio.CancelledError:  # the loop closes
            return
        except OSError:
            pass  # the connection broke
        except ValueError as error:
            logger.warning("host %s sent a line that is too long or malformed: %r", host.name, error)
        finally:
            self._writers.discard(writer)
            writer.close()
        if not self._is_closed:
            self.lost.add(host.rank)
            self._on_lost(host)


class Provider(Protocol):
    """A kind of hosts: how it gets Monarch's host onto machines. Ranks count the hosts of all meshes, in their order."""

    @abstractmethod
    async def start(self, identities: Sequence[str]) -> list[str]:
        """Acquire the hosts, and start Monarch's hosts with these identities; return `identity@address` by rank.

        The caller calls `kill` afterwards, even if this fails.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Kill every process on the hosts, and release them. A second call does nothing."""

    @abstractmethod
    def has_ended(self, rank: int) -> bool:
        """Return True if a host exited or became unreachable."""


class HostsError(TitanRLError):
    """Hosts exited or did not start in time."""


class LeasedHosts(Provider, ABC):
    """Hosts that hold leases: the state that all their kinds share."""

    def __init__(self, num_hosts: int, leases: Leases | None = None) -> None:
        """Create hosts that hold no lease yet; `leases` is given by a check before the run, which reports lost hosts itself."""
        self.leases = leases or Leases(num_hosts, self._on_lost, self._on_ending, self._on_line)
        self._tasks: set[asyncio.Task[None]] = set()
        self._identities: Sequence[str] = ()
        self._addresses: dict[int, str] = {}  # that the hosts have chosen, by rank
        self._changed = asyncio.Event()
        self.on_lost: OnLost = lambda name, cause: None
        """Called when a host is lost."""
        self.on_ending: Callable[[str], None] = lambda cause: None
        """Called with the cause when the scheduler terminates the hosts, or is about to."""

    def has_ended(self, rank: int) -> bool:
        """Return True if a host exited or became unreachable."""
        return rank in self.leases.lost

    def close(self) -> None:
        """Close the leases, and report nothing any more."""
        self.leases.close()
        for task in self._tasks:
            task.cancel()

    def _later(self, work: Coroutine[object, object, None]) -> None:
        """Await a report in the background, and log its `TitanRLError`."""

        async def report() -> None:
            try:
                await work
            except TitanRLError as error:
                logger.warning("%s", error)

        task = asyncio.create_task(report())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _chosen_addresses(self, start_s: float, kind: str) -> list[str]:
        """Wait until Monarch runs on every host, at an address that the host has chosen; return the addresses by rank."""
        deadline = asyncio.get_running_loop().time() + start_s
        while len(self._addresses) < len(self._identities):
            if self.leases.lost:
                names = ", ".join(self.leases.hosts[rank].node for rank in sorted(self.leases.lost))
                raise HostsError(f"hosts.kind: {names} exited during startup (got {kind}). Read the output there.")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                missing = [host.node for rank, host in sorted(self.leases.hosts.items()) if rank not in self._addresses]
                raise HostsError(
                    f"timeouts.start_s: Monarch did not start on {', '.join(missing)} (got {start_s:g}). Raise the limit."
                ) from None
        return [address for _, address in sorted(self._addresses.items())]

    def _on_line(self, host: Host, line: bytes) -> None:
        word, _, value = line.decode().strip().partition(" ")
        if word == UP and value.startswith(f"{self._identities[host.rank]}@"):  # not from an earlier session
            self._addresses[host.rank] = value
            self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._changed.set()
        self.on_lost(host.name, f"host {host.node} (rank {host.rank}) exited or is unreachable")

    def _on_ending(self, host: Host) -> None:
        self.on_ending(f"host {host.node} (rank {host.rank}) received a signal to terminate")


@dataclass(frozen=True, slots=True)
class Order:
    """The hosts that a run, or a check before it, requests from a scheduler."""

    config: Config
    device: DeviceKind
    log_dir: Path
    """Folder to which hosts may write their output."""
    say: Say
    """Called with what startup is waiting for."""
    leases: Leases | None = None
    """Leases of a check, which leaves existing resources as they are; None makes those of a run."""


class AcquiredHosts(LeasedHosts):
    """Hosts that the controller requests from a scheduler."""

    def __init__(self, order: Order) -> None:
        """Request nothing yet."""
        self._config, self._device, self._log_dir, self._say = order.config, order.device, order.log_dir, order.say
        self._meshes = host_counts(order.config)  # number of hosts by mesh
        super().__init__(sum(self._meshes.values()), order.leases)

    @abstractmethod
    async def acquire(self) -> None:
        """Request the hosts, and wait until they hold their leases. The caller must call `kill`, even if this fails."""


async def hold_lease(controller: Controller, host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect a host to its controller, and send what a lease requires; the controller closes the connection if it refuses."""
    name, _, port = controller.address.rpartition(":")
    async with asyncio.timeout(GREETING_S):
        reader, writer = await asyncio.open_connection(name, int(port))
    keep_alive(writer, CONTROLLER_LOST_S)
    writer.write(f"{controller.token} {host.rank} {host.node} {host.name}\n".encode())
    await writer.drain()
    return reader, writer


# Rules about the machines of a run


def broken_by_remote_hosts(config: Config, hosts: str) -> Iterator[BrokenRule]:
    """Yield the rules for hosts on other machines that a configuration breaks; `hosts` names them in the messages."""
    kind = config.hosts.kind
    if config.device == "auto":
        rule = f"auto selects the device of this machine, but the {hosts} may have a different one"
        yield BrokenRule({"hosts.kind": kind, "device": "auto"}, rule, f"set device to that of the {hosts}")
    yield from broken_by_trust(config, f"the {hosts}")


def broken_by_trust(config: Config, hosts: str) -> Iterator[BrokenRule]:
    """Yield a rule if hosts would listen on a network that is not declared as trusted; its text calls them `hosts`."""
    if not config.hosts.trusted_network:
        rule = f"{hosts} listen on the network, and a program that can connect to them can execute code as you"
        fix = "set hosts.trusted_network to true if you trust everyone who can reach them (docs/security.md)"
        yield BrokenRule({"hosts.kind": config.hosts.kind, "hosts.trusted_network": False}, rule, fix)


def broken_by_name(config: Config, hosts: str, fix: str) -> Iterator[BrokenRule]:
    """Yield a rule if the name of this machine does not resolve to an address that other machines can reach."""
    name = socket.gethostname()
    addresses = addresses_of(name)
    if all(map(is_loopback, addresses)):
        found = f"it resolves to {', '.join(addresses)}" if addresses else "it does not resolve"
        rule = f"the name of this machine, {name}, must resolve to an address that {hosts} can reach, but {found}"
        yield config.broken("hosts.kind", rule, fix)


def is_loopback(address: str) -> bool:
    """Return True if an address is only reachable from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a host name resolves; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})
