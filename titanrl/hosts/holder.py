"""Host leases, and the program that holds a host for a controller.

A lease is one TCP connection between a host and the controller, open as long as both are alive. The kernel reports when the
peer dies or its machine loses power or network, so neither side polls. A host stops serving when it loses its controller, so no
allocation outlives a killed controller. Who connects depends on the kind of hosts: a host that connects first sends
`token rank node name`; one that listens first receives its controller's greeting. From then on, all kinds exchange the same
lines:

| sender | line | meaning |
|---|---|---|
| host | `ready`, or `failed` with a reason | first of these lines |
| controller | `start identity[@address]` | start Monarch's host; the host replies `up identity@address` |
| controller | `stop` | kill Monarch's host |
| controller | a request of `titanrl doctor` as JSON | the reply is a line of JSON |
| controller | `end` with an exit code | stop serving |
| host | `ending` | the scheduler terminates the host |

The first half of this module is the controller's: the leases, the classes of providers on top of them, and rules that all kinds
of hosts on other machines share. The second half is the program, which runs Monarch's host on command, and answers
`titanrl doctor`. In a pod, it waits for one controller after another; elsewhere, it connects to the controller and serves it
alone. Monarch's host ignores SIGTERM and outlives its controller, so it is a child of the program. This module must import
neither Monarch nor torch: their versions may differ between hosts.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import platform
import resource
import secrets
import shutil
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from titanrl.base.errors import TitanRLError
from titanrl.base.ownership import bind
from titanrl.config.device import DeviceKind, installed_version, missing_for, packages, query_gpus
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.sizes import host_bytes, host_counts
from titanrl.processes.bootstrap import MONARCH_HOST
from titanrl.processes.temporary import TemporaryFolder
from titanrl.processes.variables import temporary_folder

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


# The program

POD_IP = "TITANRL_POD_IP"
"""Environment variable with the address of the pod."""
FREE_S = 5.0
"""Seconds that a new controller waits for a pod to finish serving the previous one."""
SERVING, BUSY = "serving", "busy"
"""First word of a pod's reply. `serving` is followed by the pod's host name, `busy` by the controller that it serves."""

MISSING = "missing"
"""State of a path that does not exist on a host."""
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MAX_FILES = 10_000
"""Number of files per folder whose names and sizes are compared."""
_DIGESTED = (".json", ".jinja", ".txt", ".model", ".yaml")
"""Suffixes of a model's small files, whose contents are also compared."""
_MAX_DIGESTED_BYTES = 20_000_000
CHOSEN = "any port"
"""Name of the port chosen by the kernel; most connections of a run use such ports."""
CONNECT_S = 3.0
"""Limit for connecting to another host, in seconds."""
ROUND_TRIPS = 20
SEND_S = 0.3
"""Seconds of continuous sending for measuring the bandwidth."""
_CHUNK = bytes(1 << 20)
_ECHO, _SINK = b"e", b"s"


def main() -> None:
    """Serve the controller, or, in a pod, one controller after another."""
    mode, *values = sys.argv[1:]
    if mode == READ:
        os.environ[CONTROLLER], os.environ[TOKEN] = sys.stdin.readline().split()
    token, name = os.environ.pop(TOKEN), socket.gethostname()  # the variables are not needed by the run's processes
    if mode == LISTEN:
        with temporary_folder():
            asyncio.run(Pod(token, os.environ.pop(POD_IP), int(values[0])).serve())
        return
    rank, node = (values[0], name) if values else (os.environ["SLURM_NODEID"], os.environ["SLURMD_NODENAME"])
    sys.exit(serve(Controller(os.environ.pop(CONTROLLER), token), Host(rank=int(rank), node=node, name=name)))


def serve(controller: Controller, host: Host, problem: str = "") -> int:
    """Serve until the controller releases this host; return the exit code. A `problem` of this host ends the run."""
    with temporary_folder():
        return asyncio.run(_serve(controller, host, problem))


