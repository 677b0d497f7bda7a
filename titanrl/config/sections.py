"""The sections of a configuration for model, rollouts, trainer, generator and weight transfer.

Every field has a type and a short description, and a default where one is safe. Names include the unit. A section validates
itself. Validation never assigns values: derived values are properties.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from titanrl.base.choices import Dtype, TransportName, Verify
from titanrl.config.errors import BrokenRule
from titanrl.config.section import (
    Bytes,
    Count,
    CountOrZero,
    FilePath,
    InputPath,
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
    """A tiny model with random weights, for runs without a pretrained model, such as the quick start."""

    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Model type from docs/howto/model_families.md; null uses the first one."""

    hidden_size: Count = 128
    """Hidden size of the model."""
    num_layers: Count = 2
    """Number of transformer layers."""
    num_heads: Count = 4
    """Number of query heads."""
    num_kv_heads: Count = 2
    """Number of key-value heads; must divide `num_heads`."""
    head_dim: Literal[32, 64, 80, 96, 112, 128, 160, 192, 224, 256] = 32
    """Dimension of an attention head. vLLM's CPU attention supports only these sizes."""
    intermediate_size: Count = 384
    """Hidden size of the feed-forward layers."""
    init_std: PositiveFloat = 0.05
    """Standard deviation of the initial weights."""
    max_positions: Tokens = 512
    """Maximum sequence length in tokens."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_heads % self.num_kv_heads:
            yield BrokenRule(
                values={"num_kv_heads": self.num_kv_heads, "num_heads": self.num_heads},
                rule="num_kv_heads must divide num_heads",
                fix=f"set num_kv_heads to {largest_divisor(self.num_heads, self.num_kv_heads)}",
            )


class ModelConfig(Section):
    """The policy to train."""

    path: InputPath | None = None
    """Directory of a model in Hugging Face format (config.json, tokenizer, safetensors); null builds the model of `recipe`."""
    family: Annotated[str, OrImportPath()] | None = None
    """Import path of a custom model family, as `package.module:name` or `file.py:name`. Null selects the family by the model
    type in config.json."""
    recipe: RecipeConfig = RecipeConfig()
    """The tiny model to build when `path` is null."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.family is not None and self.recipe.family is not None:
            yield BrokenRule(
                values={"recipe.family": self.recipe.family, "family": self.family},
                rule="model.family and model.recipe.family both select the model family",
                fix="remove one of them",
            )


