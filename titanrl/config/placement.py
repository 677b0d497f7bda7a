"""Placement of a run's processes on hosts and devices, with the memory that each process needs. Pure functions;
`launch/hosts.py` manages the hosts themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanrl.base.choices import DeviceKind
from titanrl.config.hosts import HostGroup
from titanrl.config.schema import Config
from titanrl.config.sizes import LIBRARY_BYTES, Sizes

HostPlace = tuple[str, int]
"""A host: its mesh (`trainers` or `generators`), and its index in the mesh."""
HERE = "this machine"


def host_counts(config: Config) -> dict[str, int]:
    """Return the number of hosts that a run needs in each mesh."""
    counts = {"trainers": config.hosts.trainer_hosts}
    if config.num_generator_ranks and config.placement.generator == "generators":
        counts["generators"] = config.hosts.generator_hosts
    return counts


def spread(number: int, num_hosts: int, per_host: Sequence[int] | None) -> list[int]:
    """Return the host index of each process: round-robin, or in blocks of the given sizes."""
    if per_host is None:
        return [process % num_hosts for process in range(number)]
    return [host for host, count in enumerate(per_host) for _ in range(count)]


def replica_hosts(config: Config) -> list[int]:
    """Return the host index of each generator replica, among the hosts of the replicas."""
    return spread(config.generator.replicas, config.hosts.generator_hosts, config.placement.replicas_per_host)


def replica_place(config: Config, replica: int) -> HostPlace:
    """Return the host of a generator replica."""
    return config.placement.generator, replica_hosts(config)[replica]


def replica_slot(config: Config, replica: int) -> int:
    """Return the index of a replica among those on its host. An additional replica (number `generator.replicas`) follows those
    of the first host."""
    hosts = replica_hosts(config)
    return hosts[:replica].count(hosts[replica % len(hosts)])


def rollout_group(config: Config) -> HostGroup:
    """Return the host group of the rollout workers."""
    if config.placement.rollout != "auto":
        return (
            config.placement.rollout if config.num_generator_ranks or config.placement.rollout != "generators" else "controller"
        )
    return "generators" if config.num_generator_ranks else "controller"


def worker_hosts(config: Config) -> list[int]:
    """Return the host index of each rollout worker, among the hosts of its group."""
    counts = {"controller": 1, "trainers": config.hosts.trainer_hosts, "generators": config.hosts.generator_hosts}
    return spread(config.rollout.num_workers, counts[rollout_group(config)], config.placement.workers_per_host)


def worker_place(config: Config, worker: int) -> HostPlace | None:
    """Return the host of a rollout worker; None for the controller's host."""
    group, number = rollout_group(config), worker_hosts(config)[worker]
    if group == "controller":
        return None
    return ("trainers" if group == "trainers" else config.placement.generator), number


def store_group(config: Config) -> HostGroup:
    """Return the group whose first host runs the buffer and the weight store."""
    if config.placement.store == "auto":
        return "trainers" if config.weights.transport == "store" else "controller"
    return config.placement.store if config.num_generator_ranks or config.placement.store != "generators" else "controller"


