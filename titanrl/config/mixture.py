"""The section `data.mixture`: several tasks in one run, each with its own prompts, rewards and settings."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, model_validator

from titanrl.base.choices import Program
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.registry import ADVANTAGES
from titanrl.config.section import Count, OrImportPath, Tokens
from titanrl.config.sections import RolloutConfig

MIXTURE = "data.mixture"
"""Section of the tasks."""
SHARED_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Keys of `rollout` that all tasks share."""


class TaskConfig(DataConfig):
    """One task of a mixture. It inherits the keys of `data` that it does not set."""

    weight: PositiveFloat = 1.0
    """Share of this task among the groups that are trained on, relative to the other weights."""
    max_new_tokens: Tokens | None = None
    """Maximum completion length in tokens; null uses `rollout.max_new_tokens`."""
    group_size: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Number of completions per prompt; null uses `rollout.group_size`."""
    advantage: Annotated[str, OrImportPath(tuple(ADVANTAGES))] | None = None
    """Advantage estimator of this task; null uses `algorithm.advantage`. Estimators with batch statistics compute them over all
    tasks that use the same one."""
    std_ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """Delta degrees of freedom of the standard deviation; null uses `algorithm.std_ddof`."""
    pass_k: Count | None = None
    """Value of k for `advantage: pass_at_k`; null uses `algorithm.pass_k`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_shared_keys(cls, values: Any) -> Any:
        shared = [key for key in SHARED_SAMPLING if isinstance(values, dict) and key in values]
        if shared:
            raise BrokenRules(
                *(
                    BrokenRule(
                        values={key: values[key]},
                        rule="all tasks share this key, because the trainer uses one sampling distribution for all of them",
                        fix=f"remove it, and set rollout.{key}",
                    )
                    for key in shared
                )
            )
        return values

    def rollout(self, shared: RolloutConfig) -> RolloutConfig:
        """Return the section `rollout` with the settings of this task."""
        own = {"max_new_tokens": self.max_new_tokens, "group_size": self.group_size}
        return shared.model_copy(update={key: value for key, value in own.items() if value is not None})

    def algorithm(self, shared: AlgorithmConfig) -> AlgorithmConfig:
        """Return the section `algorithm` with the settings of this task."""
        own: dict[str, object] = {"std_ddof": self.std_ddof, "advantage": self.advantage, "pass_k": self.pass_k}
        changes = {key: value for key, value in own.items() if value is not None}
        if self.advantage is not None and self.pass_k is None:
            changes["pass_k"] = shared.pass_k if self.advantage == "pass_at_k" else None
        return shared.model_copy(update=changes)


class RunDataConfig(DataConfig):
    """Prompts, and the rewards of their completions."""

    mixture: dict[str, TaskConfig] = {}
    """Tasks by name, trained on together in the ratio of their weights (docs/howto/mixture.md). The other keys of this section
    are the defaults of every task. If empty, this section is the only task."""

    @model_validator(mode="before")
    @classmethod
    def _put_in_defaults(cls, values: Any) -> Any:
        if isinstance(values, DataConfig) and not isinstance(values, cls):
            return {key: getattr(values, key) for key in values.model_fields_set}
        mixture = values.get("mixture") if isinstance(values, dict) else None
        if not isinstance(mixture, dict):
            return values
        shared = {key: value for key, value in values.items() if key in DataConfig.model_fields}
        tasks = {name: {**shared, **task} if isinstance(task, dict) else task for name, task in mixture.items()}
        return {**values, "mixture": tasks}

    @property
    def tasks(self) -> Mapping[str, DataConfig]:
        """Tasks by name. Without a mixture, this section under the name of `task`."""
        return self.mixture or {self.task: self}

    @property
    def draws_by_outcome(self) -> bool:
        """True if the choice of prompts depends on earlier groups."""
        return bool(self.mixture) or self.curriculum is not None

    def weight_of(self, part: str, task: int = 0) -> float:
        """Return the weight of a part of the reward. `task` is the index of the task in the mixture."""
        if not self.mixture:
            return super().weight_of(part)
        return list(self.mixture.values())[task].weight_of(part)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from super()._broken_rules()
        for name in self.mixture:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
                yield BrokenRule(
                    values={f"mixture.{name}": {}},
                    rule="the name of a task must consist of letters, digits, _ and -, and start with a letter or digit",
                    fix="rename it",
                )


