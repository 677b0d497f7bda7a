"""The section `evaluation`: evaluation sets, their schedule, early stopping and the best checkpoint."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, CountOrZero, Section, StepsOrZero, Tokens

MAX_COMPLETIONS = 1_000_000
"""Maximum number of completions per evaluation."""
DEFAULT = "evaluation"
"""Section of the default set."""
SETS = "evaluation.sets"
"""Section of the additional sets."""

Split = Literal["heldout", "all"]


class EvaluationSetConfig(Section):
    """An additional evaluation set."""

    every_steps: StepsOrZero | None = None
    """Number of steps between evaluations; 0 evaluates only before and after training. Null uses `evaluation.every_steps`."""
    num_prompts: Count = 200
    """Number of prompts."""
    split: Split = "heldout"
    """`heldout` uses the held-out split, which is never trained on if training uses the same `heldout_fraction`. `all` uses
    every prompt, and requires `data`."""
    num_samples: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of completions per prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature; 0 is greedy decoding. Other values below 0.01 are not supported by vLLM."""
    max_new_tokens: Tokens | None = None
    """Maximum completion length in tokens; null uses `rollout.max_new_tokens`."""
    pass_k: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Values of k for which pass@k is reported. If empty, `num_samples`, if that is more than 1."""
    solved_from: float = 1.0
    """Minimum reward of a solved completion, for pass@k and avg@k."""
    data: DataConfig | None = None
    """Prompts and rewards of the set; null uses those of the run."""
    task: str | None = None
    """Task of `data.mixture` whose held-out prompts and rewards the set uses."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_samples > 1 and self.temperature == 0:
            rule = "num_samples > 1 requires temperature > 0, because greedy completions of a prompt are all equal"
            fix = "set temperature, for example to 1, or set num_samples to 1"
            yield self.broken("temperature num_samples", rule, fix)
        if 0 < self.temperature < 0.01:
            rule = "vLLM does not support temperatures between 0 and 0.01"
            yield self.broken("temperature", rule, "set it to 0 for greedy decoding, or to at least 0.01")
        if self.pass_k and max(self.pass_k) > self.num_samples:
            fix = f"set num_samples to at least {max(self.pass_k)}"
            yield self.broken("pass_k num_samples", "pass@k needs at least k samples per prompt", fix)
        if self.num_prompts * self.num_samples > MAX_COMPLETIONS:
            rule = f"an evaluation must not sample more than {MAX_COMPLETIONS:,} completions (num_prompts * num_samples)"
            yield self.broken("num_prompts num_samples", rule, "lower one of them")
        if self.data is not None and self.task is not None:
            values = {"task": self.task, "data": self.data.source}
            yield BrokenRule(values, "a set uses the prompts either of task or of data", "remove one of them")
        if self.data is not None and self.data.curriculum is not None:
            values = {"data.curriculum": self.data.curriculum.sampler}
            rule = "an evaluation set does not support a curriculum"
            yield BrokenRule(values, rule, "remove it, or define one set per level")
        if self.split == "all" and self.data is None:
            rule = "split: all would evaluate on prompts of the run that are trained on"
            yield self.broken("split data", rule, "set split to heldout, or add a data section to the set")


class EvaluationConfig(Section):
    """Evaluation. The default set is `num_prompts` held-out prompts of `data`, or of each task in `data.mixture`, decoded
    greedily. `sets` adds more (docs/howto/evaluate.md)."""

    every_steps: StepsOrZero = 20
    """Number of steps between evaluations; 0 evaluates only before and after training."""
    num_prompts: CountOrZero = 200
    """Number of prompts of the default set, per task with `data.mixture`; 0 disables the default set."""
    sets: dict[str, EvaluationSetConfig] = {}
    """Additional evaluation sets by name. Metrics are named `eval/<name>/...`."""
    background: bool = True
    """In asynchronous training, run evaluations between the first and the last step in the background, on a separate generator
    with `generator.tp` ranks. `false` pauses training and evaluates on the rollout generators."""
    best_metric: str | None = None
    """Metric of an evaluation set, such as "eval/chain_sum/mean". The policy with its highest value is exported to
    `checkpoints/best`."""
    min_improvement: Annotated[float, Field(ge=0.0)] = 0.0
    """Minimum increase of `best_metric` for a policy to count as better."""
    max_error_frac: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Maximum share of completions without a reward in an evaluation that is compared by `best_metric`. Another evaluation is a
    mean over other completions, so it neither selects a policy nor counts for `patience`."""
    patience: Count | None = None
    """Early stopping: number of consecutive evaluations without a better policy after which training ends. Null never stops
    early."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
                rule = "the name of a set must consist of letters, digits, _ and -, and start with a letter or digit"
                yield BrokenRule({f"sets.{name}": {}}, rule, "rename it")
        for key in ("patience", "min_improvement", "max_error_frac"):
            if self.best_metric is None and getattr(self, key):
                rule = f"{key} requires best_metric, which policies are compared by"
                yield self.broken(f"{key} best_metric", rule, "set best_metric")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """An evaluation set with all values resolved.

    Example: `EvaluationSet(name="hard", key="evaluation.sets.hard", every_steps=50, num_prompts=100, num_samples=8, ...)`
    """

    name: str
    """Name in metrics. The default set of a task has the task's name."""
    key: str
    """Configuration section of the set."""
    every_steps: int
    """Number of steps between evaluations; 0 evaluates only before and after training."""
    num_prompts: int
    """Number of prompts."""
    split: Split
    """Split that the prompts are taken from."""
    num_samples: int
    """Completions per prompt."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int
    """Maximum completion length in tokens."""
    pass_k: tuple[int, ...]
    """Values of k for pass@k."""
    solved_from: float
    """Minimum reward of a solved completion."""
    data: DataConfig
    """Prompts and rewards."""
    has_own_data: bool
    """True if the set has its own `data` section."""
    task: str
    """Task of the run whose prompts and rewards the set uses; empty if it has its own."""

    @property
    def max_tokens(self) -> int:
        """Maximum length of prompt plus completion in tokens."""
        return self.data.max_prompt_tokens + self.max_new_tokens

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that can be maximized."""
        averages = (f"avg@{self.num_samples}",) if self.num_samples > 1 else ()
        return tuple(f"eval/{self.name}/{name}" for name in ("mean", *averages, *(f"pass@{k}" for k in self.pass_k)))


def evaluation_sets(
    evaluation: EvaluationConfig, tasks: Mapping[str, DataConfig], max_new_tokens: Mapping[str, int]
) -> Mapping[str, EvaluationSet]:
    """Return the evaluation sets of a run by name, the default sets first.

    Args:
        evaluation: Section `evaluation`.
        tasks: Prompts and rewards by task.
        max_new_tokens: Maximum completion length by task, in tokens.
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
