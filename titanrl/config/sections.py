"""The sections of a configuration, as typed models.

Every field has a type, a default where one is safe, and one line that says what it does; names carry units. A section checks
itself. Validation never assigns: derived values are properties.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from titanrl.config.errors import BrokenRule
from titanrl.config.objective import ALGORITHM_PRESETS, CorrectionConfig, KLConfig, with_preset
from titanrl.config.section import Decay, Dtype, FilePath, Fraction, Section


class RecipeConfig(Section):
    """A tiny Qwen3 made on the spot, for runs without a checkpoint (the quick start)."""

    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    num_layers: PositiveInt = 2
    """Transformer blocks."""
    num_heads: PositiveInt = 4
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; must divide `num_heads`."""
    head_dim: Literal[32, 64, 80, 96, 112, 128, 160, 192, 224, 256] = 32
    """Width of one head; the sizes vLLM's CPU attention has kernels for."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward block."""
    init_std: PositiveFloat = 0.05
    """Standard deviation of the initial weights."""
    max_positions: PositiveInt = 512
    """Longest sequence the model accepts, in tokens."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_heads % self.num_kv_heads:
            yield BrokenRule(
                values={"num_kv_heads": self.num_kv_heads, "num_heads": self.num_heads},
                rule="num_kv_heads must divide num_heads",
                fix=f"set num_kv_heads to {largest_divisor(self.num_heads, self.num_kv_heads)}",
            )


class ModelConfig(Section):
    """Which policy is trained."""

    path: FilePath | None = None
    """Hugging Face Qwen3 directory (config.json, tokenizer, safetensors). Without it, `recipe` makes a tiny model."""
    recipe: RecipeConfig = RecipeConfig()
    """The tiny model that is made when `path` is not given."""


class WarmStartConfig(Section):
    """Supervised training before RL, on demonstrations the task writes itself; cached under `cache_dir`."""

    num_steps: PositiveInt = 460
    """Optimizer steps."""
    num_long_only_steps: NonNegativeInt = 400
    """First steps, which show worked solutions only; the rest mix in short answers."""
    short_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.75
    """Share of short answers (no working shown) after `num_long_only_steps`."""
    batch_size: PositiveInt = 64
    """Demonstrations per optimizer step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate; warmed up, then decayed linearly to zero."""
    num_warmup_steps: NonNegativeInt = 20
    """Steps of linear learning-rate warm-up."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_long_only_steps > self.num_steps:
            yield BrokenRule(
                values={"num_long_only_steps": self.num_long_only_steps, "num_steps": self.num_steps},
                rule="num_long_only_steps must not exceed num_steps",
                fix=f"set num_long_only_steps to at most {self.num_steps}",
            )


