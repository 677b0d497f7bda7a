"""Custom prompt sources: a list of prompts, or a function that returns one."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.plugins import Plugin, check_call

EXPECTED = "def prompts(seed: int) -> Sequence[Mapping[str, Any]]"


@runtime_checkable
class Prompts(Protocol):
    """A sequence of prompts, such as a list of dicts.

    A prompt is a mapping with the string `prompt` or `question`, and usually the string `answer`. Rewards receive it as
    `question`, `answer` (None if missing) and `metadata`, a dict of all other keys.

    Example: `[{"prompt": "What is 7 * 8?", "answer": "56", "level": 2}]`
    """

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a prompt."""
        ...


class PromptSource(Protocol):
    """A function that returns the prompts of a run. It receives `data.options` as keyword arguments.

    Every rollout worker calls it, so the same seed must give the same prompts.

    Example:
        def squares(seed: int, largest: int = 100) -> list[dict[str, str]]:
            return [{"prompt": f"{n} * {n} =", "answer": str(n * n)} for n in range(largest)]
    """

    def __call__(self, seed: int, /) -> Prompts:
        """Return the prompts."""
        ...


def check_prompt_source(source: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that an object is a list of prompts, or has the signature of `PromptSource`.

    Raises:
        ValueError: It is neither.
    """
    if not _is_list(source):
        check_call(source, PromptSource.__call__, key=key, name=name, expected=EXPECTED, options=options)
    elif options:
        raise ValueError(
            f"data.options: a list of prompts does not take options (got {dict(options)}). "
            f"Remove them, or write a function `{EXPECTED}`."
        )


def read_custom_prompts(
    plugin: Plugin, seed: int, options: Mapping[str, Any], *, needs_answer: bool
) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a custom source as entries with `question`, `answer` and `metadata`.

    Args:
        plugin: The list, or the function that returns it.
        seed: Seed of the run.
        options: Keyword arguments of the function.
        needs_answer: True if a prompt without an answer is an error.

    Raises:
        ValueError: The source or one of its prompts is invalid.
    """
    source = plugin.load()
    check_prompt_source(source, key=plugin.key, name=plugin.name, options=options)
    prompts = source if _is_list(source) else _called(source, plugin, seed, options)
    for index in range(len(prompts)):
        try:
            yield _entry(prompts[index], needs_answer=needs_answer)
        except _BadPrompt as error:
            raise _broken(plugin, f"item {index}: {error.problem}", error.fix) from error
        except Exception as error:  # custom code may raise anything
            problem = f"item {index}: reading it raised {type(error).__name__}: {error}"
            raise _broken(plugin, problem, "give a list of dicts") from error


def _is_list(source: object) -> TypeGuard[Prompts]:
    return isinstance(source, Prompts) and not isinstance(source, str | Mapping | type)


def _called(source: Callable[..., Any], plugin: Plugin, seed: int, options: Mapping[str, Any]) -> Prompts:
    try:
        prompts = source(seed, **options)
    except Exception as error:  # custom code may raise anything
        raise _broken(plugin, f"the function raised {type(error).__name__}: {error}", "correct it, or data.options") from error
    if not _is_list(prompts):
        raise _broken(plugin, f"must return a list of prompts, got {type(prompts).__name__}", f"write it as `{EXPECTED}`")
    return prompts


class _BadPrompt(Exception):
    """Raised for an item that is not a valid prompt."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


def _entry(item: object, *, needs_answer: bool) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _BadPrompt(f"must be a mapping with prompt and answer, got {type(item).__name__}", "return a list of dicts")
    rest = {str(key): value for key, value in item.items() if key not in ("prompt", "question", "answer", "metadata")}
    question, answer = item.get("question", item.get("prompt")), item.get("answer")
    if question is None:
        raise _BadPrompt("prompt is missing", "give every item the key prompt")
    if answer is None and needs_answer:
        raise _BadPrompt("answer is missing", "give every item the key answer, or set data.rewards to a custom reward")
    for key, text in {"prompt": question, "answer": answer}.items():
        if not isinstance(text, str) and text is not None:
            raise _BadPrompt(f"{key} must be a string, got {text!a:.60}", "convert it with str()")
        if text is not None and not text.strip():
            raise _BadPrompt(f"{key} is empty", "fill it in, or leave the item out")
    metadata = item.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise _BadPrompt(f"metadata must be a mapping, got {type(metadata).__name__}", "rename the key")
    entry = {"question": question, "answer": answer, "metadata": {**metadata, **rest}}
    try:
        question.encode()
        pickle.dumps(entry)  # it is sent to the sandbox
    except Exception as error:  # pickling runs custom code
        raise _BadPrompt(
            f"must be picklable, to be sent to rewards: {type(error).__name__}: {error}", "use plain values"
        ) from error
    return entry


def _broken(plugin: Plugin, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values={plugin.key: plugin.name}, rule=rule, fix=fix))
