"""The sections of a configuration: model, data, rollouts, algorithm, trainer, generator and weight sync.

Every field has a type, a default where one is safe, and a one-line description; names carry units. A section validates itself.
Validation never assigns: derived values are properties.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from titanrl.config.choices import (
    AdvantageMethod,
    Dtype,
    LearningRateDecay,
    PolicyLoss,
    Proximal,
    Reduction,
    TransportName,
    Verify,
)
from titanrl.config.errors import BrokenRule
from titanrl.config.objective import ALGORITHM_PRESETS, CorrectionConfig, KLConfig, with_preset
from titanrl.config.section import (
    Bytes,
    Count,
    CountOrZero,
    Decay,
    FilePath,
    Fraction,
    Processes,
    Seconds,
    Section,
    Share,
    Steps,
    StepsOrZero,
    Tokens,
)


class RecipeConfig(Section):
    """A tiny Qwen3 with random weights, for runs without a checkpoint (the quick start)."""

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
    """Directory of a dense Qwen3 in Hugging Face format (config.json, tokenizer, safetensors); null builds `recipe` instead."""
    recipe: RecipeConfig = RecipeConfig()
    """The tiny model built when `path` is null."""


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

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_long_only_steps > self.num_steps:
            yield BrokenRule(
                values={"num_long_only_steps": self.num_long_only_steps, "num_steps": self.num_steps},
                rule="num_long_only_steps must not exceed num_steps",
                fix=f"set num_long_only_steps to at most {self.num_steps}",
            )


class DataConfig(Section):
    """Prompts, and the scorer of their answers."""

    source: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """Source of the prompts: a task of the reasoning-gym package, or a JSONL file."""
    task: str = "chain_sum"
    """Name of the reasoning-gym task. With `source: jsonl` it only labels the metrics."""
    task_config: dict[str, Any] = {}
    """Options passed to the reasoning-gym task."""
    path: FilePath | None = None
    """JSONL file: one object per line with the string keys `prompt` and `answer`; other keys become metadata."""
    num_prompts: Count = 12_000
    """Number of training prompts per epoch of a reasoning-gym task. Each epoch is shuffled differently."""
    heldout_fraction: Fraction = 0.2
    """Fraction of the questions that is held out for evaluation, selected by a hash of their text."""
    scorer: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """Scorer as `package.module:function`, called in the sandbox as `function(completion_text, entry) -> float`. Null selects
    the task's own scorer."""
    system_prompt: str | None = None
    """System message placed before the question; requires a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto` applies the tokenizer's chat template if it has one; `never` sends the question unchanged."""
    max_prompt_tokens: Tokens = 64
    """Maximum prompt length; longer prompts are skipped."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.source == "jsonl") != (self.path is not None):
            yield BrokenRule(
                values={"path": self.path, "source": self.source},
                rule="path is required when source is jsonl, and allowed only then",
                fix="set path to the file of prompts and answers"
                if self.path is None
                else "remove path, or set source to jsonl",
            )


class RolloutConfig(Section):
    """Sampling of completions."""

    groups_per_step: Count = 8
    """Number of prompts per optimizer step. Each prompt yields one group of completions."""
    group_size: Annotated[int, Field(ge=2, le=1_000_000)] = 8
    """Number of completions per prompt. Advantages compare the completions of a group, so it needs at least two."""
    max_new_tokens: Tokens = 26
    """Maximum completion length, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same value."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it. Trainer log-probabilities do not account for it."""
    top_k: CountOrZero = 0
    """Top-k sampling; 0 disables it. Trainer log-probabilities do not account for it."""
    min_p: Share = 0.0
    """Minimum token probability, relative to the likeliest token; 0 disables it. Trainer log-probabilities do not account for
    it."""
    dynamic_sampling: bool = False
    """Discard groups whose rewards are all equal and sample new ones until the batch has `groups_per_step` groups (DAPO)."""
    window: Share = 0.0
    """Fraction of the buffer's slots that may be trained on before an older, unfinished group, so that one slow group does not
    block the others. That group may then exceed `max_staleness`; the run prints the exact bound. 0 trains strictly in order."""
    num_spare_completions: CountOrZero = 0
    """Extra completions started per prompt. The first `group_size` to finish are kept and the others cancelled. This avoids
    waiting for the longest ones, but biases training towards short completions."""
    num_workers: Processes = 1
    """Number of rollout worker processes."""
    starvation_timeout_s: Seconds = 300.0
    """Maximum wait for a trainable batch while groups keep finishing without a signal. The run then ends with an error."""

    @property
    def num_requests(self) -> int:
        """Number of completions started per prompt."""
        return self.group_size + self.num_spare_completions


class SandboxConfig(Section):
    """The confined, killable processes that run the scorer. A scorer may pass model output to `eval`."""

    timeout_s: Seconds = 5.0
    """Time limit for scoring one group. On timeout the process is killed and each completion is scored separately."""
    num_processes: Processes = 8
    """Number of scoring processes per rollout worker. With `rollout.groups_per_step` processes no group waits for one."""
    groups_per_process: Count = 1
    """Number of groups a process scores before it is replaced. With 1, a completion that corrupts its process affects only its
    own group. Larger values save forks and are safe if the scorer never evaluates model output."""
    memory_bytes: Bytes = 2 << 30
    """Address-space limit of one scoring process."""