class DataConfig(Section):
    """Prompts and how their answers are verified."""

    source: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """Where prompts come from: a task of the reasoning-gym package, or a JSONL file of `prompt` and `answer`."""
    task: str = "chain_sum"
    """Name of the reasoning-gym task; with `jsonl`, the name the metrics carry."""
    task_config: dict[str, Any] = {}
    """Options of the reasoning-gym task, passed through."""
    path: FilePath | None = None
    """The JSONL file, one object a line with `prompt` and `answer`."""
    num_prompts: PositiveInt = 12_000
    """Training prompts drawn from the reasoning-gym task before the stream repeats in another order."""
    heldout_fraction: Fraction = 0.2
    """Share of the questions, chosen by a hash of their text, that is never trained on."""
    scorer: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """`package.module:function`, called as `function(completion_text, entry) -> float` in the sandbox; null: the task's own."""
    system_prompt: str | None = None
    """System message put before the question; needs a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto` applies the tokenizer's own template if it has one; `never` feeds the question as it is."""
    max_prompt_tokens: PositiveInt = 64
    """Longest prompt; longer ones are skipped and counted."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.source == "jsonl") != (self.path is not None):
            yield BrokenRule(
                values={"path": self.path, "source": self.source},
                rule="path is required when source is jsonl, and read only then",
                fix="set path to the file of prompts and answers"
                if self.path is None
                else "remove path, or set source to jsonl",
            )


class RolloutConfig(Section):
    """How completions are sampled and scored."""

    groups_per_step: PositiveInt = 8
    """Prompts per optimizer step; each gets a group of completions."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt; a single one has nothing to be compared with."""
    max_new_tokens: PositiveInt = 26
    """Longest completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw only from the likeliest tokens that have this probability together; 1: from all. The trainer cannot follow it."""
    top_k: NonNegativeInt = 0
    """Draw only from so many of the likeliest tokens; 0: from all. The trainer cannot follow it."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Draw only tokens with this share of the likeliest token's probability; 0: all. The trainer cannot follow it."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by fresh ones until the batch has `groups_per_step` with a signal (DAPO)."""
    window: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the buffer's slots that may be trained on before an older group that is not finished, so that a straggler does
    not hold up the rest; it may then be older than `max_staleness`, by the bound printed at the start. 0 keeps the order."""
    num_spare_completions: NonNegativeInt = 0
    """Completions started per prompt beyond `group_size`; the first `group_size` to end are kept and the others aborted.
    Saves the wait for the longest, at the price of a bias towards short ones."""
    num_workers: PositiveInt = 1
    """Rollout worker processes."""
    starvation_timeout_s: PositiveFloat = 300.0
    """Longest wait for a batch with any signal, while groups keep finishing; then the run ends with the reasons."""

    @property
    def num_requests(self) -> int:
        """Completions started per prompt."""
        return self.group_size + self.num_spare_completions


class SandboxConfig(Section):
    """The process that scores answers: model output may reach `eval` there, so it is confined and killable."""

    timeout_s: PositiveFloat = 5.0
    """Wall-clock limit for scoring one group; then its process is killed and each answer is tried alone."""
    num_processes: PositiveInt = 8
    """Scoring processes kept forked and ready, per rollout worker; `rollout.groups_per_step` of them never wait."""
    groups_per_process: PositiveInt = 1
    """Groups one process scores before it is thrown away. With 1 an answer that tampers with Python, where the verifier
    evaluates it, reaches its own group at most; more saves forks where the verifier never runs what it is given."""
    memory_bytes: PositiveInt = 2 << 30
    """Address-space limit of one scoring process."""


class AlgorithmConfig(Section):
    """Objective and optimizer of the policy."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"] | None = None
    """A published algorithm; it sets keys of this section that are not written beside it (docs/algorithms.md)."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "pass_at_k"] = "dr_grpo"
    """`grpo` divides the centred reward by the group's standard deviation, `dr_grpo` only centres, `rloo` leaves one out;
    `reinforce_pp` standardizes rewards over the batch, with `_baseline` after centring them by group; `maxrl` divides the
    centred reward by the group's mean; `pass_at_k` rewards what helps the best of `pass_k` answers."""
    std_ddof: Literal[0, 1] = 0
    """Degrees of freedom taken off in the standard deviation of `grpo`."""
    pass_k: PositiveInt | None = None
    """Answers that `advantage: pass_at_k` takes the best of."""
    loss: Literal["ppo", "importance_sampling", "reinforce", "gspo", "cispo", "dro", "sapo"] = "ppo"
    """Loss of a token (docs/algorithms.md)."""
    proximal: Literal["sampler", "step_start", "interval_start"] = "sampler"
    """The policy that the ratio of `ppo`, `gspo`, `cispo` and `sapo` starts from: the one that sampled, the one at the start of
    the optimizer step, or the last one published; the way from the sampler to there is `correction`'s (decoupled PPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Clip: the ratio counts no lower than 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Clip: the ratio counts no higher than 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip of `ppo`: with a negative advantage the ratio counts no higher than this either; 3 is usual."""
    dro_beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio in `dro`."""
    sapo_temperatures: Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)] = (1.0, 1.05)
    """Steepness of the gate of `sapo` for positive and for negative advantages."""
    kl: KLConfig = KLConfig()
    """Divergence from a reference policy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus: this times the entropy of each token's distribution is taken off its loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    reduction: Literal["sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"] = (
        "token_mean"
    )
    """How token losses become one number; as weights from global counts, so batch layout never matters."""
    constant_length: PositiveInt | None = None
    """Tokens that `reduction: constant` divides each sequence's sum by; default: `rollout.max_new_tokens`."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    num_warmup_steps: NonNegativeInt = 0
    """Steps of linear learning-rate warm-up."""
    lr_decay: Literal["constant", "linear"] = "constant"
    """Learning rate after the warm-up: kept, or linear to zero at the last step."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    updates_per_publish: PositiveInt = 1
    """Optimizer steps, each on `rollout.groups_per_step` groups, between two versions that reach the generators."""
    max_skipped_steps: PositiveInt = 10
    """Steps in a row that may be skipped for a non-finite gradient before the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, ALGORITHM_PRESETS)

    @property
    def ratio_starts_at_sampler(self) -> bool:
        """Whether the loss holds the importance ratio of policy to sampling policy."""
        always, by_proximal = ("importance_sampling", "dro"), ("ppo", "gspo", "cispo", "sapo")
        return self.loss in always or (self.loss in by_proximal and self.proximal == "sampler")

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the generator's log-probabilities change the gradient."""
        weighted_kl = self.kl.coef > 0 and self.kl.place == "loss" and self.kl.importance_weighted
        return self.ratio_starts_at_sampler or self.correction.is_on or weighted_kl

    @property
    def runs_without_advantage(self) -> bool:
        """Whether a sequence of advantage 0 has a gradient, or has to be looked at for the sake of the others."""
        return self.kl.coef > 0 or self.entropy_coef > 0 or self.loss == "dro" or self.correction.is_measured

    @property
    def trains_on_equal_rewards(self) -> bool:
        """Whether the same holds for a group whose rewards are all equal."""
        return self.runs_without_advantage or self.advantage == "reinforce_pp"

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.constant_length is not None and self.reduction != "constant":
            yield BrokenRule(
                values={"constant_length": self.constant_length, "reduction": self.reduction},
                rule="constant_length is read only when reduction is constant",
                fix="remove constant_length, or set algorithm.reduction to constant",
            )
        if (self.pass_k is None) == (self.advantage == "pass_at_k"):
            yield BrokenRule(
                values={"pass_k": self.pass_k, "advantage": self.advantage},
                rule="pass_k is required when advantage is pass_at_k, and read only then",
                fix="set pass_k to the answers tried"
                if self.pass_k is None
                else "remove pass_k, or set advantage to pass_at_k",
            )
        if self.dual_clip is not None and self.loss != "ppo":
            yield BrokenRule(
                values={"dual_clip": self.dual_clip, "loss": self.loss},
                rule="dual_clip is read only when loss is ppo",
                fix="remove dual_clip, or set algorithm.loss to ppo",
            )
        if self.correction.denominator == "post" and self.reduction == "prompt_mean":
            yield BrokenRule(
                values={"correction.denominator": "post", "reduction": self.reduction},
                rule="what rejection leaves of a prompt lies on several ranks, none of which can count it",
                fix="set correction.denominator to pre, or reduction to sequence_mean",
            )
        if self.correction.weight != "none" and self.ratio_starts_at_sampler:
            clipped = self.loss not in ("importance_sampling", "dro")
            yield BrokenRule(
                values={"correction.weight": self.correction.weight, "loss": self.loss, "proximal": self.proximal},
                rule="the ratio of this loss starts at the sampler already, so weights would count it twice",
                fix="set proximal to step_start, or correction.weight to none"
                if clipped
                else "set correction.weight to none; rejection stays possible",
            )


