"""Options of the built-in rewards: the keys under `data.rewards.<name>.options`."""

import re
import string
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.section import Count, Seconds, Section, Tokens

JUDGE_PROMPT = """\
Grade the answer of a student from 0 to 10. Judge whether it is right, not how it is written.

Question: {question}
Reference answer: {answer}
Answer of the student: {completion}

End your reply with a line such as "Grade: 7"."""
"""Default of `prompt`."""
PROMPT_FIELDS = ("question", "answer", "completion", "metadata")
"""Names that a prompt of the judge may contain in braces."""
REQUEST_KEYS = ("messages", "model", "n", "stream")
"""Fields of a request that the judge sets itself, or whose replies it cannot read."""


class RegexOptions(Section):
    """Options of `regex`, which is 1 for a completion that matches a regular expression, else 0."""

    pattern: str
    """Regular expression of Python's `re`. Flags are part of it: in `(?s)...` a dot also matches a line break."""
    match: Literal["full", "anywhere"] = "full"
    """Match the whole completion, or any part of it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from _broken_by_pattern("pattern", self.pattern)


class OverlongOptions(Section):
    """Options of `overlong`, DAPO's soft penalty for long completions: from 0 down to -1 over the last `cache_tokens`."""

    cache_tokens: Tokens
    """Number of tokens before `max_tokens` over which the penalty grows (L_cache)."""
    max_tokens: Tokens | None = None
    """Length from which the penalty is -1 (L_max); null means `rollout.max_new_tokens`."""

    def broken_by(self, max_tokens: int) -> Iterator[BrokenRule]:
        """Yield the rule that `cache_tokens` breaks with the effective `max_tokens`."""
        if self.cache_tokens > max_tokens:
            yield BrokenRule(
                values={"cache_tokens": self.cache_tokens},
                rule=f"the penalty must begin within max_tokens, which is {max_tokens}",
                fix=f"set cache_tokens to at most {max_tokens}",
            )

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.max_tokens is not None:
            yield from self.broken_by(self.max_tokens)


class RepetitionOptions(Section):
    """Options of `repetition`, which is minus the share of n-grams that occurred before: from 0 down to -1."""

    ngram_size: Count = 3
    """Number of words, or characters, of an n-gram."""
    unit: Literal["word", "character"] = "word"
    """Unit of the n-grams. Characters suit languages that do not separate words by spaces."""


class MathVerifyOptions(Section):
    """Options of `math_verify`, which compares mathematical expressions."""

    timeout_s: Annotated[int, Field(ge=1, le=3600)] = 2
    """Time limit for reading one completion, and for each comparison, in whole seconds. Beyond it there is no reward."""


class JudgeOptions(Section):
    """Options of `judge`, a model behind an OpenAI-compatible endpoint that grades each completion."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """URL of the API, such as `http://127.0.0.1:8000/v1`; requests go to `<url>/chat/completions`."""
    model: str
    """Name of the model in the requests."""
    prompt: str = JUDGE_PROMPT
    """Text of the user's message, with `{question}`, `{answer}`, `{completion}` and `{metadata[key]}` in braces."""
    system_prompt: str | None = None
    """Text of a system message before it."""
    score_pattern: str = r"(?i)grade:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression of the grade in the reply: its first group, or else the whole match. The last match counts."""
    min_score: float = 0.0
    """Grade that becomes the reward 0."""
    max_score: float = 10.0
    """Grade that becomes the reward 1. A grade outside of both is a failure."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable with the API key; null sends none."""
    request: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
    """Further fields of each request."""
    timeout_s: Seconds = 30.0
    """Time limit of one request."""
    num_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Number of further attempts after a timeout, a lost connection, or one of the replies 408, 429 and 5xx."""

    @property
    def uses_answer(self) -> bool:
        """True if the prompt contains the answer, so that every question needs one."""
        return "answer" in _fields(self.prompt)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from _broken_by_pattern("score_pattern", self.score_pattern)
        yield from self._broken_by_prompt()
        if not _has_host(self.url):
            yield BrokenRule(
                values={"url": self.url}, rule="must be a URL with a host", fix="write it like http://host:8000/v1"
            )
        if "@" in self.url:
            yield BrokenRule(
                values={"url": re.sub(r"//.*@", "//...@", self.url)},
                rule="a URL must not contain credentials, because the configuration is recorded",
                fix="put the key into an environment variable and name it in key_variable",
            )
        if not self.min_score < self.max_score:
            yield BrokenRule(
                values={"min_score": self.min_score, "max_score": self.max_score},
                rule="min_score must be below max_score",
                fix="exchange them; a negative weight turns the reward around",
            )
        for key in sorted(self.request.keys() & set(REQUEST_KEYS)):
            yield BrokenRule(
                values={f"request.{key}": self.request[key]},
                rule="the judge sets this field itself, or could not read the replies",
                fix="remove it",
            )

    def _broken_by_prompt(self) -> Iterator[BrokenRule]:
        fix = "use {question}, {answer}, {completion} or {metadata[key]}, and write other braces twice"
        try:
            fields = _fields(self.prompt)
        except ValueError as error:
            yield BrokenRule(values={"prompt": self.prompt}, rule=f"a prompt must have paired braces ({error})", fix=fix)
            return
        for field in sorted(fields - set(PROMPT_FIELDS)):
            yield BrokenRule(values={"prompt": self.prompt}, rule=f"a prompt has no field {{{field}}}", fix=fix)
        if "completion" not in fields:
            yield BrokenRule(values={"prompt": self.prompt}, rule="a prompt must contain {completion}", fix="add it")


REWARD_OPTIONS: Mapping[str, type[Section]] = {
    "math_verify": MathVerifyOptions,
    "regex": RegexOptions,
    "overlong": OverlongOptions,
    "repetition": RepetitionOptions,
    "judge": JudgeOptions,
}
"""Options of the built-in rewards that have some, by name of the reward."""


def broken_by_options(function: str, options: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules that the options of a reward break; the keys start with `options`."""
    section = REWARD_OPTIONS.get(function)
    if section is None:
        if options:
            yield BrokenRule(
                values={"options": dict(options), "function": function},
                rule=f"only the built-in rewards {', '.join(REWARD_OPTIONS)} have options",
                fix="remove options; bind the arguments of a function of your own with functools.partial",
            )
        return
    try:
        section.model_validate(options)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join(["options", *map(str, details["loc"])])
            cause = details.get("ctx", {}).get("error")
            if isinstance(cause, BrokenRules):
                for rule in cause.broken:
                    values = {f"options.{name}": value for name, value in rule.values.items()}
                    yield BrokenRule(values=values, rule=rule.rule, fix=rule.fix)
            elif details["type"] == "extra_forbidden":
                fix = f"choose one of its options: {', '.join(section.model_fields)}"
                yield BrokenRule(values={key: details["input"]}, rule=f"{function} has no such option", fix=fix)
            elif details["type"] == "missing":
                meaning = section.model_fields[str(details["loc"][0])].description
                yield BrokenRule(values={"options": dict(options)}, rule=f"{key} is required", fix=f"add it. {meaning}")
            else:
                yield BrokenRule(values={key: details["input"]}, rule=_lower(details["msg"]), fix="correct it")


def _broken_by_pattern(key: str, pattern: str) -> Iterator[BrokenRule]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"must be a regular expression ({error})"
        yield BrokenRule(values={key: pattern}, rule=rule, fix="correct it; docs.python.org/3/library/re.html describes them")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _fields(template: str) -> set[str]:
    """Return the names in braces of a template.

    Raises:
        ValueError: Its braces are not paired.
    """
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
