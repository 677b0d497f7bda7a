"""The sections `data` and `evaluation`: prompts with their rewards, curriculum and environment, the tasks of a mixture, and the
evaluation sets."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, NonNegativeFloat, PositiveFloat, ValidationError, model_validator
from pydantic_core import CoreSchema

from titanrl.config.algorithm import ADVANTAGES, AlgorithmConfig
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.sections import (
    FOLDER,
    FOR_KEYS,
    LIVE,
    Count,
    CountOrZero,
    DistillConfig,
    Fraction,
    InputPath,
    OrImportPath,
    RolloutConfig,
    Seconds,
    Section,
    Share,
    StepsOrZero,
    Tokens,
    broken_by_names,
    broken_by_url,
    fields_of,
    meanings,
)

ACCEPTS_CHANGED_DATA = "--accept-changed-data"
"""Flag of the command line that lets a resumed run continue on changed data."""
FILE_SOURCES = ("jsonl", "parquet", "arrow")
"""Built-in prompt sources that read files."""
SOURCES = ("reasoning_gym", *FILE_SOURCES)
"""Built-in prompt sources."""
ANSWER_REWARDS = ("reasoning_gym", "exact", "math_verify")
"""Built-in rewards that compare the completion with the reference answer."""
PENALTIES = ("overlong", "repetition")
"""Built-in rewards from -1 to 0."""
REWARDS = (*ANSWER_REWARDS, "regex", *PENALTIES, "judge")
"""Built-in rewards."""
RESERVED = ("mean", "error_frac", "num_errors", "num_completions", "turns", "truncated")
"""Names that a reward cannot have, because `reward/<name>` is already a metric."""
SAMPLERS = ("success_rate",)
"""Built-in level samplers."""
Levels = Annotated[int, Field(ge=2, le=1_000)]
BUILT_IN_KEYS = ("raise_at", "lower_at", "window", "solved_from", "start_level", "review")
"""Keys of the built-in sampler."""
ENVIRONMENTS = ("single_turn", "tools", "calculator", "python", "tic_tac_toe", "openenv", "verifiers")
"""Built-in environments."""
MIXTURE = "data.mixture"
"""Section of the tasks."""
SHARED_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Keys of `rollout` that all tasks share."""


def data_file(path: Path) -> Path:
    """Return the path of a JSONL file if it exists, else the shipped file of this name."""
    shipped = FOLDER / path
    return shipped if not os.path.exists(path) and path.suffix == ".jsonl" and os.path.isfile(shipped) else path


JUDGE_PROMPT = """\
Grade the answer of a student from 0 to 10. Judge whether it is right, not how it is written.

Question: {question}
Reference answer: {answer}
Answer of the student: {completion}

End your reply with a line such as "Grade: 7"."""
"""Default of `prompt`."""
RUBRIC_PROMPT = """\
Judge the answer of a student by each of these criteria:

{criteria}

Question: {question}
Answer of the student: {completion}

End your reply with a JSON object that has true or false for the name of each criterion, such as {{"name": true}}."""
"""Default of `prompt` with criteria."""
PROMPT_FIELDS = ("question", "answer", "completion", "metadata", "criteria")
"""Placeholders that a judge's prompt may contain."""
REQUEST_KEYS = ("messages", "model", "n", "stream")
"""Request fields that the judge sets itself, or whose responses it cannot parse."""


class RegexOptions(Section):
    """Options of `regex`: reward 1 for a completion that matches a regular expression, else 0."""

    pattern: str
    """Regular expression in the syntax of Python's `re`, with inline flags such as `(?s)`."""
    match: Literal["full", "anywhere"] = "full"
    """`full` matches the whole completion, `anywhere` any part of it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from _broken_by_pattern("pattern", self.pattern)


class OverlongOptions(Section):
    """Options of `overlong`, DAPO's soft penalty for long completions. It falls from 0 to -1 over the last `cache_tokens`."""

    cache_tokens: Tokens
    """Number of tokens before `max_tokens` over which the penalty grows (L_cache)."""
    max_tokens: Tokens | None = None
    """Length in tokens from which the penalty is -1 (L_max); null uses `rollout.max_new_tokens`."""

    def broken_by(self, max_tokens: int) -> Iterator[BrokenRule]:
        """Yield the rule that `cache_tokens` breaks with the effective `max_tokens`."""
        if self.cache_tokens > max_tokens:
            rule = f"cache_tokens must not exceed max_tokens, which is {max_tokens}"
            yield self.broken("cache_tokens", rule, f"set cache_tokens to at most {max_tokens}")

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.max_tokens is not None:
            yield from self.broken_by(self.max_tokens)


class RepetitionOptions(Section):
    """Options of `repetition`: minus the share of n-grams that occurred before, from 0 to -1."""

    ngram_size: Count = 3
    """Number of words or characters per n-gram."""
    unit: Literal["word", "character"] = "word"
    """Unit of the n-grams. `character` suits languages without spaces between words."""


