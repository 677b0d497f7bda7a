"""Verdict of `titanrl doctor --config`: what is wrong with which host, from the reports of all of them. Nothing here looks at a
machine."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from titanrl.config.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.config.sizes import LIBRARY_BYTES, Sizes, cpu_bytes, gigabytes
from titanrl.launch.host_probe import CHOSEN
from titanrl.launch.host_report import MISSING, HostReport

CLOCK_S = 1.0
"""Difference of clocks from which it is reported."""
SLOW = 5
"""Factor below the median at which the bandwidth of a connection is reported."""
_WITH_CONTROLLER = ("controller", "rollout", "sandbox", "buffer", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a run's roles on one host.

    Example: `Needs(roles="generators", memory=1_900_000_000, shared_memory=0, devices=8)`
    """

    roles: str
    """Roles on the host, for people."""
    memory: int
    """Bytes of memory."""
    shared_memory: int
    """Bytes of them in `/dev/shm`."""
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
    """Errors of the ports that cannot be reached, by the name of the port."""
    latency_s: float | None = None
    """Shortest round trip."""
    bytes_per_s: float | None = None
    """Bandwidth of one connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One host, as it was found."""

    node: str
    """Name of the host."""
    report: HostReport
    """State of the host."""
    needs: Needs
    """Needs of the run there."""
    clock_s: float
    """Seconds by which its clock is ahead of the controller's."""
    taken: Mapping[str, str]
    """Errors of the ports that cannot be opened there, by the name of the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the verdict."""

    host: str
    """Host."""
    what: str
    """Fault, as a sentence without its end."""
    fix: str
    """Way to mend it, as a sentence without its end."""
    level: Literal["error", "warning"] = "error"
    """A run can start in spite of a warning."""

    def __str__(self) -> str:
        return f"{self.host}: {self.what}. {self.fix}."


def needs_of(config: Config, sizes: Sizes, device: DeviceKind) -> list[Needs]:
    """Return what a run needs on each of its hosts, trainer hosts first.

    On one machine, also with emulated hosts, all roles are there. A controller beside a trainer host is on the first one.
    """
    hosts, memory, on_cpu = config.hosts, sizes.memory, device == "cpu"
    has_generators = config.num_generator_ranks > 0
    num_hosts = hosts.trainer_hosts + (hosts.generator_hosts if has_generators else 0)
    trainers, generators = config.num_trainer_ranks, config.num_generator_ranks
    others = sum(number * LIBRARY_BYTES[role] for role, number in sizes.processes.items() if role in _WITH_CONTROLLER)
    published = 2 * memory.replica_weights if memory is not None and has_generators else 0
    if not hosts.across_machines:
        total = sum(number * LIBRARY_BYTES[role] for role, number in sizes.processes.items())
        if memory is not None and on_cpu:
            total = cpu_bytes(config, memory, memory.trainer.cpu_total)
        devices = 0 if on_cpu else max(trainers, generators) if hosts.share_devices else trainers + generators
        count = 1 if hosts.kind == "local" else num_hosts
        return [Needs(roles="all", memory=total, shared_memory=published, devices=devices)] * count
    trainer, generator = LIBRARY_BYTES["trainer"], LIBRARY_BYTES["generator"]
    if memory is not None and on_cpu:
        trainer += memory.trainer.cpu_total
        generator += memory.generator_rank_weights + config.generator.kv_cache_bytes // config.generator.tp
    ranks, shared = trainers // hosts.trainer_hosts, published // hosts.trainer_hosts
    found = [
        Needs(roles="trainer", memory=ranks * trainer + shared, shared_memory=shared, devices=0 if on_cpu else ranks)
    ] * hosts.trainer_hosts
    if has_generators:
        ranks = generators // hosts.generator_hosts
        further = sizes.processes.get("teacher", 0) + sizes.processes.get("evaluator", 0)
        needs = (ranks + further) * generator
        found += [
            Needs(roles="generators", memory=needs, shared_memory=0, devices=0 if on_cpu else ranks + further)
        ] * hosts.generator_hosts
    first = found[0]
    found[0] = Needs(roles="controller, trainer", memory=first.memory + others, shared_memory=shared, devices=first.devices)
    return found