def key_of(name: str, task: DataConfig) -> str:
    """Return the path of a task's section."""
    return f"{MIXTURE}.{name}" if isinstance(task, TaskConfig) else "data"


def rollout_of(task: DataConfig, shared: RolloutConfig) -> RolloutConfig:
    """Return the section `rollout` with the settings of a task."""
    return task.rollout(shared) if isinstance(task, TaskConfig) else shared


def algorithm_of(task: DataConfig, shared: AlgorithmConfig) -> AlgorithmConfig:
    """Return the section `algorithm` with the settings of a task."""
    return task.algorithm(shared) if isinstance(task, TaskConfig) else shared


def sequence_tokens(task: DataConfig, rollout: RolloutConfig, row_tokens: int) -> int:
    """Return the maximum length of a task's prompt plus completion, or of its conversations, in tokens."""
    if task.environment is not None:
        return task.environment.max_conversation_tokens or row_tokens
    return task.max_prompt_tokens + rollout_of(task, rollout).max_new_tokens


def broken_by_rows(tasks: Mapping[str, DataConfig], rollout: RolloutConfig, row_tokens: int) -> Iterator[BrokenRule]:
    """Yield a rule for each task whose sequences do not fit into a row."""
    for name, task in tasks.items():
        longest, key, environment = sequence_tokens(task, rollout, row_tokens), key_of(name, task), task.environment
        if longest <= row_tokens:
            continue
        has_own = isinstance(task, TaskConfig) and task.max_new_tokens is not None
        yield BrokenRule(
            values={
                "trainer.row_tokens": row_tokens,
                **(
                    {f"{key}.environment.max_conversation_tokens": environment.max_conversation_tokens}
                    if environment is not None
                    else {
                        f"{key}.max_prompt_tokens": task.max_prompt_tokens,
                        f"{key if has_own else 'rollout'}.max_new_tokens": rollout_of(task, rollout).max_new_tokens,
                    }
                ),
            },
            rule=f"row_tokens must cover the longest {'prompt plus completion' if environment is None else 'conversation'}",
            fix=f"set trainer.row_tokens to at least {longest}, or trainer.overlong to truncate or skip",
        )


def broken_by_tasks(
    tasks: Mapping[str, DataConfig], rollout: RolloutConfig, algorithm: AlgorithmConfig, program: Program
) -> Iterator[BrokenRule]:
    """Yield the rules that the tasks of a run break together with other sections.

    Args:
        tasks: Tasks of the run by name.
        rollout: Section `rollout`.
        algorithm: Section `algorithm`.
        program: Subcommand of the configuration.
    """
    for name, task in tasks.items():
        key = key_of(name, task)
        if program != "train" and task.curriculum is not None:
            yield BrokenRule(
                values={f"{key}.curriculum": task.curriculum.sampler},
                rule="fine-tuning and distillation do not support a curriculum, which follows rewards",
                fix="remove it",
            )
        if not isinstance(task, TaskConfig):
            continue
        if program == "sft":
            yield BrokenRule(
                values={MIXTURE: sorted(tasks)}, rule="supervised fine-tuning does not support a mixture", fix="remove it"
            )
            return
        own = task.algorithm(algorithm)
        yield from own.broken_pass_k(f"{key}.")
        if own.credit != "rollout" and own.advantage in ("pass_at_k", "gdpo"):
            yield BrokenRule(
                values={f"{key}.advantage": own.advantage, "algorithm.credit": own.credit},
                rule=f"{own.advantage} compares whole completions, so credit must be rollout",
                fix="choose another advantage, or remove algorithm.credit",
            )
        group_size = task.rollout(rollout).group_size
        if own.pass_k is not None and own.pass_k > group_size:
            yield BrokenRule(
                values={f"{key}.pass_k": own.pass_k, f"{key}.group_size": group_size},
                rule="group_size must be at least pass_k",
                fix=f"set pass_k to at most {group_size}",
            )