class MathVerifyOptions(Section):
    """Options of `math_verify`, which compares mathematical expressions."""

    timeout_s: Annotated[int, Field(ge=1, le=3600)] = 2
    """Time limit in whole seconds for parsing a completion, and for each comparison. On timeout the completion gets no
    reward."""


class Criterion(Section):
    """A criterion of a rubric. A string is short for a criterion of this description and weight 1."""

    description: Annotated[str, Field(min_length=1)]
    """Condition that the completion meets or not, as the judge reads it."""
    weight: float = 1.0
    """Weight of the criterion. A negative weight is a penalty for a completion that meets it."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"description": value} if isinstance(value, str) else value


CriterionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
Rubric = Annotated[dict[CriterionName, Criterion], Field(min_length=1, max_length=32)]
"""Criteria by name."""


class JudgeOptions(Section):
    """Options of `judge`, a language model behind an OpenAI-compatible endpoint that grades each completion."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """Base URL of the API, such as `http://127.0.0.1:8000/v1`. Requests are sent to `<url>/chat/completions`."""
    model: str
    """Model name in the requests."""
    criteria: Rubric | None = None
    """Rubric: criteria by name, with a description and a weight each, which the judge decides in one reply. Null requests a
    single grade."""
    criteria_field: Annotated[str, Field(min_length=1)] | None = None
    """Field of `metadata` that has the criteria of each prompt, in the format of `criteria`."""
    prompt: str = JUDGE_PROMPT
    """User message, with the placeholders `{question}`, `{answer}`, `{completion}`, `{metadata[key]}` and, with criteria,
    `{criteria}`. The default depends on whether there are criteria."""
    system_prompt: str | None = None
    """System message; null sends none."""
    score_pattern: str = r"(?i)grade[*_`\s]*:[*_`\s\[({$]*(?:\\boxed\{\s*)?([-+\u2212]?[\d.,]*\d)"
    """Regular expression that finds the grade in the response: its first group or, without groups, the whole match. The last
    match is used."""
    min_score: float = 0.0
    """Grade that corresponds to reward 0."""
    max_score: float = 10.0
    """Grade that corresponds to reward 1. A grade outside of `min_score` and `max_score` is a failure."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable with the API key; null sends no key."""
    request: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
    """Additional fields of each request."""
    timeout_s: Seconds = 30.0
    """Time limit in seconds for one request."""
    num_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Number of retries after a timeout, a lost connection, or the status codes 408, 429 and 5xx."""

    @model_validator(mode="before")
    @classmethod
    def _default_prompt(cls, values: Any) -> Any:
        has_criteria = isinstance(values, dict) and (values.get("criteria") or values.get("criteria_field"))
        return {"prompt": RUBRIC_PROMPT, **values} if has_criteria else values

    @property
    def has_criteria(self) -> bool:
        """True if the judge decides criteria instead of giving a grade."""
        return self.criteria is not None or self.criteria_field is not None

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.criteria is not None:
            if self.criteria_field is not None:
                rule = "the criteria are those of the options or those of each prompt"
                yield self.broken("criteria criteria_field", rule, "remove one of them")
            if total_weight(self.criteria) == 0.0:
                yield self.broken("criteria", NO_WEIGHT, "give one of them a positive weight")
        for key in self.changed("score_pattern", "min_score", "max_score") if self.has_criteria else ():
            yield self.broken(key, "with criteria, the judge gives no grade", "remove it")
        yield from _broken_by_pattern("score_pattern", self.score_pattern)
        fix = "use {question}, {answer}, {completion}, {metadata[key]} or {criteria}, and double all other braces"
        try:
            fields = fields_of(self.prompt)
        except ValueError as error:
            yield self.broken("prompt", f"prompt must have paired braces ({error})", fix)
        else:
            for field in sorted(fields - set(PROMPT_FIELDS)):
                yield self.broken("prompt", f"prompt contains the unknown placeholder {{{field}}}", fix)
            if ("criteria" in fields) != self.has_criteria:
                rule = "prompt must contain {criteria} if there are criteria, and only then"
                yield self.broken("prompt", rule, "remove it" if "criteria" in fields else "add it")
            if "completion" not in fields:
                yield self.broken("prompt", "prompt must contain {completion}", "add it")
        yield from broken_by_url("url", self.url, "http://host:8000/v1", FOR_KEYS)
        if not self.min_score < self.max_score:
            fix = "swap them; use a negative weight to invert the reward"
            yield self.broken("min_score max_score", "min_score must be below max_score", fix)
        for key in sorted(self.request.keys() & set(REQUEST_KEYS)):
            rule = "the judge sets this field itself, or could not parse the response"
            yield self.broken(f"request.{key}", rule, "remove it")


NO_WEIGHT = "the weights of the criteria must include a positive one, because the reward is divided by the sum of these"
"""Rule about the weights of criteria."""


def total_weight(criteria: Mapping[str, Criterion]) -> float:
    """Return the sum of the positive weights of criteria, the largest value of their weighted sum."""
    return sum(max(criterion.weight, 0.0) for criterion in criteria.values())


REWARD_OPTIONS: Mapping[str, type[Section]] = {
    "math_verify": MathVerifyOptions,
    "regex": RegexOptions,
    "overlong": OverlongOptions,
    "repetition": RepetitionOptions,
    "judge": JudgeOptions,
}
"""Option sections of the built-in rewards that have options, by reward."""


def broken_by_options(
    function: str, options: Mapping[str, Any], section: type[Section], key: str = "options"
) -> Iterator[BrokenRule]:
    """Yield the rules that the options of a built-in function break. The keys start with `key`."""
    try:
        section.model_validate(options)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            name = ".".join([key, *map(str, details["loc"])])
            cause = details.get("ctx", {}).get("error")
            if isinstance(cause, BrokenRules):
                for broken in cause.broken:
                    yield replace(broken, values={f"{key}.{name}": value for name, value in broken.values.items()})
                continue
            if details["type"] == "extra_forbidden":
                fix = f"choose one of its options: {', '.join(section.model_fields)}"
                yield BrokenRule({name: details["input"]}, f"{function} has no such option", fix)
                continue
            meaning = " ".join(meanings(section).get(str(details["loc"][0]), "").split())
            if details["type"] == "missing":
                yield BrokenRule({key: dict(options)}, f"{name} is required", f"add it. {meaning}")
            else:
                condition = re.sub(r"^\w+ should ", "must ", details["msg"])
                yield BrokenRule({name: details["input"]}, condition, f"correct it. {meaning}")


def _broken_by_pattern(key: str, pattern: str) -> Iterator[BrokenRule]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        fix = "correct it; see docs.python.org/3/library/re.html"
        yield BrokenRule({key: pattern}, f"must be a regular expression ({error})", fix)


class FunctionSection(Section):
    """A section with the key `function`. A string is short for a section with this value."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section, which also allows a string."""
        section = handler.resolve_ref_schema(handler(schema))
        return section | {"type": ["object", "string"]}


