"""Check the hosts of a run for `titanrl doctor --config`: query each one, in the allocation that a run would get.

The verdict, which is the problems of each host, is computed from the replies of all hosts by pure functions.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import add
from pathlib import Path
from typing import Any, Literal

from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.errors import ConfigError
from titanrl.config.schema import Config
from titanrl.config.sizes import (
    LIBRARY_BYTES,
    HostPlace,
    Sizes,
    cpu_bytes,
    gigabytes,
    host_counts,
    received_bytes,
    replica_place,
    store_place,
    worker_place,
)
from titanrl.hosts.holder import CONNECT, CONTROLLER, MODULE, TOKEN
from titanrl.hosts.kubernetes import KubernetesHosts
from titanrl.hosts.launcher import World, own_address, publish
from titanrl.hosts.leases import FAILED, READY, Controller, Host, Leases, Say
from titanrl.hosts.report import CHOSEN, MISSING, HostReport, ReportRequest, connect
from titanrl.hosts.slurm import SlurmHosts

REPLY_S = 60.0
"""Limit for a probe's reply, in seconds. Listing a large model's files on a slow disk takes longest."""
CLOCK_S = 1.0
"""Smallest clock difference that is reported, in seconds."""
SLOW = 5
"""Factor by which a reported connection is slower than the median bandwidth."""
CLOCK_ROUNDS = 5
END_S = 10.0
"""Seconds that a probe on this machine has to exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources that a run's roles need on one host.

    Example: `Needs(roles="generators", memory=1_900_000_000, shared_memory=0, devices=8)`
    """

    roles: str
    """Roles on the host, for display."""
    memory: int
    """Bytes of memory, including shared memory."""
    shared_memory: int
    """Bytes in `/dev/shm`."""
    devices: int
    """Number of accelerators; 0 on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection from one host to another."""

    source: str
    """Host that connects."""
    target: str
    """Host that listens."""
    closed: Mapping[str, str]
    """Errors of the unreachable ports, by port name."""
    latency_s: float | None = None
    """Shortest round trip in seconds; None if it was not measured."""
    bytes_per_s: float | None = None
    """Bandwidth of one connection; None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Findings about one host."""

    node: str
    """Name of the host."""
    report: HostReport
    """State of the host."""
    needs: Needs
    """Resources that the run needs on the host."""
    clock_s: float
    """Seconds by which the host's clock is ahead of the controller's."""
    taken: Mapping[str, str]
    """Errors of the ports that cannot be opened on the host, by port name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the verdict."""

    host: str
    """Name of the host."""
    what: str
    """Problem, as a sentence without the period."""
    fix: str
    """Instruction to fix it, as a sentence without the period."""
    level: Literal["error", "warning"] = "error"
    """Severity. A run can start despite warnings."""

    def __str__(self) -> str:
        return f"{self.host}: {self.what}. {self.fix}."


class CheckupError(TitanRLError):
    """The hosts could not be examined."""


class Probes:
    """Connections to the probes on the hosts."""

    def __init__(self, num_hosts: int) -> None:
        """Start without connections."""
        self.leases = Leases(num_hosts, self._on_lost, self._on_lost, self._on_line)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._problems: dict[int, str] = {}  # configuration errors of hosts that a launcher started, by rank

    @property
    def hosts(self) -> list[Host]:
        """Hosts, by rank."""
        return [host for _, host in sorted(self.leases.hosts.items())]

    async def connected(self, timeout_s: float) -> None:
        """Wait until every probe has connected.

        Raises:
            CheckupError: A probe did not connect in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.leases.all_held()
        except TimeoutError:
            missing = ", ".join(map(str, self.leases.missing))
            raise CheckupError(
                f"timeouts.start_s: the probe of host {missing} has not connected to {socket.gethostname()} "
                f"(got {timeout_s:g}). Read the output of the hosts, and allow all ports between them."
            ) from None

    async def query(self, rank: int, request: str, **fields: Any) -> Any:
        """Send a request to a host's probe; return its reply.

        Raises:
            CheckupError: The probe exited or did not reply.
            ConfigError: The host's configuration is invalid.
        """
        reply = self._replies[rank] = asyncio.get_running_loop().create_future()
        if rank in self._problems:
            raise ConfigError(self._problems[rank])
        if rank in self.leases.lost:
            self._on_lost(self.leases.hosts[rank])
        self.leases.send(rank, json.dumps({"request": request, **fields}))
        try:
            return await asyncio.wait_for(reply, REPLY_S)
        except TimeoutError:
            node = self.leases.hosts[rank].node
            raise CheckupError(f"{node}: no reply to '{request}' within {REPLY_S:g} s. Check this host.") from None

    async def query_all(self, request: str, **fields: Any) -> list[Any]:
        """Send a request to all hosts; return their replies by rank."""
        return await asyncio.gather(*(self.query(host.rank, request, **fields) for host in self.hosts))

    def _on_line(self, host: Host, line: bytes) -> None:
        if line == READY:
            return
        reply = self._replies.pop(host.rank, None)
        if line.startswith(FAILED):
            self._problems[host.rank] = f"{host.node} (rank {host.rank}): {line.removeprefix(FAILED).decode().strip()}"
        if reply is not None and not reply.done():
            if host.rank in self._problems:
                reply.set_exception(ConfigError(self._problems[host.rank]))
            else:
                reply.set_result(json.loads(line))

    def _on_lost(self, host: Host) -> None:
        reply = self._replies.pop(host.rank, None)
        if reply is not None and not reply.done():
            reply.set_exception(CheckupError(f"{host.node}: its probe exited. Read the output of this host."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Findings about the hosts of a run."""

    hosts: Sequence[Examined]
    """Hosts, by rank."""
    links: Sequence[Link]
    """Connections between them."""
    problems: Sequence[Problem]
    """Problems, errors first."""

    @property
    def code(self) -> int:
        """Exit code: 1 if a run would not start or would fail, else 0."""
        return int(any(problem.level == "error" for problem in self.problems))


async def examine(config: Config, sizes: Sizes, device: DeviceKind, world: World | None, say: Say) -> Checkup:
    """Check the hosts of a configuration. This starts probes on them, unless a launcher has already done so.

    Args:
        config: configuration of the run.
        sizes: sizes of the run.
        device: kind of the hosts' devices.
        world: processes of a launcher; None without a launcher.
        say: called with a message for the user about what startup is waiting for.

    Raises:
        CheckupError: A probe does not reply.
        TitanRLError: The hosts cannot be acquired.
    """
    needs, token = needs_of(config, sizes, device), secrets.token_hex(8)
    folder = config.output_dir.absolute() / f".doctor-{token}"
    folder.mkdir(parents=True)
    (folder / "token").write_text(token, encoding="utf-8")
    request = ReportRequest(device=device, folders=_folders(config), token_file=str(folder / "token"), token=token)
    keeps_folder = config.hosts.kind == "slurm"  # after an error, the folder contains the hosts' output
    try:
        async with _started(config, device, world, len(needs), folder, say) as probes:
            try:
                checkup = await _query_hosts(config, probes, request, needs)
            except ConfigError:
                probes.leases.end(2)
                raise
            probes.leases.end(checkup.code)
            keeps_folder = False
        return checkup
    finally:
        if not keeps_folder:
            shutil.rmtree(folder)


async def _query_hosts(config: Config, probes: Probes, request: ReportRequest, needs: Sequence[Needs]) -> Checkup:
    reports = await probes.query_all("report", **asdict(request))
    listening = [await probes.query(host.rank, "listen", ports=_named_ports(config)) for host in probes.hosts]
    clocks = [await _clock(probes, host.rank) for host in probes.hosts]
    names = names_of(probes.hosts)
    links = await _links(probes, names, listening)
    if config.hosts.kind in ("slurm", "kubernetes"):
        links += await _links_from_here(probes, listening)
    hosts = [
        Examined(node=name, report=HostReport(**report), needs=need, clock_s=clock, taken=reply["taken"])
        for name, report, need, clock, reply in zip(names, reports, needs, clocks, listening, strict=True)
    ]
    return Checkup(hosts=hosts, links=links, problems=problems(hosts, links))


def names_of(hosts: Sequence[Host]) -> list[str]:
    """Return unique display names of the hosts: the node, with the rank if several hosts are on one machine."""
    names = [host.node for host in hosts]
    return [name if names.count(name) == 1 else f"{name}:{host.rank}" for name, host in zip(names, hosts, strict=True)]


def _named_ports(config: Config) -> dict[str, int]:
    if config.hosts.kind not in ("slurm", "kubernetes"):
        return {}
    port = config.hosts.slurm.port if config.hosts.kind == "slurm" else config.hosts.kubernetes.port
    return {f"port {port} (hosts.{config.hosts.kind}.port)": port}


def _folders(config: Config) -> dict[str, str]:
    """Return the files and folders that every host must see, by key."""
    found = {"model.path": config.model.path}
    if config.distill is not None:
        found["distill.teacher.path"] = config.distill.teacher.path
    return {key: str(path.absolute()) for key, path in found.items() if path is not None}


@contextlib.asynccontextmanager
async def _started(
    config: Config, device: DeviceKind, world: World | None, num_hosts: int, folder: Path, say: Say
) -> AsyncIterator[Probes]:
    """Start the probes on the hosts that a run would get; release the hosts afterwards."""
    probes, start_s = Probes(num_hosts), config.timeouts.start_s
    if config.hosts.kind in ("slurm", "kubernetes"):
        if config.hosts.kind == "slurm":
            provider: SlurmHosts | KubernetesHosts = SlurmHosts(config, device, num_hosts, folder, say, probes.leases)
        else:
            provider = KubernetesHosts(config, device, host_counts(config), say, probes.leases, keep=True)
        try:
            await provider.acquire()
            yield probes
        finally:
            provider.kill()
        return
    address = "127.0.0.1" if world is None else own_address(world)
    if world is not None and not address:
        raise CheckupError(
            f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown here). Correct it."
        )
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    await probes.leases.serve(listener)
    controller = Controller(f"{address}:{listener.getsockname()[1]}", probes.leases.token)
    store = None if world is None else publish(world, controller, address, start_s)
    children = [_start_holder(controller, rank) for rank in range(num_hosts if world is None else 1)]
    try:
        await probes.connected(start_s)
        yield probes
    except BaseException:  # including cancellation
        probes.leases.close()  # makes the probes exit
        raise
    finally:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, END_S)
            child.kill()
            child.wait()
        probes.leases.close()
        del store  # no longer needed, because all probes have connected


def _start_holder(controller: Controller, rank: int) -> "subprocess.Popen[bytes]":
    environment = os.environ | {CONTROLLER: controller.address, TOKEN: controller.token}
    return subprocess.Popen([sys.executable, "-m", MODULE, CONNECT, str(rank)], stdin=subprocess.DEVNULL, env=environment)


async def _clock(probes: Probes, rank: int) -> float:
    """Return the seconds by which a host's clock is ahead of this one, from the fastest of several round trips.

    The host is assumed to read its clock halfway through the round trip.
    """
    best, ahead = float("inf"), 0.0
    for _ in range(CLOCK_ROUNDS):
        sent = time.time()
        there = await probes.query(rank, "clock")
        received = time.time()
        if received - sent < best:
            best, ahead = received - sent, there - (sent + received) / 2
    return ahead


async def _links(probes: Probes, names: Sequence[str], listening: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Measure the connection from every host to every other one. No host takes part in two measurements at the same time."""
    found = list[Link]()
    for pairs in rounds(len(names)):
        replies = await asyncio.gather(
            *(
                probes.query(source, "connect", address=listening[target]["address"], ports=listening[target]["ports"])
                for source, target in pairs
            )
        )
        found += [
            Link(source=names[source], target=names[target], **reply)
            for (source, target), reply in zip(pairs, replies, strict=True)
        ]
    return found


async def _links_from_here(probes: Probes, listening: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Measure the connections from the controller to the hosts on other machines."""
    here, found = socket.gethostname(), list[Link]()
    for host, reply in zip(probes.hosts, listening, strict=True):
        if host.name != here:
            link = await connect(reply["address"], reply["ports"])
            found.append(Link(source=f"{here} (controller)", target=host.node, **link))
    return found


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return every ordered pair of hosts, in rounds in which each host occurs at most once (a round-robin tournament)."""
    players: Sequence[int] = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [pair for pair in zip(players[:half], reversed(players[half:]), strict=True) if -1 not in pair]
        found += [pairs, [(second, first) for first, second in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return found


# Verdict


def needs_of(config: Config, sizes: Sizes, device: DeviceKind) -> list[Needs]:
    """Return the resources that a run needs on each of its hosts, trainer hosts first.

    On a single machine, each host, also an emulated one, is assigned all roles. If the controller shares a machine with a
    trainer host, it is the first one.
    """
    hosts, memory, on_cpu = config.hosts, sizes.memory, device == "cpu"
    trainers, generators = config.num_trainer_ranks, config.num_generator_ranks
    if hosts.across_machines:
        return _needs_by_host(config, sizes, on_cpu=on_cpu)
    total = sum(number * LIBRARY_BYTES[role] for role, number in sizes.processes.items())
    published = 0
    if memory is not None:
        published = 2 * memory.replica_weights if generators else 0
        total = cpu_bytes(config, memory, memory.trainer.cpu_total) if on_cpu else total
    devices = 0 if on_cpu else max(trainers, generators) if hosts.share_devices else trainers + generators
    count = 1 if hosts.kind == "local" else sum(host_counts(config).values())
    return [Needs(roles="all", memory=total, shared_memory=published, devices=devices)] * count


@dataclass(slots=True)
class _Tally:
    """Sums over the roles on a host."""

    roles: list[str] = field(default_factory=list)
    private: int = 0
    """Bytes of the processes' private memory."""
    shared: int = 0
    """Bytes of shared memory."""
    trainers: int = 0
    """Number of trainer ranks."""
    generators: int = 0
    """Number of ranks of generators, teacher and evaluator."""


def _needs_by_host(config: Config, sizes: Sizes, *, on_cpu: bool) -> list[Needs]:
    """Return the resources needed on each host, given the roles that `placement` assigns to it."""
    tallies = {(mesh, number): _Tally() for mesh, count in host_counts(config).items() for number in range(count)}
    _add_others(config, sizes, tallies)
    _add_trainers(config, sizes, tallies, on_cpu=on_cpu)
    if config.num_generator_ranks:
        _add_generators(config, sizes, tallies, on_cpu=on_cpu)
    combine = max if config.hosts.share_devices else add
    return [
        Needs(
            roles=", ".join(dict.fromkeys(tally.roles)),
            memory=tally.private + tally.shared,
            shared_memory=tally.shared,
            devices=0 if on_cpu else combine(tally.trainers, tally.generators),
        )
        for tally in tallies.values()
    ]


def _add_others(config: Config, sizes: Sizes, tallies: Mapping[HostPlace, _Tally]) -> None:
    controller = next(iter(tallies))
    workers = [worker_place(config, worker) or controller for worker in range(config.rollout.num_workers)]
    store = [store_place(config) or controller]
    homes = {"controller": [controller], "rollout": workers, "sandbox": workers, "buffer": store, "store": store}
    for role, places in homes.items():
        for place in places if role in sizes.processes else ():
            tallies[place].roles += [role] if role in ("controller", "rollout") else []
            tallies[place].private += sizes.processes[role] // len(places) * LIBRARY_BYTES[role]


def _add_trainers(config: Config, sizes: Sizes, tallies: Mapping[HostPlace, _Tally], *, on_cpu: bool) -> None:
    memory, num_hosts = sizes.memory, config.hosts.trainer_hosts
    ranks = config.num_trainer_ranks // num_hosts
    rank_bytes = LIBRARY_BYTES["trainer"] + (memory.trainer.cpu_total if memory is not None and on_cpu else 0)
    for number in range(num_hosts if ranks else 0):
        tally = tallies["trainers", number]
        tally.roles.append("trainer")
        tally.private += ranks * rank_bytes
        tally.trainers = ranks
        if memory is not None and config.num_generator_ranks:
            tally.shared += 2 * memory.replica_weights // num_hosts


def _add_generators(config: Config, sizes: Sizes, tallies: Mapping[HostPlace, _Tally], *, on_cpu: bool) -> None:
    memory, tp = sizes.memory, config.generator.tp
    rank_bytes = LIBRARY_BYTES["generator"]
    if memory is not None and on_cpu:
        rank_bytes += memory.generator_rank_weights + config.generator.kv_cache_bytes // tp
    ranks = Counter({replica_place(config, 0): sizes.processes.get("teacher", 0) + sizes.processes.get("evaluator", 0)})
    for replica in range(config.generator.replicas):
        ranks[replica_place(config, replica)] += tp
    for place, count in ranks.items():
        tally = tallies[place]
        tally.roles.append("generators")
        tally.private += count * rank_bytes
        tally.generators = count
        tally.shared += 0 if memory is None else received_bytes(config, memory)


def problems(hosts: Sequence[Examined], links: Sequence[Link]) -> list[Problem]:
    """Return all problems: errors first, each level in the order of the hosts."""
    found = [*_versions(hosts), *_machines(hosts), *_files(hosts), *_ports(hosts, links), *_clocks(hosts), *_speeds(links)]
    order = {host.node: number for number, host in enumerate(hosts)}
    return sorted(found, key=lambda problem: (problem.level, order.get(problem.host, -1)))


def _versions(hosts: Sequence[Examined]) -> Iterator[Problem]:
    """Yield the packages whose version differs from most hosts; in a tie, from the first host."""
    names = list(dict.fromkeys(name for host in hosts for name in host.report.versions))
    for name in names:
        usual, _ = Counter(host.report.versions.get(name) for host in hosts).most_common(1)[0]
        others = [host.node for host in hosts if host.report.versions.get(name) == usual]
        for host in hosts:
            version = host.report.versions.get(name)
            if version != usual:
                what = f"{name} {version}" if version else f"{name} is not installed"
                fix = "Install the same packages on all hosts: titanrl doctor --install"
                verb = "has" if len(others) == 1 else "have"
                yield Problem(host=host.node, what=f"{what}, but {', '.join(others)} {verb} {usual or 'none'}", fix=fix)


def _machines(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for host in hosts:
        report, needs = host.report, host.needs
        if report.device_problem is not None:
            yield Problem(host=host.node, what=f"the device cannot be used: {report.device_problem}", fix="Correct device")
        elif len(report.devices) < needs.devices:
            what = f"{len(report.devices)} accelerators, but {needs.roles} need {needs.devices}"
            yield Problem(host=host.node, what=what, fix="Request more, or change hosts.trainer_hosts or generator_hosts")
        if report.memory < needs.memory:
            limit = f" ({report.limited_by})" if report.limited_by else ""
            what = f"{gigabytes(report.memory)} of memory{limit}, but its roles ({needs.roles}) need {gigabytes(needs.memory)}"
            yield Problem(host=host.node, what=what, fix="Raise the limit, use more hosts, or use a smaller model")
        if report.shared_memory is None:
            fix = "Mount a tmpfs there; in a container, use --shm-size"
            yield Problem(host=host.node, what="/dev/shm is not writable", fix=fix)
        elif report.shared_memory < needs.shared_memory:
            what = f"/dev/shm has {gigabytes(report.shared_memory)}, but the weights need {gigabytes(needs.shared_memory)}"
            yield Problem(host=host.node, what=what, fix="Make it larger; in a container, use --shm-size")


def _files(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for key in dict.fromkeys(key for host in hosts for key in host.report.files):
        states = [host.report.files[key] for host in hosts if host.report.files[key] != MISSING]
        usual = Counter(states).most_common(1)[0][0] if states else MISSING
        for host in hosts:
            state = host.report.files[key]
            if state == MISSING:
                fix = "Mount it under the same path, or correct the key"
                yield Problem(host=host.node, what=f"{key} is missing", fix=fix)
            elif state != usual:
                yield Problem(host=host.node, what=f"{key} differs from the other hosts", fix="Copy it again")
    for host in hosts:
        if not host.report.shares_runs:
            what = "output_dir is not shared with the controller: a file that the controller wrote there is not visible"
            yield Problem(host=host.node, what=what, fix="Choose an output_dir that all hosts share under the same path")


def _ports(hosts: Sequence[Examined], links: Sequence[Link]) -> Iterator[Problem]:
    for host in hosts:
        for name, reason in host.taken.items():
            fix = "Stop the program that uses it, or choose another port"
            yield Problem(host=host.node, what=f"{name} cannot be opened: {reason}", fix=fix)
    closed: dict[tuple[str, str], dict[str, str]] = {}  # errors by source, by target and port
    for link in links:
        for name, error in link.closed.items():
            closed.setdefault((link.target, name), {})[link.source] = error
    for (target, name), errors in closed.items():
        sources, reasons = ", ".join(sorted(errors)), ", ".join(sorted(set(errors.values())))
        what = "its TCP ports are closed" if name == CHOSEN else f"{name} is closed"
        fix = "Allow TCP between the hosts in the firewall" + (" on all ports" if name == CHOSEN else "")
        yield Problem(host=target, what=f"{what} for {sources} ({reasons})", fix=fix)


def _clocks(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for host in hosts:
        if abs(host.clock_s) > CLOCK_S:
            what = f"its clock is {abs(host.clock_s):.1f} s {'ahead of' if host.clock_s > 0 else 'behind'} the controller's"
            yield Problem(host=host.node, what=what, fix="Synchronize it (NTP)", level="warning")


def _speeds(links: Sequence[Link]) -> Iterator[Problem]:
    measured = sorted(link.bytes_per_s for link in links if link.bytes_per_s is not None)
    if not measured:
        return
    median = measured[len(measured) // 2]
    for link in links:
        if link.bytes_per_s is not None and link.bytes_per_s * SLOW < median:
            what = f"{gigabytes(int(link.bytes_per_s))}/s to {link.target}, but the median is {gigabytes(int(median))}/s"
            yield Problem(host=link.source, what=what, fix="Check its network", level="warning")