def problems(hosts: Sequence[Examined], links: Sequence[Link]) -> list[Problem]:
    """Return everything that is wrong, by host."""
    found = [*_versions(hosts), *_machines(hosts), *_files(hosts), *_ports(hosts, links), *_clocks(hosts), *_speeds(links)]
    order = {host.node: number for number, host in enumerate(hosts)}
    return sorted(found, key=lambda problem: (problem.level, order.get(problem.host, -1)))


def _versions(hosts: Sequence[Examined]) -> Iterator[Problem]:
    """Yield the packages whose version differs from that of most hosts; of the first, if there are two opinions."""
    names = list(dict.fromkeys(name for host in hosts for name in host.report.versions))
    for name in names:
        usual, _ = Counter(host.report.versions.get(name) for host in hosts).most_common(1)[0]
        others = [host.node for host in hosts if host.report.versions.get(name) == usual]
        for host in hosts:
            version = host.report.versions.get(name)
            if version != usual:
                what = f"{name} {version}" if version else f"{name} is not installed"
                fix = "Install the same packages on all hosts: titanrl doctor --install"
                yield Problem(host=host.node, what=f"{what}, but {', '.join(others)} has {usual or 'none'}", fix=fix)


def _machines(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for host in hosts:
        report, needs = host.report, host.needs
        if report.device_problem is not None:
            yield Problem(host=host.node, what=f"the device cannot be used: {report.device_problem}", fix="Correct device")
        elif len(report.devices) < needs.devices:
            what = f"{len(report.devices)} accelerators, and {needs.roles} need {needs.devices}"
            yield Problem(host=host.node, what=what, fix="Ask for more, or change hosts.trainer_hosts or generator_hosts")
        if report.memory < needs.memory:
            limit = f" ({report.limited_by})" if report.limited_by else ""
            what = f"{gigabytes(report.memory)} of memory{limit}, and its roles ({needs.roles}) need {gigabytes(needs.memory)}"
            yield Problem(host=host.node, what=what, fix="Raise the limit, use more hosts, or a smaller model")
        if report.shared_memory is None:
            fix = "Mount a tmpfs there; in a container, use --shm-size"
            yield Problem(host=host.node, what="/dev/shm cannot be written", fix=fix)
        elif report.shared_memory < needs.shared_memory:
            what = f"/dev/shm has {gigabytes(report.shared_memory)}, and the weights need {gigabytes(needs.shared_memory)}"
            yield Problem(host=host.node, what=what, fix="Make it larger; in a container, use --shm-size")


def _files(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for key in dict.fromkeys(key for host in hosts for key in host.report.files):
        states = [host.report.files[key] for host in hosts if host.report.files[key] != MISSING]
        usual = Counter(states).most_common(1)[0][0] if states else MISSING
        for host in hosts:
            state = host.report.files[key]
            if state == MISSING:
                fix = "Mount it there by the same path, or correct the key"
                yield Problem(host=host.node, what=f"{key} is missing", fix=fix)
            elif state != usual:
                yield Problem(host=host.node, what=f"{key} differs from that of other hosts", fix="Copy it again")
    for host in hosts:
        if not host.report.shares_runs:
            what = "output_dir is not that of the controller: a file that it has written there is not seen"
            yield Problem(host=host.node, what=what, fix="Choose an output_dir that all hosts see by the same path")


def _ports(hosts: Sequence[Examined], links: Sequence[Link]) -> Iterator[Problem]:
    for host in hosts:
        for name, reason in host.taken.items():
            fix = "End the program that uses it, or choose another port"
            yield Problem(host=host.node, what=f"{name} cannot be opened: {reason}", fix=fix)
    closed: dict[tuple[str, str], dict[str, str]] = {}  # errors by source, by target and port
    for link in links:
        for name, error in link.closed.items():
            closed.setdefault((link.target, name), {})[link.source] = error
    for (target, name), errors in closed.items():
        sources, reasons = ", ".join(sorted(errors)), ", ".join(sorted(set(errors.values())))
        what = "its TCP ports are closed" if name == CHOSEN else f"{name} is closed"
        fix = "Let TCP between the hosts pass in the firewall" + (" on all ports" if name == CHOSEN else "")
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
            what = f"{gigabytes(int(link.bytes_per_s))}/s to {link.target}, and the median is {gigabytes(int(median))}/s"
            yield Problem(host=link.source, what=what, fix="Check its network", level="warning")
