"""The root of the configuration, and the rules that relate keys of different sections."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from titanrl.base.choices import DeviceName, Program
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import ANSWER_REWARDS, DataConfig
from titanrl.config.distill import DistillConfig, unused_keys
from titanrl.config.dump_rules import broken_by_dump
from titanrl.config.epoch_rules import broken_by_epochs
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.evaluation import (
    EvaluationConfig,
    EvaluationSet,
    broken_by_best,
    broken_by_evaluation,
    broken_by_positions,
    evaluation_sets,
)
from titanrl.config.faults import FaultsConfig
from titanrl.config.host_rules import broken_by_device, broken_by_hosts, device_shortage
from titanrl.config.mixture import (
    RunDataConfig,
    algorithm_of,
    broken_by_rows,
    broken_by_tasks,
    key_of,
    rollout_of,
    sequence_tokens,
)
from titanrl.config.operations import CheckpointConfig, HostsConfig, LoggingConfig, TimeoutsConfig
from titanrl.config.registry import LossTraits
from titanrl.config.replay import ReplayConfig, broken_by_replay
from titanrl.config.roles import PlacementConfig, broken_by_placement
from titanrl.config.section import FilePath, OrImportPath, Section, Steps
from titanrl.config.sections import (
    GeneratorConfig,
    ModelConfig,
    RolloutConfig,
    SandboxConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
    largest_divisor,
)
from titanrl.config.sft import USED, SFTConfig, unused_by_sft

MAX_AT_ONCE = 1_000_000
"""Upper bound on completions per step, and on buffer slots."""
MAX_BUFFERED = 10_000_000
"""Upper bound on completions in the buffer."""


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
    sft: SFTConfig | None = None
    """Supervised fine-tuning. With this section, the configuration is for `titanrl sft`."""
    distill: DistillConfig | None = None
    """On-policy distillation. With this section, the configuration is for `titanrl distill`."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from self._broken_by_size()
        yield from self._broken_by_staleness()
        yield from self._broken_by_loss()
        yield from self._broken_by_rows()
        yield from broken_by_epochs(self.trainer, self.algorithm, self.rollout.groups_per_step, self.program)
        yield from self._broken_by_sampling()
        yield from broken_by_tasks(self.data.tasks, self.rollout, self.algorithm, self.program)
        yield from broken_by_device(self.trainer, self.device)
        yield from self._broken_by_recipe()
        yield from self._broken_by_warm_start()
        yield from self._broken_by_environment()
        yield from broken_by_dump(self.rollout, self.replay, self.data, train=self.train, program=self.program)
        yield from broken_by_hosts(self.hosts, self.placement, self.trainer.parallelism, self.generator, self.weights)
        yield from broken_by_placement(self.placement, self.hosts, self.generator.replicas, self.rollout.num_workers)
        yield from self._broken_by_sft()
        yield from self._broken_by_distillation()
        yield from broken_by_evaluation(
            self.evaluation, self.data.tasks, is_sft=self.sft is not None, is_distillation=self.distill is not None
        )
        if self.sft is None:
            updates = self.algorithm.updates_per_publish
            yield from broken_by_best(self.evaluation.best_metric, self.evaluation_sets, updates)
        if self.device in ("cuda", "npu"):
            yield from self.device_shortage()

    def _broken_by_size(self) -> Iterator[BrokenRule]:
        rollout = self.rollout
        if rollout.groups_per_step * rollout.num_requests > MAX_AT_ONCE:
            yield BrokenRule(
                values={"rollout.groups_per_step": rollout.groups_per_step, "rollout.group_size": rollout.group_size},
                rule=f"a step must not sample more than {MAX_AT_ONCE:,} completions (groups_per_step * group_size)",
                fix="lower one of them",
            )
        num_buffered = self.num_slots * rollout.num_requests
        if self.num_slots > MAX_AT_ONCE or num_buffered > MAX_BUFFERED:
            yield BrokenRule(
                values={
                    "max_staleness": self.max_staleness,
                    "rollout.groups_per_step": rollout.groups_per_step,
                    "algorithm.updates_per_publish": self.algorithm.updates_per_publish,
                },
                rule=f"the buffer is limited to {MAX_AT_ONCE:,} slots and {MAX_BUFFERED:,} completions, but these "
                f"values need {self.num_slots:,} slots with {num_buffered:,} completions",
                fix="lower max_staleness",
            )

    def _broken_by_staleness(self) -> Iterator[BrokenRule]:
        algorithm, updates = self.algorithm, self.algorithm.updates_per_publish
        if self.num_steps % updates:
            yield BrokenRule(
                values={"num_steps": self.num_steps, "algorithm.updates_per_publish": updates},
                rule="updates_per_publish must divide num_steps, so that the final weights are published",
                fix=f"set num_steps to {self.num_steps + updates - self.num_steps % updates}",
            )
        is_declared = algorithm.loss_traits.ratio != "undeclared"
        if self.max_staleness > 0 and is_declared and not (algorithm.ratio_starts_at_sampler or algorithm.correction.is_on):
            yield BrokenRule(
                values={"max_staleness": self.max_staleness, "algorithm.loss": algorithm.loss},
                rule="stale tokens require importance sampling: a loss with the ratio to the sampling policy, or a correction",
                fix="set algorithm.correction, or use a loss with a ratio, such as ppo, with algorithm.proximal set to sampler",
            )
        yield from broken_by_replay(self.replay, algorithm, self.rollout.groups_per_step, self.max_staleness)
        if self.max_staleness == 0 and self.window_groups > 1:
            yield BrokenRule(
                values={"rollout.window": self.rollout.window, "max_staleness": self.max_staleness},
                rule="a reordering window requires asynchronous training, because a group that is overtaken becomes stale",
                fix="remove rollout.window, or set max_staleness to 1",
            )

    def _broken_by_loss(self) -> Iterator[BrokenRule]:
        algorithm, weight = self.algorithm, self.algorithm.correction.weight
        if weight != "none" and algorithm.ratio_starts_at_sampler:
            yield BrokenRule(
                values={
                    "algorithm.correction.weight": weight,
                    "algorithm.loss": algorithm.loss,
                    "algorithm.proximal": algorithm.proximal,
                },
                rule="this loss already contains the ratio to the sampling policy, so correction.weight would apply it twice",
                fix="set algorithm.proximal to step_start, or algorithm.correction.weight to none"
                if algorithm.loss_traits.ratio == "proximal"
                else "set algorithm.correction.weight to none; its rejection bounds are allowed",
            )
        if algorithm.knows_loss and algorithm.loss_traits.ratio == "undeclared":
            involved: dict[str, object] = {}
            if weight != "none":
                involved["algorithm.correction.weight"] = weight
            if self.max_staleness:
                involved["max_staleness"] = self.max_staleness
            if self.replay.fraction:
                involved["replay.fraction"] = self.replay.fraction
            if involved:
                yield BrokenRule(
                    values={"algorithm.loss": algorithm.loss, **involved},
                    rule="these keys require a loss that declares its importance ratio, and this loss declares none",
                    fix='decorate the loss with titanrl.policy_loss(ratio=...), where ratio is "sampler", "proximal" or "none"',
                )

    def _broken_by_rows(self) -> Iterator[BrokenRule]:
        row_tokens, tp = self.trainer.row_tokens, self.trainer.parallelism.tp
        if self.sft is None and self.trainer.overlong == "error":
            yield from broken_by_rows(self.data.tasks, self.rollout, row_tokens)
        if row_tokens % tp:
            yield BrokenRule(
                values={"trainer.row_tokens": row_tokens, "trainer.parallelism.tp": tp},
                rule="row_tokens must be a multiple of tp, because sequence parallelism splits each row",
                fix=f"set trainer.row_tokens to {row_tokens + tp - row_tokens % tp}",
            )

    def _broken_by_sampling(self) -> Iterator[BrokenRule]:
        algorithm, rollout = self.algorithm, self.rollout
        if algorithm.pass_k is not None and algorithm.pass_k > rollout.group_size:
            yield BrokenRule(
                values={"algorithm.pass_k": algorithm.pass_k, "rollout.group_size": rollout.group_size},
                rule="group_size must be at least pass_k",
                fix=f"set algorithm.pass_k to at most {rollout.group_size}",
            )
        mode = self.generator.vllm.get("logprobs_mode", "processed_logprobs")
        if mode != "processed_logprobs":
            yield BrokenRule(
                values={"generator.vllm.logprobs_mode": mode},
                rule="the generator must return log-probabilities after temperature and truncation, like the trainer's",
                fix="remove generator.vllm.logprobs_mode",
            )
        parts = [reward.function for task in self.data.tasks.values() for reward in task.reward_parts.values()]
        reads_tags = next((function for function in parts if function in ANSWER_REWARDS), None)
        if reads_tags and not rollout.keep_stop and any("</answer>" in text for text in rollout.stop_texts):
            yield BrokenRule(
                values={"rollout.stop": list(rollout.stop), "rollout.keep_stop": False},
                rule=f"the reward {reads_tags} reads the text between <answer> tags, but the stop text is removed from it",
                fix="set rollout.keep_stop to true",
            )

    def _broken_by_recipe(self) -> Iterator[BrokenRule]:
        if self.model.path is not None:
            return
        recipe = self.model.recipe
        for key, tp in self.tensor_parallel_degrees.items():
            if recipe.num_kv_heads % tp:
                yield BrokenRule(
                    values={key: tp, "model.recipe.num_kv_heads": recipe.num_kv_heads},
                    rule="num_kv_heads must be a multiple of the tensor-parallel degree",
                    fix=f"set {key} to {largest_divisor(recipe.num_kv_heads, tp)}",
                )
            if recipe.intermediate_size % tp:
                fitting = recipe.intermediate_size + tp - recipe.intermediate_size % tp
                yield BrokenRule(
                    values={key: tp, "model.recipe.intermediate_size": recipe.intermediate_size},
                    rule="intermediate_size must be a multiple of the tensor-parallel degree",
                    fix=f"set model.recipe.intermediate_size to {fitting}",
                )
        longest = self.trainer.row_tokens
        if self.trainer.overlong != "error":
            longest = max(longest, self.max_sequence_tokens)
        if longest > recipe.max_positions:
            yield BrokenRule(
                values={"trainer.row_tokens": self.trainer.row_tokens, "model.recipe.max_positions": recipe.max_positions},
                rule=f"max_positions must cover the longest row or sequence, which has {longest} tokens",
                fix=f"set model.recipe.max_positions to at least {longest}",
            )
        yield from broken_by_positions(self.evaluation_sets, recipe.max_positions)

    def _broken_by_warm_start(self) -> Iterator[BrokenRule]:
        if self.warm_start is not None and (self.data.source, self.data.task) != ("reasoning_gym", "chain_sum"):
            yield BrokenRule(
                values={"data.task": self.data.task, "data.source": self.data.source},
                rule="warm_start has demonstrations only for the reasoning_gym task chain_sum",
                fix="remove warm_start, or set data.source to reasoning_gym and data.task to chain_sum",
            )

    def _broken_by_environment(self) -> Iterator[BrokenRule]:
        # In synchronous training all episodes of a worker advance one turn at a time, together.
        groups = 0 if self.max_staleness else -(-self.groups_per_publish // self.rollout.num_workers)
        if self.warm_start is not None and self.warm_start.tool_calls and self.data.environment is None:
            yield BrokenRule(
                values={"warm_start.tool_calls": True, "data.environment": None},
                rule="tool calls require an environment that runs them",
                fix="set data.environment.function to calculator or to a custom tool, or remove warm_start.tool_calls",
            )
        for name, task in self.data.tasks.items():
            if task.environment is not None:
                yield from task.environment.broken_by_run(
                    key_of(name, task),
                    is_rl=self.sft is None and self.distill is None,
                    has_warm_start=self.warm_start is not None and task is self.data,
                    num_at_once=groups * rollout_of(task, self.rollout).num_requests,
                )

    def _broken_by_sft(self) -> Iterator[BrokenRule]:
        if self.sft is None:
            return
        if self.distill is not None:
            yield BrokenRule(
                values={"sft": {"path": str(self.sft.path)}, "distill": self.distill.model_dump(mode="json")},
                rule="sft and distill select different subcommands",
                fix="remove one of the two sections",
            )
        yield from unused_by_sft({name: getattr(self, name) for name in USED})
        max_tokens, row_tokens = self.sft.max_example_tokens, self.trainer.row_tokens
        if max_tokens is not None and max_tokens > row_tokens:
            yield BrokenRule(
                values={"sft.max_example_tokens": max_tokens, "trainer.row_tokens": row_tokens},
                rule="row_tokens must be at least max_example_tokens",
                fix=f"set trainer.row_tokens to at least {max_tokens}",
            )

    def _broken_by_distillation(self) -> Iterator[BrokenRule]:
        if self.distill is None:
            return
        yield from unused_keys({"rollout": self.rollout, "replay": self.replay, "algorithm": self.algorithm})
        exact = {"rollout.temperature": (self.rollout.temperature, 1.0), "max_staleness": (self.max_staleness, 0)}
        for key, (value, needed) in exact.items():
            if value != needed:
                yield BrokenRule(
                    values={key: value},
                    rule="distillation requires on-policy samples at temperature 1, at which the teacher is evaluated",
                    fix=f"set {key} to {needed:g}",
                )

    def device_shortage(self) -> Iterator[BrokenRule]:
        """Yield a broken rule if a host has too few accelerators. Not meaningful on CPU."""
        num_teachers = 0 if self.distill is None else self.distill.teacher.tp
        ranks = (self.num_generator_ranks, num_teachers, self.num_evaluator_ranks)
        yield from device_shortage(
            self.hosts, self.placement, self.trainer.parallelism, self.generator, *ranks, trains=self.train
        )

    def with_loss_traits(self, traits: LossTraits) -> Self:
        """Return a copy with the traits that a custom loss declares.

        Raises:
            BrokenRules: The traits contradict other keys.
        """
        config = self.model_copy(update={"algorithm": self.algorithm.with_loss_traits(traits)})
        if broken := tuple(config._broken_rules()):
            raise BrokenRules(*broken)
        return config

    @property
    def program(self) -> Program:
        """Subcommand of `titanrl` that runs this configuration."""
        return "sft" if self.sft is not None else "train" if self.distill is None else "distill"

    @property
    def tensor_parallel_degrees(self) -> dict[str, int]:
        """Tensor-parallel degrees of the trainer and of each generator replica, by key."""
        return {"trainer.parallelism.tp": self.trainer.parallelism.tp, "generator.tp": self.generator.tp}

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
        is_between = any(0 < subset.every_steps < self.num_steps for subset in self.evaluation_sets.values())
        return self.generator.tp if is_asynchronous and is_between and self.evaluation.background else 0

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of a training sequence in tokens: of prompt plus completion, of a conversation, or of an SFT
        example."""
        if self.sft is not None:
            return self.sft.max_example_tokens or self.trainer.row_tokens
        return max(sequence_tokens(task, self.rollout, self.trainer.row_tokens) for task in self.data.tasks.values())

    def of_task(self, task: DataConfig) -> Self:
        """Return a copy of the configuration with the settings of one task."""
        sections = {"rollout": rollout_of(task, self.rollout), "algorithm": algorithm_of(task, self.algorithm)}
        return self.model_copy(update={"data": task, **sections})

    @property
    def evaluation_sets(self) -> Mapping[str, EvaluationSet]:
        """Evaluation sets by name, the default set first."""
        max_new_tokens = {name: rollout_of(task, self.rollout).max_new_tokens for name, task in self.data.tasks.items()}
        return evaluation_sets(self.evaluation, self.data.tasks, max_new_tokens)

    @property
    def evaluates(self) -> bool:
        """True if evaluation sets are sampled. The replay of a dump has no generators, and without a trainer the policy never
        changes."""
        return self.train and self.rollout.replay is None

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum length of prompt plus completion in tokens, over training and evaluation."""
        return max(self.max_sequence_tokens, *(subset.max_tokens for subset in self.evaluation_sets.values()), 0)

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
        """Number of buffer slots. A slot holds a group that is in flight or waits to be trained on."""
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
    def worst_staleness(self) -> int:
        """Maximum staleness of a token in published versions; `replay/buffer.py` derives the formula."""
        return (self.num_slots + self.window_groups - 2) // self.groups_per_publish
