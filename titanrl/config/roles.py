"""The section of a configuration that says on which hosts each role runs, and on which of their CPU cores."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.operations import HostsConfig
from titanrl.config.section import Processes, Section

HostGroup = Literal["controller", "trainers", "generators"]
"""The controller's host, hosts of the trainer mesh, or hosts of the generator replicas."""
Cpus = Annotated[str, Field(pattern=r"^(numa|split|\d+(-\d+)?(,\d+(-\d+)?)*)$")]
"""CPU cores of a role on each of its hosts: `numa`, `split`, or numbers such as `0-7,16`."""
PerHost = Annotated[tuple[Processes, ...], Field(strict=False)]


class CpusConfig(Section):
    """CPU cores that the processes of a role may use, on each of its hosts. `split` gives each process an equal share of the
    host's cores, `numa` the cores of one NUMA node, and numbers such as `0-7,16` these cores to all of them. Null binds
    nothing."""

    trainer: Cpus | None = None
    """Trainer ranks."""
    generator: Cpus | None = None
    """Generator ranks, also those that evaluate or teach."""
    rollout: Cpus | None = None
    """Rollout workers, with their shards and scoring processes."""
    store: Cpus | None = None
    """Process of the weight store and the buffer."""


class PlacementConfig(Section):
    """Hosts of each role. On one machine every role runs on it."""

    generator: Literal["generators", "trainers"] = "generators"
    """`generators`: replicas have hosts of their own. `trainers`: they run on the first `hosts.generator_hosts` trainer hosts,
    on devices behind those of the trainer ranks."""
    rollout: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Hosts of the rollout workers. Each has its storage shard and its scoring processes beside it. `auto` is `generators`, and
    `controller` for a run without generators."""
    store: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Host of the buffer and the weight store, which hold no tokens: the first of a group. `auto` is `controller`, and
    `trainers` with `weights.transport: store`."""
    replicas_per_host: PerHost | None = None
    """Number of generator replicas on each of their hosts; null spreads them evenly."""
    workers_per_host: PerHost | None = None
    """Number of rollout workers on each of their hosts; null spreads them evenly."""
    cpus: CpusConfig = CpusConfig()
    """CPU cores of each role."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = None
    """Network interface, such as `eth0`, over which ranks of one process group on several hosts exchange tensors (gloo and
    NCCL). Null lets each library choose."""


def broken_by_placement(placement: PlacementConfig, hosts: HostsConfig, replicas: int, workers: int) -> Iterator[BrokenRule]:
    """Yield the rules that the placement breaks.

    Args:
        placement: Hosts of each role.
        hosts: Numbers of hosts.
        replicas: Number of generator replicas.
        workers: Number of rollout workers.
    """
    if placement.generator == "trainers" and hosts.generator_hosts > hosts.trainer_hosts:
        yield BrokenRule(
            values={
                "placement.generator": placement.generator,
                "hosts.generator_hosts": hosts.generator_hosts,
                "hosts.trainer_hosts": hosts.trainer_hosts,
            },
            rule="generators on trainer hosts cannot have more hosts than the trainer",
            fix=f"set hosts.generator_hosts to {hosts.trainer_hosts}, or placement.generator to generators",
        )
    if placement.replicas_per_host is not None:
        yield from _broken_by_list(
            "placement.replicas_per_host",
            placement.replicas_per_host,
            ("hosts.generator_hosts", hosts.generator_hosts),
            ("generator.replicas", replicas),
        )
    if placement.workers_per_host is not None:
        group = placement.rollout if placement.rollout != "auto" else "generators"
        counts: dict[str, tuple[str, int]] = {
            "trainers": ("hosts.trainer_hosts", hosts.trainer_hosts),
            "generators": ("hosts.generator_hosts", hosts.generator_hosts),
        }
        yield from _broken_by_list(
            "placement.workers_per_host",
            placement.workers_per_host,
            counts.get(group, ("placement.rollout", 1)),
            ("rollout.num_workers", workers),
        )


def _broken_by_list(
    key: str, numbers: tuple[int, ...], hosts: tuple[str, int], processes: tuple[str, int]
) -> Iterator[BrokenRule]:
    """Yield the rules that a list with a number for each host breaks."""
    if len(numbers) != hosts[1]:
        yield BrokenRule(
            values={key: list(numbers), **({} if hosts[0] == "placement.rollout" else {hosts[0]: hosts[1]})},
            rule=f"needs one number for each of the {hosts[1]} hosts",
            fix=f"write {hosts[1]} numbers, or null",
        )
    elif sum(numbers) != processes[1]:
        yield BrokenRule(
            values={key: list(numbers), processes[0]: processes[1]},
            rule=f"the numbers must add up to {processes[1]}, and add up to {sum(numbers)}",
            fix=f"correct them, or set {processes[0]} to {sum(numbers)}",
        )
