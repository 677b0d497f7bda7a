"""The section `evaluation`: which prompts are evaluated, how often, and what follows from the results."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, CountOrZero, Section, StepsOrZero, Tokens

MAX_COMPLETIONS = 1_000_000
"""Limit of completions per evaluation."""
DEFAULT = "evaluation"
"""Key of the default set."""
SETS = "evaluation.sets"
"""Key of the evaluation sets."""

Split = Literal["heldout", "all"]


class EvaluationSetConfig(Section):
    """One evaluation set."""

    every_steps: StepsOrZero | None = None
    """Number of steps between evaluations, 0 for those before and after training alone; null means `evaluation.every_steps`."""
    num_prompts: Count = 200
    """Number of prompts."""
    split: Split = "heldout"
    """`heldout` takes prompts of the held-out split, which training never contains if it has the same `heldout_fraction`; `all`
    takes every prompt of a set with data of its own."""
    num_samples: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of completions per prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature; 0 is greedy. vLLM takes no others below 0.01."""
    max_new_tokens: Tokens | None = None
    """Maximum completion length; null means `rollout.max_new_tokens`."""
    pass_k: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Numbers k for which pass@k is estimated; without any, `num_samples` if that is more than 1."""
    solved_from: float = 1.0
    """Reward from which a completion counts as solved, for pass@k and avg@k."""
    data: DataConfig | None = None
    """Prompts and rewards of the set; null means those of the run."""
    task: str | None = None
    """Task of `data.mixture` whose held-out prompts and rewards are those of the set."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_samples > 1 and self.temperature == 0:
            yield BrokenRule(
                values={"temperature": self.temperature, "num_samples": self.num_samples},
                rule="greedy completions of a prompt are all equal",
                fix="set temperature to 1, or num_samples to 1",
            )
        if 0 < self.temperature < 0.01:
            yield BrokenRule(
                values={"temperature": self.temperature},
                rule="vLLM takes no temperature between 0 and 0.01",
                fix="set it to 0 for greedy decoding",
            )
        if self.pass_k and max(self.pass_k) > self.num_samples:
            yield BrokenRule(
                values={"pass_k": self.pass_k, "num_samples": self.num_samples},
                rule="pass@k needs at least k samples per prompt",
                fix=f"set num_samples to at least {max(self.pass_k)}",
            )
        if self.num_prompts * self.num_samples > MAX_COMPLETIONS:
            yield BrokenRule(
                values={"num_prompts": self.num_prompts, "num_samples": self.num_samples},
                rule=f"an evaluation must not sample more than {MAX_COMPLETIONS:,} completions",
                fix="lower one of them",
            )
        if self.data is not None and self.task is not None:
            yield BrokenRule(
                values={"task": self.task, "data": self.data.source},
                rule="the prompts of a set are either its own or those of a task",
                fix="remove one of them",
            )
        if self.data is not None and self.data.curriculum is not None:
            yield BrokenRule(
                values={"data.curriculum": self.data.curriculum.sampler},
                rule="an evaluation set has no levels",
                fix="remove it, or give each level a set of its own",
            )
        if self.split == "all" and self.data is None:
            yield BrokenRule(
                values={"split": self.split, "data": None},
                rule="all prompts of the run's own data include those that are trained on",
                fix="set split to heldout, or give the set data of its own",
            )


