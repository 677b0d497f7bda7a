"""Verdict of `titanrl doctor --config`: the problems of each host, computed from the reports of all hosts by pure functions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Literal

from titanrl.base.choices import DeviceKind
from titanrl.config.placement import HostPlace, host_counts, replica_place, store_place, worker_place
from titanrl.config.schema import Config
from titanrl.config.sizes import LIBRARY_BYTES, Sizes, cpu_bytes, gigabytes, received_bytes
from titanrl.hosts.checkup.probe import CHOSEN
from titanrl.hosts.checkup.report import MISSING, HostReport

CLOCK_S = 1.0
"""Smallest clock difference that is reported, in seconds."""
SLOW = 5
"""Factor by which a reported connection is slower than the median bandwidth."""


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
