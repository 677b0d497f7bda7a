"""The section `placement`: hosts and CPU cores of each role."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.operations import HostsConfig
from titanrl.config.section import Processes, Section

HostGroup = Literal["controller", "trainers", "generators"]
"""The controller's host, the trainer hosts, or the hosts of the generator replicas."""
Cpus = Annotated[str, Field(pattern=r"^(numa|split|\d+(-\d+)?(,\d+(-\d+)?)*)$")]
"""CPU cores of a role on each of its hosts: `numa`, `split`, or core numbers such as `0-7,16`."""
PerHost = Annotated[tuple[Processes, ...], Field(strict=False)]


class CpusConfig(Section):
    """CPU affinity of the processes of each role, on each host. `split` gives each process an equal share of the host's
    cores, `numa` the cores of one NUMA node. Core numbers such as `0-7,16` apply to all processes of the role. Null sets no
    affinity."""

    trainer: Cpus | None = None
    """Trainer ranks."""
    generator: Cpus | None = None
    """Generator ranks, including background evaluators and teachers."""
    rollout: Cpus | None = None
    """Rollout workers, with their storage shards and scoring processes."""
    store: Cpus | None = None
    """Process of the weight store and the buffer."""


class PlacementConfig(Section):
    """Hosts of each role. With `hosts.kind: local`, every role runs on this machine."""

    generator: Literal["generators", "trainers"] = "generators"
    """`generators`: replicas run on their own hosts. `trainers`: they run on the first `hosts.generator_hosts` trainer hosts,
    on the devices after those of the trainer ranks."""
    rollout: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Hosts of the rollout workers. A worker's storage shard and scoring processes run on the same host. `auto` uses
    `generators`, or `controller` if the run has no generators."""
    store: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Host of the buffer and the weight store, which hold no tokens: the first host of a group. `auto` uses `controller`, or
    `trainers` with `weights.transport: store`."""
    replicas_per_host: PerHost | None = None
    """Number of generator replicas on each of their hosts; null distributes them evenly."""
    workers_per_host: PerHost | None = None
    """Number of rollout workers on each of their hosts; null distributes them evenly."""
    cpus: CpusConfig = CpusConfig()
    """CPU cores of each role."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = None
    """Network interface, such as `eth0`, for collectives between ranks on several hosts (gloo and NCCL). Null lets each library
    choose."""


def broken_by_placement(placement: PlacementConfig, hosts: HostsConfig, replicas: int, workers: int) -> Iterator[BrokenRule]:
    """Yield the rules that the placement breaks.

    Args:
        placement: Section `placement`.
        hosts: Section `hosts`.
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
            rule="with placement.generator: trainers, generator_hosts must not exceed trainer_hosts",
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
    """Yield the rules that a list with one number per host breaks."""
    if len(numbers) != hosts[1]:
        yield BrokenRule(
            values={key: list(numbers), **({} if hosts[0] == "placement.rollout" else {hosts[0]: hosts[1]})},
            rule=f"needs one number for each of the {hosts[1]} hosts, but has {len(numbers)}",
            fix=f"write {hosts[1]} numbers, or null for an even distribution",
        )
    elif sum(numbers) != processes[1]:
        yield BrokenRule(
            values={key: list(numbers), processes[0]: processes[1]},
            rule=f"the numbers must add up to {processes[1]}, but add up to {sum(numbers)}",
            fix=f"correct them, or set {processes[0]} to {sum(numbers)}",
        )