class WarmStartConfig(Section):
    """Supervised training before RL, on demonstrations generated for the task. `cache_dir` stores the result for later runs."""

    num_steps: Steps = 460
    """Number of optimizer steps."""
    num_long_only_steps: StepsOrZero = 400
    """Number of initial steps with worked solutions only. Later steps also contain short answers."""
    short_fraction: Share = 0.75
    """Fraction of answers without a worked solution after the first `num_long_only_steps` steps."""
    batch_size: Count = 64
    """Number of demonstrations per optimizer step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, reached after `num_warmup_steps` and then decayed linearly to zero."""
    num_warmup_steps: StepsOrZero = 20
    """Number of linear learning-rate warm-up steps."""
    tool_calls: bool | None = None
    """Let the worked solutions call a tool, with the sum as its only argument. Null enables this if `data.environment` is the
    calculator. Set true for a custom tool that takes such an argument."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_long_only_steps > self.num_steps:
            yield BrokenRule(
                values={"num_long_only_steps": self.num_long_only_steps, "num_steps": self.num_steps},
                rule="num_long_only_steps must not exceed num_steps",
                fix=f"set num_long_only_steps to at most {self.num_steps}",
            )


TokenId = Annotated[int, Field(ge=0, le=100_000_000)]


class RolloutConfig(Section):
    """Sampling of completions."""

    groups_per_step: Count = 8
    """Number of prompts per step. Each prompt yields one group of completions."""
    group_size: Annotated[int, Field(ge=2, le=1_000_000)] = 8
    """Number of completions per prompt. Advantages compare the completions of a group, so at least two are needed."""
    min_group_size: Count = 1
    """Minimum number of scored completions a group needs to be trained on. Completions whose reward or environment failed are
    removed from their group. A group with fewer than this is dropped and replaced by another prompt."""
    max_new_tokens: Tokens = 26
    """Maximum completion length in tokens; with `data.environment`, of one turn."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same value. vLLM does not sample below 0.01."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it. The trainer renormalizes over the same tokens (docs/howto/truncated_sampling.md)."""
    top_k: CountOrZero = 0
    """Top-k sampling; 0 disables it. The trainer renormalizes over the same tokens."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Minimum probability of a token, relative to the most likely one; 0 disables it. The trainer renormalizes over the same
    tokens."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)] | TokenId, ...], Field(strict=False)] = ()
    """Texts and token ids that end a completion, in addition to the end tokens of the model and of its chat template, such as
    `["</answer>", 198]` (docs/howto/model.md). Evaluations and the turns of environments use them, too."""
    keep_stop: bool = False
    """Keep the stop text at the end of the text that rewards, environments and files receive. As in vLLM, the default removes
    it. The tokens to train on always include it."""
    dynamic_sampling: bool = False
    """Discard groups whose rewards are all equal, and sample others until the batch has `groups_per_step` groups (DAPO)."""
    window: Share = 0.0
    """Reordering window, as a fraction of the buffer's slots: groups in it may be trained on before an older, unfinished group,
    so that one slow group does not block the others. The slow group may then exceed `max_staleness`; the run prints the exact
    bound. 0 trains strictly in order."""
    num_spare_completions: CountOrZero = 0
    """Extra completions to start per prompt. The first `group_size` to finish are kept and the others are cancelled. This
    avoids waiting for the longest ones, but biases training toward short completions."""
    group_filter: Annotated[str, OrImportPath()] | None = None
    """Import path of a function that selects the groups to train on (docs/howto/filter.md); null keeps all groups."""
    num_workers: Processes = 1
    """Number of rollout worker processes. Add more if environments or rewards limit throughput."""
    starvation_timeout_s: Seconds = 300.0
    """Maximum time in seconds to wait for a trainable batch, for example when all rewards are equal. The run then ends with an
    error."""
    save: FilePath | None = None
    """Directory for a dump of all rollouts, as Parquet files with tokens, log-probabilities, rewards and messages
    (docs/howto/dump.md); null writes none."""
    replay: InputPath | None = None
    """Directory of a dump to train on, batch by batch in the recorded order, without generators, environments and rewards
    (docs/howto/dump.md). Null samples new rollouts."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return tuple(value for value in self.stop if isinstance(value, str))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids in `stop`."""
        return tuple(value for value in self.stop if isinstance(value, int))

    @property
    def is_truncated(self) -> bool:
        """True if tokens are sampled from a truncated distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def num_requests(self) -> int:
        """Number of completions started per prompt."""
        return self.group_size + self.num_spare_completions

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.min_group_size > self.group_size:
            yield BrokenRule(
                values={"min_group_size": self.min_group_size, "group_size": self.group_size},
                rule="min_group_size must not exceed group_size",
                fix=f"set min_group_size to at most {self.group_size}",
            )


class SandboxConfig(Section):
    """Isolated processes that run the reward functions. A reward may execute model output, and a process that hangs is
    killed."""

    timeout_s: Seconds = 5.0
    """Time limit in seconds for one reward to score one group. On timeout the process is killed, and each completion is scored
    separately. For a trusted reward, the limit applies to each call."""
    num_processes: Processes = 8
    """Number of scoring processes per rollout worker. Groups never wait for a process if there are `rollout.groups_per_step` of
    them per reward."""
    groups_per_process: Count = 1
    """Number of groups that a process scores before it is replaced. With 1, a completion that corrupts its process affects only
    its own group. Larger values save forks, and are safe if no reward executes model output."""
    memory_bytes: Bytes = 2 << 30
    """Address-space limit of a scoring process, in bytes."""


class ParallelismConfig(Section):
    """Degrees of parallelism. Their product is the number of trainer ranks."""

    dp_replicate: Processes = 1
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: Processes = 1
    """Number of ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    tp: Processes = 1
    """Tensor-parallel degree, with sequence parallelism; must divide the number of attention heads."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """FSDP's policy for parameters gathered in the forward pass: `always` frees them, which saves memory; `never` keeps them
    for the backward pass, which saves communication; `default` is torchtitan's choice."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_size(self) -> int:
        """Number of ranks that process different data."""
        return self.dp_replicate * self.dp_shard


class LoraConfig(Section):
    """Low-rank adapters (LoRA). The base weights stay frozen, and generators receive the merged weights."""

    rank: Count = 32
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(strict=False, min_length=1)] = ("attention", "mlp")
    """Layers with adapters on their projections. Embedding and output layer never have adapters."""