class ParallelismConfig(Section):
    """torchtitan's parallel plan; the degrees multiply to the number of trainer ranks."""

    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks, with sequence parallelism; must divide the heads."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When FSDP frees gathered parameters; torchtitan's own option."""

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_size(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard


class LoraConfig(Section):
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are; generators get the sum of both."""

    rank: PositiveInt = 32
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """The adapter's output counts alpha / rank times."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(strict=False, min_length=1)] = ("attention", "mlp")
    """Projections that get adapters; the embedding and the output layer never do."""


class TrainerConfig(Section):
    """The policy trainer mesh (torchtitan)."""

    parallelism: ParallelismConfig = ParallelismConfig()
    """How the model is spread over ranks."""
    dtype: Dtype = "float32"
    """Type of the parameters and the optimizer state."""
    compute_dtype: Dtype = "float32"
    """Type that FSDP casts parameters to for the forward and backward pass."""
    row_tokens: PositiveInt = 256
    """Length of a packed row; the longest prompt plus completion must fit, unless `overlong` says what else to do."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """A sequence longer than a row ends the run (`error`), loses its end (`truncate`) or is not trained on (`skip`); both are
    counted in `tokens/overlong_frac`, and what is not trained on counts in no loss weight."""
    rows_per_microbatch: PositiveInt = 16
    """Packed rows that one rank runs at once."""
    share_prompts: bool = False
    """Run the prompt of a group once in each row instead of once in each completion; gradients are the same."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is recomputed in the backward pass to save memory."""
    compile: bool = False
    """Compile each transformer block with torch.compile; the first step then takes a minute or more."""
    float8: Literal["rowwise", "rowwise_with_gw_hp"] | None = None
    """torchtitan's float8 recipe for the projections; emulated on CPU, which is slow and only there to be tried out."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights; none by default."""
    snapshots_on_device: bool = False
    """Hold other versions of the weights (for proximal or reference log-probabilities) in device memory, not the host's."""

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

    replicas: PositiveInt = 1
    """Independent engines, each in a process mesh of its own."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks of each replica, a process and a device each; must divide the heads."""
    model_impl: Literal["titan", "native"] = "titan"
    """`titan` runs the trainer's model definition inside vLLM, `native` vLLM's own Qwen3."""
    dtype: Dtype = "float32"
    """Type the generator holds weights in; the trainer casts to it when it pushes."""
    on_update: Literal["continue", "restart", "drain"] = "continue"
    """What becomes of running requests when new weights arrive: `continue` goes on with them, each token marked with the
    version that made it; `restart` begins them again; `drain` ends them with the old weights, and admits none meanwhile."""
    max_num_seqs: PositiveInt = 256
    """Completions one engine decodes at the same time."""
    kv_cache_bytes: PositiveInt = 64 << 20
    """Memory for the KV cache of a replica on CPU, shared by its ranks; elsewhere vLLM's `gpu_memory_utilization` decides."""
    vllm: dict[str, Any] = {}
    """More `vllm.EngineArgs`, passed through."""

    @property
    def num_ranks(self) -> int:
        """Processes of all replicas."""
        return self.replicas * self.tp

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for key in ("tensor_parallel_size", "distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"):
            if key in self.vllm:
                yield BrokenRule(
                    values={f"vllm.{key}": self.vllm[key]},
                    rule="the processes of an engine are started here, one for each tensor-parallel rank, not by vLLM",
                    fix=f"remove vllm.{key}, and set generator.tp",
                )


class WeightsConfig(Section):
    """How the policy's weights reach the generators."""

    transport: Literal["auto", "arena", "rdma", "store"] = "auto"
    """`arena` is shared memory, for one host; `rdma` and `store` (torchstore's own tensors) are for any. `auto`: each generator
    takes the arena where it is on the trainer's host, else RDMA, which Monarch runs over TCP where there is no InfiniBand."""
    verify: Literal["off", "sampled", "full"] = "sampled"
    """Part of the weights' bytes that a digest covers: `sampled` is one page in 64, another one each time. Versions, names,
    shapes, types and overwriting are always checked."""


class EvaluationConfig(Section):
    """Greedy evaluation on held-out prompts."""

    every_steps: NonNegativeInt = 20
    """Steps between evaluations while training; 0: only before and after."""
    num_prompts: PositiveInt = 200
    """Held-out prompts per evaluation."""


class CheckpointConfig(Section):
    """Checkpoints to resume from, and the final Hugging Face export."""

    every_steps: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_last: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept; older ones are deleted."""


class TimeoutsConfig(Section):
    """Deadlines: every wait has one, and names itself when it passes."""

    start_s: PositiveFloat = 600.0
    """Until every process has loaded its part."""
    step_s: PositiveFloat = 1800.0
    """For one call to the trainer or one batch of rollouts."""
    sync_s: PositiveFloat = 600.0
    """For one weight push or pull."""
    close_s: PositiveFloat = 16.0
    """For the orderly part of the shutdown, half for the actors and half for their processes; then these are killed."""


class LoggingConfig(Section):
    """What is shown and recorded."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`auto` is a live table on a terminal and plain lines elsewhere."""
    rollouts_per_step: NonNegativeInt = 2
    """Groups per step written to `rollouts.jsonl`."""
    loggers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)] = ()
    """Trackers besides `metrics.jsonl`; each needs its package."""


class HostsConfig(Section):
    """Where the meshes run."""

    kind: Literal["local", "process", "slurm"] = "local"
    """`local`: this machine. `process`: this machine as several emulated hosts. `slurm`: one Slurm job per mesh."""
    trainer_hosts: PositiveInt = 1
    """Hosts of the trainer mesh."""
    generator_hosts: PositiveInt = 1
    """Hosts of the generator replicas."""
    devices_per_host: PositiveInt = 8
    """Accelerators on one host; not read on CPU."""
    share_devices: bool = False
    """Put the generators' ranks on the accelerators of the trainer's, from the first on; otherwise each has one of its own."""
    slurm: dict[str, Any] = {}
    """Options of `monarch.job.SlurmJob`, such as `partition` and `time_limit`, passed through."""


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a number that does not exceed a limit."""
    return max(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)