class RewardConfig(FunctionSection):
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

    @property
    def compares_with_answer(self) -> bool:
        """True if every prompt needs a reference answer."""
        return self.function in ANSWER_REWARDS or (
            self.function == "judge" and "answer" in fields_of(JudgeOptions.model_validate(self.options).prompt)
        )

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (section := REWARD_OPTIONS.get(self.function)) is not None:
            yield from broken_by_options(self.function, self.options, section)
        elif self.options:
            rule = f"only the built-in rewards {', '.join(REWARD_OPTIONS)} have options"
            fix = "remove options; for a custom function, bind arguments with functools.partial"
            yield self.broken("options function", rule, fix)
        if self.trusted and self.function in REWARDS:
            yield self.broken(
                "trusted function",
                "the judge always runs outside the sandbox"
                if self.function == "judge"
                else "built-in rewards run in the sandbox, because some of them execute model output",
                "remove trusted",
            )


class AnswerConfig(Section):
    """Extraction of the reference answer from the column of answers."""

    after: Annotated[str, Field(min_length=1)]
    """The answer is the text after the last occurrence of this text, without surrounding white space. GSM8K's answers are the
    solution, then `#### ` and the number: `{after: "####"}`. `metadata` keeps the whole text."""


_IMPORT_PATH = re.compile(r"[^\s]+:[A-Za-z_]\w*")
TEMPLATE_ARGUMENTS = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"),
    *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
    *("tokenizer_kwargs", "tools", "truncation"),
)
"""Arguments of `apply_chat_template` that TitanRL sets, so that they are not variables of the chat template."""


