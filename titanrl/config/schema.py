"""The root of the configuration, and the rules that involve several sections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from titanrl.config.choices import DeviceName
from titanrl.config.errors import BrokenRule
from titanrl.config.operations import CheckpointConfig, EvaluationConfig, HostsConfig, LoggingConfig, TimeoutsConfig
from titanrl.config.section import FilePath, Section, Steps
from titanrl.config.sections import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    RolloutConfig,
    SandboxConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
    largest_divisor,
)

MAX_AT_ONCE = 1_000_000
"""Limit of completions per step, and of buffer slots."""


class Config(Section):
    """Configuration of one training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its directory is `<output_dir>/<name>`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of every random number generator."""
    num_steps: Steps
    """Number of optimizer steps."""
    device: DeviceName = "auto"
    """Device of trainer and generators; `auto` selects the first available one of NPU, CUDA and CPU."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Maximum age of a token, in published weight versions, when it is trained on; 0 is synchronous, on-policy training.
    `rollout.window` can extend it."""
    output_dir: FilePath = Path("runs")
    """Parent of the run directories."""
    cache_dir: FilePath = Path("cache")
    """Directory for the models of `model.recipe` and `warm_start`, reused between runs."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before RL; null skips it."""
    data: DataConfig = DataConfig()
    """Prompts and scorer."""
    rollout: RolloutConfig = RolloutConfig()
    """Groups of completions per prompt."""
    sandbox: SandboxConfig = SandboxConfig()
    """Scoring processes."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Objective and optimizer."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer mesh."""
    generator: GeneratorConfig = GeneratorConfig()
    """The generator mesh."""
    weights: WeightsConfig = WeightsConfig()
    """Weight sync."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines of all waits."""
    logging: LoggingConfig = LoggingConfig()
    """Console and records."""
    hosts: HostsConfig = HostsConfig()
    """Placement on hosts."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from self._broken_by_size()
        yield from self._broken_by_staleness()
        yield from self._broken_by_rows()
        yield from self._broken_by_sampling()
        yield from self._broken_by_device()
        yield from self._broken_by_recipe()
        yield from self._broken_by_warm_start()
        yield from self._broken_by_hosts()
        if self.device in ("cuda", "npu"):
            yield from self.device_shortage()

    def _broken_by_size(self) -> Iterator[BrokenRule]:
        rollout = self.rollout
        if rollout.groups_per_step * rollout.num_requests > MAX_AT_ONCE:
            yield BrokenRule(
                values={"rollout.groups_per_step": rollout.groups_per_step, "rollout.group_size": rollout.group_size},
                rule=f"a step must not sample more than {MAX_AT_ONCE:,} completions",
                fix="lower one of them",
            )
        if self.num_slots > MAX_AT_ONCE:
            yield BrokenRule(
                values={
                    "max_staleness": self.max_staleness,
                    "rollout.groups_per_step": rollout.groups_per_step,
                    "algorithm.updates_per_publish": self.algorithm.updates_per_publish,
                },
                rule=f"the buffer must not need more than {MAX_AT_ONCE:,} slots, and these values need {self.num_slots:,}",
                fix="lower max_staleness",
            )

    def _broken_by_staleness(self) -> Iterator[BrokenRule]:
        updates = self.algorithm.updates_per_publish
        if self.num_steps % updates:
            yield BrokenRule(
                values={"num_steps": self.num_steps, "algorithm.updates_per_publish": updates},
                rule="updates_per_publish must divide num_steps, so that the last version is published",
                fix=f"set num_steps to {self.num_steps + updates - self.num_steps % updates}",
            )
        algorithm = self.algorithm
        if self.max_staleness > 0 and not (algorithm.ratio_starts_at_sampler or algorithm.correction.is_on):
            yield BrokenRule(
                values={"max_staleness": self.max_staleness, "algorithm.loss": algorithm.loss},
                rule="with stale tokens the loss must contain the ratio to the sampling policy, or a correction for it",
                fix="set algorithm.correction, or algorithm.proximal to sampler with a loss that has a ratio, such as ppo",
            )
        if self.max_staleness == 0 and self.window_groups > 1:
            yield BrokenRule(
                values={"rollout.window": self.rollout.window, "max_staleness": self.max_staleness},
                rule="synchronous training consumes groups in order, because a group that is overtaken becomes stale",
                fix="remove rollout.window, or set max_staleness to 1",
            )

    def _broken_by_rows(self) -> Iterator[BrokenRule]:
        row_tokens, tp = self.trainer.row_tokens, self.trainer.parallelism.tp
        if self.trainer.overlong == "error" and self.max_sequence_tokens > row_tokens:
            yield BrokenRule(
                values={
                    "trainer.row_tokens": row_tokens,
                    "data.max_prompt_tokens": self.data.max_prompt_tokens,
                    "rollout.max_new_tokens": self.rollout.max_new_tokens,
                },
                rule="a row must hold the longest prompt and completion",
                fix=f"set trainer.row_tokens to at least {self.max_sequence_tokens}, or trainer.overlong to truncate or skip",
            )
        if row_tokens % tp:
            yield BrokenRule(
                values={"trainer.row_tokens": row_tokens, "trainer.parallelism.tp": tp},
                rule="tp must divide row_tokens, because sequence parallelism splits each row",
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
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        cut = {f"rollout.{key}": value for key, value in rollout.model_dump(include=set(off)).items() if value != off[key]}
        if cut and algorithm.compares_with_sampler:
            yield BrokenRule(
                values={**cut, "algorithm.loss": algorithm.loss},
                rule="the sampler's log-probabilities are of a truncated distribution and the trainer's of the full one, so "
                "their ratio would be wrong",
                fix=f"remove {' and '.join(cut)}, or set algorithm.loss to reinforce without correction",
            )
        mode = self.generator.vllm.get("logprobs_mode", "processed_logprobs")
        if mode != "processed_logprobs":
            yield BrokenRule(
                values={"generator.vllm.logprobs_mode": mode},
                rule="log-probabilities must include the temperature, as the trainer's do",
                fix="remove generator.vllm.logprobs_mode",
            )

    def _broken_by_device(self) -> Iterator[BrokenRule]:
        trainer = self.trainer
        if trainer.float8 is not None and self.device == "npu":
            yield BrokenRule(
                values={"trainer.float8": trainer.float8, "device": self.device},
                rule="torchtitan supports float8 on CUDA, and emulates it on CPU",
                fix="set trainer.float8 to null",
            )
        if trainer.float8 is not None and self.device == "cpu" and trainer.compile:
            yield BrokenRule(
                values={"trainer.compile": True, "trainer.float8": trainer.float8, "device": self.device},
                rule="torch.compile does not support float8 emulation on CPU",
                fix="set trainer.compile to false",
            )
        if trainer.compile and self.device == "npu":
            yield BrokenRule(
                values={"trainer.compile": True, "device": self.device},
                rule="torch.compile has no NPU backend among the packages of requirements/npu.txt",
                fix="set trainer.compile to false",
            )

    def _broken_by_recipe(self) -> Iterator[BrokenRule]:
        if self.model.path is not None:
            return
        recipe = self.model.recipe
        for key, tp in self.tensor_parallel_degrees.items():
            if recipe.num_kv_heads % tp:
                yield BrokenRule(
                    values={key: tp, "model.recipe.num_kv_heads": recipe.num_kv_heads},
                    rule="tp must divide the number of key-value heads",
                    fix=f"set {key} to {largest_divisor(recipe.num_kv_heads, tp)}",
                )
            if recipe.intermediate_size % tp:
                fitting = recipe.intermediate_size + tp - recipe.intermediate_size % tp
                yield BrokenRule(
                    values={key: tp, "model.recipe.intermediate_size": recipe.intermediate_size},
                    rule="tp must divide the width of the feed-forward block",
                    fix=f"set model.recipe.intermediate_size to {fitting}",
                )
        longest = self.trainer.row_tokens
        if self.trainer.overlong != "error":
            longest = max(longest, self.max_sequence_tokens)
        if longest > recipe.max_positions:
            yield BrokenRule(
                values={"trainer.row_tokens": self.trainer.row_tokens, "model.recipe.max_positions": recipe.max_positions},
                rule="rows and sequences must not be longer than the model's max_positions",
                fix=f"set model.recipe.max_positions to at least {longest}",
            )

    def _broken_by_warm_start(self) -> Iterator[BrokenRule]:
        if self.warm_start is not None and (self.data.source, self.data.task) != ("reasoning_gym", "chain_sum"):
            yield BrokenRule(
                values={"data.task": self.data.task, "data.source": self.data.source},
                rule="warm_start requires the task chain_sum of reasoning_gym, the only one with demonstrations",
                fix="remove warm_start, or set data.task to chain_sum",
            )

    def _broken_by_hosts(self) -> Iterator[BrokenRule]:
        hosts, ranks, replicas = self.hosts, self.trainer.parallelism.world_size, self.generator.replicas
        if hosts.kind == "slurm" and self.weights.transport == "arena":
            yield BrokenRule(
                values={"weights.transport": "arena", "hosts.kind": "slurm"},
                rule="an arena is shared memory of one host, and slurm starts each mesh on its own",
                fix="set weights.transport to auto",
            )
        if ranks % hosts.trainer_hosts:
            yield BrokenRule(
                values={"hosts.trainer_hosts": hosts.trainer_hosts, **self._parallelism_values()},
                rule=f"trainer_hosts must divide the {ranks} trainer ranks",
                fix=f"set hosts.trainer_hosts to {largest_divisor(ranks, hosts.trainer_hosts)}",
            )
        if replicas % hosts.generator_hosts:
            yield BrokenRule(
                values={"hosts.generator_hosts": hosts.generator_hosts, "generator.replicas": replicas},
                rule="generator_hosts must divide the number of replicas",
                fix=f"set hosts.generator_hosts to {largest_divisor(replicas, hosts.generator_hosts)}",
            )
        if hosts.kind == "local" and (hosts.trainer_hosts, hosts.generator_hosts) != (1, 1):
            yield BrokenRule(
                values={
                    "hosts.kind": hosts.kind,
                    "hosts.trainer_hosts": hosts.trainer_hosts,
                    "hosts.generator_hosts": hosts.generator_hosts,
                },
                rule="local runs every mesh on this machine, so each mesh has one host",
                fix="remove trainer_hosts and generator_hosts, or set hosts.kind to slurm",
            )
        if hosts.kind == "slurm" and hosts.share_devices:
            yield BrokenRule(
                values={"hosts.share_devices": True, "hosts.kind": hosts.kind},
                rule="slurm starts trainer and generators on different hosts, which cannot share devices",
                fix="remove hosts.share_devices",
            )

    def device_shortage(self) -> Iterator[BrokenRule]:
        """Yield the rule broken by a host with too few accelerators; meaningless on CPU."""
        hosts, ranks, generators = self.hosts, self.trainer.parallelism.world_size, self.generator.num_ranks
        advice = "lower the degrees or the replicas"
        if hosts.kind == "slurm":
            needed = max(ranks // hosts.trainer_hosts, generators // hosts.generator_hosts)
        elif hosts.share_devices:
            needed = max(ranks, generators)
        else:  # emulated hosts (`process`) are one machine too, and see the same accelerators
            needed = ranks + generators
            advice += ", or let them share with hosts.share_devices: true"
        if needed > hosts.devices_per_host:
            yield BrokenRule(
                values={
                    "hosts.devices_per_host": hosts.devices_per_host,
                    **self._parallelism_values(),
                    "generator.replicas": self.generator.replicas,
                    **({"generator.tp": self.generator.tp} if self.generator.tp > 1 else {}),
                },
                rule=f"a host must have one accelerator per trainer rank and generator rank on it, which is {needed}",
                fix=f"set hosts.devices_per_host to {needed} if the host has as many, or {advice}",
            )

    def _parallelism_values(self) -> dict[str, int]:
        degrees = self.trainer.parallelism.model_dump(include={"dp_replicate", "dp_shard", "tp"})
        return {f"trainer.parallelism.{axis}": degree for axis, degree in degrees.items() if degree > 1}

    @property
    def tensor_parallel_degrees(self) -> dict[str, int]:
        """Tensor-parallel degrees of the trainer and of each generator replica, by key."""
        return {"trainer.parallelism.tp": self.trainer.parallelism.tp, "generator.tp": self.generator.tp}

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest prompt plus the longest completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

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
        """Number of buffer slots: groups in flight or waiting to be trained on."""
        return (self.max_staleness + 1) * self.groups_per_publish

    @property
    def groups_per_publish(self) -> int:
        """Number of groups trained on per published version."""
        return self.rollout.groups_per_step * self.algorithm.updates_per_publish

    @property
    def window_groups(self) -> int:
        """Number of groups in the reordering window; 1 trains on groups strictly in order."""
        return max(1, int(self.rollout.window * self.num_slots))

    @property
    def worst_staleness(self) -> int:
        """Maximum age of a token in published versions; `replay/buffer.py` derives the formula."""
        return (self.num_slots + self.window_groups - 2) // self.groups_per_publish
