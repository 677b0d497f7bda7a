"""Placement of the processes of a run on hosts and devices, with the memory that each process needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from titanrl.config.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.config.sizes import LIBRARY_BYTES, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Equal processes of one role on one host, or on several equal hosts.

    Example: `Placement(host="trainer hosts (4)", devices="0-7", role="trainer rank", processes=8, num_bytes=52_000_000_000)`
    """

    host: str
    """Host, or kind and number of hosts."""
    devices: str
    """Indices of the accelerators, `cpu`, or empty if the role uses no device."""
    role: str
    """Role of the processes."""
    processes: int
    """Number of processes per host."""
    num_bytes: int | None
    """Estimated memory of one process: all of its private memory on a CPU, else that of its device. None if unknown or none."""


def placements(config: Config, sizes: Sizes, device: DeviceKind) -> Iterator[Placement]:
    """Yield the placement of every role, on the hosts that `hosts.kind` selects."""
    libraries = LIBRARY_BYTES if device == "cpu" else dict.fromkeys(LIBRARY_BYTES, 0)
    trainer_bytes = generator_bytes = None
    if sizes.memory is not None:
        trainer = sizes.memory.trainer
        trainer_bytes = libraries["trainer"] + (trainer.cpu_total if device == "cpu" else trainer.total)
        cache = config.generator.kv_cache_bytes // config.generator.tp if device == "cpu" else 0
        generator_bytes = libraries["generator"] + sizes.memory.generator_rank_weights + cache
    hosts = config.hosts
    ranks, generators = config.num_trainer_ranks, config.num_generator_ranks
    here = "this machine"
    trainer_host = generator_host = here
    if hosts.across_machines:
        trainer_host, generator_host = f"trainer hosts ({hosts.trainer_hosts})", f"generator hosts ({hosts.generator_hosts})"
        ranks, generators = ranks // hosts.trainer_hosts, generators // hosts.generator_hosts
    first = 0 if hosts.across_machines or hosts.share_devices else ranks
    if ranks:
        yield Placement(
            host=trainer_host,
            devices=_devices(device, 0, ranks),
            role="trainer rank",
            processes=ranks,
            num_bytes=trainer_bytes,
        )
    if generators:
        yield Placement(
            host=generator_host,
            devices=_devices(device, first, generators),
            role="generator rank",
            processes=generators,
            num_bytes=generator_bytes,
        )
    if teachers := sizes.processes.get("teacher", 0):
        devices = _devices(device, first + generators, teachers)
        yield Placement(host=generator_host, devices=devices, role="teacher rank", processes=teachers, num_bytes=None)
    if evaluators := sizes.processes.get("evaluator", 0):
        devices = _devices(device, first + generators, evaluators)
        yield Placement(host=generator_host, devices=devices, role="evaluator rank", processes=evaluators, num_bytes=None)
    for role in ("rollout", "sandbox", "buffer", "store", "controller"):
        if role in sizes.processes:
            num_bytes = libraries[role] or None
            yield Placement(host=here, devices="", role=role, processes=sizes.processes[role], num_bytes=num_bytes)


def _devices(device: DeviceKind, first: int, count: int) -> str:
    if device == "cpu":
        return "cpu"
    return f"{device} {first}" if count == 1 else f"{device} {first}-{first + count - 1}"