class CurriculumConfig(Section):
    """Curriculum: difficulty levels from easy to hard, and a sampler that chooses the level of each prompt. One key defines the
    levels: `levels` for those of a reasoning-gym task, `task_configs` for its options per level, or `field` with `edges`,
    `values` or `levels` for a field of the prompts."""

    levels: Levels | None = None
    """Number of levels: the easiest ones of the curriculum that reasoning-gym defines for the task or, with `field`, groups of
    equal size."""
    task_configs: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Options of a reasoning-gym task for each level, on top of `data.task_config`, such as `[{max_terms: 2}, {max_terms:
    6}]`."""
    field: str | None = None
    """Metadata field that orders the prompts of a file or of a custom source by difficulty. A dot selects a nested field."""
    edges: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Boundaries of `field` between the levels, ascending. A prompt at a boundary belongs to the higher level; n boundaries
    make n + 1 levels."""
    values: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Values of `field`, one per level, such as `[easy, medium, hard]`."""
    sampler: Annotated[str, OrImportPath(SAMPLERS)] = "success_rate"
    """Sampler that chooses the level of each prompt. `success_rate` moves up or down by the success rate at the current level.
    Or the import path of a custom sampler (docs/howto/curriculum.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a custom sampler."""
    raise_at: Share = 0.8
    """Success rate from which `success_rate` moves to the next level."""
    lower_at: Share = 0.1
    """Success rate at or below which it moves to the previous level. With 0, only if nothing is solved."""
    window: Count = 32
    """Number of recent groups of the current level that the success rate is computed over. It restarts after each move."""
    solved_from: float = 1.0
    """Minimum reward of a successful completion."""
    start_level: Annotated[int, Field(ge=0, le=999)] = 0
    """Initial level, counted from 0."""
    review: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    """Share of the prompts that are drawn from lower levels, so that the policy does not forget them."""

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        if self.task_configs:
            return len(self.task_configs)
        if self.edges:
            return len(self.edges) + 1
        return len(self.values) or self.levels or 1

    def _broken_rules(self) -> Iterator[BrokenRule]:
        given = {key: getattr(self, key) for key in ("levels", "task_configs", "edges", "values")}
        set_keys = {key: value for key, value in given.items() if value}
        if len(set_keys) != 1:
            yield BrokenRule(
                set_keys or {"levels": None},
                "exactly one of levels, task_configs, edges and values must define the levels",
                "keep one of them" if set_keys else "set levels to the number of levels",
            )
        for key in ("edges", "values"):
            if given[key] and self.field is None:
                fix = "set field to the name of a metadata field"
                yield self.broken(f"{key} field", f"{key} requires field, whose values it refers to", fix)
        if self.field is not None and self.task_configs:
            rule = "field and task_configs are different ways to define the levels"
            yield self.broken("field task_configs", rule, "remove one of them")
        if list(self.edges) != sorted(set(self.edges)):
            yield self.broken("edges", "edges must be ascending, without duplicates", "sort them")
        if len(set(self.values)) != len(self.values):
            yield self.broken("values", "values must not contain duplicates", "list each value once")
        if len(self.task_configs) == 1 or len(self.values) == 1:
            key = "task_configs" if self.task_configs else "values"
            yield self.broken(key, "a curriculum needs at least two levels", "add a level")
        if self.lower_at >= self.raise_at:
            yield self.broken("lower_at raise_at", "lower_at must be below raise_at", "lower lower_at, or raise raise_at")
        if self.start_level >= self.num_levels:
            rule = f"start_level must be one of the {self.num_levels} levels, counted from 0"
            yield self.broken("start_level", rule, f"set start_level to at most {self.num_levels - 1}")
        if self.sampler in SAMPLERS and self.options:
            yield self.broken("options sampler", "options are the arguments of a custom sampler", "remove options")
        if self.sampler not in SAMPLERS and (changed := self.changed(*BUILT_IN_KEYS)):
            fix = "remove them, or pass them to your sampler in options"
            yield self.broken(" ".join([*changed, "sampler"]), "only the sampler success_rate uses these keys", fix)


class McpOptions(Section):
    """Options of an MCP server in `data.environment.options.tools`."""

    mcp: Annotated[str, Field(min_length=1)]
    """Command that starts the server, which speaks over its standard input and output; or the URL of a server that speaks
    streamable HTTP. `{folder}` in a command is replaced with an empty folder, which is deleted with the server."""
    shared: bool = False
    """Let all episodes of a rollout worker use one server, which must not keep state. Otherwise, each episode has its own."""
    only: list[str] = []
    """Names of the tools that the policy may call; empty for all."""
    timeout_s: Seconds = 30.0
    """Time limit in seconds for one request to the server, such as a call. The first one includes the start of the server."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable with the key that is sent to a URL; null sends none."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if is_url(self.mcp):
            yield from broken_by_url("mcp", self.mcp, "http://host:8000/mcp", FOR_KEYS)
            if "{folder}" in self.mcp:
                yield self.broken("mcp", "only a command can use {folder}", "remove it")
            return
        if self.key_variable is not None:
            yield self.broken("key_variable mcp", "a command has no key", "remove key_variable")
        try:
            is_empty = not shlex.split(self.mcp)
        except ValueError as error:
            yield self.broken("mcp", f"must be a command or a URL ({error})", "correct its quotes")
        else:
            if is_empty:
                yield self.broken("mcp", "must be a command or a URL", "write the command that starts the server")


class OpenEnvOptions(Section):
    """Options of `openenv`, an environment behind an OpenEnv server."""

    openenv: Annotated[str, Field(min_length=1)]
    """URL of a server, such as `http://127.0.0.1:8000`; or a Python package with a server, such as `maze_env`, which each
    rollout worker starts and stops. `package.module:app` selects its application."""
    python: str | None = None
    """Python interpreter that has the package, for example of another virtual environment; null for the current one."""
    sessions: Count | None = None
    """Largest number of sessions of a rollout worker at once, which is also the limit of the server that it starts. Null leaves
    the limit to the server, whose own is usually 1."""
    reset: dict[str, Any] = {}
    """Arguments of `reset`, besides `seed`, `episode_id` and those in the metadata field `reset` of the prompt."""
    action: str | None = None
    """Field of the action that takes the policy's text. Null selects the only required field; if there are several, the policy
    writes the action as a JSON object."""
    pattern: str | None = None
    """Regular expression that finds the action in the policy's text, such as `<answer>(.*?)</answer>`: its first group, or the
    whole match. The last match counts, and a text without one is an invalid action. Null takes the whole text."""
    message: str | None = None
    """Template of the messages for the policy, with the fields of an observation, such as `{question}`. Null shows the only
    field of the observation; if there are several, all of them as a JSON object."""
    system_prompt: str | None = None
    """System message before the first observation."""
    show_errors: bool = False
    """Show the policy the errors that `step` raises, like invalid actions, for an environment that raises for a wrong move. By
    default they fail the episode."""
    timeout_s: Seconds = 60.0
    """Time limit in seconds for `reset`, including the start of a server, and for `step`."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if is_url(self.openenv):
            yield from broken_by_url("openenv", self.openenv, "http://host:8000", "remove them")
            if self.python is not None:
                yield self.broken("python openenv", "the server at a URL is not started", "remove python")
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(:[A-Za-z_]\w*)?", self.openenv, re.ASCII) is None:
            fix = "write it like http://host:8000, maze_env or maze_env.server.app:app"
            yield self.broken("openenv", "must be a URL, or the name of an importable package", fix)
        if reserved := self.reset.keys() & {"seed", "episode_id"}:
            yield self.broken("reset", f"{min(reserved)} is set by the run", f"remove {min(reserved)}")
        if self.pattern is not None:
            yield from _broken_by_pattern("pattern", self.pattern)
        if self.message is not None:
            try:
                fields_of(self.message)
            except ValueError as error:
                yield self.broken("message", f"message must have paired braces ({error})", "double all other braces")


class VerifiersOptions(Section):
    """Options of `verifiers`, a taskset of the package verifiers."""

    verifiers: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")]
    """Name of the module of the taskset, such as `marble_v1`."""
    taskset: dict[str, Any] = {}
    """Options of the taskset."""
    env: dict[str, Any] = {}
    """Options of verifiers' environment, such as its `id`, and of its seats."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        for key, reserved in (("taskset", "id"), ("env", "taskset")):
            if reserved in self.value_of(key):
                yield self.broken(key, f"{reserved} is set by verifiers", f"remove {reserved}")


def is_url(text: str) -> bool:
    """Return True for the URL of a server, and not a command or a package that starts one."""
    return re.match(r"(https?|wss?)://", text) is not None


NAMED = ("openenv", "tools", "verifiers")
"""Built-in environments whose main option has their name, so `{tools: X}` means `{function: tools, options: {tools: X}}`."""


class EnvironmentConfig(FunctionSection):
    """Multi-turn environment. The string `my_game.py:Game` is short for `{function: my_game.py:Game}`, `{openenv: URL}` for
    `{function: openenv, options: {openenv: URL}}`, and `{tools: ...}` and `{verifiers: MODULE}` likewise. With `program` in
    place of `function`, a program plays the episodes and calls the policy itself."""

    function: Annotated[str, OrImportPath(ENVIRONMENTS)] | None = None
    """Built-in environment, or the import path of a class or function that creates one per episode (docs/howto/environment.md).
    `calculator`, `python` and `tools` let the policy call tools (docs/howto/tools.md), `tic_tac_toe` is a game, `openenv` is an
    OpenEnv server (docs/howto/tool_servers.md), `verifiers` a taskset of that package (docs/howto/verifiers.md), and
    `single_turn` asks one question."""
    program: Annotated[tuple[str, ...], Field(strict=False)] | Annotated[str, OrImportPath()] | None = None
    """A program that plays each episode and calls the policy at an endpoint (docs/howto/agents.md): a command such as `python
    my_agent.py`, as text or as a list, or the import path of an async function."""
    returns: Literal["nothing", "answer", "rewards"] = "nothing"
    """Use of the result of a program: `nothing` scores the policy's last message with `rewards`, `answer` scores the text that
    the program returns, and `rewards` takes the rewards that it returns."""
    shows_answer: bool = False
    """Give a program the reference answer."""
    confined: bool = False
    """Confine a command and all it starts: it can change files only in the folder of the episode, connect only to the port of
    the endpoint, and signal only its own processes. `sandbox.memory_bytes` limits the address space of each."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or function. Those of `openenv` and of MCP servers are in docs/howto/tool_servers.md. A
    command gets them in its task."""
    max_turns: Count = 8
    """Maximum number of turns of the policy per episode."""
    max_conversation_tokens: Tokens | None = None
    """Maximum length of a conversation in tokens; null uses `trainer.row_tokens`. `rollout.max_new_tokens` limits each turn."""
    renderer: str = "auto"
    """Renderer that converts messages to tokens: `plain`, which needs no chat template; `template`, which uses the tokenizer's
    chat template and JSON tool calls in `<tool_call>` tags; or a name from the package `renderers`, such as `glm-5`. `auto`
    selects by the model type, and uses `plain` if the tokenizer has no chat template."""
    renderer_options: dict[str, Any] = {}
    """Options of a renderer from that package, or variables of the chat template, such as `{enable_thinking: false}`."""
    weights: dict[str, float] = {}
    """Weights of the rewards that the environment returns, by name. Rewards that are not listed have weight 1."""
    truncated_reward: float = 0.0
    """Reward of an episode that a limit ended before the environment returned `Done`, unless the environment judges it
    (docs/howto/environment.md). It is reported as `reward/truncated`, in place of the environment's own rewards."""
    step_timeout_s: Seconds = 60.0
    """Time limit in seconds for one call of the environment."""
    episode_timeout_s: Seconds = 600.0
    """Time limit in seconds for all calls of the environment in one episode; for a program, from its start to its end, without
    the time in which it waits for the policy."""
    retries: CountOrZero = 1
    """Number of times to restart an episode after the environment failed. After that, it is removed from its group."""
    num_processes: CountOrZero = 0
    """Number of environment processes per rollout worker, for native code and blocking calls. Each runs one episode at a time
    and is killed at a time limit. With 0, environments run in the rollout worker itself. For a command, the number of commands
    that run at the same time; 0 sets no limit."""
    python: InputPath | None = None
    """Python interpreter of the environment processes, for example of another virtual environment; null uses the current
    one."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        named = [name for name in NAMED if isinstance(value, dict) and name in value]
        if len(named) != 1 or "function" in value or not isinstance(value.get("options", {}), dict):
            return value
        rest = {key: item for key, item in value.items() if key not in (named[0], "options")}
        return rest | {"function": named[0], "options": {named[0]: value[named[0]]} | value.get("options", {})}

    @model_validator(mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(program := value.get("program"), str) and not _IMPORT_PATH.fullmatch(program):
            try:
                return value | {"program": shlex.split(program)}
            except ValueError as error:
                rule = f"must be a command or an import path ({error})"
                raise BrokenRules(BrokenRule({"program": program}, rule, "correct its quotes")) from error
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section, which also allows a string, or the name of an environment as a key."""
        section = super().__get_pydantic_json_schema__(schema, handler)
        named = [{"required": [name]} for name in ("function", "program", *NAMED)]
        section["patternProperties"] = {
            f"^({'|'.join(NAMED)})$": {"description": "Main option of the function with this name."}
        }
        return section | {"anyOf": [{"type": "string"}, *({"type": "object", **form} for form in named)]}

    @property
    def name(self) -> str:
        """The environment, or the program as text."""
        if self.function is not None:
            return self.function
        return self.program if isinstance(self.program, str) else shlex.join(self.program or ())

    @property
    def max_episodes(self) -> int | None:
        """Largest number of episodes that can run in a rollout worker at once; None for no limit."""
        return self.options.get("sessions") if self.function == "openenv" else self.num_processes or None

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.function is None) == (not self.program):
            fix = "set function to an environment, or program to a command or an async function"
            yield self.broken("function program", "exactly one of function and program must be set", fix)
        for key in self.changed("returns", "shows_answer", "confined") if self.function is not None else ():
            yield self.broken(key, "only a program has this key", f"remove {key}")
        if self.program and self.python is not None:
            yield self.broken("python program", "a command names its own interpreter", "remove python")
        if isinstance(self.program, str):
            for key in ("confined", "num_processes"):
                if getattr(self, key):
                    rule = "an async function runs in the rollout worker"
                    yield self.broken(f"{key} program", rule, f"remove {key}, or write the program as a command")
        if self.function == "openenv":
            yield from broken_by_options("openenv", self.options, OpenEnvOptions)
            if self.num_processes or self.python:
                fix = "remove num_processes and python; options.python is the interpreter of the server"
                yield self.broken("num_processes python function", "an OpenEnv server is a process already", fix)
        if self.function == "verifiers":
            yield from broken_by_options("verifiers", self.options, VerifiersOptions)
            if self.python is None or not self.num_processes:
                rule = "the package verifiers runs in processes with an interpreter of its own, because its pins conflict"
                fix = (
                    "run `titanrl doctor --install verifiers`, and set python to .venv-verifiers/bin/python, and num_processes"
                )
                yield self.broken("python num_processes function", rule, fix)
        if self.function == "tools" and "tools" in self.options:
            given = self.options["tools"]
            for i, tool in enumerate(given if isinstance(given, list) else [given]):
                key = f"options.tools.{i}" if isinstance(given, list) else "options.tools"
                if isinstance(tool, dict):
                    yield from broken_by_options("an MCP server", tool, McpOptions, key)
                elif not isinstance(given, list) or not isinstance(tool, str):
                    rule = "tools must be a list of names, import paths and MCP servers, or one MCP server"
                    yield BrokenRule({key: tool}, rule, "write it like [calculator, {mcp: COMMAND}]")
        if self.python is not None and not self.num_processes:
            fix = "set num_processes to the number of concurrent episodes, for example to 8"
            yield self.broken("python num_processes", "another interpreter requires environment processes", fix)


