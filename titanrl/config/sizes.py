"""What a configuration amounts to: processes, sequences, memory, and what of it does not fit."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.shapes import DTYPE_BYTES, ModelShape, model_shape

DEVICE_BYTES = 80_000_000_000
"""Memory of the accelerators most clusters have; what needs more is pointed out."""


LOGITS_AT_ONCE = 1 << 27
"""Logits that exist at a time on a trainer rank, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on one trainer rank. What the libraries and the allocator need comes on top."""

    parameters: int
    """Its share of the parameters, in `trainer.dtype`."""
    gradients: int
    """Their gradients, in the same type; with LoRA those of the adapters."""
    optimizer: int
    """AdamW's two moments, likewise."""
    gathered: int
    """What FSDP gathers for a while: the layer at work, the next one, embedding and output layer, in the compute type."""
    activations: int
    """An estimate of what one micro-batch of full rows keeps for its backward pass, and of its logits."""

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most at once."""
        return self.state + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that follow from the model's shape."""

    num_parameters: int
    """Parameters of the policy."""
    trainer: TrainerMemory
    """On one trainer rank."""
    replica_weights: int
    """Weights of one generator replica, over all its ranks."""
    generator_rank_weights: int
    """What one of its tensor-parallel ranks holds of them."""
    kv_cache: int
    """Cache that `generator.max_num_seqs` completions of full length take in one replica, shared evenly by its ranks."""


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
            "generator": config.generator.num_ranks,
            "rollout": config.rollout.num_workers,
            "buffer": 1,
            "sandbox": config.rollout.num_workers * config.sandbox.num_processes,
        },
        sequences_per_step=sequences,
        max_tokens_per_step=sequences * config.max_sequence_tokens,
        buffer_slots=config.num_slots,
        worst_staleness=config.worst_staleness,
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


def _max_microbatches(config: Config, sequences: int) -> int:
    sequences_per_row = max(1, config.trainer.row_tokens // config.max_sequence_tokens)
    rows = -(-sequences // sequences_per_row)
    return -(-rows // (config.trainer.parallelism.dp_size * config.trainer.rows_per_microbatch))


def _memory(config: Config, shape: ModelShape) -> Memory:
    generator = config.generator
    return Memory(
        num_parameters=shape.num_parameters,
        trainer=_trainer_memory(config, shape),
        replica_weights=shape.num_parameters * DTYPE_BYTES[generator.dtype],
        generator_rank_weights=shape.rank_parameters(generator.tp) * DTYPE_BYTES[generator.dtype],
        kv_cache=generator.max_num_seqs * config.max_sequence_tokens * shape.kv_token_bytes(generator.dtype),
    )


def _trainer_memory(config: Config, shape: ModelShape) -> TrainerMemory:
    trainer = config.trainer
    plan, compute_bytes = trainer.parallelism, DTYPE_BYTES[trainer.compute_dtype]
    share = DTYPE_BYTES[trainer.dtype] / (plan.dp_shard * plan.tp)
    trained = shape.num_parameters
    if trainer.lora is not None:
        trained = trainer.lora.rank * shape.adapter_width(trainer.lora.targets)
    held = shape.num_parameters + (0 if trainer.lora is None else trained)
    gathered = 0
    if plan.dp_size > 1 or trainer.dtype != trainer.compute_dtype:
        at_once = shape.num_layers if plan.fsdp_reshard_after_forward == "never" else 2
        gathered = (at_once * shape.layer_parameters + shape.embedding_parameters) * compute_bytes // plan.tp
    return TrainerMemory(
        parameters=int(held * share),
        gradients=int(trained * share),
        optimizer=int(2 * trained * share),
        gathered=gathered,
        activations=_activations(config, shape),
    )


def _activations(config: Config, shape: ModelShape) -> int:
    """Bytes of one micro-batch: what each layer keeps by token, one layer in full, and logits with their gradient.

    Sequence parallelism shares all of it among the tensor-parallel ranks. Selective checkpointing keeps about half of it.
    """
    trainer = config.trainer
    tokens = trainer.rows_per_microbatch * trainer.row_tokens
    numbers = {"none": shape.layer_activations, "selective": shape.layer_activations // 2, "full": shape.hidden_size}
    kept = shape.num_layers * numbers[trainer.activation_checkpointing] + shape.layer_activations
    logits = min(tokens * shape.vocab_size // trainer.parallelism.tp, LOGITS_AT_ONCE)
    return (tokens * kept // trainer.parallelism.tp + 2 * logits) * DTYPE_BYTES[trainer.compute_dtype]


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
    ranks, generator = config.trainer.parallelism.world_size, config.generator
    published = 2 * memory.replica_weights  # two versions in shared memory, over all ranks
    generators = generator.num_ranks * memory.generator_rank_weights + generator.replicas * configured
    needed = ranks * memory.trainer.total + published + generators
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        yield BrokenRule(
            values={**_model_values(config), "generator.replicas": generator.replicas},
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
    shard = {"trainer.parallelism.dp_shard": config.trainer.parallelism.dp_shard}
    tp = {"generator.tp": config.generator.tp}
    needs = {
        "trainer rank": (memory.trainer.total, shard, "trainer.parallelism.dp_shard or tp"),
        "generator rank": (memory.generator_rank_weights, tp, "generator.tp"),
    }
    if shares:
        total = memory.trainer.total + memory.generator_rank_weights
        needs = {"trainer rank with its generator rank": (total, shard | tp, "trainer.parallelism.dp_shard or generator.tp")}
    device = gigabytes(DEVICE_BYTES)
    for role, (needed, values, keys) in needs.items():
        if needed > DEVICE_BYTES:
            yield BrokenRule(
                values={**_model_values(config), **values},
                rule=f"a {role} needs about {gigabytes(needed)} without KV cache, a device often has {device}",
                fix=f"raise {keys}, take bfloat16, a smaller model or larger devices",
            )


def _model_values(config: Config) -> dict[str, object]:
    return {"model.path": None if config.model.path is None else str(config.model.path)}


def gigabytes(num_bytes: int) -> str:
    """Bytes with a unit that suits their size, in powers of ten: `65.5 GB`, `1.6 MB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
