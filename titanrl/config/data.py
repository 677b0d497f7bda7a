"""The section `data`: prompts, and the rewards of their completions."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from titanrl.config.curriculum import CurriculumConfig
from titanrl.config.environment import EnvironmentConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.rewards import JudgeOptions, broken_by_options
from titanrl.config.section import Count, FilePath, Fraction, OrImportPath, Section, Tokens

FILE_SOURCES = ("jsonl", "parquet")
"""Built-in sources of prompts that are files."""
SOURCES = ("reasoning_gym", *FILE_SOURCES)
"""Built-in sources of prompts."""
ANSWER_REWARDS = ("reasoning_gym", "exact", "math_verify")
"""Built-in rewards that compare the completion with the answer."""
REWARDS = (*ANSWER_REWARDS, "regex", "overlong", "repetition", "judge")
"""Built-in rewards."""
RESERVED = ("mean", "error_frac")
"""Names that no reward may have, because `reward/<name>` is another metric."""


class RewardConfig(Section):
    """One reward. The text `my_rewards.py:score` is short for `{function: my_rewards.py:score}`."""

    function: Annotated[str, OrImportPath(REWARDS)]
    """Built-in reward, or import path of a function `reward(completion, entry) -> float` (docs/howto/reward.md).
    `reasoning_gym` is the score of the task `data.task`. `exact` compares the completion with the answer, `math_verify` as a
    mathematical expression. `regex` matches a pattern, `overlong` and `repetition` are penalties from 0 to -1, and `judge` asks
    a model (docs/howto/built_in_rewards.md)."""
    options: dict[str, Any] = {}
    """Options of a built-in reward (docs/howto/built_in_rewards.md)."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    weights: dict[str, float] = {}
    """Further factors by part, for a function that returns a mapping of parts; 1 by default."""
    trusted: bool = False
    """Run the function in the rollout worker instead of the sandbox, so that it can use network and devices. Never set this for
    a function that executes model output."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section; a text is allowed in its place."""
        section = handler.resolve_ref_schema(handler(schema))
        return section | {"type": ["object", "string"]}

    @property
    def is_confined(self) -> bool:
        """True if the function runs in the sandbox. The judge needs the network, and executes no model output."""
        return not self.trusted and self.function != "judge"

    @property
    def compares_with_answer(self) -> bool:
        """True if every prompt needs an answer."""
        return self.function in ANSWER_REWARDS or (
            self.function == "judge" and JudgeOptions.model_validate(self.options).uses_answer
        )

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from broken_by_options(self.function, self.options)
        if self.trusted and self.function in REWARDS:
            yield BrokenRule(
                values={"trusted": True, "function": self.function},
                rule="the judge runs outside the sandbox anyway"
                if self.function == "judge"
                else "built-in rewards run in the sandbox, because some of them execute model output",
                fix="remove trusted",
            )


