"""The sections of a configuration: model, rollouts, trainer, generator and weight sync.

Every field has a type, a default where one is safe, and a one-line description; names carry units. A section validates itself.
Validation never assigns: derived values are properties.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from titanrl.config.choices import Dtype, TransportName, Verify
from titanrl.config.errors import BrokenRule
from titanrl.config.section import (
    Bytes,
    Count,
    CountOrZero,
    FilePath,
    OrImportPath,
    Processes,
    Seconds,
    Section,
    Share,
    Steps,
    StepsOrZero,
    Tokens,
)


class RecipeConfig(Section):
    """A tiny model with random weights, for runs without a checkpoint (the quick start)."""

    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Model type, one of those in docs/howto/model_families.md; null selects the first."""

    hidden_size: Count = 128
    """Width of the residual stream."""
    num_layers: Count = 2
    """Number of transformer blocks."""
    num_heads: Count = 4
    """Number of query heads."""
    num_kv_heads: Count = 2
    """Number of key-value heads; must divide `num_heads`."""
    head_dim: Literal[32, 64, 80, 96, 112, 128, 160, 192, 224, 256] = 32
    """Width of one attention head, one of the sizes that vLLM's CPU attention supports."""
    intermediate_size: Count = 384
    """Width of the feed-forward block."""
    init_std: PositiveFloat = 0.05
    """Standard deviation of the initial weights."""
    max_positions: Tokens = 512
    """Maximum sequence length, in tokens."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_heads % self.num_kv_heads:
            yield BrokenRule(
                values={"num_kv_heads": self.num_kv_heads, "num_heads": self.num_heads},
                rule="num_kv_heads must divide num_heads",
                fix=f"set num_kv_heads to {largest_divisor(self.num_heads, self.num_kv_heads)}",
            )


class ModelConfig(Section):
    """The policy to train."""

    path: FilePath | None = None
    """Directory of a model in Hugging Face format (config.json, tokenizer, safetensors); null builds `recipe` instead."""
    family: Annotated[str, OrImportPath()] | None = None
    """A model family of your own as `package.module:name` or `file.py:name`; null selects by the model type in config.json."""
    recipe: RecipeConfig = RecipeConfig()
    """The tiny model built when `path` is null."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.family is not None and self.recipe.family is not None:
            yield BrokenRule(
                values={"recipe.family": self.recipe.family, "family": self.family},
                rule="only one key may select the family",
                fix="remove one of them",
            )