@dataclass(frozen=True, slots=True)
class Distillation:
    """Teacher and weights of a task in a distillation."""

    teacher: str
    """Path of the teacher's section."""
    weight: float
    """Weight of the divergence from the teacher; 0 asks no teacher."""
    reward_weight: float
    """Weight of the reward."""


class DataConfig(Section):
    """Prompts, and the rewards of their completions."""

    source: Annotated[str, OrImportPath(SOURCES)] = "reasoning_gym"
    """Prompt source: a task of the reasoning-gym package; `jsonl` or `parquet` files; `arrow`, a data set saved by Hugging Face
    datasets; or the import path of a list of prompts or of a function `prompts(seed)` that returns one (docs/howto/data.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a custom prompt source."""
    task: str = "chain_sum"
    """Name of the reasoning-gym task. With another source, only a label in metrics; `prompts` if it is not set."""
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

    @model_validator(mode="before")
    @classmethod
    def _label_other_prompts(cls, values: Any) -> Any:
        is_other = isinstance(values, dict) and values.get("source", "reasoning_gym") != "reasoning_gym"
        return {"task": "prompts", **values} if is_other else values

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if (self.source in FILE_SOURCES) != (self.path is not None):
            yield self.broken(
                "path source",
                "path is required when source is jsonl, parquet or arrow, and allowed only then",
                "set path to the file with prompts and answers"
                if self.path is None
                else "remove path, or set source to jsonl, parquet or arrow",
            )
        for key in ("columns", "answer"):
            if getattr(self, key) and self.source == "reasoning_gym":
                yield self.broken(f"{key} source", "a reasoning-gym task has no columns", f"remove {key}")
        if reserved := self.chat_template_kwargs.keys() & set(TEMPLATE_ARGUMENTS):
            rule = f"{min(reserved)} is not a variable of a chat template"
            yield self.broken("chat_template_kwargs", rule, f"remove {min(reserved)}")
        if self.chat_template_kwargs and self.chat_template == "never":
            fix = "remove them, or set chat_template to auto"
            yield self.broken("chat_template_kwargs chat_template", "variables require a chat template", fix)
        if self.environment is not None:
            environment = {"environment": self.environment.name}
            if self.chat_template_kwargs:
                yield BrokenRule(
                    {"chat_template_kwargs": self.chat_template_kwargs, **environment},
                    "the renderer of the environment renders its messages",
                    "set environment.renderer_options instead",
                )
            if self.system_prompt:
                yield BrokenRule(
                    {"system_prompt": self.system_prompt, **environment},
                    "the environment writes the messages of the conversation",
                    "let the environment return it; the built-in ones for questions have the option system_prompt",
                )
        if self.options and self.source in SOURCES:
            fix = "remove options; use task_config for the options of a reasoning-gym task"
            yield self.broken("options source", "options are the arguments of a custom prompt source", fix)
        if self.curriculum is not None:
            if self.source == "reasoning_gym" and self.curriculum.field is not None:
                rule = "prompts of a reasoning-gym task are generated on demand and cannot be sorted by a field"
                yield self.broken("curriculum.field source", rule, "remove field, and set levels or task_configs")
            if self.source != "reasoning_gym" and self.curriculum.field is None:
                key = "task_configs" if self.curriculum.task_configs else "levels"
                fix = "set curriculum.field to the name of a metadata field of the prompts"
                yield self.broken(f"curriculum.{key} source", "only reasoning-gym tasks define levels", fix)
        for name, reward in self.rewards.items():
            if name in RESERVED or not name.isidentifier():
                rule = f"a reward's name must consist of letters, digits and _, and must not be one of {', '.join(RESERVED)}"
                yield BrokenRule({f"rewards.{name}": reward.function}, rule, "rename it")

    @property
    def reward_parts(self) -> Mapping[str, RewardConfig]:
        """Rewards by name. If `rewards` is empty, the default reward of the source."""
        own = "reasoning_gym" if self.source == "reasoning_gym" else "exact"
        return self.rewards or {"answer": RewardConfig(function=own)}

    @property
    def tasks(self) -> "Mapping[str, DataConfig]":
        """Tasks by name: this section alone, unless there is a mixture."""
        return {self.task: self}

    def key(self, name: str) -> str:
        """Return the path of the section of the task with this name."""
        return "data"

    def rollout(self, shared: RolloutConfig) -> RolloutConfig:
        """Return the section `rollout` with the settings of this task."""
        return shared

    def algorithm(self, shared: AlgorithmConfig) -> AlgorithmConfig:
        """Return the section `algorithm` with the settings of this task."""
        return shared

    def distillation(self, shared: DistillConfig) -> Distillation:
        """Return teacher and weights of this task."""
        return Distillation("distill.teacher", 1.0, shared.reward_weight)

    @property
    def chooses_prompts(self) -> bool:
        """True if prompts are chosen among tasks or levels instead of following the order of one stream."""
        return len(self.tasks) > 1 or any(task.curriculum is not None for task in self.tasks.values())

    def weight_of(self, part: str, task: int = 0) -> float:
        """Return the weight of a part in the summed reward; 0 for a reward that is no longer configured.

        `part` is the name of a reward, or `name/part` for one of several parts. `task` is the index of the task in the mixture.
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


class TaskConfig(DataConfig):
    """One task of a mixture. It inherits the keys of `data` that it does not set."""

    weight: Annotated[PositiveFloat, LIVE] = 1.0
    """Share of this task among the groups that are trained on, relative to the other weights."""
    max_new_tokens: Tokens | None = None
    """Maximum completion length in tokens; null uses `rollout.max_new_tokens`."""
    group_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of completions per prompt; null uses `rollout.group_size`."""
    advantage: Annotated[str, OrImportPath(tuple(ADVANTAGES))] | None = None
    """Advantage estimator of this task; null uses `algorithm.advantage`. Estimators with batch statistics compute them over all
    tasks that use the same one."""
    std_ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """Delta degrees of freedom of the standard deviation; null uses `algorithm.std_ddof`."""
    pass_k: Count | None = None
    """Value of k for `advantage: pass_at_k`; null uses `algorithm.pass_k`."""
    teacher: str | None = None
    """`titanrl distill`: name of the task's teacher in `distill.teachers`; null uses `distill.teacher`."""
    distill_weight: NonNegativeFloat = 1.0
    """`titanrl distill`: weight of the divergence from the teacher in the loss of the task's tokens. With 0, the task learns
    only from its rewards."""
    reward_weight: NonNegativeFloat | None = None
    """`titanrl distill`: weight of the task's reward; null uses `distill.reward_weight`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_shared_keys(cls, values: Any) -> Any:
        shared = [key for key in SHARED_SAMPLING if isinstance(values, dict) and key in values]
        if shared:
            rule = "all tasks share this key, because the trainer uses one sampling distribution for all of them"
            raise BrokenRules(*(BrokenRule({key: values[key]}, rule, f"remove it, and set rollout.{key}") for key in shared))
        return values

    def key(self, name: str) -> str:
        """Return the path of this section."""
        return f"{MIXTURE}.{name}"

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

    def distillation(self, shared: DistillConfig) -> Distillation:
        """Return teacher and weights of this task."""
        teacher = "distill.teacher" if self.teacher is None else f"distill.teachers.{self.teacher}"
        reward_weight = shared.reward_weight if self.reward_weight is None else self.reward_weight
        return Distillation(teacher, self.distill_weight, reward_weight)


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

    def weight_of(self, part: str, task: int = 0) -> float:
        """Return the weight of a part of the reward. `task` is the index of the task in the mixture."""
        if not self.mixture:
            return super().weight_of(part)
        return list(self.mixture.values())[task].weight_of(part)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from super()._broken_rules()
        yield from broken_by_names("mixture", self.mixture, "task")


MAX_COMPLETIONS = 1_000_000
"""Maximum number of completions per evaluation."""
DEFAULT = "evaluation"
"""Section of the default set."""
SETS = "evaluation.sets"
"""Section of the additional sets."""

Split = Literal["heldout", "all"]


class EvaluationSetConfig(Section):
    """An additional evaluation set."""

    every_steps: Annotated[StepsOrZero | None, LIVE] = None
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

    every_steps: Annotated[StepsOrZero, LIVE] = 20
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
    min_improvement: Annotated[float, Field(ge=0.0), LIVE] = 0.0
    """Minimum increase of `best_metric` for a policy to count as better."""
    max_error_frac: Annotated[float, Field(ge=0.0, lt=1.0), LIVE] = 0.0
    """Maximum share of completions without a reward in an evaluation that is compared by `best_metric`. Another evaluation is a
    mean over other completions, so it neither selects a policy nor counts for `patience`."""
    patience: Annotated[Count | None, LIVE] = None
    """Early stopping: number of consecutive evaluations without a better policy after which training ends. Null never stops
    early."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from broken_by_names("sets", self.sets, "set")
        for key in self.changed("patience", "min_improvement", "max_error_frac") if self.best_metric is None else ():
            rule = f"{key} requires best_metric, which policies are compared by"
            yield self.broken(f"{key} best_metric", rule, "set best_metric")