def store_place(config: Config) -> HostPlace | None:
    """Return the host of the buffer and the weight store; None for the controller's host."""
    group = store_group(config)
    if group == "controller":
        return None
    return ("trainers" if group == "trainers" else config.placement.generator), 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Identical processes of one role, on one host or on several identical hosts.

    Example: `Placement(host="trainer hosts (4)", devices="0-7", role="trainer rank", processes=8, num_bytes=52_000_000_000)`
    """

    host: str
    """Name of the host, or type and number of hosts."""
    devices: str
    """Indices of the accelerators, `cpu`, or selected CPU cores; empty if the role uses no device."""
    role: str
    """Role of the processes."""
    processes: int
    """Number of processes per host."""
    num_bytes: int | None
    """Estimated memory of one process: its private memory on CPU, else its device memory. None if unknown or zero."""


def placements(config: Config, sizes: Sizes, device: DeviceKind) -> Iterator[Placement]:
    """Yield the placement of each role, on the hosts that `hosts.kind` and `placement` select."""
    yield from _rank_placements(config, sizes, device)
    cores, libraries = config.placement.cpus, _libraries(device)
    workers = list(_counts(config, rollout_group(config), worker_hosts(config)))
    for role in ("rollout", "sandbox", "buffer", "store", "controller"):
        number = sizes.processes.get(role)
        if number is None:
            continue
        if role in ("rollout", "sandbox") and "rollout" in sizes.processes:
            per_worker, choice = number // config.rollout.num_workers, cores.rollout
            hosts = [(host, count * per_worker) for host, count in workers]
        elif role in ("buffer", "store"):
            hosts, choice = [(_host(config, store_group(config), 0), number)], cores.store
        else:
            hosts, choice = [(HERE, number)], None
        for host, count in hosts:
            bytes_each = libraries[role] or None
            yield Placement(host=host, devices=_cores(choice), role=role, processes=count, num_bytes=bytes_each)


def _rank_placements(config: Config, sizes: Sizes, device: DeviceKind) -> Iterator[Placement]:
    """Yield the placement of the ranks that use devices."""
    libraries, hosts, cores = _libraries(device), config.hosts, config.placement.cpus
    trainer_bytes = generator_bytes = None
    if sizes.memory is not None:
        trainer = sizes.memory.trainer
        trainer_bytes = libraries["trainer"] + (trainer.cpu_total if device == "cpu" else trainer.total)
        cache = config.generator.kv_cache_bytes // config.generator.tp if device == "cpu" else 0
        generator_bytes = libraries["generator"] + sizes.memory.generator_rank_weights + cache
    ranks, generators, of_replica = config.num_trainer_ranks, config.num_generator_ranks, replica_hosts(config)
    most = max(map(of_replica.count, of_replica)) * config.generator.tp if generators else 0
    per_host = ranks // hosts.trainer_hosts
    on_ranks = per_host if config.placement.generator == "trainers" else 0
    # Emulated hosts share the devices of one machine.
    first = 0 if hosts.share_devices else on_ranks if hosts.across_machines else ranks
    behind = first + (most if hosts.across_machines else generators)
    if ranks:
        host, shown = host_name(config, "trainers"), per_host if hosts.across_machines else ranks
        devices = _devices(device, 0, shown) + _cores(cores.trainer, " ")
        yield Placement(host=host, devices=devices, role="trainer rank", processes=per_host, num_bytes=trainer_bytes)
    for host, count in _counts(config, "generators", of_replica) if generators else ():
        number = count * config.generator.tp
        devices = _devices(device, first, number if hosts.across_machines else generators) + _cores(cores.generator, " ")
        yield Placement(host=host, devices=devices, role="generator rank", processes=number, num_bytes=generator_bytes)
    for role in ("teacher", "evaluator"):
        if number := sizes.processes.get(role, 0):
            devices, host = _devices(device, behind, number), _host(config, "generators", 0)
            yield Placement(host=host, devices=devices, role=f"{role} rank", processes=number, num_bytes=None)


def _counts(config: Config, group: HostGroup, hosts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield hosts with their number of processes. Hosts of a group are yielded together if all have the same number."""
    counts = [hosts.count(host) for host in range(max(hosts) + 1)]
    total = {"controller": 1, "trainers": config.hosts.trainer_hosts, "generators": config.hosts.generator_hosts}[group]
    if config.hosts.kind == "local" or group == "controller":
        yield HERE, len(hosts)
    elif len(set(counts)) == 1 and len(counts) == total:
        yield host_name(config, group), counts[0]
    else:
        for number, count in enumerate(counts):
            yield _host(config, group, number), count


def host_name(config: Config, group: HostGroup) -> str:
    """Return the name of all hosts of a group."""
    hosts = config.hosts
    if hosts.kind == "local" or group == "controller":
        return HERE
    if group == "trainers":
        return f"trainer hosts ({hosts.trainer_hosts})"
    if config.placement.generator == "generators":
        return f"generator hosts ({hosts.generator_hosts})"
    if hosts.generator_hosts == hosts.trainer_hosts:
        return f"trainer hosts ({hosts.trainer_hosts})"
    return f"trainer hosts (first {hosts.generator_hosts} of {hosts.trainer_hosts})"


def _host(config: Config, group: HostGroup, number: int) -> str:
    """Return the name of one host of a group."""
    if config.hosts.kind == "local" or group == "controller":
        return HERE
    return f"{'generator' if group == config.placement.generator == 'generators' else 'trainer'} host {number}"


def _libraries(device: DeviceKind) -> dict[str, int]:
    return dict(LIBRARY_BYTES) if device == "cpu" else dict.fromkeys(LIBRARY_BYTES, 0)


def _devices(device: DeviceKind, first: int, count: int) -> str:
    if device == "cpu":
        return "cpu"
    return f"{device} {first}" if count == 1 else f"{device} {first}-{first + count - 1}"


def _cores(choice: str | None, before: str = "") -> str:
    return "" if choice is None else f"{before}cores {choice}"