class TrainerConfig(Section):
    """Trainer ranks (torchtitan)."""

    parallelism: ParallelismConfig = ParallelismConfig()
    """Degrees of parallelism."""
    dtype: Dtype = "float32"
    """Data type of parameters, gradients and optimizer state."""
    compute_dtype: Dtype = "float32"
    """Data type that FSDP casts parameters to for the forward and backward pass."""
    row_tokens: Tokens = 256
    """Length in tokens of a row, into which several sequences are packed. The longest prompt plus completion must fit, unless
    `overlong` allows otherwise."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of sequences longer than a row: `error` rejects the configuration, `truncate` cuts their last tokens, `skip`
    leaves the sequences out. Tokens that are cut or left out do not count in the loss weights; `tokens/overlong_frac` reports
    their share."""
    rows_per_microbatch: Count = 16
    """Number of packed rows per micro-batch and rank. Lower it if activations do not fit into memory."""
    epochs: Count = 1
    """Number of passes over each batch (docs/howto/epochs.md)."""
    minibatches_per_batch: Count = 1
    """Number of mini-batches per epoch; each takes one optimizer step, with its own loss weights. Every epoch assigns the
    groups to mini-batches in a new order."""
    share_prompts: bool = False
    """Compute the prompt of a group once per row instead of once per completion. Gradients are the same. Helps if groups are
    large or prompts are long."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute some (`selective`) or all (`full`) activations in the backward pass, which saves memory and costs time."""
    compile: bool = False
    """Compile each transformer layer with torch.compile. The first step then takes longer."""
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """torchao's float8 recipe for the projections: `tensorwise` (one scale per tensor, the fastest), `rowwise` (one per row) or
    `rowwise_with_gw_hp` (one per row, weight gradients in high precision). Null disables it. On CPU it is emulated, which is
    slow and only for tests."""
    deterministic: Literal["off", "warn", "error"] = "off"
    """Use PyTorch's deterministic algorithms, which may be slower. If an operation has none, `error` stops the run and `warn`
    prints a warning."""
    detect_anomaly: bool = False
    """Report the forward operation that caused an error in the backward pass (torch.autograd.detect_anomaly). Slow; for
    debugging."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights; null trains all weights."""
    snapshots_on_device: bool = False
    """Keep the weight snapshots for proximal and reference log-probabilities in device memory instead of host memory."""

    @property
    def max_optimizer_steps(self) -> int:
        """Maximum number of optimizer steps per batch; a mini-batch without a gradient takes none."""
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
                rule="torch 2.13 cannot compile activation checkpointing with tensor parallelism",
                fix="set trainer.compile to false, trainer.activation_checkpointing to none, or trainer.parallelism.tp to 1",
            )


class GeneratorConfig(Section):
    """Generator replicas (vLLM)."""

    replicas: Processes = 1
    """Number of independent vLLM engines."""
    tp: Processes = 1
    """Tensor-parallel degree of each replica, with one process and device per rank; must divide the number of attention
    heads."""
    model_impl: Literal["titan", "native"] = "titan"
    """Model implementation: `titan` runs the trainer's model definition inside vLLM, `native` runs vLLM's own model."""
    dtype: Dtype = "float32"
    """Data type of the generator's weights. The trainer casts to it when it publishes weights."""
    on_update: Literal["continue", "restart", "drain"] = "continue"
    """Handling of running requests when new weights arrive: `continue` keeps them and records the weight version of each token,
    `restart` discards their tokens and starts them again, `drain` first finishes them with the old weights."""
    max_num_seqs: Count = 256
    """Maximum number of completions that one engine decodes concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size of one replica in bytes, divided among its ranks. CPU only; on accelerators set `gpu_memory_utilization` in
    `vllm`."""
    vllm: dict[str, Any] = {}
    """Additional arguments of `vllm.EngineArgs`."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all replicas."""
        return self.replicas * self.tp

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for key in ("tensor_parallel_size", "distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"):
            if key in self.vllm:
                yield BrokenRule(
                    values={f"vllm.{key}": self.vllm[key]},
                    rule="TitanRL sets this argument: it starts one process per tensor-parallel rank",
                    fix=f"remove generator.vllm.{key}, and set generator.tp",
                )


class WeightsConfig(Section):
    """Weight transfer from the trainer to the generators."""

    transport: Literal["auto", TransportName] = "auto"
    """Transport of the weights: `arena` is shared memory within one host; `rdma` and `store` (torchstore) also work between
    hosts. `auto` uses `arena` for generators on the trainer's host and `rdma` for others. Without InfiniBand, Monarch runs RDMA
    over TCP."""
    verify: Verify = "sampled"
    """Checksum of received weights: `off`, `full`, or `sampled`, which covers one page in 64 and other pages every time.
    Versions, names, shapes, data types and overwrites are always checked."""


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is at most `at_most`."""
    return max(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)
