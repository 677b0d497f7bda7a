"""Rules for the distribution of trainer and generator ranks over hosts and accelerators."""

from collections.abc import Iterator

from titanrl.base.choices import DeviceName
from titanrl.config.errors import BrokenRule
from titanrl.config.operations import HostsConfig
from titanrl.config.roles import PlacementConfig
from titanrl.config.sections import GeneratorConfig, ParallelismConfig, TrainerConfig, WeightsConfig, largest_divisor


def broken_by_hosts(
    hosts: HostsConfig,
    placement: PlacementConfig,
    parallelism: ParallelismConfig,
    generator: GeneratorConfig,
    weights: WeightsConfig,
) -> Iterator[BrokenRule]:
    """Yield the rules that the distribution of ranks over hosts breaks."""
    ranks, replicas = parallelism.world_size, generator.replicas
    if hosts.kind != "local" and weights.transport == "arena":
        yield BrokenRule(
            values={"weights.transport": "arena", "hosts.kind": hosts.kind},
            rule="arena is shared memory of one host, so it requires hosts.kind: local",
            fix="set weights.transport to auto",
        )
    if ranks % hosts.trainer_hosts:
        yield BrokenRule(
            values={"hosts.trainer_hosts": hosts.trainer_hosts, **_degrees(parallelism)},
            rule=f"trainer_hosts must divide the {ranks} trainer ranks",
            fix=f"set hosts.trainer_hosts to {largest_divisor(ranks, hosts.trainer_hosts)}",
        )
    if replicas % hosts.generator_hosts and placement.replicas_per_host is None:
        yield BrokenRule(
            values={"hosts.generator_hosts": hosts.generator_hosts, "generator.replicas": replicas},
            rule="generator_hosts must divide generator.replicas",
            fix=f"set hosts.generator_hosts to {largest_divisor(replicas, hosts.generator_hosts)}, or "
            "placement.replicas_per_host",
        )
    if hosts.kind == "local" and (hosts.trainer_hosts, hosts.generator_hosts) != (1, 1):
        yield BrokenRule(
            values={
                "hosts.kind": hosts.kind,
                "hosts.trainer_hosts": hosts.trainer_hosts,
                "hosts.generator_hosts": hosts.generator_hosts,
            },
            rule="hosts.kind: local runs everything on this machine, so there is only one host",
            fix="remove trainer_hosts and generator_hosts, or set hosts.kind to slurm, kubernetes or launcher",
        )
    if hosts.across_machines and hosts.share_devices and placement.generator == "generators":
        yield BrokenRule(
            values={"hosts.share_devices": True, "hosts.kind": hosts.kind},
            rule=f"{hosts.kind} runs trainer and generators on different hosts, which cannot share devices",
            fix="remove hosts.share_devices, or set placement.generator to trainers",
        )


def device_shortage(
    hosts: HostsConfig,
    placement: PlacementConfig,
    parallelism: ParallelismConfig,
    generator: GeneratorConfig,
    generators: int,
    teachers: int,
    evaluators: int = 0,
    *,
    trains: bool = True,
) -> Iterator[BrokenRule]:
    """Yield a broken rule if a host has too few accelerators. Not meaningful on CPU.

    Args:
        hosts: Section `hosts`.
        placement: Section `placement`.
        parallelism: Degrees of parallelism of the trainer.
        generator: Section `generator`.
        generators: Number of generator ranks; 0 for fine-tuning.
        teachers: Number of teacher ranks.
        evaluators: Number of ranks of the background evaluation generator.
        trains: False if no trainer runs.
    """
    ranks, others = parallelism.world_size if trains else 0, teachers + evaluators
    roles = "trainer rank, generator rank and teacher rank" if teachers else "trainer rank and generator rank"
    roles = "trainer rank, generator rank and evaluator rank" if evaluators else roles if generators else "trainer rank"
    roles = roles if trains else "generator rank"
    advice = "lower the degrees or the replicas"
    advice += ", or set evaluation.background to false" if evaluators else ""
    if hosts.across_machines:
        counts = placement.replicas_per_host or (generator.replicas // hosts.generator_hosts,)
        on_trainer, on_generator = ranks // hosts.trainer_hosts, (max(counts) * generator.tp if generators else 0) + others
        is_sum = placement.generator == "trainers" and not hosts.share_devices
        needed = on_trainer + on_generator if is_sum else max(on_trainer, on_generator)
    elif hosts.share_devices:
        needed = max(ranks, generators + others)
    else:  # emulated hosts (`process`) also share the accelerators of one machine
        needed = ranks + generators + others
        advice += ", or share devices with hosts.share_devices: true"
    if needed > hosts.devices_per_host:
        yield BrokenRule(
            values={
                "hosts.devices_per_host": hosts.devices_per_host,
                **_degrees(parallelism),
                **({"generator.replicas": generator.replicas} if generators else {}),
                **({"generator.tp": generator.tp} if generator.tp > 1 else {}),
                **({"distill.teacher.tp": teachers} if teachers else {}),
                **({"evaluation.background": True} if evaluators else {}),
            },
            rule=f"a host needs one accelerator per {roles}, which is {needed}",
            fix=f"set hosts.devices_per_host to {needed} if the host has that many, or {advice}",
        )


def _degrees(parallelism: ParallelismConfig) -> dict[str, int]:
    """Return the trainer's degrees of parallelism above 1, by key."""
    degrees = parallelism.model_dump(include={"dp_replicate", "dp_shard", "tp"})
    return {f"trainer.parallelism.{axis}": degree for axis, degree in degrees.items() if degree > 1}


def broken_by_device(trainer: TrainerConfig, device: DeviceName) -> Iterator[BrokenRule]:
    """Yield the rules that trainer options break on a device type."""
    if trainer.float8 is not None and device == "npu":
        yield BrokenRule(
            values={"trainer.float8": trainer.float8, "device": device},
            rule="torchtitan supports float8 only on CUDA, and emulated on CPU",
            fix="set trainer.float8 to null",
        )
    if trainer.float8 is not None and device == "cpu" and trainer.compile:
        yield BrokenRule(
            values={"trainer.compile": True, "trainer.float8": trainer.float8, "device": device},
            rule="torch.compile does not support float8 emulation on CPU",
            fix="set trainer.compile to false",
        )
    if trainer.compile and device == "npu":
        yield BrokenRule(
            values={"trainer.compile": True, "device": device},
            rule="the packages of requirements/npu.txt include no NPU backend for torch.compile",
            fix="set trainer.compile to false",
        )