async def _serve(controller: Controller, host: Host, problem: str) -> int:
    try:
        reader, writer = await hold_lease(controller, host)
    except (OSError, TimeoutError) as error:
        print(f"{host.node}: the controller at {controller.address} cannot be reached: {error!r}", file=sys.stderr)
        return 1
    session, loop = Session(host.node, reader, writer), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:  # before the controller knows about this host
        loop.add_signal_handler(number, session.forward, number)
    try:
        writer.write(FAILED + " ".join(problem.split()).encode() + b"\n" if problem else READY)
        await session.serve()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return session.code


class Session:
    """Service of this host for one controller, on an open connection."""

    def __init__(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._node, self._reader, self._writer = node, reader, writer
        self._own_address = str(writer.get_extra_info("sockname")[0])
        self._worker: asyncio.subprocess.Process | None = None  # Monarch's host
        self._watch: asyncio.Task[None] | None = None
        self._worker_exited = asyncio.Event()
        self._folder: TemporaryFolder | None = None
        self._servers: list[asyncio.Server] = []  # of `titanrl doctor`
        self.code = 1
        """Exit code of this process; 1 until the controller sends one or a termination signal arrives."""

    async def serve(self) -> None:
        """Serve until the controller sends `end`, the connection breaks, or Monarch's host exits. Leave no process behind."""
        ends = [asyncio.ensure_future(end) for end in (self._execute(), self._worker_exited.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            for server in self._servers:
                server.close()
            await self._stop()

    def forward(self, number: int) -> None:
        """Report a termination signal of the scheduler to the controller, which shuts the run down in order."""
        self.code = 128 + number
        self._writer.write(ENDING)

    async def _execute(self) -> None:
        with contextlib.suppress(OSError):  # the connection broke
            while line := await self._reader.readline():
                word, _, value = line.decode().strip().partition(" ")
                if word == END:
                    self.code = int(value)
                    return
                if word == START:
                    self._writer.write(f"{UP} {await self._start(value)}\n".encode())
                elif word == STOP:
                    await self._stop()
                else:
                    self._writer.write(await reply(line, self._own_address, self._servers))

    async def _start(self, value: str) -> str:
        """Start Monarch's host; return its identity and address, `identity@address`.

        Without an address, choose one. If the controller is reached over loopback, all hosts are on this machine and use Unix
        sockets.
        """
        await self._stop()
        identity, _, address = value.partition("@")
        if not address and is_loopback(self._own_address):
            self._folder = TemporaryFolder("/tmp")  # the path of a socket must be short
            address = f"ipc://{self._folder.path}/host"
        elif not address:
            with bind((self._own_address, 0)) as free:
                address = tcp(self._own_address, free.getsockname()[1])
        self._worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MONARCH_HOST, f"{identity}@{address}", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # launchers send signals to the process group of this process
        )
        self._watch = asyncio.create_task(self._wait(self._worker))
        return f"{identity}@{address}"

    async def _wait(self, worker: asyncio.subprocess.Process) -> None:
        code = await worker.wait()
        if worker is self._worker:
            print(f"{self._node}: Monarch's host exited with code {code}", file=sys.stderr, flush=True)
            self._worker_exited.set()

    async def _stop(self) -> None:
        """Kill Monarch's host, and with it every process of the run on this host."""
        worker, self._worker = self._worker, None
        if worker is not None and self._watch is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await self._watch
        if self._folder is not None:
            self._folder.delete()


class Pod:
    """Server in a pod, which serves one controller after another.

    The controller connects, because pods can exist before it. Its first line has the secret and its name.
    """

    def __init__(self, token: str, ip: str, port: int) -> None:
        self._token, self._ip, self._port = token, ip, port
        self._holder, self._is_serving = "", asyncio.Lock()
        self._is_told = asyncio.Event()
        self._served: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT. A pod has nothing to save, so it does not wait for its controller then."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_told.set)
        server = await asyncio.start_server(self._accept, self._ip, self._port)
        print(f"{socket.gethostname()} waits for a controller on port {self._port}", flush=True)
        await self._is_told.wait()
        server.close()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._served.add(task)
        try:
            await task
        finally:
            self._served.discard(task)
            writer.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. Kubernetes' readiness probe connects and disconnects without a message."""
        try:
            async with asyncio.timeout(GREETING_S):
                line = await reader.readuntil(b"\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        words = line[:MAX_GREETING].decode(errors="replace").split()
        if len(words) != 2 or not hmac.compare_digest(words[0].encode(), self._token.encode()):
            return
        try:
            async with asyncio.timeout(FREE_S):
                await self._is_serving.acquire()
        except TimeoutError:
            writer.write(f"{BUSY} {self._holder}\n".encode())
            return
        self._holder = words[1]
        try:
            await self._serve_controller(reader, writer)
        finally:
            self._is_serving.release()

    async def _serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer, CONTROLLER_LOST_S)
        name = socket.gethostname()
        writer.write(f"{SERVING} {name}\n".encode())
        print(f"serving {self._holder}", flush=True)
        ends = [asyncio.ensure_future(end) for end in (Session(name, reader, writer).serve(), self._is_told.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._is_told.is_set():
                writer.write(ENDING)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            print(f"ended serving {self._holder}", flush=True)


def tcp(ip: str, port: int) -> str:
    """Return an address in Monarch's notation."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


# Replies to `titanrl doctor --config`: versions, devices, memory and files of this host, and its connections to other hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Request for a host's report."""

    device: DeviceKind
    folders: Mapping[str, str]
    """Files and folders that every host must see, by configuration key."""
    token_file: str
    """File that the controller has written into `output_dir`."""
    token: str
    """Content of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """State of one host."""

    name: str
    versions: Mapping[str, str]
    device_problem: str | None
    """Missing prerequisite of the device; None if there is none."""
    devices: Sequence[str]
    """Names of the accelerators; empty on CPU."""
    cores: int
    """Number of CPU cores that this process may use."""
    memory: int
    """Bytes of memory that a run may use: the machine's memory, or the lowest limit on this process."""
    limited_by: str
    """Description of that limit; empty if it is the machine's memory."""
    shared_memory: int | None
    """Free bytes of `/dev/shm`; None if it cannot be written."""
    files: Mapping[str, str]
    """Digest, `missing` or an error, by configuration key."""
    shares_runs: bool
    """True if this host sees the file that the controller has written into `output_dir`."""


def report(request: ReportRequest) -> HostReport:
    """Return the report of this host."""
    memory, limited_by = memory_limit()
    folder = Path("/dev/shm")
    return HostReport(
        name=socket.gethostname(),
        versions=versions(request.device),
        device_problem=missing_for(request.device),
        devices=accelerators(request.device),
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        limited_by=limited_by,
        shared_memory=shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None,
        files={key: digest_of(Path(path)) for key, path in request.folders.items()},
        shares_runs=_content(Path(request.token_file)) == request.token,
    )


def versions(device: DeviceKind) -> dict[str, str]:
    """Return the versions of Python, TitanRL and the packages for a kind of device. TitanRL's includes a digest of its code."""
    names = [package.name for package in packages(device)]
    found = {name: version for name in names if (version := installed_version(name)) is not None}
    code = _digest_of_files(Path(__file__).parents[1], "*.py", contents=True)
    own = f"{installed_version('titanrl') or 'not installed'} (code {code[:8]})"
    return {"python": platform.python_version(), "titanrl": own} | found


def accelerators(device: DeviceKind) -> list[str]:
    """Return the names of the accelerators of this host."""
    if device == "npu":
        return sorted(entry.name for entry in Path("/dev").glob("davinci[0-9]*"))
    return query_gpus("name") if device == "cuda" else []


def memory_limit() -> tuple[int, str]:
    """Return the bytes of memory that this host's processes may use, and the limit's name; empty if it is the machine."""
    limits = {host_bytes(): ""}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits[soft] = "ulimit -v, of each process"
    for line in (_content(Path("/proc/self/cgroup")) or "").splitlines():
        _, kinds, path = line.split(":", 2)
        cgroup = Path(path.lstrip("/"))  # a container sees its own cgroup as the root
        folders = [Path(root, folder) for root in _CGROUPS for folder in (cgroup, *cgroup.parents)]
        for file in (Path(folder, name) for folder in folders for name in _LIMITS if kinds in ("", "memory")):
            text = (_content(file) or "").strip()
            if text.isdecimal():
                limits[int(text)] = "the memory limit of its cgroup"
    lowest = min(limits)
    return lowest, limits[lowest]


def digest_of(path: Path) -> str:
    """Return a digest of a file or folder, `missing` if it does not exist, or the error if it cannot be read."""
    try:
        if path.is_file():
            return hashlib.sha256(f"{path.stat().st_size}".encode()).hexdigest()
        if not path.is_dir():
            return MISSING
        return _digest_of_files(path, "*", contents=False)
    except OSError as error:
        return f"{error.strerror}"


def _digest_of_files(folder: Path, pattern: str, *, contents: bool) -> str:
    """Return a digest of file names and sizes, and of contents: of all files, or only of a model's small files."""
    found = hashlib.sha256()
    files = sorted(file for file in folder.rglob(pattern) if file.is_file())[:_MAX_FILES]
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder)} {size}\n".encode())
        if contents or (file.suffix in _DIGESTED and size < _MAX_DIGESTED_BYTES):
            found.update(file.read_bytes())
    return found.hexdigest()


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


async def reply(line: bytes, address: str, servers: list[asyncio.Server]) -> bytes:
    """Return the reply to a request of the controller, as JSON. Servers for measurements are added to `servers`."""
    message = json.loads(line)
    request = message.pop("request")
    if request == "report":
        found: Any = asdict(await asyncio.to_thread(report, ReportRequest(**message)))
    elif request == "listen":
        found = await listen(address, message["ports"], servers)
    elif request == "connect":
        found = await connect(message["address"], message["ports"])
    else:
        found = time.time()
    return json.dumps(found).encode() + b"\n"


async def listen(address: str, ports: Mapping[str, int], servers: list[asyncio.Server]) -> dict[str, Any]:
    """Listen on a port that the kernel chooses, and on some named ports. The list `servers` keeps the servers alive.

    Returns:
        `address`, `ports` (open ports by name), and `taken` (by name, reasons why the other ports cannot be opened).
    """
    open_ports, taken = {}, {}
    for name, port in ({CHOSEN: 0} | dict(ports)).items():
        try:
            server = await asyncio.start_server(_serve_measurement, address, port, limit=1 << 22)
        except OSError as error:
            taken[name] = _reason(error)
            continue
        servers.append(server)
        open_ports[name] = server.sockets[0].getsockname()[1]
    return {"address": address, "ports": open_ports, "taken": taken}


async def connect(address: str, ports: Mapping[str, int]) -> dict[str, Any]:
    """Connect to the ports of another host, and measure the connection to the port `CHOSEN`.

    Returns:
        `closed` (errors of the unreachable ports, by name), and if `CHOSEN` is reachable, `latency_s` (shortest round trip) and
        `bytes_per_s`.
    """
    closed, measured = {}, {}
    for name, port in ports.items():
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = "no answer" if isinstance(error, TimeoutError) else _reason(error)
            continue
        try:
            if name == CHOSEN:
                measured = await _measure(reader, writer, address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = f"the connection broke: {_reason(error)}"
        finally:
            writer.close()
    return {"closed": closed, **measured}


async def _measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int) -> dict[str, float]:
    trips: list[float] = []
    async with asyncio.timeout(CONNECT_S):
        writer.write(_ECHO)
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            writer.write(b".")
            await reader.readexactly(1)
            trips.append(time.perf_counter() - started)
    async with asyncio.timeout(CONNECT_S + SEND_S):
        _, sink = second = await asyncio.open_connection(address, port)
        sink.write(_SINK)
        num_sent, started = 0, time.perf_counter()
        while time.perf_counter() < started + SEND_S:
            sink.write(_CHUNK)
            await sink.drain()
            num_sent += len(_CHUNK)
        sink.write_eof()
        await second[0].read()  # returns when the peer has received everything
        sink.close()
        return {"latency_s": min(trips), "bytes_per_s": num_sent / (time.perf_counter() - started)}


async def _serve_measurement(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return the received data to the sender, or discard it, as requested by the first byte."""
    try:
        kind = await reader.read(1)
        while data := await reader.read(1 << 20):
            if kind == _ECHO:
                writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


if __name__ == "__main__":
    main()
