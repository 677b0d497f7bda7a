"""Numbers computed from a configuration: processes and their hosts, sequences and memory. No model is loaded."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titanrl.config.algorithm import ALGORITHM_PRESETS, CORRECTION_PRESETS
from titanrl.config.device import device_kind
from titanrl.config.errors import inline
from titanrl.config.sections import Dtype

if TYPE_CHECKING:
    from titanrl.config.schema import Config
    from titanrl.config.sections import GeneratorConfig, HostGroup

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of the instructions for products of bfloat16 numbers in /proc/cpuinfo, on x86 and on Arm."""

RECIPE_VOCAB_SIZE = 112
"""Rows of the recipe model's embedding: 95 characters, 9 phrases, 2 special tokens, padded to a multiple of 16."""

LIBRARY_BYTES: Mapping[str, int] = {
    "controller": 400_000_000,
    "trainer": 500_000_000,
    "generator": 650_000_000,
    "teacher": 650_000_000,
    "evaluator": 650_000_000,
    "rollout": 170_000_000,
    "store": 270_000_000,
    "sandbox": 20_000_000,
}
"""Private memory of a CPU process without its model, by role, as measured by `python -m benchmarks.full_size`."""

LARGE_BYTES = 64 << 20
"""Weights of a generator rank on a CPU from which several threads make it faster."""
PACKED_BYTES: Mapping[Dtype, int] = {"bfloat16": 64 << 20, "float32": 16 << 20}
"""Weights of a generator rank on a CPU from which packed copies make it faster, by data type."""

SPARE_SHARE = 0.1
"""Share of a machine's memory that no process of a run uses, by the estimates."""

LOGITS_BYTES = 1 << 29
"""Maximum size of the logits in memory on a trainer rank: 1766 tokens in bfloat16 for a vocabulary size of 151 936. Their
gradient takes as much again."""


