"""The built-in rewards, and the factory of those that run in the sandbox.

Each factory here returns a function from a completion's text and its prompt's entry to a reward. If it raises, its rollout has
no reward: it is left out of its group and counted in `reward/error_frac`.
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
    """Return the task's own reward, applied to the text in the last `<answer>` tags; the score is 0 without tags.

    `config` holds the task's options.

    Raises:
        ValueError: The task is unknown, or its options are wrong.
    """
    from titanrl.data.streams import make_gym_dataset

    dataset = make_gym_dataset(task, dict(config), seed=0, size=1)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        answer = last_answer(text)
        if answer is None:
            return 0.0
        try:
            reward = float(dataset.score_answer(answer, entry))
        except Exception:  # several tasks raise on a malformed answer, which is a wrong answer
            dataset.score_answer(entry["answer"], entry)  # raises as well if the task's scorer itself is at fault
            reward = 0.0
        return min(max(reward, 0.0), 1.0)

    return score


def exact() -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, else 0.

    The answer is the text in the last `<answer>` tags, or the whole text without tags. White space counts as one space.
    Numbers compare by value: 1.50 equals 1.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        answer = last_answer(text)
        return float(_equal(text if answer is None else answer, str(entry["answer"])))

    return score


def math_verify(timeout_s: int) -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]` as a mathematical expression, else 0.

    The answer is the text in the last `<answer>` tags, or else what the package math-verify finds in the whole text: `\\boxed`
    first, then other LaTeX, then numbers. A text without an expression has the reward 0. If an expression cannot be compared
    in `timeout_s`, or the expected answer cannot be read, there is no reward. The package sets its time limits by SIGALRM, so
    this works only in the main thread of a process.

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
            raise TimeoutError(f"an expression was not read in {timeout_s} s") from None

    @lru_cache(maxsize=16)
    def expected(answer: str) -> list[Any]:
        if not (expressions := read(_boxed(answer))):
            raise ValueError(f"the expected answer has no mathematical expression (got {answer!a:.60})")
        return expressions

    def score(text: str, entry: Mapping[str, Any]) -> float:
        right, tagged = expected(str(entry["answer"])), last_answer(text)
        try:
            found = read(text if tagged is None else _boxed(tagged))
        except (TimeoutError, MemoryError):
            raise
        except Exception:  # of any kind: the package fails on some malformed expressions, which are wrong answers
            found = []
        failures: list[BaseException] = []
        for one, other in product(right, found):
            try:
                if verify([one], [other], timeout_seconds=timeout_s, raise_on_error=True):
                    return 1.0
            except TimeoutException:
                failures.append(TimeoutError(f"two expressions were not compared in {timeout_s} s"))
            except Exception as error:  # unknown, unless another pair is equal
                failures.append(error)
        if failures:
            raise failures[0]
        return 0.0

    score(r"\boxed{\frac{1}{2}}, $x = 1,000.5$ or 3%", {"answer": "0.5"})  # loads what every forked process needs
    return score


def regex(pattern: str, match: Literal["full", "anywhere"]) -> Scorer:
    """Return a reward that is 1 if a regular expression matches the completion, else 0."""
    compiled = re.compile(pattern)
    matches = compiled.fullmatch if match == "full" else compiled.search
    return lambda text, entry: float(matches(text) is not None)


def overlong(cache_tokens: int, max_tokens: int) -> Callable[..., float]:
    """Return DAPO's soft penalty for long completions (arXiv:2503.14476, formula 13).

    0 up to `max_tokens - cache_tokens` tokens, -1 beyond `max_tokens`, and linear between them.
    """
    free_tokens = max_tokens - cache_tokens

    def score(text: str, entry: Mapping[str, Any], num_tokens: int) -> float:
        return -min(max(num_tokens - free_tokens, 0), cache_tokens) / cache_tokens

    return score


def repetition(ngram_size: int, unit: Literal["word", "character"]) -> Scorer:
    """Return minus the share of n-grams that occurred before; 0 for a text of at most one n-gram.

    The penalty is that of TRL and open-r1 with `max_penalty: -1`, after arXiv:2502.03373.
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


def own(plugin: Plugin) -> Callable[..., Any]:
    """Return the reward function of the user.

    Raises:
        ValueError: It cannot be imported, or called as a reward.
    """
    function = plugin.load()
    check_reward(function, key=plugin.key, name=plugin.name)
    loaded: Callable[..., Any] = function
    return loaded


def last_answer(text: str) -> str | None:
    """Return the text between the last pair of `<answer>` and `</answer>`, stripped; None if there is no pair.

    The result equals that of `reasoning_gym.utils.extract_answer`, but takes linear time also for a text full of unclosed tags.
    """
    answer, start = None, None
    for tag in _TAG.finditer(text):
        if start is None and tag[0] == "<answer>":
            start = tag.end()
        elif start is not None and tag[0] == "</answer>":
            answer, start = text[start : tag.start()].strip(), None
    return answer


def _boxed(answer: str) -> str:
    """Return an answer as LaTeX that math-verify reads as one expression."""
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