class EvaluationSet(EvaluationSetConfig):
    """An evaluation set with all values resolved."""

    name: str
    """Name in metrics. The default set of a task has the task's name."""
    key: str
    """Configuration section of the set."""
    every_steps: int
    max_new_tokens: int
    data: DataConfig
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
    """Return the evaluation sets of a run by name, the default sets first. Lengths in tokens are by task, too."""
    sections = {name: (f"{SETS}.{name}", section) for name, section in evaluation.sets.items()}
    if evaluation.num_prompts:
        sections = {
            task: (DEFAULT, EvaluationSetConfig(num_prompts=evaluation.num_prompts, task=task)) for task in tasks
        } | sections
    first = next(iter(tasks))
    return {
        name: EvaluationSet.model_construct(
            **{
                **dict(section),
                "name": name,
                "key": key,
                "every_steps": evaluation.every_steps if section.every_steps is None else section.every_steps,
                "max_new_tokens": section.max_new_tokens or max_new_tokens.get(section.task or first, max_new_tokens[first]),
                "pass_k": section.pass_k or ((section.num_samples,) if section.num_samples > 1 else ()),
                "data": section.data or tasks.get(section.task or first, tasks[first]),
                "has_own_data": section.data is not None,
                "task": "" if section.data is not None else section.task or first,
            }
        )
        for name, (key, section) in sections.items()
    }
