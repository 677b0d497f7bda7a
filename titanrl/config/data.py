"""The section `data`: prompts, and the rewards of their completions."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from titanrl.config.curriculum import CurriculumConfig
from titanrl.config.environment import EnvironmentConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.rewards import JudgeOptions, broken_by_options
from titanrl.config.section import Count, Fraction, InputPath, OrImportPath, Section, Tokens

FILE_SOURCES = ("jsonl", "parquet", "arrow")
"""Built-in prompt sources that read files."""
SOURCES = ("reasoning_gym", *FILE_SOURCES)
"""Built-in prompt sources."""
ANSWER_REWARDS = ("reasoning_gym", "exact", "math_verify")
"""Built-in rewards that compare the completion with the reference answer."""
REWARDS = (*ANSWER_REWARDS, "regex", "overlong", "repetition", "judge")
"""Built-in rewards."""
RESERVED = ("mean", "error_frac", "num_errors", "num_completions", "turns", "truncated")
"""Names that a reward cannot have, because `reward/<name>` is already a metric."""


class RewardConfig(Section):
    """A reward function. The string `my_rewards.py:score` is short for `{function: my_rewards.py:score}`."""

    function: Annotated[str, OrImportPath(REWARDS)]
    """Built-in reward, or the import path of a function `reward(completion, entry) -> float` (docs/howto/reward.md).
    `reasoning_gym` is the scorer of `data.task`. `exact` compares the completion with the reference answer, `math_verify` does
    so mathematically. `regex` matches a pattern. `overlong` and `repetition` are penalties from 0 to -1. `judge` is graded by a
    language model (docs/howto/built_in_rewards.md)."""
    options: dict[str, Any] = {}
    """Options of a built-in reward (docs/howto/built_in_rewards.md)."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    weights: dict[str, float] = {}
    """Additional weights by part, for a function that returns a mapping of named parts. Parts that are not listed have weight
    1."""
    trusted: bool = False
    """Run the function in the rollout worker instead of the sandbox, with access to network and devices. Never enable this for
    a function that executes model output."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section, which also allows a string."""
        section = handler.resolve_ref_schema(handler(schema))
        return section | {"type": ["object", "string"]}

    @property
    def is_confined(self) -> bool:
        """True if the function runs in the sandbox. The judge runs outside: it needs the network, and executes no model
        output."""
        return not self.trusted and self.function != "judge"

    @property
    def compares_with_answer(self) -> bool:
        """True if every prompt needs a reference answer."""
        return self.function in ANSWER_REWARDS or (
            self.function == "judge" and JudgeOptions.model_validate(self.options).uses_answer
        )

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from broken_by_options(self.function, self.options)
        if self.trusted and self.function in REWARDS:
            yield BrokenRule(
                values={"trusted": True, "function": self.function},
                rule="the judge always runs outside the sandbox"
                if self.function == "judge"
                else "built-in rewards run in the sandbox, because some of them execute model output",
                fix="remove trusted",
            )


class AnswerConfig(Section):
    """Extraction of the reference answer from the column of answers."""

    after: Annotated[str, Field(min_length=1)]
    """The answer is the text after the last occurrence of this text, without surrounding white space. GSM8K's answers are the
    solution, then `#### ` and the number: `{after: "####"}`. `metadata` keeps the whole text."""


TEMPLATE_ARGUMENTS = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"),
    *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
    *("tokenizer_kwargs", "tools", "truncation"),
)
"""Arguments of `apply_chat_template` that TitanRL sets, so that they are not variables of the chat template."""


