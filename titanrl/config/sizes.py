"""What a configuration amounts to: processes, sequences, memory, and what of it does not fit."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.shapes import DTYPE_BYTES, ModelShape, model_shape

DEVICE_BYTES = 80_000_000_000
"""Memory of the accelerators most clusters have; what needs more is pointed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that follow from the model's shape, without activations and buffers of the libraries."""

    num_parameters: int
    """Parameters of the policy."""
    trainer_rank: int
    """Parameters, gradients and AdamW's two moments on one trainer rank, all in `trainer.dtype`."""
    replica_weights: int
    """Weights of one generator replica."""
    kv_cache: int
    """Cache that `generator.max_num_seqs` completions of full length take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers derived from a configuration."""

    processes: Mapping[str, int]
    """How many there are, by role."""
    sequences_per_step: int
    """Completions trained on in one optimizer step."""
    max_tokens_per_step: int
    """Their prompts and completions, if all have full length."""
    buffer_slots: int
    """Groups under way or waiting at once."""
    worst_staleness: int
    """Versions the oldest token of a batch can lag behind."""
    max_microbatches: int
    """Micro-batches of one step, if all sequences have full length."""
    memory: Memory | None
    """None if the shape of the model is not known yet."""
    misfits: tuple[BrokenRule, ...]
    """What does not fit, as far as one can tell without starting anything."""
    notes: tuple[str, ...]
    """What is allowed but easily overlooked."""


def derive(config: Config) -> Sizes:
    """The sizes of a run. Reads at most the model's config.json; starts nothing."""
    shape = model_shape(config)
    memory = None if shape is None else _memory(config, shape)
    sequences = config.rollout.groups_per_step * config.rollout.group_size
    return Sizes(
        processes={
            "controller": 1,
            "trainer": config.trainer.parallelism.world_size,
            "generator": config.generator.replicas,
            "rollout": config.rollout.num_workers,
            "buffer": 1,
            "sandbox": config.rollout.num_workers * config.sandbox.num_processes,
        },
        sequences_per_step=sequences,
        max_tokens_per_step=sequences * config.max_sequence_tokens,
        buffer_slots=config.num_slots,
        worst_staleness=_worst_staleness(config),
        max_microbatches=_max_microbatches(config, sequences),
        memory=memory,
        misfits=tuple(_misfits(config, memory)),
        notes=tuple(notes(config)),
    )


def notes(config: Config) -> Iterator[str]:
    """What is allowed but easily overlooked, a sentence or two each."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.reduction == "sum":
        tokens = rollout.groups_per_step * rollout.group_size * rollout.max_new_tokens
        yield (
            "algorithm.reduction=sum: the gradient is that of token_mean times the tokens sampled in the step, up to "
            f"{tokens:,}; for the same step of plain SGD divide learning_rate by as much. AdamW cancels the factor (but for "
            f"eps={algorithm.eps:g}), except where max_grad_norm={algorithm.max_grad_norm:g} cuts some gradients and others not"
        )


def _worst_staleness(config: Config) -> int:
    """torchtitan's bound (B + W - 2) // P: B slots, P groups per step, a batch is taken from the W oldest groups."""
    slots, window = config.num_slots, 1
    return (slots + window - 2) // config.rollout.groups_per_step


def _max_microbatches(config: Config, sequences: int) -> int:
    sequences_per_row = max(1, config.trainer.row_tokens // config.max_sequence_tokens)
    rows = -(-sequences // sequences_per_row)
    return -(-rows // (config.trainer.parallelism.dp_size * config.trainer.rows_per_microbatch))


def _memory(config: Config, shape: ModelShape) -> Memory:
    parallelism, generator = config.trainer.parallelism, config.generator
    state = 4 * shape.num_parameters * DTYPE_BYTES[config.trainer.dtype]
    return Memory(
        num_parameters=shape.num_parameters,
        trainer_rank=state // (parallelism.dp_shard * parallelism.tp),
        replica_weights=shape.num_parameters * DTYPE_BYTES[generator.dtype],
        kv_cache=generator.max_num_seqs * config.max_sequence_tokens * shape.kv_token_bytes(generator.dtype),
    )


def _misfits(config: Config, memory: Memory | None) -> Iterator[BrokenRule]:
    if config.device == "auto":  # which device it will be is not known before torch is loaded
        for broken in config.device_shortage():
            yield replace(broken, fix=f"{broken.fix}; on a CPU this does not matter")
    if memory is not None:
        yield from _accelerator_misfits(config, memory) if config.device in ("cuda", "npu") else _cpu_misfits(config, memory)


def _cpu_misfits(config: Config, memory: Memory) -> Iterator[BrokenRule]:
    configured = config.generator.kv_cache_bytes
    if memory.kv_cache > configured:
        yield BrokenRule(
            values={"generator.kv_cache_bytes": configured, "generator.max_num_seqs": config.generator.max_num_seqs},
            rule=f"max_num_seqs completions of full length take {gigabytes(memory.kv_cache)} of cache; beyond it they wait",
            fix=f"set generator.kv_cache_bytes to {memory.kv_cache}, or lower generator.max_num_seqs",
        )
    if config.hosts.kind == "slurm":
        return  # the memory of other machines is not known here
    ranks, replicas = config.trainer.parallelism.world_size, config.generator.replicas
    published = 2 * memory.replica_weights  # two versions in shared memory, over all ranks
    needed = ranks * memory.trainer_rank + published + replicas * (memory.replica_weights + configured)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        yield BrokenRule(
            values={**_model_values(config), "generator.replicas": replicas},
            rule=f"trainer and generators need {gigabytes(needed)}, this machine has {gigabytes(available)}",
            fix="take a smaller model, fewer replicas, or trainer.dtype=bfloat16",
        )


def _accelerator_misfits(config: Config, memory: Memory) -> Iterator[BrokenRule]:
    shares = config.hosts.share_devices
    if shares and "gpu_memory_utilization" not in config.generator.vllm:
        yield BrokenRule(
            values={"hosts.share_devices": True, "generator.vllm": config.generator.vllm},
            rule="vLLM takes 0.9 of a device by default, which leaves the trainer on it too little",
            fix="set generator.vllm.gpu_memory_utilization, for example to 0.4",
        )
    needs = {"trainer rank": memory.trainer_rank, "generator replica": memory.replica_weights}
    if shares:
        needs = {"trainer rank with its generator replica": sum(needs.values())}
    device = gigabytes(DEVICE_BYTES)
    for role, needed in needs.items():
        if needed > DEVICE_BYTES:
            yield BrokenRule(
                values={**_model_values(config), "trainer.parallelism.dp_shard": config.trainer.parallelism.dp_shard},
                rule=f"a {role} needs {gigabytes(needed)} before activations and cache, a device often has {device}",
                fix="raise trainer.parallelism.dp_shard or tp, take bfloat16, a smaller model or larger devices",
            )


def _model_values(config: Config) -> dict[str, object]:
    return {"model.path": None if config.model.path is None else str(config.model.path)}


def gigabytes(num_bytes: int) -> str:
    """Bytes with a unit that suits their size, in powers of ten: `65.5 GB`, `1.6 MB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