class EvaluationConfig(Section):
    """Evaluation. The default set are held-out prompts of `data`, or of each task of `data.mixture`, answered greedily; `sets`
    adds others (docs/howto/evaluate.md)."""

    every_steps: StepsOrZero = 20
    """Number of steps between evaluations; 0 evaluates only before and after training."""
    num_prompts: CountOrZero = 200
    """Number of prompts of the default set, of that of each task with `data.mixture`; 0 leaves it out."""
    sets: dict[str, EvaluationSetConfig] = {}
    """Further evaluation sets by name, which is part of the names of their metrics."""
    background: bool = True
    """In asynchronous training, evaluate between the first and the last step in the background, on a generator of its own with
    `generator.tp` ranks. False lets training wait while the generators of the rollouts evaluate."""
    best_metric: str | None = None
    """Metric of an evaluation set, such as "eval/chain_sum/mean", whose best policy is exported to `checkpoints/best`."""
    min_improvement: Annotated[float, Field(ge=0.0)] = 0.0
    """Increase of `best_metric` from which a policy counts as better."""
    patience: Count | None = None
    """Number of evaluations of the set in a row without a better policy after which training ends; null never does."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
                yield BrokenRule(
                    values={f"sets.{name}": {}},
                    rule="the name of an evaluation set must consist of letters, digits, _ and -",
                    fix="rename it",
                )
        for key in ("patience", "min_improvement"):
            if self.best_metric is None and getattr(self, key):
                yield BrokenRule(
                    values={key: getattr(self, key), "best_metric": None},
                    rule="without a metric no policy is better than another",
                    fix="set best_metric",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """An evaluation set with all its values.

    Example: `EvaluationSet(name="hard", key="evaluation.sets.hard", every_steps=50, num_prompts=100, num_samples=8, ...)`
    """

    name: str
    """Name in metrics; the default set of a task has that of the task."""
    key: str
    """Configuration section of the set."""
    every_steps: int
    """Number of steps between evaluations; 0 evaluates only before and after training."""
    num_prompts: int
    """Number of prompts."""
    split: Split
    """Prompts to choose from."""
    num_samples: int
    """Completions per prompt."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int
    """Longest completion, in tokens."""
    pass_k: tuple[int, ...]
    """Numbers k of the estimates of pass@k."""
    solved_from: float
    """Reward from which a completion counts as solved."""
    data: DataConfig
    """Prompts and rewards."""
    has_own_data: bool
    """True if these are not those of the run."""
    task: str
    """Task of the run whose prompts and rewards these are otherwise; empty if they are its own."""

    @property
    def max_tokens(self) -> int:
        """Length of the longest prompt plus completion."""
        return self.data.max_prompt_tokens + self.max_new_tokens

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of which a higher value is better."""
        averages = (f"avg@{self.num_samples}",) if self.num_samples > 1 else ()
        return tuple(f"eval/{self.name}/{name}" for name in ("mean", *averages, *(f"pass@{k}" for k in self.pass_k)))


def evaluation_sets(
    evaluation: EvaluationConfig, tasks: Mapping[str, DataConfig], max_new_tokens: Mapping[str, int]
) -> Mapping[str, EvaluationSet]:
    """Return the evaluation sets of a run by name, the default sets first.

    Args:
        evaluation: Section of the run.
        tasks: Prompts and rewards of the run by task.
        max_new_tokens: Longest completion of each task.
    """
    sections = {name: (f"{SETS}.{name}", section) for name, section in evaluation.sets.items()}
    if evaluation.num_prompts:
        sections = {
            task: (DEFAULT, EvaluationSetConfig(num_prompts=evaluation.num_prompts, task=task)) for task in tasks
        } | sections
    first = next(iter(tasks))
    return {
        name: EvaluationSet(
            name=name,
            key=key,
            every_steps=evaluation.every_steps if section.every_steps is None else section.every_steps,
            num_prompts=section.num_prompts,
            split=section.split,
            num_samples=section.num_samples,
            temperature=section.temperature,
            max_new_tokens=section.max_new_tokens or max_new_tokens.get(section.task or first, max_new_tokens[first]),
            pass_k=section.pass_k or ((section.num_samples,) if section.num_samples > 1 else ()),
            solved_from=section.solved_from,
            data=section.data or tasks.get(section.task or first, tasks[first]),
            has_own_data=section.data is not None,
            task="" if section.data is not None else section.task or first,
        )
        for name, (key, section) in sections.items()
    }


def broken_by_positions(sets: Mapping[str, EvaluationSet], max_positions: int) -> Iterator[BrokenRule]:
    """Yield the rules broken by sets with data or lengths of their own, for a model with so many positions."""
    for subset in sets.values():
        if subset.key != DEFAULT and subset.max_tokens > max_positions:
            yield BrokenRule(
                values={f"{subset.key}.max_new_tokens": subset.max_new_tokens},
                rule=f"a prompt plus completion of {subset.max_tokens} tokens must not be longer than the model's "
                f"{max_positions} positions",
                fix=f"lower it, or {subset.key}.data.max_prompt_tokens",
            )


def broken_by_best(metric: str | None, sets: Mapping[str, EvaluationSet], updates_per_publish: int) -> Iterator[BrokenRule]:
    """Yield the rules that `evaluation.best_metric` breaks."""
    if metric is None:
        return
    names = [name for subset in sets.values() for name in subset.metrics]
    if metric not in names:
        yield BrokenRule(
            values={"evaluation.best_metric": metric},
            rule="must be a metric of an evaluation set of which a higher value is better",
            fix=f"choose one of {', '.join(names)}" if names else "add an evaluation set",
        )
        return
    every_steps = next(subset.every_steps for subset in sets.values() if metric in subset.metrics)
    if every_steps % updates_per_publish:
        yield BrokenRule(
            values={
                "evaluation.best_metric": metric,
                "evaluation.every_steps": every_steps,
                "algorithm.updates_per_publish": updates_per_publish,
            },
            rule="updates_per_publish must divide every_steps of this set, so that the evaluated policy is the trainer's",
            fix=f"set every_steps to {every_steps + updates_per_publish - every_steps % updates_per_publish}",
        )


def broken_by_evaluation(
    evaluation: EvaluationConfig, tasks: Mapping[str, DataConfig], *, is_sft: bool, is_distillation: bool
) -> Iterator[BrokenRule]:
    """Yield the rules that the evaluation sets break together with other sections."""
    if is_sft and evaluation.best_metric is not None:
        yield BrokenRule(
            values={"evaluation.best_metric": evaluation.best_metric},
            rule="supervised fine-tuning evaluates no sets",
            fix="remove it",
        )
    for task in tasks if evaluation.num_prompts else ():
        if task in evaluation.sets:
            yield BrokenRule(
                values={f"{SETS}.{task}": {}, "data.task": task},
                rule="the default set has the name of the task",
                fix="rename the set, or leave the default set out with evaluation.num_prompts: 0",
            )
    for name, section in evaluation.sets.items():
        if section.task is not None and section.task not in tasks:
            yield BrokenRule(
                values={f"{SETS}.{name}.task": section.task},
                rule="must be a task of the run",
                fix=f"choose one of {', '.join(tasks)}",
            )
        if section.data is None and section.task is None and len(tasks) > 1:
            yield BrokenRule(
                values={f"{SETS}.{name}.task": None},
                rule="with several tasks in data.mixture, a set must say whose prompts it has",
                fix=f"set it to one of {', '.join(tasks)}, or give the set data of its own",
            )
    if is_sft and evaluation.sets:
        yield BrokenRule(
            values={SETS: sorted(evaluation.sets)},
            rule="supervised fine-tuning evaluates the loss on held-out examples, and samples nothing",
            fix=f"remove {SETS}; `titanrl evaluate` evaluates the exported model",
        )
    if is_distillation and not evaluation.num_prompts:
        yield BrokenRule(
            values={"evaluation.num_prompts": 0},
            rule="a distillation evaluates the teacher on the default set",
            fix="set it to at least 1",
        )
