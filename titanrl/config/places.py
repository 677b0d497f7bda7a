"""Assignment of processes to hosts, computed from a configuration. Pure functions; `launch/hosts.py` manages the hosts
themselves."""

from collections.abc import Sequence

from titanrl.config.roles import HostGroup
from titanrl.config.schema import Config

HostPlace = tuple[str, int]
"""A host: its mesh (`trainers` or `generators`), and its index in the mesh."""


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


def most_replicas(config: Config) -> int:
    """Return the largest number of replicas on one host."""
    hosts = replica_hosts(config)
    return max(map(hosts.count, hosts))


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
