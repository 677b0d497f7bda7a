"""Hosts that a launcher (torchrun, srun, mpirun, a platform) has started: one process on each host runs the same command.

Rank 0 becomes the controller, the other ranks serve as hosts. Every process exits with the exit code of rank 0, or with 1 if it
loses the connection to rank 0. This module must not import Monarch; it imports torch only for the store of the rendezvous.
"""

import asyncio
import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

from titanrl.base.ownership import bind
from titanrl.config.device import missing_for, resolve_device
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError
from titanrl.config.load import Source, explain_rule
from titanrl.config.schema import Config
from titanrl.config.sizes import host_counts
from titanrl.hosts.holder import (
    END,
    FAILED,
    START,
    STOP,
    Controller,
    Host,
    HostsError,
    LeasedHosts,
    Leases,
    Say,
    addresses_of,
    broken_by_trust,
    holder_command,
    is_loopback,
    serve,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")
DEFAULT_PORT = 29500
"""Port of rank 0 if no variable names another one; torchrun has the same default."""
FIRST_SLURM_PORT = 20_000
NUM_SLURM_PORTS = 10_000
END_S = 10.0
"""Seconds that `Crew.end` waits for the other processes to exit, including ones that have not connected yet."""
TELL_S = 5.0
"""Seconds for which a process with an invalid configuration tries to notify the others."""
_COUNTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables with the rank, the number of processes, and the number of processes on this host. The first ones that are set are
used, because mpirun may run inside srun. A Slurm batch script also has a rank, but no step tasks."""
_OWN = (
    *(name for names in _COUNTS[:3] for name in names),
    *("SLURM_PROCID", "SLURM_LOCALID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
_OWN_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_FIRST_NODE = re.compile(r"(?P<prefix>[^\[,]*)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^\[,]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of a launcher, from the point of view of one of them."""

    rank: int
    size: int
    local_size: int
    """Number of processes that the launcher has started on this host."""
    address: str
    """Name or address of the host of rank 0."""
    port: int
    """Port of the store in which the other ranks look up rank 0."""
    agent_has_store: bool = False
    """True if the launcher serves that store, like torchrun."""
    attempt: str = "0"
    """Number of the launcher's attempt, because torchrun may restart the processes."""


def world_of(environment: Mapping[str, str]) -> World | None:
    """Return the processes that a launcher's variables describe, if there are any; raise `BrokenRules` if some are wrong."""
    for names in _COUNTS:
        rank, size, local_size = (environment.get(name) for name in names)
        if rank is not None and (names[0] == "RANK" or size is not None):
            break
    else:
        return None
    given = {names[0]: rank, names[1]: size}
    if not (rank.isdecimal() and size is not None and size.isdecimal() and int(rank) < int(size)):
        rule = "the launcher must set the rank of this process (from 0) and the number of processes (from 1)"
        raise BrokenRules(BrokenRule(given, rule, f"set both, or unset {names[0]}"))
    # Slurm writes the tasks of each node, such as 1(x2),3.
    on_this_host = max(map(int, re.findall(r"(?<!x)\b\d+", local_size or "")), default=1)
    by_slurm = names[0] == "SLURM_PROCID"
    if "MASTER_ADDR" in environment:
        address = environment["MASTER_ADDR"]
    elif by_slurm:
        address = first_node(environment.get("SLURM_STEP_NODELIST", ""))
    elif on_this_host == int(size):
        address = "127.0.0.1"
    else:
        rule = "this launcher does not provide the address of rank 0"
        fix = "pass it, for example with `mpirun -x MASTER_ADDR=<host of rank 0>`"
        raise BrokenRules(BrokenRule({**given, "MASTER_ADDR": None}, rule, fix))
    port = environment.get("MASTER_PORT", str(DEFAULT_PORT))
    if "MASTER_PORT" not in environment and by_slurm:  # steps of a job that share a node must not share the port
        number = 100 * int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        port = str(FIRST_SLURM_PORT + number % NUM_SLURM_PORTS)
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        fix = "set it to a free port, the same for all processes"
        raise BrokenRules(BrokenRule({"MASTER_PORT": port}, "must be a port from 1 to 65535", fix))
    return World(
        rank=int(rank),
        size=int(size),
        local_size=on_this_host,
        address=address,
        port=int(port),
        agent_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list, such as `gpu[07-09,12],login1`."""
    found = _FIRST_NODE.match(nodes)
    assert found is not None  # every part may be empty
    return found["prefix"] + (found["first"] or "") + (found["suffix"] or "")


def drop_variables() -> None:
    """Delete the launcher's variables from the environment of this process.

    The run's processes inherit the environment; with these variables, torch's process groups would use the launcher's store.
    """
    for name in list(os.environ):
        if name in _OWN or name.startswith(_OWN_PREFIXES):
            del os.environ[name]


def broken_by_world(config: Config, world: World | None) -> Iterator[BrokenRule]:
    """Yield the rules that a configuration breaks when it runs on these processes."""
    if world is None:
        yield BrokenRule(
            {"hosts.kind": "launcher"},
            "launcher requires a program that starts this command once on each host, and none of "
            f"{', '.join(names[0] for names in _COUNTS)} is set",
            "start the command with torchrun, srun or mpirun (docs/howto/launcher.md), or set hosts.kind to local",
        )
        return
    counts = host_counts(config)
    needed = sum(counts.values())
    if world.size != needed:
        yield config.broken(
            " ".join(f"hosts.{group[:-1]}_hosts" for group in counts),
            f"the launcher must start one process for each trainer host and each generator host, {needed} in total, "
            f"but it started {world.size}",
            f"start {needed}, or change the numbers of hosts",
        )
    if world.local_size > 1 and config.device != "cpu" and resolve_device("auto").kind != "cpu":
        yield BrokenRule(
            {"hosts.kind": "launcher"},
            "a run needs one process per host, which uses all of its accelerators, but the launcher started "
            f"{world.local_size} on this host",
            "start one per host, for example with `torchrun --nproc-per-node 1` or `srun --ntasks-per-node 1`",
        )


def world_for(config: Config, source: Source, *others: BrokenRule) -> World:
    """Return the launcher's processes, and remove their variables. If they break a rule, refuse them with it and `others`."""
    try:
        world = world_of(os.environ)
        found = [explain_rule(rule, source) for rule in broken_by_world(config, world)]
    except BrokenRules as error:  # environment variables have no line in the configuration
        world, found = None, [*map(str, error.broken)]
    if found or world is None:
        raise ConfigError(*found, *(explain_rule(rule, source) for rule in others))
    drop_variables()
    return world


def broken_by_launcher(config: Config) -> Iterator[BrokenRule]:
    """Return the rules about launchers that a configuration breaks on any machine."""
    return broken_by_trust(config, "hosts of a launcher")


def own_address(world: World) -> str:
    """Return this host's address on the route to rank 0; `""` if rank 0's name does not resolve here.

    Connecting a datagram socket determines the route without sending anything.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


# Rendezvous: rank 0 publishes its address in a `TCPStore` at the master address and port, where the other ranks look it up.
# With torchrun, this is the store of its agent, which already occupies the port.


class LauncherError(HostsError):
    """The processes of a launcher cannot find each other, or one of them exited."""


def publish(world: World, controller: Controller, own_address: str, timeout_s: float) -> "TCPStore":
    """Publish the address of rank 0; return the store, which must exist until all processes have connected."""

    def open_and_set() -> "TCPStore":
        store = _store(world, timeout_s) if world.agent_has_store else _own_store(world, own_address)
        store.set(_key(world), f"{controller.address} {controller.token}")
        return store

    return _in_thread(open_and_set)


def find(world: World, timeout_s: float) -> Controller:
    """Wait until rank 0 has published its address; return it. Raise `LauncherError` if that takes too long."""
    address, token = _in_thread(lambda: _store(world, timeout_s).get(_key(world)).decode()).split()
    return Controller(address, token)


def _key(world: World) -> str:
    return f"titanrl/{world.attempt}/controller"  # torchrun's store outlives an attempt


def _store(world: World, timeout_s: float) -> "TCPStore":
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(world.address, world.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:  # torch's own exceptions derive from it
        raise LauncherError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 has not opened a store at {world.address}:{world.port} within {timeout_s:g} s "
            f"(got {_first_line(error)}). Correct the address, or allow this port in the network."
        ) from None


def _own_store(world: World, own_address: str) -> "TCPStore":
    """Start a store on the interface of rank 0's address. By default, torch's stores listen on all interfaces."""
    from torch.distributed import TCPStore

    try:
        listener = bind((own_address, world.port))
    except OSError as error:
        raise LauncherError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 cannot listen at {own_address}:{world.port} (got {error.strerror}). "
            "Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port."
        ) from None
    return TCPStore(own_address, world.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _in_thread(call: Callable[[], T]) -> T:
    """Call a function in another thread, so that signals can end this process while the library blocks.

    The thread is a daemon, so the process can exit before the call returns.
    """
    results: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except Exception as error:  # raised again below
            results.put(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    result = results.get()
    if isinstance(result, LauncherError):
        raise result
    if isinstance(result, Exception):
        raise LauncherError(f"MASTER_ADDR: the launcher's store failed (got {_first_line(result)}). Read its output.")
    return result


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Connections


class Crew:
    """Rank 0's connections to all processes of a launcher, for the lifetime of the command. Use it in a `with` statement.

    Each session starts and stops Monarch's hosts, and a restarted run opens another session. The connections stay open in
    between, so that the other processes wait for the next session and finally receive the exit code.
    """

    current: "Crew | None" = None
    """The crew of this process, used by its sessions."""

    def __init__(self, world: World, timeout_s: float) -> None:
        """Listen for the other processes, and publish the address of this one. The launcher's store may take `timeout_s`."""
        self.world, self.code = world, 1
        address = own_address(world)
        if not address:
            raise LauncherError(
                f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown on "
                f"{socket.gethostname()}). Correct it, or the name server."
            )
        self.address = address
        """Address at which the other hosts can reach this one."""
        self._listener = bind((address, 0))
        self._listener.listen(world.size + 16)
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
        Crew.current = self
        return self

    def __exit__(self, *error: object) -> None:
        Crew.current = None
        self.end(self.code)

    def gather(self, timeout_s: float) -> None:
        """Start the host of rank 0, and wait until every process has connected and is ready, or reported a problem."""
        environment = os.environ | self.controller.variables
        self._own_host = subprocess.Popen(holder_command(0), stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
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
        if not self._has_waited:  # each of the others connects as soon as it knows the address
            while missing > 0 and (left := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left)
                with contextlib.suppress(OSError):
                    connections.append(self._listener.accept()[0])
                    missing -= 1
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.sendall(f"{END} {code}\n".encode())
        for connection in connections:
            with contextlib.suppress(OSError):  # the process was killed, or the time is over
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(4096):
                        break
            connection.close()
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

    def _on_line(self, host: Host, line: bytes) -> None:
        self._reported[host.rank] = line.removeprefix(FAILED).decode().strip() if line.startswith(FAILED) else ""
        self._changed.set()

    def _on_lost(self, host: Host) -> None:
        self._leases.lost.add(host.rank)  # including a host that is being terminated
        self._changed.set()

    def _name(self, rank: int) -> str:
        return f"{self._leases.hosts[rank].node} (rank {rank})"


class LauncherHosts(LeasedHosts):
    """Hosts on the processes that a launcher, such as torchrun, has started. Trainers are on those of the lowest ranks."""

    def __init__(self, crew: Crew, start_s: float, say: Say) -> None:
        super().__init__(crew.world.size)
        self.crew, self._start_s, self._say = crew, start_s, say

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Start Monarch's hosts. See `Provider`."""
        self._identities, count = identities, len(identities)
        if gone := [str(rank) for rank in range(count) if rank not in self.crew.connections]:
            raise LauncherError(f"hosts.kind: the hosts of rank {', '.join(gone)} exited (got launcher). Restart the launcher.")
        for host, connection in self.crew.connections.values():
            self.leases.take(host, *await asyncio.open_connection(sock=connection.dup()))
        for rank, identity in enumerate(identities):
            self.crew.send(rank, f"{START} {identity}")
        addresses = await self._chosen_addresses(self._start_s, "launcher")
        nodes = ", ".join(host.node for _, host in sorted(self.leases.hosts.items()))
        self._say(f"{count} hosts of the launcher ({nodes})")
        return addresses

    async def kill(self) -> None:
        """Stop Monarch's hosts, and every process on them. The launcher's processes wait for the next session."""
        self.close()
        for rank in self.leases.lost:
            self.crew.connections.pop(rank, None)
        for rank in self.crew.connections:
            self.crew.send(rank, STOP)


# The command


def run_launched(config: Config, source: Source, controller: Callable[[], int], check: Callable[[], object]) -> int:
    """Run the controller on rank 0, and a host on every other rank; return the exit code.

    If the launcher's processes are wrong, `check` is called, whose `ConfigError` is part of the refusal: otherwise a user would
    learn only from the next start what is wrong with the model or the data.
    """
    try:
        world = world_for(config, source, *broken_by_launcher(config))
    except ConfigError as error:
        try:
            check()
        except ConfigError as other:  # has the rules about launchers, too
            raise ConfigError(*dict.fromkeys((*other.messages, *error.messages))) from None
        raise
    problems = [explain_rule(rule, source) for rule in _broken_here(config, world)]
    try:
        if not world.rank:
            with Crew(world, config.timeouts.start_s) as crew:
                try:
                    if problems:
                        raise ConfigError(*problems)
                    crew.gather(config.timeouts.start_s)
                    crew.code = controller()
                except ConfigError:
                    crew.code = 2
                    raise
                return crew.code
        host, found = own_host(world), find(world, config.timeouts.start_s)
        print(f"{host.name}: rank {world.rank} of {world.size} serves the controller at {found.address}", flush=True)
        for problem in problems:
            print(problem, file=sys.stderr)
        return serve(found, host, "\n".join(problems))
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def tell_failure(source: Source | None, problem: str) -> None:
    """Make the launcher's other processes, if there are any, exit with code 2. `source` is None if it could not be read."""
    try:
        world = world_of(os.environ)
        hosts = {"kind": "launcher"} if source is None else source.values.get("hosts")
        is_wanted = isinstance(hosts, dict) and hosts.get("kind") in ("launcher", None)
        if world is None or world.size == 1 or not is_wanted or (source is None and not world.rank):
            return
        drop_variables()
        if world.rank:
            serve(find(world, TELL_S), own_host(world), problem)
        else:
            Crew(world, TELL_S).end(2)
    except (BrokenRules, LauncherError):  # the others have also exited, or there are none
        return


def own_host(world: World) -> Host:
    """Return this host."""
    name = socket.gethostname()
    return Host(rank=world.rank, node=name, name=name)


def _broken_here(config: Config, world: World) -> list[BrokenRule]:
    broken, name = [], socket.gethostname()
    missing = None if config.device == "auto" else missing_for(config.device)
    if missing is not None:
        rule = f"the device must be usable on every host, but on {name} it is not: {missing}"
        broken.append(config.broken("device", rule, "set device to that of the hosts"))
    own, addresses = own_address(world), addresses_of(name)
    if own and not is_loopback(own) and all(map(is_loopback, addresses)):
        found = f"resolves to {', '.join(addresses)}" if addresses else "does not resolve"
        rule = f"the name of each host must resolve to an address that the others can reach, but {name} {found}"
        broken.append(config.broken("hosts.kind", rule, "correct /etc/hosts or the name server"))
    return broken