HostPlace = tuple[str, int]
"""A host: its mesh (`trainers` or `generators`), and its index in the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder model, named like the fields of `RecipeConfig`.

    Example: the model of width 128 with 4 query heads is
    `ModelShape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, vocab_size=112,
    max_positions=512, tied_embeddings=True, qk_norm=True)`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    qkv_bias: bool = False
    """True if the query, key and value projections have biases."""
    num_experts: int = 0
    """Number of experts of each layer, each with a feed-forward layer of `intermediate_size`; 0 for a dense model."""
    experts_per_token: int = 0
    """Number of experts that compute each token."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: embedding, layers, final norm, and the output layer unless it is tied."""
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute a token: all but the experts that are not chosen."""
        idle = self.expert_parameters * (self.num_experts - self.experts_per_token) // max(1, self.num_experts)
        return self.num_parameters - self.num_layers * idle

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of the experts of one layer."""
        return self.num_experts * 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)  # q and o, k and v
        feed_forward = 3 * self.hidden_size * self.intermediate_size  # gate, up, down
        if self.num_experts:
            feed_forward = self.expert_parameters + self.num_experts * self.hidden_size  # with the router
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        return attention + self.layer_norms + feed_forward + biases

    @property
    def layer_norms(self) -> int:
        """Number of norm parameters of one layer: before attention and feed-forward, and of queries and keys."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embedding and output layer."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def rank_parameters(self, tp: int) -> int:
        """Return the parameters held by one of `tp` tensor-parallel ranks: its share of each matrix, and every norm."""
        norms = self.num_layers * self.layer_norms + self.hidden_size
        return (self.num_parameters - norms) // tp + norms

    @property
    def layer_activations(self) -> int:
        """Number of activation values per token that one layer stores for its backward pass, assuming that attention stores no
        scores."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Two norms and two residuals; queries and keys before and after norm and rotation, values, the attention's output;
        # gate, its activation, up, their product.
        common = 4 * self.hidden_size + 4 * queries + 4 * keys
        if not self.num_experts:
            return common + 4 * self.intermediate_size
        # For each chosen expert also its input, output, and weighted output; the router's logits and scores.
        return common + self.experts_per_token * (4 * self.intermediate_size + 3 * self.hidden_size) + 2 * self.num_experts

    @property
    def compiled_activations(self) -> int:
        """Number of activation values per token that one dense layer stores if it is compiled.

        The backward pass computes some values again. Stored are two norms and a residual; queries and the attention's output;
        keys and values; gate, up, their product.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 3 * self.hidden_size + 3 * queries + 4 * keys + 3 * self.intermediate_size

    @property
    def normalized_values(self) -> int:
        """Number of values per token that the norms of one layer take."""
        return 2 * self.hidden_size + ((self.num_heads + self.num_kv_heads) * self.head_dim if self.qk_norm else 0)

    @property
    def selective_activations(self) -> int:
        """Number of values that torchtitan's `SelectiveAC` stores: every second matrix product, the attention's output."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        feed_forward = max(self.experts_per_token, 1) * (2 * self.intermediate_size + self.hidden_size) + self.num_experts
        return queries + (queries + 2 * keys + self.hidden_size + feed_forward) // 2

    def adapter_width(self, targets: Collection[str]) -> int:
        """Return the number of LoRA parameters per unit of rank: the input and output sizes of all adapted projections."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width = 0
        if "attention" in targets:
            width += 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        if "mlp" in targets:
            width += 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * width

    def kv_token_bytes(self, dtype: Dtype) -> int:
        """Return the KV-cache bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one trainer rank in bytes, without the overhead of libraries and allocator."""

    parameters: int
    """Sharded parameters, in `trainer.dtype`."""
    experts: int = 0
    """Part of these that belongs to experts."""
    gradients: int
    """Sharded gradients in the same data type; with LoRA only of the adapters."""
    optimizer: int
    """AdamW's two moments, sharded like the gradients."""
    average: int
    """Moving average of the trainable parameters in float32, sharded like them; 0 without `algorithm.ema_decay`."""
    gathered: int
    """Parameters in `trainer.compute_dtype`: two layers, embedding and output layer, which FSDP gathers at a time, or
    a copy of all parameters on one data-parallel rank; 0 if that is their dtype anyway."""
    activations: int
    """Estimated activations of the largest micro-batch, with full rows, including logits."""
    unreduced: int
    """Gradients of embedding and output layer at the end of a backward pass, until they are added up or reduced."""
    reuses_activations: bool = False
    """True if the C library's allocator reuses the memory of the activations for these gradients, as measured without FSDP for
    compiled layers and with checkpointing. Else small tensors lie between the activations."""
    critic: int = 0
    """Parameters, gradients and moments of the critic, without those that FSDP gathers; 0 without a critic."""
    another_model: int
    """Adapter, gradient, moments and moving average of each further model of a session; 0 without LoRA. Runs have none."""

    @property
    def state(self) -> int:
        """Permanently allocated bytes."""
        return self.parameters + self.gradients + self.optimizer + self.average + self.critic

    @property
    def total(self) -> int:
        """Peak memory on an accelerator, whose allocator reuses the memory of the activations for the last gradients."""
        return self.state + self.gathered + max(self.activations, self.unreduced)

    @property
    def cpu_total(self) -> int:
        """Peak memory on a CPU: of a step, or of an export, which holds two serialized copies of the parameters."""
        step = self.total if self.reuses_activations else self.state + self.gathered + self.activations + self.unreduced
        return max(step, self.state + 2 * self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory sizes in bytes derived from the model."""

    num_parameters: int
    """Number of parameters of the policy."""
    expert_parameters: int = 0
    """Number of those that belong to experts; 0 for a dense model."""
    active_parameters: int = 0
    """Number of those that compute a token."""
    trainer: TrainerMemory
    """Memory of one trainer rank."""
    replica_weights: int
    """Weights of one generator replica, summed over its ranks."""
    generator_rank_weights: int
    """Weights on one tensor-parallel rank of a replica."""
    packed_weights: int
    """Copies of these weights on a CPU, for the linear layers and the experts; see `packed_weights` and `plain_experts`."""
    published: int
    """Published weights in shared memory: two versions, or with `weights.lora: adapters` one base and two of the adapters."""
    kv_cache: int
    """KV cache of `generator.max_num_seqs` completions of maximum length, summed over the ranks of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes computed from a configuration."""

    processes: Mapping[str, int]
    """Number of processes by role."""
    sequences_per_step: int
    """Number of completions or examples per step."""
    max_tokens_per_step: int
    """Number of tokens per step if all sequences have maximum length."""
    max_microbatches: int
    """Number of micro-batches per step if all sequences have maximum length."""
    memory: Memory | None
    """Memory sizes; None if the model cannot be read yet."""


def derive(config: "Config", shape: ModelShape | None) -> Sizes:
    """Return the sizes of a run, whose policy has these dimensions; None if they are unknown."""
    sequences = _num_sequences(config)
    rows = microbatch_rows(config, shape)
    return Sizes(
        processes=_processes(config),
        sequences_per_step=sequences,
        max_tokens_per_step=sequences * config.max_sequence_tokens,
        max_microbatches=-(-_max_rows(config, sequences) // rows),
        memory=None if shape is None else _memory(config, shape, _num_rows(config, rows)),
    )


def microbatch_rows(config: "Config", shape: ModelShape | None) -> int:
    """Return the maximum number of rows in a rank's micro-batch: `trainer.rows_per_microbatch`, or fewer on one machine without
    accelerators whose memory they would exceed by the estimates of all processes."""
    limit = config.trainer.rows_per_microbatch
    if shape is None or not config.train or config.hosts.across_machines or device_kind(config.device) != "cpu":
        return limit
    most = _num_rows(config, limit)
    for rows in range(most, 1, -1):
        memory = _memory(config, shape, rows)
        if cpu_bytes(config, memory, memory.trainer.cpu_total) <= (1.0 - SPARE_SHARE) * host_bytes():
            return limit if rows == most else rows
    return 1


def _processes(config: "Config") -> dict[str, int]:
    processes = {"controller": 1, **({"trainer": config.num_trainer_ranks} if config.train else {})}
    if config.sft is not None:
        return processes | {"store": 1}
    processes["generator"] = config.num_generator_ranks
    if config.distill is not None:
        return processes | {"teacher": config.distill.num_teacher_ranks, "sandbox": config.sandbox.num_processes, "store": 1}
    workers = config.rollout.num_workers
    if config.num_evaluator_ranks:
        processes["evaluator"] = config.num_evaluator_ranks
    processes |= {"rollout": workers, "store": 1}
    return processes if config.rollout.replay else processes | {"sandbox": workers * config.sandbox.num_processes}


def describe_staleness(config: "Config") -> str:
    """Return the bound on staleness as a sentence, with the numbers it is computed from."""
    if config.max_staleness == 0 and config.algorithm.updates_per_publish == 1:
        return f"synchronous: {config.num_slots} groups at a time, trained on with the weights that sampled them"
    return (
        f"B={config.num_slots} slots, window W={config.window_groups}, P={config.groups_per_publish} groups per publication: "
        f"no token older than (B + W - 2) // P = {config.staleness_bound} published versions"
    )


def notes(config: "Config") -> Iterator[str]:
    """Yield remarks on values that are allowed but often unintended."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.reduction == "sum":
        tokens = rollout.groups_per_step * rollout.group_size * rollout.max_new_tokens
        yield (
            "algorithm.reduction=sum: the gradient is that of token_mean, multiplied by the number of sampled tokens, up to "
            f"{tokens:,}. AdamW cancels this factor except for eps={algorithm.eps:g}, but "
            f"max_grad_norm={algorithm.max_grad_norm:g} clips more gradients."
        )
    for path, section, presets in (
        ("algorithm", algorithm, ALGORITHM_PRESETS),
        ("algorithm.correction", algorithm.correction, CORRECTION_PRESETS),
    ):
        preset = section.preset
        if preset is not None:
            alone = section.model_validate({"preset": preset})
            values = {key: (getattr(section, key), getattr(alone, key)) for key in presets[preset]}
            others = [f"{key}={inline(own)} (preset: {inline(its)})" for key, (own, its) in values.items() if own != its]
            if others:
                yield f"{path}.preset={preset}: the configuration sets other values for {', '.join(others)}. They are used."


def _num_sequences(config: "Config") -> int:
    return config.rollout.groups_per_step * config.rollout.group_size if config.sft is None else config.sft.batch_size


def _num_rows(config: "Config", limit: int) -> int:
    """Return the number of rows in the largest micro-batch of a rank, of at most `limit` rows."""
    warm_start = 0 if config.warm_start is None else config.warm_start.batch_size
    rows = _max_rows(config, max(_num_sequences(config), warm_start))
    if config.examples is not None:
        row_tokens = config.trainer.row_tokens
        per_row = max(1, row_tokens // (config.examples.max_example_tokens or row_tokens))
        rows = max(rows, -(-config.examples.batch_size // (per_row * config.trainer.parallelism.dp_size)))
    return min(limit, rows)


def _max_rows(config: "Config", sequences: int) -> int:
    """Return the number of rows of a data-parallel rank in a step, if all sequences have maximum length."""
    sequences_per_row = max(1, config.trainer.row_tokens // config.max_sequence_tokens)
    rows = -(-sequences // sequences_per_row)
    return -(-rows // config.trainer.parallelism.dp_size)


def _memory(config: "Config", shape: ModelShape, num_rows: int) -> Memory:
    generator, lora = config.generator, config.trainer.lora
    published = 2 * shape.num_parameters
    if lora is not None and config.publishes_adapters:
        published = shape.num_parameters + 2 * lora.rank * shape.adapter_width(lora.targets)
    return Memory(
        num_parameters=shape.num_parameters,
        expert_parameters=shape.num_layers * shape.expert_parameters,
        active_parameters=shape.active_parameters,
        trainer=_trainer_memory(config, shape, num_rows),
        replica_weights=shape.num_parameters * DTYPE_BYTES[generator.dtype],
        generator_rank_weights=shape.rank_parameters(generator.tp) * DTYPE_BYTES[generator.dtype],
        packed_weights=packed_weights(generator, shape) + plain_experts(generator, shape),
        published=published * DTYPE_BYTES[generator.dtype],
        kv_cache=generator.max_num_seqs * config.max_sequence_tokens * shape.kv_token_bytes(generator.dtype),
    )


def is_large(generator: "GeneratorConfig", shape: ModelShape) -> bool:
    """Return whether a generator rank on a CPU has enough weights for several threads."""
    return shape.rank_parameters(generator.tp) * DTYPE_BYTES[generator.dtype] >= LARGE_BYTES


def packed_weights(generator: "GeneratorConfig", shape: ModelShape) -> int:
    """Return the bytes of the packed weights of a generator rank on a CPU; 0 if its linear layers use the weights themselves.

    Torchtitan's sharded layers are never packed, and an embedding that is no output layer is not.
    """
    num_bytes, held = DTYPE_BYTES[generator.dtype], shape.rank_parameters(generator.tp)
    can_pack = generator.tp == 1 or generator.model_impl == "native"
    if not can_pack or held * num_bytes < PACKED_BYTES[generator.dtype]:
        return 0
    looked_up = 0 if shape.tied_embeddings else shape.embedding_parameters // 2 // generator.tp
    experts = shape.num_layers * shape.expert_parameters // generator.tp
    return (held - looked_up - experts) * num_bytes


def plain_experts(generator: "GeneratorConfig", shape: ModelShape) -> int:
    """Return the bytes of a generator rank's unpacked experts on a CPU, which it keeps beside those that vLLM has packed."""
    if generator.model_impl == "titan":
        return 0
    return shape.num_layers * shape.expert_parameters // generator.tp * DTYPE_BYTES[generator.dtype]


def _trainer_memory(config: "Config", shape: ModelShape, num_rows: int) -> TrainerMemory:
    trainer = config.trainer
    plan, compute_bytes = trainer.parallelism, DTYPE_BYTES[trainer.compute_dtype]
    share = DTYPE_BYTES[trainer.dtype] / (plan.num_shards * plan.tp)
    trained = shape.num_parameters
    if trainer.lora is not None:
        trained = trainer.lora.rank * shape.adapter_width(trainer.lora.targets)
    held = shape.num_parameters + (0 if trainer.lora is None else trained)
    # A tied matrix has two gradients, of embedding and output layer, and their sum.
    gathered, unreduced = 0, (3 if shape.tied_embeddings else 1) * compute_bytes * shape.embedding_parameters // plan.tp
    if trainer.uses_fsdp:
        at_once = shape.num_layers if plan.fsdp_reshard_after_forward == "never" else 2
        # With expert parallelism, a rank computes only its experts, and all of each.
        experts = shape.expert_parameters // (plan.ep if plan.ep > 1 else plan.tp)
        layer = (shape.layer_parameters - shape.expert_parameters) // plan.tp + experts
        gathered = (at_once * layer + shape.embedding_parameters // plan.tp) * compute_bytes
        # FSDP frees the gathered parameters first. The reduction holds input and output, and a copy of the input in float32.
        largest = max(shape.embedding_parameters // plan.tp, layer if shape.num_experts else 0)
        unreduced = max(unreduced, (3 * DTYPE_BYTES["float32"] - compute_bytes) * largest)
    elif trainer.dtype != trainer.compute_dtype:
        gathered = held * compute_bytes // plan.tp
    average = 0 if config.algorithm.ema_decay is None else trained * DTYPE_BYTES["float32"] // (plan.num_shards * plan.tp)
    return TrainerMemory(
        parameters=int(held * share),
        experts=int(shape.num_layers * shape.expert_parameters * share),
        gradients=int(trained * share),
        optimizer=int(2 * trained * share),
        average=average,
        gathered=gathered,
        activations=_activations(config, shape, num_rows),
        unreduced=0 if trainer.lora is not None else unreduced,
        reuses_activations=not trainer.uses_fsdp and (trainer.compile or trainer.activation_checkpointing != "none"),
        critic=int(4 * shape.num_parameters * share) if config.algorithm.has_critic else 0,
        another_model=0 if trainer.lora is None else int(4 * trained * share) + average,
    )


def _activations(config: "Config", shape: ModelShape, num_rows: int) -> int:
    """Estimate the bytes of `num_rows` rows: stored activations, one layer in full, and logits with their gradient.

    Sequence parallelism divides them among the tensor-parallel ranks, and context parallelism among its ranks, except the keys
    and values of attention, which each of them gathers.
    """
    trainer, plan = config.trainer, config.trainer.parallelism
    tokens, layer = num_rows * trainer.row_tokens, shape.layer_activations
    if device_kind(config.device) == "cpu" and trainer.compute_dtype == "bfloat16":
        layer += 2 * shape.normalized_values  # torch's norm on a CPU also stores its input in float32
    stored = shape.compiled_activations if trainer.compile else layer
    numbers = {"none": stored, "selective": shape.selective_activations, "full": shape.hidden_size}
    kept = shape.num_layers * numbers[trainer.activation_checkpointing] + layer
    logits = min(tokens * shape.vocab_size // (plan.cp * plan.tp), LOGITS_BYTES // DTYPE_BYTES[trainer.compute_dtype])
    if config.distill is not None and config.distill.teacher.policy is not None:  # its logits of a micro-batch are all kept
        logits += tokens * shape.vocab_size // plan.tp // 2
    gathered = 0
    if plan.cp > 1:
        layers = {"none": shape.num_layers, "selective": shape.num_layers / 2, "full": 0}[trainer.activation_checkpointing] + 1
        gathered = int(tokens * layers * 2 * shape.num_kv_heads * shape.head_dim) // plan.tp
    return (tokens * kept // (plan.cp * plan.tp) + gathered + 2 * logits) * DTYPE_BYTES[trainer.compute_dtype]


def cpu_bytes(config: "Config", memory: Memory, trainer_rank_bytes: int) -> int:
    """Return the total memory of all processes and published weights on one machine without accelerators.

    `trainer_rank_bytes` counts the tensors of a trainer rank: `memory.trainer.cpu_total`, or only what is always allocated.
    """
    generator = config.generator
    libraries = sum(number * LIBRARY_BYTES[role] for role, number in _processes(config).items())
    if not config.num_generator_ranks:
        return libraries + config.num_trainer_ranks * trainer_rank_bytes
    received = received_bytes(config, memory) * config.hosts.generator_hosts
    published = memory.published + received
    weights = generator.num_ranks * (memory.generator_rank_weights + memory.packed_weights)
    generators = weights + generator.replicas * generator.kv_cache_bytes
    if config.distill is not None:  # without the weights of teachers, whose sizes are in their files
        generators += sum(each.kv_cache_bytes for each in config.distill.by_key.values() if each.path is not None)
    return libraries + config.num_trainer_ranks * trainer_rank_bytes + published + generators


def received_bytes(config: "Config", memory: Memory) -> int:
    """Return the bytes of two weight versions that a generator host receives from other hosts into shared memory."""
    hosts = config.hosts
    if hosts.kind == "local" or not (config.train and config.num_generator_ranks):
        return 0
    if config.placement.generator == "generators":
        return 2 * memory.replica_weights
    return 2 * memory.replica_weights * (hosts.trainer_hosts - 1) // hosts.trainer_hosts


def host_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def multiplies_bfloat16() -> bool:
    """Return True if this processor has instructions for products of bfloat16 numbers. Without them these are very slow."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def model_values(config: "Config") -> dict[str, object]:
    """Return the model's key and value, for error messages."""
    return {"model.path": None if config.model.path is None else str(config.model.path)}


def gigabytes(num_bytes: int) -> str:
    """Format bytes with a decimal unit: `65.5 GB`, `1.6 MB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# Hosts


def host_counts(config: "Config") -> dict[str, int]:
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


def replica_hosts(config: "Config") -> list[int]:
    """Return the host index of each generator replica, among the hosts of the replicas."""
    return spread(config.generator.replicas, config.hosts.generator_hosts, config.placement.replicas_per_host)


def replica_place(config: "Config", replica: int) -> HostPlace:
    """Return the host of a generator replica."""
    return config.placement.generator, replica_hosts(config)[replica]


def replica_slot(config: "Config", replica: int) -> int:
    """Return the index of a replica among those on its host. An additional replica (number `generator.replicas`) follows those
    of the first host."""
    hosts = replica_hosts(config)
    return hosts[:replica].count(hosts[replica % len(hosts)])


def _group(config: "Config", chosen: 'HostGroup | Literal["auto"]', by_default: "HostGroup") -> "HostGroup":
    group = by_default if chosen == "auto" else chosen
    return group if config.num_generator_ranks or group != "generators" else "controller"


def rollout_group(config: "Config") -> "HostGroup":
    """Return the host group of the rollout workers."""
    return _group(config, config.placement.rollout, "generators")


def store_group(config: "Config") -> "HostGroup":
    """Return the group whose first host runs the buffer and the weight store."""
    return _group(config, config.placement.store, "trainers" if config.weights.transport == "store" else "controller")


def worker_hosts(config: "Config") -> list[int]:
    """Return the host index of each rollout worker, among the hosts of `rollout_group`."""
    num_hosts = config.hosts.count(rollout_group(config))
    return spread(config.rollout.num_workers, num_hosts, config.placement.workers_per_host)


def worker_place(config: "Config", worker: int) -> HostPlace | None:
    """Return the host of a rollout worker; None for the controller's host."""
    return _place(config, rollout_group(config), worker_hosts(config)[worker])


def store_place(config: "Config") -> HostPlace | None:
    """Return the host of the buffer and the weight store; None for the controller's host."""
    return _place(config, store_group(config), 0)


def _place(config: "Config", group: "HostGroup", number: int) -> HostPlace | None:
    if group == "controller":
        return None
    return ("trainers" if group == "trainers" else config.placement.generator), number
