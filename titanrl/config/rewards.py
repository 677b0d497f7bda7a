"""Options of the built-in rewards: the keys under `data.rewards.<name>.options`."""

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
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


class JudgeOptions(Section):
    """Options of `judge`, a language model behind an OpenAI-compatible endpoint that grades each completion."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """Base URL of the API, such as `http://127.0.0.1:8000/v1`. Requests are sent to `<url>/chat/completions`."""
    model: str
    """Model name in the requests."""
    prompt: str = JUDGE_PROMPT
    """User message, with the placeholders `{question}`, `{answer}`, `{completion}` and `{metadata[key]}`."""
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

    @property
    def uses_answer(self) -> bool:
        """True if the prompt contains the reference answer, so that every question needs one."""
        return "answer" in _fields(self.prompt)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from _broken_by_pattern("score_pattern", self.score_pattern)
        fix = "use {question}, {answer}, {completion} or {metadata[key]}, and double all other braces"
        try:
            fields = _fields(self.prompt)
        except ValueError as error:
            yield self.broken("prompt", f"prompt must have paired braces ({error})", fix)
        else:
            for field in sorted(fields - set(PROMPT_FIELDS)):
                yield self.broken("prompt", f"prompt contains the unknown placeholder {{{field}}}", fix)
            if "completion" not in fields:
                yield self.broken("prompt", "prompt must contain {completion}", "add it")
        if not _has_host(self.url):
            yield self.broken("url", "url must contain a host", "write it like http://host:8000/v1")
        if "@" in self.url:
            yield BrokenRule(
                {"url": re.sub(r"//.*@", "//...@", self.url)},
                "url must not contain credentials, because the configuration is saved in the run directory",
                "put the key into an environment variable, and set key_variable to its name",
            )
        if not self.min_score < self.max_score:
            fix = "swap them; use a negative weight to invert the reward"
            yield self.broken("min_score max_score", "min_score must be below max_score", fix)
        for key in sorted(self.request.keys() & set(REQUEST_KEYS)):
            rule = "the judge sets this field itself, or could not parse the response"
            yield self.broken(f"request.{key}", rule, "remove it")


REWARD_OPTIONS: Mapping[str, type[Section]] = {
    "math_verify": MathVerifyOptions,
    "regex": RegexOptions,
    "overlong": OverlongOptions,
    "repetition": RepetitionOptions,
    "judge": JudgeOptions,
}
"""Option sections of the built-in rewards that have options, by reward."""


def broken_by_options(function: str, options: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules that the options of a reward break. The keys start with `options`."""
    section = REWARD_OPTIONS.get(function)
    if section is None:
        if options:
            rule = f"only the built-in rewards {', '.join(REWARD_OPTIONS)} have options"
            fix = "remove options; for a custom function, bind arguments with functools.partial"
            yield BrokenRule({"options": dict(options), "function": function}, rule, fix)
        return
    try:
        section.model_validate(options)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join(["options", *map(str, details["loc"])])
            cause = details.get("ctx", {}).get("error")
            if isinstance(cause, BrokenRules):
                for broken in cause.broken:
                    yield replace(broken, values={f"options.{name}": value for name, value in broken.values.items()})
                continue
            if details["type"] == "extra_forbidden":
                fix = f"choose one of its options: {', '.join(section.model_fields)}"
                yield BrokenRule({key: details["input"]}, f"{function} has no such option", fix)
                continue
            meaning = section.model_fields[str(details["loc"][0])].description
            if details["type"] == "missing":
                yield BrokenRule({"options": dict(options)}, f"{key} is required", f"add it. {meaning}")
            else:
                condition = re.sub(r"^\w+ should ", "must ", details["msg"])
                yield BrokenRule({key: details["input"]}, condition, f"correct it. {meaning}")


def _broken_by_pattern(key: str, pattern: str) -> Iterator[BrokenRule]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        fix = "correct it; see docs.python.org/3/library/re.html"
        yield BrokenRule({key: pattern}, f"must be a regular expression ({error})", fix)


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _fields(template: str) -> set[str]:
    """Return the placeholders of a template.

    Raises:
        ValueError: The braces are not paired.
    """
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}
