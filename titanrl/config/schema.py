"""The root of the configuration, the numbers that its sections result in together, and the rules between them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from titanrl.config.algorithm import ADVANTAGES, LOSS_KEYS, AlgorithmConfig, LossTraits
from titanrl.config.data import (
    ANSWER_REWARDS,
    DEFAULT,
    MIXTURE,
    SETS,
    DataConfig,
    EvaluationConfig,
    EvaluationSet,
    RunDataConfig,
    TaskConfig,
    evaluation_sets,
)
from titanrl.config.device import DeviceName
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.sections import (
    CheckpointConfig,
    DistillConfig,
    ExamplesConfig,
    ExampleSet,
    FaultsConfig,
    FilePath,
    GeneratorConfig,
    HostGroup,
    HostsConfig,
    LoggingConfig,
    ModelConfig,
    OrImportPath,
    PlacementConfig,
    ReplayConfig,
    RolloutConfig,
    SandboxConfig,
    Section,
    SFTConfig,
    Steps,
    TimeoutsConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
    largest_divisor,
)

Program = Literal["train", "sft", "distill"]
"""Subcommands of `titanrl` that run a configuration."""

LARGEST_RANK = 512
"""Largest rank of an adapter that vLLM 0.32.0 accepts."""
VLLM_LORA_ARGS = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules")
"""Arguments of `vllm.EngineArgs` that publishing adapters sets, or leaves at their defaults."""
MAX_AT_ONCE = 1_000_000
"""Upper bound on completions per step, and on buffer slots."""
MAX_BUFFERED = 10_000_000
"""Upper bound on completions in the buffer."""

USED_BY_SFT = {
    "algorithm": ("max_skipped_steps", "optimizer", "muon_momentum"),
    "data": ("chat_template", "chat_template_kwargs", "system_prompt", "control_tokens"),
    "generator": (),
    "replay": (),
    "rollout": ("max_new_tokens",),  # by `titanrl serve`
    "sandbox": (),
    "weights": (),
}
"""Keys that fine-tuning uses, in the sections for reinforcement learning. Setting any other key of these sections is an
error."""
UNUSED_BY_DISTILLATION = {
    "rollout": (
        *("top_p", "top_k", "min_p", "dynamic_sampling", "window", "num_spare_completions", "group_filter", "min_group_size"),
        *("num_workers", "starvation_timeout_s"),
    ),
    "trainer": ("overlong", "share_prompts"),
    "replay": ("fraction",),
    "algorithm": (
        *("preset", "advantage", "std_ddof", "pass_k", "loss", "loss_options", "proximal", *LOSS_KEYS),
        *("critic", "kl", "ema_decay", "entropy_coef", "entropy_target", "correction"),
        *("reduction", "constant_length", "updates_per_publish"),
    ),
}
"""Keys by section that distillation does not use. Setting one to a value other than its default is an error."""


class Config(Section):
    """Configuration of one training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    """Name of the run. Its files are written to `<output_dir>/<name>`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of all random number generators."""
    num_steps: Steps
    """Number of training steps. Each step trains on one batch of `rollout.groups_per_step` groups."""
    device: DeviceName = "auto"
    """Device type of trainer and generators. `auto` uses the first available of NPU, CUDA and CPU."""
    train: bool = True
    """Train the policy. `false` starts no trainer and only generates `num_steps` batches (docs/howto/dump.md)."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Maximum staleness of training data: the number of weight versions that may be published between sampling a token and
    training on it. 0 is synchronous, on-policy training; with 1 or more, sampling and training overlap. `rollout.window` can
    raise the bound."""
    output_dir: FilePath = Path("runs")
    """Parent directory of all run directories."""
    cache_dir: FilePath = Path("cache")
    """Directory of the models built by `model.recipe` and `warm_start`. Runs reuse them."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before RL; null skips it."""
    data: RunDataConfig = RunDataConfig()
    """Prompts and rewards."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of completions, in groups of several per prompt."""
    replay: ReplayConfig = ReplayConfig()
    """Reuse of groups from earlier batches."""
    sandbox: SandboxConfig = SandboxConfig()
    """Processes that run the reward functions."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective and optimizer."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer, which computes gradients and updates the policy."""
    generator: GeneratorConfig = GeneratorConfig()
    """The generators, which sample completions."""
    weights: WeightsConfig = WeightsConfig()
    """Transport and verification of the weights that the trainer sends to the generators."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation during training, early stopping and the best checkpoint."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Time limits."""
    faults: FaultsConfig = FaultsConfig()
    """Detection of hanging and failed processes, and the response to them."""
    logging: LoggingConfig = LoggingConfig()
    """Console output and records of the run."""
    hooks: Annotated[tuple[Annotated[str, OrImportPath()], ...], Field(strict=False)] = ()
    """Import paths of custom hooks, which run around steps, evaluations and checkpoints (docs/howto/hooks.md)."""
    hosts: HostsConfig = HostsConfig()
    """Hosts and accelerators of the run, and how it obtains them."""
    placement: PlacementConfig = PlacementConfig()
    """Assignment of each role to hosts and CPU cores."""
    examples: ExamplesConfig | None = None
    """Examples to train on together with the rollouts; null trains only on rollouts."""
    sft: SFTConfig | None = None
    """Supervised fine-tuning. With this section, the configuration is for `titanrl sft`."""
    distill: DistillConfig | None = None
    """On-policy distillation. With this section, the configuration is for `titanrl distill`."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        return broken_rules(self)

    def with_loss_traits(self, traits: LossTraits) -> Self:
        """Return a copy with the traits that a custom loss declares; raise `BrokenRules` if they contradict other keys."""
        config = self.model_copy(update={"algorithm": self.algorithm.with_loss_traits(traits)})
        if broken := tuple(broken_rules(config)):
            raise BrokenRules(*broken)
        return config

    @property
    def program(self) -> Program:
        """Subcommand of `titanrl` that runs this configuration."""
        return "sft" if self.sft is not None else "train" if self.distill is None else "distill"

    @property
    def example_set(self) -> ExampleSet | None:
        """Examples that the run trains on, alone or together with rollouts; None without examples."""
        return self.sft or self.examples

    @property
    def tensor_parallel_degrees(self) -> dict[str, int]:
        """Tensor-parallel degrees of the trainer and of each generator replica, by key."""
        return {"trainer.parallelism.tp": self.trainer.parallelism.tp, "generator.tp": self.generator.tp}

    @property
    def publishes_adapters(self) -> bool:
        """True if generators receive LoRA adapters by themselves, not merged with the base."""
        return self.trainer.lora is not None and self.weights.lora == "adapters"

    @property
    def records_experts(self) -> bool:
        """True if generators return the experts that they chose for the tokens to train on, or for those of a dump."""
        return self.trainer.routing != "own"

    @property
    def num_trainer_ranks(self) -> int:
        """Number of trainer ranks; 0 if nothing is trained."""
        return self.trainer.parallelism.world_size if self.train else 0

    @property
    def num_generator_ranks(self) -> int:
        """Number of generator ranks over all replicas; 0 for fine-tuning and for the replay of a dump."""
        return self.generator.num_ranks if self.sft is None and self.rollout.replay is None else 0

    @property
    def num_evaluator_ranks(self) -> int:
        """Number of ranks of the background evaluation generator; 0 if there is none."""
        is_asynchronous = self.max_staleness > 0 and self.program == "train" and self.evaluates
        is_between = any(0 < eval_set.every_steps < self.num_steps for eval_set in self.evaluation_sets.values())
        return self.generator.tp if is_asynchronous and is_between and self.evaluation.background else 0

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of a training sequence in tokens: of prompt plus completion, of a conversation, or of an SFT
        example."""
        if self.sft is not None:
            return self.sft.max_example_tokens or self.trainer.row_tokens
        return max(map(self.sequence_tokens, self.data.tasks.values()))

    def sequence_tokens(self, task: DataConfig) -> int:
        """Return the maximum length of a task's prompt plus completion, or of its conversations, in tokens."""
        if task.environment is not None:
            return task.environment.max_conversation_tokens or self.trainer.row_tokens
        return task.max_prompt_tokens + task.rollout(self.rollout).max_new_tokens

    def of_task(self, task: DataConfig) -> Self:
        """Return a copy of the configuration with the settings of one task."""
        sections = {"rollout": task.rollout(self.rollout), "algorithm": task.algorithm(self.algorithm)}
        return self.model_copy(update={"data": task, **sections})

    @property
    def evaluation_sets(self) -> Mapping[str, EvaluationSet]:
        """Evaluation sets by name, the default set first."""
        max_new_tokens = {name: task.rollout(self.rollout).max_new_tokens for name, task in self.data.tasks.items()}
        return evaluation_sets(self.evaluation, self.data.tasks, max_new_tokens)

    def evaluation_set(self, name: str | None = None) -> EvaluationSet:
        """Return an evaluation set by name; None means the first set, which is the default set unless `num_prompts` is 0.

        Raises:
            ValueError: There is no such set.
        """
        sets = self.evaluation_sets
        if not sets:
            raise ValueError(
                "evaluation: no set is configured (got num_prompts=0). "
                "Raise evaluation.num_prompts, or add a set to evaluation.sets."
            )
        name = next(iter(sets)) if name is None else name
        if name not in sets:
            raise ValueError(f"evaluation set: no such set (got {name!r}). Choose one of {', '.join(sets)}.")
        return sets[name]

    @property
    def evaluates(self) -> bool:
        """True if evaluation sets are sampled. The replay of a dump has no generators, and without a trainer the policy never
        changes."""
        return self.train and self.rollout.replay is None

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum length of prompt plus completion in tokens, over training and evaluation."""
        return max(self.max_sequence_tokens, *(eval_set.max_tokens for eval_set in self.evaluation_sets.values()), 0)

    @property
    def trains_on_equal_rewards(self) -> bool:
        """True if groups whose rewards are all equal are trained on."""
        return self.algorithm.trains_on_equal_rewards and not self.rollout.dynamic_sampling

    @property
    def run_dir(self) -> Path:
        """Run directory."""
        return self.output_dir / self.name

    @property
    def num_slots(self) -> int:
        """Number of buffer slots. A slot holds a group that is in flight, waits to be trained on,
        or was trained on and is not yet published."""
        return (self.max_staleness + 1) * self.groups_per_publish

    @property
    def groups_per_publish(self) -> int:
        """Number of groups trained on between two published weight versions."""
        return self.rollout.groups_per_step * self.algorithm.updates_per_publish

    @property
    def window_groups(self) -> int:
        """Size of the reordering window in groups; 1 trains on groups strictly in order."""
        return max(1, int(self.rollout.window * self.num_slots))

    @property
    def staleness_bound(self) -> int:
        """Maximum staleness of a token in published versions; docs/async.md proves the formula."""
        return (self.num_slots + self.window_groups - 2) // self.groups_per_publish


def broken_rules(config: Config) -> Iterator[BrokenRule]:
    """Yield the broken rules between keys of different sections."""
    for rules in RULES:
        yield from rules(config)
    if config.device in ("cuda", "npu"):
        yield from device_shortage(config)


def _size(config: Config) -> Iterator[BrokenRule]:
    rollout = config.rollout
    if rollout.groups_per_step * rollout.num_requests > MAX_AT_ONCE:
        rule = f"a step must not sample more than {MAX_AT_ONCE:,} completions (groups_per_step * group_size)"
        yield config.broken("rollout.groups_per_step rollout.group_size", rule, "lower one of them")
    num_buffered = config.num_slots * rollout.num_requests
    if config.num_slots > MAX_AT_ONCE or num_buffered > MAX_BUFFERED:
        yield config.broken(
            "max_staleness rollout.groups_per_step algorithm.updates_per_publish",
            f"the buffer is limited to {MAX_AT_ONCE:,} slots and {MAX_BUFFERED:,} completions, but these "
            f"values need {config.num_slots:,} slots with {num_buffered:,} completions",
            "lower max_staleness",
        )


def _staleness(config: Config) -> Iterator[BrokenRule]:
    updates = config.algorithm.updates_per_publish
    if config.num_steps % updates:
        rule = "updates_per_publish must divide num_steps, so that the final weights are published"
        fix = f"set num_steps to {config.num_steps + updates - config.num_steps % updates}"
        yield config.broken("num_steps algorithm.updates_per_publish", rule, fix)
    if config.max_staleness > 0 and _lacks_ratio(config):
        rule = "stale tokens require importance sampling: a loss with the ratio to the sampling policy, or a correction"
        yield config.broken("max_staleness algorithm.loss", rule, _WITH_RATIO)
    yield from _replay(config)
    if config.max_staleness == 0 and config.window_groups > 1:
        rule = "a reordering window requires asynchronous training, because a group that is overtaken becomes stale"
        yield config.broken("rollout.window max_staleness", rule, "remove rollout.window, or set max_staleness to 1")


_WITH_RATIO = "set algorithm.correction, or use a loss with a ratio, such as ppo, with algorithm.proximal set to sampler"


def _lacks_ratio(config: Config) -> bool:
    """Return True if the loss is known to ignore that tokens were sampled by another policy."""
    algorithm = config.algorithm
    is_declared = algorithm.loss_traits.ratio != "undeclared"
    return is_declared and not (algorithm.ratio_starts_at_sampler or algorithm.correction.is_on)


def _replay(config: Config) -> Iterator[BrokenRule]:
    replay, groups_per_step = config.replay, config.rollout.groups_per_step
    if not replay.fraction:
        others = ReplayConfig.model_fields.keys() - {"shard_memory_bytes"}  # which has an effect without replay
        if unused := [key for key in replay.changed(*ReplayConfig.model_fields) if key in others]:
            rule = "the other keys of replay have no effect while fraction is 0"
            fix = "set replay.fraction, for example to 0.5, or remove the others"
            yield config.broken(" replay.".join(["replay.fraction", *unused]), rule, fix)
        return
    if replay.max_age <= config.max_staleness:
        rule = "max_age must exceed max_staleness, because a replayed group is older than a new one"
        yield config.broken("replay.max_age max_staleness", rule, f"set replay.max_age to at least {config.max_staleness + 1}")
    num_replayed = replay.num_replayed(groups_per_step)
    if not 1 <= num_replayed <= replay.capacity:
        yield config.broken(
            "replay.fraction replay.capacity rollout.groups_per_step",
            f"a batch must replay between 1 and replay.capacity groups, but these values give {num_replayed}",
            f"set replay.capacity to at least {num_replayed}" if num_replayed else "raise replay.fraction",
        )
    if _lacks_ratio(config):
        rule = "replay requires importance sampling: a loss with the ratio to the sampling policy, or a correction"
        yield config.broken("replay.fraction algorithm.loss", rule, _WITH_RATIO)


def _loss(config: Config) -> Iterator[BrokenRule]:
    algorithm, weight = config.algorithm, config.algorithm.correction.weight
    if weight != "none" and algorithm.ratio_starts_at_sampler:
        yield config.broken(
            "algorithm.correction.weight algorithm.loss algorithm.proximal",
            "this loss already contains the ratio to the sampling policy, so correction.weight would apply it twice",
            "set algorithm.proximal to step_start, or algorithm.correction.weight to none"
            if algorithm.loss_traits.ratio == "proximal"
            else "set algorithm.correction.weight to none; its rejection bounds are allowed",
        )
    if algorithm.knows_loss and algorithm.loss_traits.ratio == "undeclared":
        uses = {
            "algorithm.correction.weight": weight != "none",
            "max_staleness": config.max_staleness > 0,
            "replay.fraction": config.replay.fraction > 0,
        }
        if any(uses.values()):
            yield config.broken(
                " ".join(["algorithm.loss", *(key for key, is_used in uses.items() if is_used)]),
                "these keys require a loss that declares its importance ratio, and this loss declares none",
                'decorate the loss with titanrl.policy_loss(ratio=...), where ratio is "sampler", "proximal" or "none"',
            )


def _rows(config: Config) -> Iterator[BrokenRule]:
    row_tokens, plan = config.trainer.row_tokens, config.trainer.parallelism
    must_fit = config.sft is None and config.trainer.overlong == "error"
    for name, task in config.data.tasks.items() if must_fit else ():
        longest, key, what = config.sequence_tokens(task), task.key(name), "prompt plus completion"
        if longest <= row_tokens:
            continue
        has_own = isinstance(task, TaskConfig) and task.max_new_tokens is not None
        keys = f"{key}.max_prompt_tokens {key if has_own else 'rollout'}.max_new_tokens"
        if task.environment is not None:
            keys, what = f"{key}.environment.max_conversation_tokens", "conversation"
        fix = f"set trainer.row_tokens to at least {longest}, or trainer.overlong to truncate or skip"
        yield config.broken(f"trainer.row_tokens {keys}", f"row_tokens must cover the longest {what}", fix)
    if plan.cp > 1 and row_tokens % (multiple := 2 * plan.cp * plan.tp):
        rule = "row_tokens must be a multiple of 2 x cp x tp, because each context-parallel rank has two parts of a row"
        fix = f"set trainer.row_tokens to {row_tokens + multiple - row_tokens % multiple}"
        yield config.broken("trainer.row_tokens trainer.parallelism.cp trainer.parallelism.tp", rule, fix)
    elif row_tokens % plan.tp:
        rule = "row_tokens must be a multiple of tp, because sequence parallelism splits each row"
        fix = f"set trainer.row_tokens to {row_tokens + plan.tp - row_tokens % plan.tp}"
        yield config.broken("trainer.row_tokens trainer.parallelism.tp", rule, fix)


def _epochs(config: Config) -> Iterator[BrokenRule]:
    trainer, algorithm, groups_per_step = config.trainer, config.algorithm, config.rollout.groups_per_step
    if config.program != "train":
        for key in ("epochs", "minibatches_per_batch"):
            if getattr(trainer, key) > 1:
                rule = f"titanrl {config.program} does not use this key"
                yield config.broken(f"trainer.{key}", rule, f"remove trainer.{key}")
        return
    if trainer.minibatches_per_batch > groups_per_step:
        yield config.broken(
            "trainer.minibatches_per_batch rollout.groups_per_step",
            "minibatches_per_batch must not exceed groups_per_step, because each mini-batch needs a group",
            f"set trainer.minibatches_per_batch to at most {groups_per_step}",
        )
    if trainer.epochs > 1 and algorithm.loss_traits.ratio == "none" and not algorithm.correction.is_on:
        yield config.broken(
            "trainer.epochs algorithm.loss",
            "later epochs train on tokens of an earlier policy, which requires an importance ratio or a correction",
            "set algorithm.loss to ppo, set algorithm.correction, or set trainer.epochs to 1",
        )


def _sampling(config: Config) -> Iterator[BrokenRule]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.pass_k is not None and algorithm.pass_k > rollout.group_size:
        fix = f"set algorithm.pass_k to at most {rollout.group_size}"
        yield config.broken("algorithm.pass_k rollout.group_size", "group_size must be at least pass_k", fix)
    if config.program == "train" and config.train and not config.data.mixture:
        yield from _single_completions(config, algorithm, rollout.group_size, "algorithm.advantage", "rollout.group_size")
    if config.generator.vllm.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        rule = "the generator must return log-probabilities after temperature and truncation, like the trainer's"
        yield config.broken("generator.vllm.logprobs_mode", rule, "remove generator.vllm.logprobs_mode")
    parts = [reward.function for task in config.data.tasks.values() for reward in task.reward_parts.values()]
    reads_tags = next((function for function in parts if function in ANSWER_REWARDS), None)
    if reads_tags and not rollout.keep_stop and any("</answer>" in text for text in rollout.stop_texts):
        rule = f"the reward {reads_tags} reads the text between <answer> tags, but the stop text is removed from it"
        yield config.broken("rollout.stop rollout.keep_stop", rule, "set rollout.keep_stop to true")


def _tasks(config: Config) -> Iterator[BrokenRule]:
    for name, task in config.data.tasks.items():
        key = task.key(name)
        if config.program != "train" and task.curriculum is not None:
            rule = "fine-tuning and distillation do not support a curriculum, which follows rewards"
            yield BrokenRule({f"{key}.curriculum": task.curriculum.sampler}, rule, "remove it")
        if not isinstance(task, TaskConfig):
            continue
        if config.program == "sft":
            rule = "supervised fine-tuning does not support a mixture"
            yield BrokenRule({"data.mixture": sorted(config.data.tasks)}, rule, "remove it")
            return
        own, group_size = task.algorithm(config.algorithm), task.rollout(config.rollout).group_size
        if own.has_critic != config.algorithm.has_critic:
            rule = "the critic learns from all tasks, so all of them use gae, or none"
            fix = f"remove {key}.advantage, or set algorithm.advantage to {own.advantage}"
            yield config.broken(f"{key}.advantage algorithm.advantage", rule, fix)
        yield from own.broken_pass_k(f"{key}.")
        is_whole = own.advantage in ("pass_at_k", "gdpo")
        if (own.credit != "rollout" and is_whole) or (own.credit == "state" and own.advantage == "reinforce_pp"):
            yield BrokenRule(
                {f"{key}.advantage": own.advantage, "algorithm.credit": own.credit},
                f"{own.advantage} compares whole completions, so credit must be rollout"
                if is_whole
                else "reinforce_pp has no baseline, so there is nothing that turns in the same state could be compared with",
                "choose another advantage, or remove algorithm.credit",
            )
        if own.pass_k is not None and own.pass_k > group_size:
            values = {f"{key}.pass_k": own.pass_k, f"{key}.group_size": group_size}
            yield BrokenRule(values, "group_size must be at least pass_k", f"set pass_k to at most {group_size}")
        if config.program == "train" and config.train:
            advantage = f"{key}.advantage" if task.advantage else "algorithm.advantage"
            size = f"{key}.group_size" if task.group_size else "rollout.group_size"
            yield from _single_completions(config, own, group_size, advantage, size)


def _single_completions(
    config: Config, algorithm: AlgorithmConfig, group_size: int, advantage: str, size: str
) -> Iterator[BrokenRule]:
    """Yield the rules that groups of one completion break; `advantage` and `size` are the paths of the keys."""
    if group_size == 1 and config.rollout.dynamic_sampling:
        rule = "the rewards of a group of one are all equal, so dynamic sampling would discard every group"
        fix = f"set {size} to 2 or more, or rollout.dynamic_sampling to false"
        yield BrokenRule({size: 1, "rollout.dynamic_sampling": True}, rule, fix)
    if group_size == 1 and not algorithm.advantage_traits.keeps_equal_rewards:
        alone = ", ".join(name for name, built_in in ADVANTAGES.items() if built_in.traits.keeps_equal_rewards)
        rule = f"{algorithm.advantage} compares the completions of a group, so it needs at least two"
        fix = f"set {size} to 2 or more, or {advantage} to one of {alone}"
        yield BrokenRule({advantage: algorithm.advantage, size: group_size}, rule, fix)


def _device(config: Config) -> Iterator[BrokenRule]:
    trainer, device = config.trainer, config.device
    if trainer.float8 is not None and device == "npu":
        rule = "torchtitan supports float8 only on CUDA, and emulated on CPU"
        yield config.broken("trainer.float8 device", rule, "set trainer.float8 to null")
    if trainer.float8 is not None and device == "cpu" and trainer.compile:
        rule = "torch.compile does not support float8 emulation on CPU"
        yield config.broken("trainer.compile trainer.float8 device", rule, "set trainer.compile to false")
    if trainer.compile and device == "npu":
        rule = "the packages of requirements/npu.txt include no NPU backend for torch.compile"
        yield config.broken("trainer.compile device", rule, "set trainer.compile to false")


def _adapters(config: Config) -> Iterator[BrokenRule]:
    if config.weights.lora == "merged":
        if config.weights.held_adapters:
            rule = "merged weights have only the newest version"
            yield config.broken("weights.held_adapters weights.lora", rule, "set weights.lora to adapters")
        return
    lora, merged = config.trainer.lora, "or weights.lora to merged"
    if lora is None:
        yield config.broken("weights.lora trainer.lora", "only LoRA has adapters", f"set trainer.lora, {merged}")
        return
    if config.generator.model_impl == "titan":
        rule = "torchtitan's model inside vLLM has no adapters"
        yield config.broken("weights.lora generator.model_impl", rule, f"set generator.model_impl to native, {merged}")
    if lora.rank > LARGEST_RANK:
        rule = f"vLLM's adapters have at most rank {LARGEST_RANK}"
        yield config.broken("trainer.lora.rank weights.lora", rule, f"lower trainer.lora.rank, {merged}")
    for key in VLLM_LORA_ARGS:
        if key in config.generator.vllm:
            rule = "TitanRL sets this argument for weights.lora: adapters"
            yield config.broken(f"generator.vllm.{key} weights.lora", rule, f"remove generator.vllm.{key}")
    if "quantization" in config.generator.vllm:
        rule, fix = "the base of the adapters is not quantized", f"remove generator.vllm.quantization, {merged}"
        yield config.broken("generator.vllm.quantization weights.lora", rule, fix)


def _recipe(config: Config) -> Iterator[BrokenRule]:
    if config.model.path is not None:
        return
    recipe = config.model.recipe
    for key, tp in config.tensor_parallel_degrees.items():
        if recipe.num_kv_heads % tp:
            rule = "num_kv_heads must be a multiple of the tensor-parallel degree"
            fix = f"set {key} to {largest_divisor(recipe.num_kv_heads, tp)}"
            yield config.broken(f"{key} model.recipe.num_kv_heads", rule, fix)
        if recipe.intermediate_size % tp:
            rule = "intermediate_size must be a multiple of the tensor-parallel degree"
            fitting = recipe.intermediate_size + tp - recipe.intermediate_size % tp
            fix = f"set model.recipe.intermediate_size to {fitting}"
            yield config.broken(f"{key} model.recipe.intermediate_size", rule, fix)
    longest = config.trainer.row_tokens
    if config.trainer.overlong != "error":
        longest = max(longest, config.max_sequence_tokens)
    if longest > recipe.max_positions:
        rule = f"max_positions must cover the longest row or sequence, which has {longest} tokens"
        fix = f"set model.recipe.max_positions to at least {longest}"
        yield config.broken("trainer.row_tokens model.recipe.max_positions", rule, fix)
    yield from broken_by_positions(config, recipe.max_positions)


def broken_by_positions(config: Config, max_positions: int) -> Iterator[BrokenRule]:
    """Yield the rules that the additional evaluation sets break for a model with `max_positions` positions."""
    for eval_set in config.evaluation_sets.values():
        if eval_set.key != DEFAULT and eval_set.max_tokens > max_positions:
            key, num_tokens = eval_set.key, eval_set.max_tokens
            yield BrokenRule(
                {f"{key}.max_new_tokens": eval_set.max_new_tokens},
                f"prompt plus completion can have {num_tokens} tokens, but the model has only {max_positions} positions",
                f"lower {key}.max_new_tokens or {key}.data.max_prompt_tokens",
            )


def _warm_start(config: Config) -> Iterator[BrokenRule]:
    warm_start, data = config.warm_start, config.data
    if warm_start is not None and (data.source, data.task) != ("reasoning_gym", "chain_sum"):
        rule = "warm_start has demonstrations only for the reasoning_gym task chain_sum"
        fix = "remove warm_start, or set data.source to reasoning_gym and data.task to chain_sum"
        yield config.broken("data.task data.source", rule, fix)
    if warm_start is not None and warm_start.tool_calls and data.environment is None:
        rule = "tool calls require an environment that runs them"
        fix = "set data.environment.function to calculator or to a custom tool, or remove warm_start.tool_calls"
        yield config.broken("warm_start.tool_calls data.environment", rule, fix)


def _environments(config: Config) -> Iterator[BrokenRule]:
    # In synchronous training all episodes of a worker advance one turn at a time, together.
    groups = 0 if config.max_staleness else -(-config.groups_per_publish // config.rollout.num_workers)
    for name, task in config.data.tasks.items():
        environment, key = task.environment, f"{task.key(name)}.environment"
        if environment is None:
            continue
        num_at_once = groups * task.rollout(config.rollout).num_requests
        if config.program != "train":
            rule = "supervised fine-tuning and distillation do not support environments"
            yield BrokenRule({key: environment.name}, rule, f"remove {key}")
        if environment.max_episodes is not None and environment.max_episodes < num_at_once:
            limit, place = (
                ("options.sessions", "session") if environment.function == "openenv" else ("num_processes", "process")
            )
            yield BrokenRule(
                {f"{key}.{limit}": environment.max_episodes},
                f"synchronous training runs all {num_at_once} episodes of a worker concurrently, each in its own {place}",
                f"set {key}.{limit} to {num_at_once}, or max_staleness to 1",
            )
        has_warm_start = config.warm_start is not None and task is config.data
        calls_tools = config.warm_start is not None and config.warm_start.tool_calls
        unknown = ("python", "tic_tac_toe") if calls_tools else ("tools", "python", "tic_tac_toe")
        if has_warm_start and environment.function in unknown:
            rule = "warm_start has demonstrations only for single turns and for the calculator"
            fix = f"remove warm_start, or set {key} to calculator"
            fix += ", or warm_start.tool_calls to true for a tool that takes a sum" if environment.function == "tools" else ""
            yield BrokenRule({key: environment.name}, rule, fix)
        credit = task.algorithm(config.algorithm) if isinstance(task, TaskConfig) else config.algorithm
        if environment.program and (credit.turn_discount, credit.token_discount) != (1.0, 1.0):
            rule = "the calls of a program have no order of turns to discount over, and one reward for all"
            fix = "set algorithm.turn_discount and algorithm.token_discount to 1"
            yield BrokenRule({f"{key}.program": environment.name}, rule, fix)
        if environment.program and credit.has_critic:
            rule = "the calls of a program have no order in which gae could pass on values"
            of_program = {f"{key}.program": environment.name, "algorithm.advantage": credit.advantage}
            yield BrokenRule(of_program, rule, "choose another advantage")


def _dump(config: Config) -> Iterator[BrokenRule]:
    replays = config.rollout.replay is not None
    keys = [f"rollout.{key}" for key in ("save", "replay") if getattr(config.rollout, key) is not None]
    keys += [] if config.train else ["train"]
    if config.program != "train":
        for key in keys:
            rule = f"titanrl {config.program} does not support this key, because it has no groups of rollouts"
            yield config.broken(key, rule, f"remove {key}")
        return
    if replays and config.rollout.save is not None:
        rule = "the replay of a dump samples no rollouts to save"
        yield config.broken(" ".join(keys), rule, "remove rollout.save or rollout.replay")
    if replays and (config.data.mixture or config.data.curriculum is not None):
        key = "data.mixture" if config.data.mixture else "data.curriculum"
        yield BrokenRule(
            {"rollout.replay": str(config.rollout.replay), key: "..."},
            "the replay of a dump chooses no prompts, so it supports neither tasks nor levels",
            f"remove {key}; all groups then use the advantage of `algorithm`",
        )
    if replays and not config.train:
        rule = "the run would have neither a trainer nor generators"
        yield config.broken("train rollout.replay", rule, "remove train: false or rollout.replay")
    if not config.train and config.replay.fraction:
        yield config.broken("train replay.fraction", "replay requires training", "remove replay.fraction")


def _hosts(config: Config) -> Iterator[BrokenRule]:
    hosts, placement, ranks = config.hosts, config.placement, config.trainer.parallelism.world_size
    if hosts.options and not hosts.is_custom:
        rule = "options are arguments of a function that starts the hosts, which hosts.kind names by its import path"
        yield config.broken("hosts.options hosts.kind", rule, "remove hosts.options, or name a function in hosts.kind")
    if hosts.kind != "local" and config.weights.transport == "arena":
        rule = "arena is shared memory of one host, so it requires hosts.kind: local"
        yield config.broken("weights.transport hosts.kind", rule, "set weights.transport to auto")
    if ranks % hosts.trainer_hosts:
        yield config.broken(
            " ".join(["hosts.trainer_hosts", *_degrees(config)]),
            f"trainer_hosts must divide the {ranks} trainer ranks",
            f"set hosts.trainer_hosts to {largest_divisor(ranks, hosts.trainer_hosts)}",
        )
    if config.generator.replicas % hosts.generator_hosts and placement.replicas_per_host is None:
        fitting = largest_divisor(config.generator.replicas, hosts.generator_hosts)
        fix = f"set hosts.generator_hosts to {fitting}, or placement.replicas_per_host"
        rule = "generator_hosts must divide generator.replicas"
        yield config.broken("hosts.generator_hosts generator.replicas", rule, fix)
    if hosts.kind == "local" and (hosts.trainer_hosts, hosts.generator_hosts) != (1, 1):
        yield config.broken(
            "hosts.kind hosts.trainer_hosts hosts.generator_hosts",
            "hosts.kind: local runs everything on this machine, so there is only one host",
            "remove trainer_hosts and generator_hosts, or set hosts.kind to slurm, kubernetes or launcher",
        )
    if hosts.across_machines and hosts.share_devices and placement.generator == "generators":
        rule = f"{hosts.kind} runs trainer and generators on different hosts, which cannot share devices"
        fix = "remove hosts.share_devices, or set placement.generator to trainers"
        yield config.broken("hosts.share_devices hosts.kind", rule, fix)


def device_shortage(config: Config) -> Iterator[BrokenRule]:
    """Yield a broken rule if a host has too few accelerators. Not meaningful on CPU."""
    hosts, placement, generator = config.hosts, config.placement, config.generator
    ranks, generators, evaluators = config.num_trainer_ranks, config.num_generator_ranks, config.num_evaluator_ranks
    teachers = 0 if config.distill is None else config.distill.num_teacher_ranks
    others = teachers + evaluators
    roles = "trainer rank, generator rank and teacher rank" if teachers else "trainer rank and generator rank"
    roles = "trainer rank, generator rank and evaluator rank" if evaluators else roles if generators else "trainer rank"
    roles = roles if config.train else "generator rank"
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
        involved = {
            "generator.replicas": generators,
            "generator.tp": generator.tp > 1,
            "distill.teacher.tp": teachers,
            "evaluation.background": evaluators,
        }
        yield config.broken(
            " ".join(["hosts.devices_per_host", *_degrees(config), *(key for key, counts in involved.items() if counts)]),
            f"a host needs one accelerator per {roles}, which is {needed}",
            f"set hosts.devices_per_host to {needed} if the host has that many, or {advice}",
        )


def _degrees(config: Config) -> list[str]:
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    return [f"trainer.parallelism.{axis}" for axis in axes if getattr(config.trainer.parallelism, axis) > 1]


def _placement(config: Config) -> Iterator[BrokenRule]:
    hosts, placement = config.hosts, config.placement
    if placement.generator == "trainers" and hosts.generator_hosts > hosts.trainer_hosts:
        yield config.broken(
            "placement.generator hosts.generator_hosts hosts.trainer_hosts",
            "with placement.generator: trainers, generator_hosts must not exceed trainer_hosts",
            f"set hosts.generator_hosts to {hosts.trainer_hosts}, or placement.generator to generators",
        )
    hosts_keys = {"generators": "hosts.generator_hosts", "trainers": "hosts.trainer_hosts", "controller": ""}
    of_workers: HostGroup = "generators" if placement.rollout == "auto" else placement.rollout
    of_group: tuple[tuple[str, HostGroup, str], ...] = (
        ("placement.replicas_per_host", "generators", "generator.replicas"),
        ("placement.workers_per_host", of_workers, "rollout.num_workers"),
    )
    for key, group, processes in of_group:
        numbers, total = config.value_of(key), config.value_of(processes)
        hosts_key, num_hosts = hosts_keys[group], hosts.count(group)
        if numbers is None:
            continue
        if len(numbers) != num_hosts:
            rule = f"needs one number for each of the {num_hosts} hosts, but has {len(numbers)}"
            yield config.broken(f"{key} {hosts_key}", rule, f"write {num_hosts} numbers, or null for an even distribution")
        elif sum(numbers) != total:
            rule = f"the numbers must add up to {total}, but add up to {sum(numbers)}"
            yield config.broken(f"{key} {processes}", rule, f"correct them, or set {processes} to {sum(numbers)}")


def _sft(config: Config) -> Iterator[BrokenRule]:
    if config.sft is None:
        return
    if config.distill is not None:
        values = {"sft": {"path": str(config.sft.path)}, "distill": config.distill.model_dump(mode="json")}
        yield BrokenRule(values, "sft and distill select different subcommands", "remove one of the two sections")
    for name, used in USED_BY_SFT.items():
        section: Section = getattr(config, name)
        for key in section.changed(*type(section).model_fields):
            if key not in used:
                fix = f"set sft.{key} instead" if key in SFTConfig.model_fields else f"remove {name}.{key}"
                yield config.broken(f"{name}.{key}", "supervised fine-tuning does not use this key", fix)
    unused = [
        *(f"trainer.{key}" for key in config.trainer.changed("overlong", "share_prompts")),
        *config.changed("max_staleness"),
    ]
    for key in unused:
        yield config.broken(key, "supervised fine-tuning does not use this key", f"remove {key}")


def _examples(config: Config) -> Iterator[BrokenRule]:
    for key in ("sft", "examples"):
        section: ExampleSet | None = getattr(config, key)
        max_tokens = None if section is None else section.max_example_tokens
        if max_tokens is not None and max_tokens > config.trainer.row_tokens:
            rule = "row_tokens must be at least max_example_tokens"
            fix = f"set trainer.row_tokens to at least {max_tokens}"
            yield config.broken(f"{key}.max_example_tokens trainer.row_tokens", rule, fix)
    if config.examples is None:
        return
    if config.program != "train":
        yield config.broken("examples.path", f"titanrl {config.program} does not use this section", "set examples to null")
    elif not config.train:
        rule = "a run without training does not use examples"
        yield config.broken("examples.path train", rule, "set examples to null, or train to true")
    elif config.algorithm.has_critic and config.algorithm.critic.warmup_steps:
        rule = "while the critic warms up, the policy is not trained, and examples would train it"
        fix = "set algorithm.critic.warmup_steps to 0"
        yield config.broken("examples.path algorithm.critic.warmup_steps", rule, fix)


def _distillation(config: Config) -> Iterator[BrokenRule]:
    if config.distill is None:
        for name in config.data.mixture:
            for key, default in (("teacher", None), ("distill_weight", 1.0), ("reward_weight", None)):
                if config.value_of(f"{MIXTURE}.{name}.{key}") != default:
                    fix = "remove it, or add the section distill"
                    yield config.broken(f"{MIXTURE}.{name}.{key}", "only titanrl distill uses this key", fix)
        return
    for name, keys in UNUSED_BY_DISTILLATION.items():
        section: Section = getattr(config, name)
        for key in section.changed(*keys):
            rule = "distillation does not use this key"
            yield BrokenRule({f"{name}.{key}": getattr(section, key)}, rule, f"remove {name}.{key}")
    for key, value, needed in (
        ("rollout.temperature", config.rollout.temperature, 1.0),
        ("max_staleness", config.max_staleness, 0),
    ):
        if value != needed:
            rule = "distillation requires on-policy samples at temperature 1, at which the teacher is evaluated"
            yield config.broken(key, rule, f"set {key} to {needed:g}")
    by_task = {name: task.distillation(config.distill) for name, task in config.data.tasks.items()}
    for name, task in by_task.items():
        key, names = f"{MIXTURE}.{name}", ", ".join(config.distill.teachers) or "none is defined"
        if task.teacher not in config.distill.by_key:
            rule = "must be the name of a teacher in distill.teachers"
            yield config.broken(f"{key}.teacher", rule, f"choose one of them ({names}), or remove it")
        if not task.weight and config.distill.teacher.policy is not None:
            rule = "with the policy as the teacher, every task is distilled"
            yield config.broken(f"{key}.distill_weight distill.teacher.policy", rule, "set it above 0")
        if not (task.weight or task.reward_weight):
            rule = "with both weights 0, the task would not be trained on"
            yield config.broken(f"{key}.distill_weight {key}.reward_weight", rule, "set one of them above 0")
    unused = config.distill.by_key.keys() - {task.teacher for task in by_task.values() if task.weight}
    for key in sorted(unused):
        fix = "name it as the teacher of a task, or remove it" if key != "distill.teacher" else "let a task use it"
        yield config.broken(key, "no task learns from this teacher", fix)
    for name in config.data.mixture:
        for key in ("advantage", "std_ddof", "pass_k", "group_size", "max_new_tokens"):
            if config.value_of(f"{MIXTURE}.{name}.{key}") is not None:
                rule = "distillation does not use this key: all tasks have the lengths and groups of rollout"
                yield config.broken(f"{MIXTURE}.{name}.{key}", rule, "remove it")


def _evaluation(config: Config) -> Iterator[BrokenRule]:
    evaluation, tasks = config.evaluation, config.data.tasks
    if config.sft is not None and evaluation.best_metric is not None:
        rule = "supervised fine-tuning samples no evaluation sets"
        yield config.broken("evaluation.best_metric", rule, "remove it")
    for task in tasks if evaluation.num_prompts else ():
        if task in evaluation.sets:
            rule = "this name is taken by the default set, which is named after the task"
            fix = "rename the set, or disable the default set with evaluation.num_prompts: 0"
            yield BrokenRule({f"{SETS}.{task}": {}, "data.task": task}, rule, fix)
    for name, section in evaluation.sets.items():
        if section.task is not None and section.task not in tasks:
            fix = f"choose one of {', '.join(tasks)}"
            yield BrokenRule({f"{SETS}.{name}.task": section.task}, "must be a task of data.mixture", fix)
        if section.data is None and section.task is None and len(tasks) > 1:
            rule = "with several tasks in data.mixture, a set must select one of them"
            fix = f"set it to one of {', '.join(tasks)}, or add a data section to the set"
            yield BrokenRule({f"{SETS}.{name}.task": None}, rule, fix)
    if config.sft is not None and evaluation.sets:
        rule = "supervised fine-tuning evaluates only the loss on held-out examples"
        fix = f"remove {SETS}; run `titanrl evaluate` on the exported model instead"
        yield BrokenRule({SETS: sorted(evaluation.sets)}, rule, fix)
    if config.distill is not None and not evaluation.num_prompts:
        rule = "distillation needs the default set, on which it evaluates the teacher"
        yield config.broken("evaluation.num_prompts", rule, "set it to at least 1")


def _best(config: Config) -> Iterator[BrokenRule]:
    metric, sets, updates = config.evaluation.best_metric, config.evaluation_sets, config.algorithm.updates_per_publish
    if metric is None or config.sft is not None:
        return
    names = [name for eval_set in sets.values() for name in eval_set.metrics]
    if metric not in names:
        rule = "must be a metric of an evaluation set that can be maximized"
        fix = f"choose one of {', '.join(names)}" if names else "add an evaluation set"
        yield config.broken("evaluation.best_metric", rule, fix)
        return
    every_steps = next(eval_set.every_steps for eval_set in sets.values() if metric in eval_set.metrics)
    if every_steps % updates:
        yield BrokenRule(
            {
                "evaluation.best_metric": metric,
                "evaluation.every_steps": every_steps,
                "algorithm.updates_per_publish": updates,
            },
            "every_steps must be a multiple of updates_per_publish, so that the evaluated policy is the trainer's",
            f"set every_steps of this set to {every_steps + updates - every_steps % updates}",
        )


RULES: tuple[Callable[[Config], Iterator[BrokenRule]], ...] = (
    *(_size, _staleness, _loss, _rows, _epochs, _sampling, _tasks, _device, _adapters, _recipe, _warm_start, _environments),
    *(_dump, _hosts, _placement, _sft, _examples, _distillation, _evaluation, _best),
)