class WarmStartConfig(Section):
    """Supervised training before RL, on demonstrations generated for the task. The result is cached under `cache_dir`."""

    num_steps: Steps = 460
    """Number of optimizer steps."""
    num_long_only_steps: StepsOrZero = 400
    """Number of initial steps that show only worked solutions; later steps mix in short answers."""
    short_fraction: Share = 0.75
    """Fraction of short answers, without working, after `num_long_only_steps`."""
    batch_size: Count = 64
    """Demonstrations per optimizer step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, reached after `num_warmup_steps` and then decayed linearly to zero."""
    num_warmup_steps: StepsOrZero = 20
    """Number of steps of linear learning-rate warm-up."""
    tool_calls: bool | None = None
    """True if the worked solutions of sums call a tool with the sum as its only argument; null means that they do if
    `data.environment` is the calculator. A tool of your own with such an argument needs true."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_long_only_steps > self.num_steps:
            yield BrokenRule(
                values={"num_long_only_steps": self.num_long_only_steps, "num_steps": self.num_steps},
                rule="num_long_only_steps must not exceed num_steps",
                fix=f"set num_long_only_steps to at most {self.num_steps}",
            )


class RolloutConfig(Section):
    """Sampling of completions."""

    groups_per_step: Count = 8
    """Number of prompts per optimizer step. Each prompt yields one group of completions."""
    group_size: Annotated[int, Field(ge=2, le=1_000_000)] = 8
    """Number of completions per prompt. Advantages compare the completions of a group, so it needs at least two."""
    min_group_size: Count = 1
    """Fewest completions with a reward that a group needs to be trained on. A completion whose reward or environment failed is
    left out of its group; another prompt replaces a group of fewer than this."""
    max_new_tokens: Tokens = 26
    """Maximum completion length, in tokens."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same value. vLLM takes no others."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it. The trainer normalizes over the same tokens (docs/howto/truncated_sampling.md)."""
    top_k: CountOrZero = 0
    """Top-k sampling; 0 disables it. The trainer normalizes over the same tokens."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Minimum probability of a token, relative to the likeliest one; 0 disables it. The trainer normalizes over the same
    tokens."""
    dynamic_sampling: bool = False
    """Discard groups whose rewards are all equal and sample new ones until the batch has `groups_per_step` groups (DAPO)."""
    window: Share = 0.0
    """Fraction of the buffer's slots that may be trained on before an older, unfinished group, so that one slow group does not
    block the others. That group may then exceed `max_staleness`; the run prints the exact bound. 0 trains strictly in order."""
    num_spare_completions: CountOrZero = 0
    """Extra completions started per prompt. The first `group_size` to finish are kept and the others cancelled. This avoids
    waiting for the longest ones, but biases training towards short completions."""
    group_filter: Annotated[str, OrImportPath()] | None = None
    """Import path of a function that selects the groups to train on (docs/howto/filter.md); null keeps all."""
    num_workers: Processes = 1
    """Number of rollout worker processes."""
    starvation_timeout_s: Seconds = 300.0
    """Maximum wait for a trainable batch while groups keep finishing without a signal. The run then ends with an error."""
    save: FilePath | None = None
    """Folder for a dump: every rollout with its tokens, log-probabilities, rewards and messages, as Parquet files
    (docs/howto/dump.md); null writes none."""
    replay: FilePath | None = None
    """Folder of a dump to train on, batch by batch in its order, without generators, environments and rewards
    (docs/howto/dump.md); null samples."""

    @property
    def is_truncated(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def num_requests(self) -> int:
        """Number of completions started per prompt."""
        return self.group_size + self.num_spare_completions

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.min_group_size > self.group_size:
            yield BrokenRule(
                values={"min_group_size": self.min_group_size, "group_size": self.group_size},
                rule="a group never has more completions than group_size",
                fix=f"set min_group_size to at most {self.group_size}",
            )


class SandboxConfig(Section):
    """The confined, killable processes that run the rewards. A reward may pass model output to `eval`."""

    timeout_s: Seconds = 5.0
    """Time limit for scoring one group by one reward. On timeout the process is killed and each completion is scored
    separately. For a trusted reward, the time limit of one call."""
    num_processes: Processes = 8
    """Number of scoring processes per rollout worker. With `rollout.groups_per_step` processes per reward no group waits for
    one."""
    groups_per_process: Count = 1
    """Number of groups a process scores before it is replaced. With 1, a completion that corrupts its process affects only its
    own group. Larger values save forks and are safe if no reward evaluates model output."""
    memory_bytes: Bytes = 2 << 30
    """Address-space limit of one scoring process."""


class ParallelismConfig(Section):
    """Parallelism degrees of torchtitan; their product is the number of trainer ranks."""

    dp_replicate: Processes = 1
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: Processes = 1
    """Number of ranks that share parameters, gradients and optimizer state (FSDP2)."""
    tp: Processes = 1
    """Tensor-parallel degree, with sequence parallelism; must divide the number of attention heads."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """torchtitan's policy for freeing gathered parameters after the forward pass."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_size(self) -> int:
        """Number of ranks that process different data."""
        return self.dp_replicate * self.dp_shard


class LoraConfig(Section):
    """Low-rank adapters (LoRA). The model's own weights stay frozen; generators receive the merged weights."""

    rank: Count = 32
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(strict=False, min_length=1)] = ("attention", "mlp")
    """Layers whose projections get adapters. The embedding and the output layer never do."""