class DataConfig(Section):
    """Prompts, and the rewards of their completions."""

    source: Annotated[str, OrImportPath(SOURCES)] = "reasoning_gym"
    """Prompt source: a task of the reasoning-gym package; `jsonl` or `parquet` files; `arrow`, a data set saved by Hugging Face
    datasets; or the import path of a list of prompts or of a function `prompts(seed)` that returns one (docs/howto/data.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a custom prompt source."""
    task: str = "chain_sum"
    """Name of the reasoning-gym task. With another source, only a label in metrics."""
    task_config: dict[str, Any] = {}
    """Options of the reasoning-gym task."""
    path: InputPath | None = None
    """File with the columns `prompt` and `answer`, or `messages` (a list of chat messages), and perhaps `tools`. Other columns
    become metadata. Can also be a directory of such files, a pattern such as `data/train-*.parquet`, or the directory of a
    saved data set."""
    columns: dict[Literal["prompt", "answer", "messages", "tools"], str] = {}
    """Names of the columns, if they are not `prompt`, `answer`, `messages` and `tools`, such as `{prompt: problem, answer:
    reward.truth}`. A dot selects a nested field."""
    answer: AnswerConfig | None = None
    """Extraction of the reference answer from a longer text, such as a worked solution; null takes the whole text."""
    num_prompts: Count = 12_000
    """Number of training prompts per epoch of a reasoning-gym task. Every epoch has the same prompts in a different order."""
    heldout_fraction: Fraction = 0.2
    """Fraction of the questions held out for evaluation. A hash of its text assigns each question, so the split depends on
    nothing but this value."""
    rewards: dict[str, RewardConfig] = {}
    """Reward functions by name. Their weighted sum is the reward of a completion; `reward/<name>` reports each without its
    weight. If empty, the task's own scorer (`reasoning_gym`) or the comparison with the reference answer (`exact`) is used."""
    environment: EnvironmentConfig | None = None
    """Multi-turn environment (docs/howto/environment.md); null generates one completion per prompt. `rewards` score the
    policy's last message and are added to the rewards of the environment. If `rewards` is empty, the source's own score is used
    only where the environment returns no reward."""
    system_prompt: str | None = None
    """System message before the question. Requires a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto` applies the tokenizer's chat template, if it has one. `never` uses the question unchanged."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}`. A row can override them in the column
    `chat_template_kwargs`."""
    control_tokens: bool = False
    """Encode the text of a special token in prompts and SFT examples, such as `<|im_end|>`, as the token instead of as text.
    Set it only for data that you wrote yourself. It has no effect on the messages of environments."""
    max_prompt_tokens: Tokens = 64
    """Maximum prompt length in tokens. Longer prompts are left out, and counted."""
    curriculum: CurriculumConfig | None = None
    """Difficulty levels, and the sampler that chooses among them (docs/howto/curriculum.md); null uses all prompts."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.source in FILE_SOURCES) != (self.path is not None):
            yield BrokenRule(
                values={"path": self.path, "source": self.source},
                rule="path is required when source is jsonl, parquet or arrow, and allowed only then",
                fix="set path to the file with prompts and answers"
                if self.path is None
                else "remove path, or set source to jsonl, parquet or arrow",
            )
        for key, value in {"columns": self.columns, "answer": self.answer}.items():
            if value and self.source == "reasoning_gym":
                shown = value.model_dump() if isinstance(value, Section) else value
                yield BrokenRule(
                    values={key: shown, "source": self.source},
                    rule="a reasoning-gym task has no columns",
                    fix=f"remove {key}",
                )
        yield from self._broken_by_template()
        if self.options and self.source in SOURCES:
            yield BrokenRule(
                values={"options": self.options, "source": self.source},
                rule="options are the arguments of a custom prompt source",
                fix="remove options; use task_config for the options of a reasoning-gym task",
            )
        if self.curriculum is not None:
            yield from self.curriculum.broken_by_source(self.source, self.task_config)
        for name, reward in self.rewards.items():
            if name in RESERVED or not name.isidentifier():
                rule = f"a reward's name must consist of letters, digits and _, and must not be one of {', '.join(RESERVED)}"
                yield BrokenRule(
                    values={f"rewards.{name}": reward.function},
                    rule=rule,
                    fix="rename it",
                )

    def _broken_by_template(self) -> Iterator[BrokenRule]:
        given = {"chat_template_kwargs": self.chat_template_kwargs}
        if reserved := self.chat_template_kwargs.keys() & set(TEMPLATE_ARGUMENTS):
            yield BrokenRule(
                values=given, rule=f"{min(reserved)} is not a variable of a chat template", fix=f"remove {min(reserved)}"
            )
        if self.chat_template_kwargs and self.chat_template == "never":
            yield BrokenRule(
                values={**given, "chat_template": "never"},
                rule="variables require a chat template",
                fix="remove them, or set chat_template to auto",
            )
        if self.chat_template_kwargs and self.environment is not None:
            yield BrokenRule(
                values={**given, "environment": self.environment.function},
                rule="the renderer of the environment renders its messages",
                fix="set environment.renderer_options instead",
            )
        if self.system_prompt and self.environment is not None:
            yield BrokenRule(
                values={"system_prompt": self.system_prompt, "environment": self.environment.function},
                rule="the environment writes the messages of the conversation",
                fix="let the environment return it; the built-in ones for questions have the option system_prompt",
            )

    @property
    def reward_parts(self) -> Mapping[str, RewardConfig]:
        """Rewards by name. If `rewards` is empty, the default reward of the source."""
        own = "reasoning_gym" if self.source == "reasoning_gym" else "exact"
        return self.rewards or {"answer": RewardConfig(function=own)}

    @property
    def tasks(self) -> "Mapping[str, DataConfig]":
        """Tasks by name: this section alone, unless there is a mixture."""
        return {self.task: self}

    @property
    def chooses_prompts(self) -> bool:
        """True if prompts are chosen among tasks or levels instead of following the order of one stream."""
        return len(self.tasks) > 1 or any(task.curriculum is not None for task in self.tasks.values())

    def weight_of(self, part: str, task: int = 0) -> float:
        """Return the weight of a part in the summed reward; 0 for a reward that is no longer configured.

        Args:
            part: Name of a reward, or `name/part` for one of several parts.
            task: Index of the task in the mixture, if there is one.
        """
        if self.environment is not None and part.partition("/")[0] not in self.reward_parts:
            return self.environment.weights.get(part, 1.0)
        name, _, returned = part.partition("/")
        reward = self.reward_parts.get(name)
        return 0.0 if reward is None else reward.weight * reward.weights.get(returned, 1.0)

    @property
    def compares_texts(self) -> bool:
        """True if a reward expects a short answer: the reference answer itself, or a mathematical expression that equals it."""
        return self.compares_with_answer and any(
            part.function in ("exact", "math_verify") for part in self.reward_parts.values()
        )

    @property
    def compares_with_answer(self) -> bool:
        """True if a reward compares completions with the reference answer, so that every prompt needs one.

        An environment usually returns rewards; the default reward is used only if it does not.
        """
        if self.environment is not None and not self.rewards:
            return False
        return any(reward.compares_with_answer for reward in self.reward_parts.values())