class AlgorithmConfig(Section):
    """Objective and optimizer of the policy."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"] | None = None
    """Published algorithm whose values become the defaults of this section (docs/algorithms.md)."""
    advantage: AdvantageMethod = "dr_grpo"
    """Advantage estimator. `dr_grpo` subtracts the group's mean reward; `grpo` also divides by the group's standard deviation,
    `maxrl` by the group's mean. `rloo` subtracts the mean of the other completions. `reinforce_pp` standardizes rewards over
    the batch; `reinforce_pp_baseline` subtracts the group's mean first. `pass_at_k` optimizes the best of `pass_k`
    completions."""
    std_ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the standard deviation in `advantage: grpo`."""
    pass_k: Count | None = None
    """Value of k for `advantage: pass_at_k`."""
    loss: PolicyLoss = "ppo"
    """Per-token policy loss (docs/algorithms.md)."""
    proximal: Proximal = "sampler"
    """Denominator of the ratio in `ppo`, `gspo`, `cispo` and `sapo`: the sampling policy, the policy at the start of the
    optimizer step, or the last published policy. `correction` covers the gap from the sampling policy to it (decoupled PPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Lower clip range: the ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range: the ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual-clip PPO: upper bound of the ratio for negative advantages; 3 is common, null disables it."""
    dro_beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio in `dro`."""
    sapo_temperatures: Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)] = (1.0, 1.05)
    """Gate temperatures of `sapo` for positive and negative advantages."""
    kl: KLConfig = KLConfig()
    """KL divergence from the reference policy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus: each token's loss is reduced by this value times the entropy of its distribution."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    reduction: Reduction = "token_mean"
    """Reduction of token losses to a scalar (docs/algorithms.md). Its weights use counts over the whole batch, so the result
    does not depend on micro-batches or ranks."""
    constant_length: Tokens | None = None
    """Divisor of each sequence's sum in `reduction: constant`; null means `rollout.max_new_tokens`."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    num_warmup_steps: StepsOrZero = 0
    """Number of steps of linear learning-rate warm-up."""
    lr_decay: LearningRateDecay = "constant"
    """Schedule after the warm-up: constant, or linear decay to zero at the last step."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    updates_per_publish: Count = 1
    """Number of optimizer steps, each on `rollout.groups_per_step` groups, per weight version published to the generators."""
    max_skipped_steps: Count = 10
    """Maximum number of consecutive steps skipped because of a non-finite gradient; the run then ends with an error."""

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, ALGORITHM_PRESETS)

    @property
    def ratio_starts_at_sampler(self) -> bool:
        """True if the loss contains the importance ratio of policy to sampling policy."""
        always, by_proximal = ("importance_sampling", "dro"), ("ppo", "gspo", "cispo", "sapo")
        return self.loss in always or (self.loss in by_proximal and self.proximal == "sampler")

    @property
    def compares_with_sampler(self) -> bool:
        """True if the generator's log-probabilities affect the gradient."""
        weighted_kl = self.kl.coef > 0 and self.kl.place == "loss" and self.kl.importance_weighted
        return self.ratio_starts_at_sampler or self.correction.is_on or weighted_kl

    @property
    def runs_without_advantage(self) -> bool:
        """True if sequences with advantage 0 need a forward pass, because they have a gradient or enter batch statistics."""
        return self.kl.coef > 0 or self.entropy_coef > 0 or self.loss == "dro" or self.correction.is_measured

    @property
    def trains_on_equal_rewards(self) -> bool:
        """True if groups whose rewards are all equal need a forward pass."""
        return self.runs_without_advantage or self.advantage == "reinforce_pp"

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.constant_length is not None and self.reduction != "constant":
            yield BrokenRule(
                values={"constant_length": self.constant_length, "reduction": self.reduction},
                rule="constant_length is allowed only when reduction is constant",
                fix="remove constant_length, or set algorithm.reduction to constant",
            )
        if (self.pass_k is None) == (self.advantage == "pass_at_k"):
            yield BrokenRule(
                values={"pass_k": self.pass_k, "advantage": self.advantage},
                rule="pass_k is required when advantage is pass_at_k, and allowed only then",
                fix="set pass_k to the number of completions to take the best of"
                if self.pass_k is None
                else "remove pass_k, or set advantage to pass_at_k",
            )
        if self.dual_clip is not None and self.loss != "ppo":
            yield BrokenRule(
                values={"dual_clip": self.dual_clip, "loss": self.loss},
                rule="dual_clip is allowed only when loss is ppo",
                fix="remove dual_clip, or set algorithm.loss to ppo",
            )
        if self.correction.denominator == "post" and self.reduction == "prompt_mean":
            yield BrokenRule(
                values={"correction.denominator": "post", "reduction": self.reduction},
                rule="the tokens of a prompt are spread over ranks, and no rank can count those that rejection keeps",
                fix="set correction.denominator to pre, or reduction to sequence_mean",
            )
        if self.correction.weight != "none" and self.ratio_starts_at_sampler:
            clipped = self.loss not in ("importance_sampling", "dro")
            yield BrokenRule(
                values={"correction.weight": self.correction.weight, "loss": self.loss, "proximal": self.proximal},
                rule="this loss already contains the ratio to the sampling policy, so correction weights would apply it twice",
                fix="set proximal to step_start, or correction.weight to none"
                if clipped
                else "set correction.weight to none; rejection is still allowed",
            )


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
    share_prompts: bool = False
    """Compute the prompt of a group once per row instead of once per completion; the gradients are the same."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass to save memory."""
    compile: bool = False
    """Compile each transformer block with torch.compile, which delays the first step."""
    float8: Literal["rowwise", "rowwise_with_gw_hp"] | None = None
    """torchtitan's float8 recipe for the projections. It is emulated on CPU, which is slow and meant for tests."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    snapshots_on_device: bool = False
    """Keep the snapshots used for proximal and reference log-probabilities in device memory instead of host memory."""

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
    """Model code: `titan` runs the trainer's model definition inside vLLM, `native` runs vLLM's own Qwen3."""
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
