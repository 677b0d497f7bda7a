"""Factories of the built-in rewards, and of custom rewards that run in the sandbox.

Each factory returns a function that takes the text of a completion and the entry of its prompt, and returns a reward. If the
function raises, the rollout has no reward: it is left out of its group and counted in `reward/error_frac`.
"""

import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from titanrl.plugins import Plugin
from titanrl.rewards import check_reward

Scorer = Callable[[str, Mapping[str, Any]], float]
"""Function from the text of a completion and the entry of its prompt to a reward."""

_TAG = re.compile("</?answer>")


def reasoning_gym(task: str, config: Mapping[str, Any]) -> Scorer:
    """Return the reward that a reasoning-gym task defines, applied to the text in the last `<answer>` tags.

    Without tags, the reward is 0.

    Args:
        task: Name of the reasoning-gym task.
        config: Options of the task.

    Raises:
        ValueError: The task is unknown, or its options are invalid.
    """
    from titanrl.data.streams import make_gym_dataset

    dataset = make_gym_dataset(task, dict(config), seed=0, size=1)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        answer = last_answer(text)
        if answer is None:
            return 0.0
        try:
            reward = float(dataset.score_answer(answer, entry))
        except Exception:  # several tasks raise on a malformed answer, which counts as a wrong one
            dataset.score_answer(entry["answer"], entry)  # raises if the task's scorer itself is broken
            reward = 0.0
        return min(max(reward, 0.0), 1.0)

    return score


def exact() -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, else 0.

    The answer is the text in the last `<answer>` tags, or the whole text if there are none. Runs of white space are treated as
    one space. Numbers are compared by value: 1.50 equals 1.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        answer = last_answer(text)
        return float(_equal(text if answer is None else answer, str(entry["answer"])))

    return score


def math_verify(timeout_s: int) -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]` as a mathematical expression, else 0.

    The answer is the text in the last `<answer>` tags. Without tags, it is what the package math-verify finds in the text:
    `\\boxed` first, then other LaTeX, then numbers. A text without an expression gets the reward 0. The reward raises if an
    expression cannot be compared within `timeout_s`, or if the expected answer cannot be parsed. math-verify implements its
    time limits with SIGALRM, so the reward works only in the main thread of a process.

    Raises:
        ImportError: The package is not installed.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(text: str) -> list[Any]:
        try:
            return list(parse(text, parsing_timeout=timeout_s, raise_on_error=True))
        except TimeoutException:
            raise TimeoutError(f"parsing an expression took longer than {timeout_s} s") from None

    @lru_cache(maxsize=16)
    def expected(answer: str) -> list[Any]:
        if not (expressions := read(_boxed(answer))):
            raise ValueError(f"the expected answer contains no mathematical expression (got {answer!a:.60})")
        return expressions

    def score(text: str, entry: Mapping[str, Any]) -> float:
        right, tagged = expected(str(entry["answer"])), last_answer(text)
        try:
            found = read(text if tagged is None else _boxed(tagged))
        except (TimeoutError, MemoryError):
            raise
        except Exception:  # the package raises on some malformed expressions, which count as wrong answers
            found = []
        failures: list[BaseException] = []
        for one, other in product(right, found):
            try:
                if verify([one], [other], timeout_seconds=timeout_s, raise_on_error=True):
                    return 1.0
            except TimeoutException:
                failures.append(TimeoutError(f"comparing two expressions took longer than {timeout_s} s"))
            except Exception as error:  # undecided, unless another pair is equal
                failures.append(error)
        if failures:
            raise failures[0]
        return 0.0

    score(r"\boxed{\frac{1}{2}}, $x = 1,000.5$ or 3%", {"answer": "0.5"})  # load lazy imports before the zygote forks
    return score


def regex(pattern: str, match: Literal["full", "anywhere"]) -> Scorer:
    """Return a reward that is 1 if a regular expression matches the whole completion or any part of it, else 0."""
    compiled = re.compile(pattern)
    matches = compiled.fullmatch if match == "full" else compiled.search
    return lambda text, entry: float(matches(text) is not None)


def overlong(cache_tokens: int, max_tokens: int) -> Callable[..., float]:
    """Return DAPO's soft penalty for overlong completions (arXiv:2503.14476, equation 13).

    The penalty is 0 up to `max_tokens - cache_tokens` tokens, -1 from `max_tokens` on, and linear in between.
    """
    free_tokens = max_tokens - cache_tokens

    def score(text: str, entry: Mapping[str, Any], num_tokens: int) -> float:
        return -min(max(num_tokens - free_tokens, 0), cache_tokens) / cache_tokens

    return score


def repetition(ngram_size: int, unit: Literal["word", "character"]) -> Scorer:
    """Return a penalty for repetition: minus the fraction of n-grams that occurred before.

    A text of at most one n-gram has the penalty 0. This is the penalty of TRL and open-r1 with `max_penalty: -1`, after
    arXiv:2502.03373.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        lower = text.lower()
        units = lower.split() if unit == "word" else lower
        total = len(units) - ngram_size + 1
        if total <= 1:
            return 0.0
        distinct = {tuple(units[i : i + ngram_size]) for i in range(total)}
        return len(distinct) / total - 1.0

    return score


def custom(plugin: Plugin) -> Callable[..., Any]:
    """Return a user-defined reward function.

    Raises:
        ValueError: The function cannot be imported, or does not have the signature of a reward.
    """
    function = plugin.load()
    check_reward(function, key=plugin.key, name=plugin.name)
    loaded: Callable[..., Any] = function
    return loaded


def last_answer(text: str) -> str | None:
    """Return the stripped text between the last pair of `<answer>` and `</answer>`; None if there is no pair.

    The result equals that of `reasoning_gym.utils.extract_answer`, but this function takes linear time even for a text with
    many unclosed tags.
    """
    answer, start = None, None
    for tag in _TAG.finditer(text):
        if start is None and tag[0] == "<answer>":
            start = tag.end()
        elif start is not None and tag[0] == "</answer>":
            answer, start = text[start : tag.start()].strip(), None
    return answer


def _boxed(answer: str) -> str:
    """Wrap an answer in `\\boxed`, unless it is LaTeX already, so that math-verify parses it as one expression."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _equal(answer: str, expected: str) -> bool:
    answer, expected = " ".join(answer.split()), " ".join(expected.split())
    if answer == expected:
        return True
    number, expected_number = _number(answer), _number(expected)
    return number is not None and number == expected_number


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