class DataConfig(Section):
    """Prompts, and the rewards of their completions."""

    source: Annotated[str, OrImportPath(SOURCES)] = "reasoning_gym"
    """Source of the prompts: a task of the reasoning-gym package, a JSONL or Parquet file, or the import path of a list of
    prompts or of a function `prompts(seed)` that returns one (docs/howto/data.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a prompt source of your own."""
    task: str = "chain_sum"
    """Name of the reasoning-gym task. With another source it only labels the metrics."""
    task_config: dict[str, Any] = {}
    """Options passed to the reasoning-gym task."""
    path: FilePath | None = None
    """JSONL or Parquet file whose rows have the texts `prompt` and `answer`, or the list `messages`; the rest becomes metadata.
    It may be a folder of Parquet files, or a pattern such as `data/train-*.parquet`."""
    columns: dict[Literal["prompt", "answer", "messages"], str] = {}
    """Other names of `prompt`, `answer` and `messages` in the file, such as `{prompt: problem, answer: reward.truth}`."""
    num_prompts: Count = 12_000
    """Number of training prompts per epoch of a reasoning-gym task. Each epoch is shuffled differently."""
    heldout_fraction: Fraction = 0.2
    """Fraction of the questions that is held out for evaluation, selected by a hash of their text."""
    rewards: dict[str, RewardConfig] = {}
    """Rewards by name. A completion gets their weighted sum; `reward/<name>` reports each without its weight. Without any, it
    is the task's own score (`reasoning_gym`) or the comparison with the answer (`exact`)."""
    environment: EnvironmentConfig | None = None
    """Environment in which the prompts are answered, in several turns; null answers each prompt with one completion. The
    rewards of `rewards` score the last message of the policy, and are added to those of the environment. Without `rewards`, the
    source's own score counts only where the environment returns no reward."""
    system_prompt: str | None = None
    """System message placed before the question; requires a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto` applies the tokenizer's chat template if it has one; `never` sends the question unchanged."""
    max_prompt_tokens: Tokens = 64
    """Maximum prompt length; longer prompts are skipped."""
    curriculum: CurriculumConfig | None = None
    """Levels of difficulty, and the rule that chooses the level of each prompt (docs/howto/curriculum.md); null has none."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.source in FILE_SOURCES) != (self.path is not None):
            yield BrokenRule(
                values={"path": self.path, "source": self.source},
                rule="path is required when source is jsonl or parquet, and allowed only then",
                fix="set path to the file of prompts and answers"
                if self.path is None
                else "remove path, or set source to jsonl or parquet",
            )
        if self.columns and self.source not in FILE_SOURCES:
            yield BrokenRule(
                values={"columns": self.columns, "source": self.source},
                rule="only a JSONL or Parquet file has columns",
                fix="remove columns",
            )
        if self.options and self.source in SOURCES:
            yield BrokenRule(
                values={"options": self.options, "source": self.source},
                rule="options are the arguments of a source of your own",
                fix="remove options; task_config holds those of a reasoning-gym task",
            )
        if self.curriculum is not None:
            yield from self.curriculum.broken_by_source(self.source, self.task_config)
        for name, reward in self.rewards.items():
            if name in RESERVED or not name.isidentifier():
                yield BrokenRule(
                    values={f"rewards.{name}": reward.function},
                    rule=f"a reward's name must consist of letters, digits and _, and not be {' or '.join(RESERVED)}",
                    fix="rename it",
                )

    @property
    def reward_parts(self) -> Mapping[str, RewardConfig]:
        """Rewards by name; without any in `rewards`, the one that belongs to the source."""
        own = "reasoning_gym" if self.source == "reasoning_gym" else "exact"
        return self.rewards or {"answer": RewardConfig(function=own)}

    @property
    def tasks(self) -> "Mapping[str, DataConfig]":
        """Tasks by name: this one, unless there is a mixture."""
        return {self.task: self}

    @property
    def chooses_prompts(self) -> bool:
        """True if the prompts do not simply follow each other, but are chosen among tasks or levels."""
        return len(self.tasks) > 1 or any(task.curriculum is not None for task in self.tasks.values())

    def weight_of(self, part: str, task: int = 0) -> float:
        """Return the factor of a part in the summed reward; 0 for a part of a reward that is no longer configured.

        Args:
            part: Name of a reward, or `name/part` for each of several parts.
            task: Number of the task, if there is a mixture.
        """
        if self.environment is not None and part.partition("/")[0] not in self.reward_parts:
            return self.environment.weights.get(part, 1.0)
        name, _, returned = part.partition("/")
        reward = self.reward_parts.get(name)
        return 0.0 if reward is None else reward.weight * reward.weights.get(returned, 1.0)

    @property
    def compares_with_answer(self) -> bool:
        """True if a reward compares completions with the answer, so that every prompt needs one."""
        return any(reward.compares_with_answer for reward in self.reward_parts.values())