class TrainerConfig(Section):
    """The policy trainer mesh (torchtitan)."""

    parallelism: ParallelismConfig = ParallelismConfig()
    """Distribution of the model over ranks."""
    dtype: Dtype = "float32"
    """Data type of the parameters and the optimizer state."""
    compute_dtype: Dtype = "float32"
    """Data type that FSDP casts parameters to for the forward and backward pass."""
    row_tokens: Tokens = 256
    """Length of a packed row, in tokens. The longest prompt plus completion must fit unless `overlong` allows otherwise."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of sequences longer than a row: `error` rejects the configuration, `truncate` drops their last tokens, `skip`
    drops them. `tokens/overlong_frac` counts them, and dropped tokens do not enter the loss weights."""
    rows_per_microbatch: Count = 16
    """Number of packed rows per micro-batch of one rank."""
    epochs: Count = 1
    """Number of times that a step trains on its batch (docs/trainer.md)."""
    minibatches_per_batch: Count = 1
    """Number of mini-batches that the groups of a batch are dealt to in each epoch, in a new order. Each takes one optimizer
    step, with loss weights of its own."""
    share_prompts: bool = False
    """Compute the prompt of a group once per row instead of once per completion; the gradients are the same."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass to save memory."""
    compile: bool = False
    """Compile each transformer block with torch.compile, which delays the first step."""
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """torchao's float8 recipe for the projections: one scale per tensor, the fastest; one per row; or one per row with the
    gradient of the weights in high precision. It is emulated on CPU, which is slow and meant for tests."""
    deterministic: Literal["off", "warn", "error"] = "off"
    """Use torch's deterministic algorithms, which may be slower. An operation without one is an `error`, or only a warning."""
    detect_anomaly: bool = False
    """Let an error of the backward pass name the forward operation that caused it, which is slow."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    snapshots_on_device: bool = False
    """Keep the snapshots used for proximal and reference log-probabilities in device memory instead of host memory."""

    @property
    def max_optimizer_steps(self) -> int:
        """Maximum number of optimizer steps on one batch; a mini-batch without a gradient takes none."""
        return self.epochs * self.minibatches_per_batch

    def _broken_rules(self) -> Iterator[BrokenRule]:
        tp = self.parallelism.tp
        if self.compile and tp > 1 and self.activation_checkpointing != "none":
            yield BrokenRule(
                values={
                    "compile": True,
                    "parallelism.tp": tp,
                    "activation_checkpointing": self.activation_checkpointing,
                },
                rule="torch 2.13 cannot compile activation checkpointing under tensor parallelism",
                fix="set trainer.compile to false, trainer.activation_checkpointing to none, or trainer.parallelism.tp to 1",
            )


class GeneratorConfig(Section):
    """The generator mesh (vLLM)."""

    replicas: Processes = 1
    """Number of independent vLLM engines, each in its own process mesh."""
    tp: Processes = 1
    """Tensor-parallel degree of each replica, one process and device per rank; must divide the number of attention heads."""
    model_impl: Literal["titan", "native"] = "titan"
    """Model code: `titan` runs the trainer's model definition inside vLLM, `native` runs vLLM's own model of the family."""
    dtype: Dtype = "float32"
    """Data type of the generator's weights; the trainer casts to it when it pushes."""
    on_update: Literal["continue", "restart", "drain"] = "continue"
    """Handling of running requests when new weights arrive. `continue` keeps them and records the version of each token;
    `restart` discards their tokens and restarts them; `drain` finishes them with the old weights first."""
    max_num_seqs: Count = 256
    """Maximum number of completions that one engine decodes concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size of one replica on CPU, divided among its ranks. On accelerators vLLM's `gpu_memory_utilization` sets it."""
    vllm: dict[str, Any] = {}
    """Additional `vllm.EngineArgs`."""

    @property
    def num_ranks(self) -> int:
        """Number of processes over all replicas."""
        return self.replicas * self.tp

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for key in ("tensor_parallel_size", "distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"):
            if key in self.vllm:
                yield BrokenRule(
                    values={f"vllm.{key}": self.vllm[key]},
                    rule="TitanRL starts the processes of an engine, one per tensor-parallel rank",
                    fix=f"remove vllm.{key}, and set generator.tp",
                )


class WeightsConfig(Section):
    """Weight sync from the trainer to the generators."""

    transport: Literal["auto", TransportName] = "auto"
    """`arena` is shared memory and works within one host; `rdma` and `store` (torchstore's tensors) also work across hosts.
    `auto` selects `arena` for generators on the trainer's host and `rdma` for others. Without InfiniBand, Monarch runs RDMA
    over TCP."""
    verify: Verify = "sampled"
    """Share of the weights' bytes covered by a digest: `sampled` covers one page in 64 and changes pages every time. Versions,
    names, shapes, data types and overwrites are always checked."""


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is at most `at_most`."""
    return max(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)
