"""Factories of the built-in rewards.

Each returns a function of the text of a completion and the entry of its prompt; that of `overlong` also takes the number of
tokens. If the function raises, the rollout has no reward: it is left out of its group and counted in `reward/error_frac`.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from titanrl.data.gym import create_dataset
from titanrl.rollout.answers import (
    MAX_CHARS,
    Answer,
    Choice,
    Words,
    after_thoughts,
    bare_number,
    equal,
    number,
    plain,
    read,
    unwrapped,
)

Scorer = Callable[[str, Mapping[str, Any]], float]
"""Function from the text of a completion and the entry of its prompt to a reward."""

MAX_PROSE_CHARS = 20_000
"""Length of the end of a text in which `math_verify` searches for an answer that is not marked."""

_TAG = re.compile("</?answer>")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_JOINTS = {",", "and", "or", ",and", ",or"}
_STATED = re.compile(r"(?i)\b(?:answer|option|choice)\b[*_\s]*(?:is\b|are\b|=|:)[:*_ \t]*|####")
_NUMBER = re.compile(r"\d[\d.,]*(?<=\d)")
_UNSURE = re.compile(  # "3 or 4" or "not 3" at the end
    r"(?i)\d[^\s\d]*(?:\s+[^\s\d]+)?\s+or\s+[^\s\d]*+\d[\d.,]*+[^\d]*+$"
    r"|\b(?:not|never|isn't|wrong|incorrect)\b[^\d]{0,20}\d[\d.,]*+[^\d]*+$"
)
_WORD = re.compile(r"(?<![\\a-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min|lim|mod|inf|arc\w+)\b)[a-z]{3,}")


def reasoning_gym(task: str, config: Mapping[str, Any]) -> Scorer:
    """Return the reward that a reasoning-gym task defines, limited to 0 to 1, for the text in the last `<answer>` tags.

    Without tags, the reward is 0. If the expected answer is a number, an answer such as `1,234`, `1.234,5` or `**18**` is also
    scored as a plain number, because several tasks compare texts.

    Raises:
        Exception: The task is unknown, or rejects its options.
    """
    dataset = create_dataset(task, config, seed=0, size=1)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        answer = last_answer(text)
        if answer is None:
            return 0.0
        rewards, notations = [0.0], [answer]
        bare = bare_number(unwrapped(plain(answer))) if len(answer) <= MAX_CHARS else None
        if bare is not None and number(str(entry["answer"])) is not None:
            notations.append(bare)
        for notation in dict.fromkeys(notations):
            try:
                rewards.append(float(dataset.score_answer(notation, entry)))
            except Exception:  # several tasks raise on a malformed answer, which counts as a wrong one
                dataset.score_answer(entry["answer"], entry)  # raises if the task's scorer itself is broken
        return min(max(rewards), 1.0)

    return score


def exact() -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, else 0.

    The answer is the text in the last `<answer>` tags, or the whole text if there are none; `</think>` and all text before it
    are left out, unless nothing follows it. Runs of white space are treated as one space. Numbers are compared by value:
    1,234.50 equals 1234.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> float:
        text = after_thoughts(text)
        tagged = last_answer(text)
        answer, expected = (" ".join(part.split()) for part in (text if tagged is None else tagged, str(entry["answer"])))
        if answer == expected:
            return 1.0
        value = number(answer)
        return float(value is not None and value == number(expected))

    return score


def math_verify(timeout_s: int) -> Scorer:
    """Return a reward that is 1 if the answer equals `entry["answer"]`, as a number, list, text or mathematical expression.

    The answer is the text in the last `<answer>` tags, or after the last `<answer>` if no tags are closed, and in it the last
    `\\boxed` if there is one. Without tags, it is the last `\\boxed`, the text after the last "answer is", or else what the
    package math-verify finds in the text: LaTeX first, then numbers. `</think>` and all text before it are left out, unless
    nothing follows it. A text without an answer gets the reward 0. `titanrl.rollout.answers` compares the notations that it can
    read, math-verify all others. The reward raises if an expression cannot be compared within `timeout_s`, or if the expected
    answer is empty or cannot be parsed.

    Raises:
        ImportError: The package is not installed.
        RuntimeError: This is not the main thread, in which alone math-verify's time limits (SIGALRM) work.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
    from sympy import Basic, Float, UnevaluatedExpr

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def expressions(text: str) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "math_verify compares expressions only in the main thread, because it limits their time by SIGALRM"
            )
        try:
            return list(parse(text, parsing_timeout=timeout_s, raise_on_error=True))
        except TimeoutException:
            raise TimeoutError(f"parsing an expression took longer than {timeout_s} s") from None
        except MemoryError:
            raise
        except Exception:  # the package raises on some malformed expressions, which count as wrong answers
            return []

    @lru_cache(maxsize=64)
    def expected(latex: str) -> list[Any]:
        if not (found := expressions(_boxed(latex))):
            raise ValueError(f"math-verify cannot parse the expected answer {latex!a:.60}")
        return found

    def are_close(one: Any, other: Any) -> bool:
        """Check the relative error of numbers with decimals, because math-verify only compares six decimals."""
        pair = (one, other)
        if not all(isinstance(value, Basic) and value.is_number and not value.has(UnevaluatedExpr) for value in pair):
            return True
        first, second = (complex(value.evalf(20)) for value in pair)
        return not (one.has(Float) or other.has(Float)) or abs(first - second) <= 2e-6 * max(abs(first), abs(second))

    def any_equal(right: Sequence[Any], found: Sequence[Any]) -> bool:
        failures: list[BaseException] = []
        for one, other in product(right, found):
            try:
                is_equal = verify([one], [other], timeout_seconds=timeout_s, raise_on_error=True)
                if is_equal and timeout(timeout_seconds=timeout_s)(are_close)(one, other):
                    return True
            except TimeoutException:
                failures.append(TimeoutError(f"comparing two expressions took longer than {timeout_s} s"))
            except Exception as error:  # undecided, unless another pair is equal
                failures.append(error)
        if failures:
            raise failures[0]
        return False

    def are_equal(right: str, other: str) -> bool:
        first, second = (set(_WORD.findall(text.lower())) for text in (right, other))
        if first and second and first != second:  # math-verify would read the letters of a word as factors
            return False
        return any_equal(expected(right), expressions(_boxed(other)))

    def is_right_in_prose(right: Answer, text: str) -> bool:
        """Search a text for the answer, unless it states several or denies one."""
        if isinstance(right.value, Words | Choice) or _UNSURE.search(text[-MAX_PROSE_CHARS:]):
            return False
        found = expressions(plain(text[-MAX_PROSE_CHARS:]))
        texts = [value for value in found if isinstance(value, str)]
        is_share = any(isinstance(value, Basic) and value.has(UnevaluatedExpr) for value in found)  # a percentage
        shown = [] if is_share else [answer for answer in map(read, texts) if answer.value is not None]
        if shown:
            return equal(right, shown[0], are_equal)
        return any_equal(expected(right.latex), found)

    def score(text: str, entry: Mapping[str, Any]) -> float:
        right = read(str(entry["answer"]), is_reference=True)
        if not right.text:
            raise ValueError(f"the expected answer must not be empty (got {entry['answer']!a:.60})")
        text = after_thoughts(text)
        tagged = last_answer(text)
        if tagged is None and "<answer>" in text:  # a tag that is not closed
            tagged = text.rpartition("<answer>")[2].partition("</")[0].strip()
        boxed = last_boxed(text if tagged is None else tagged)
        if boxed is not None or tagged is not None:
            marked = tagged or "" if boxed is None else boxed
            if len(marked) > MAX_CHARS:
                return 0.0
            answer = read(marked)
            is_right = equal(right, answer, are_equal)
            is_prose = answer.value is None and boxed is None and " " in answer.text
            if is_prose and len(set(_NUMBER.findall(answer.text))) == 1:
                is_right = is_right or is_right_in_prose(right, answer.text)
            return float(is_right)
        for stated in stated_answers(text):
            answer = read(stated)
            if answer.value is not None:
                return float(equal(right, answer, are_equal))
            if is_short(stated) and equal(right, answer, are_equal):
                return 1.0
        return float(is_right_in_prose(right, text))

    any_equal(expressions(r"\boxed{\frac{1}{2}}, $x = 1,000.5$ or 3%"), expressions(r"$\sqrt{2}$"))  # load lazy imports
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


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed`, or the contents of several that are joined by "and", "or" or a comma.

    Takes linear time. An unclosed `\\boxed` is ignored.
    """
    boxes: list[tuple[int, slice]] = []
    opened: list[tuple[int, int] | None] = []
    for token in _BRACE.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token.start(), token.end()) if len(token[0]) > 1 else None)
        elif token[0] == "}" and opened and (span := opened.pop()) is not None:
            while boxes and boxes[-1][0] > span[0]:  # inside of this one
                boxes.pop()
            boxes.append((span[0], slice(span[1], token.start())))
    if not boxes:
        return None
    start, content = boxes.pop()
    contents = [text[content]]
    while boxes and "".join(text[boxes[-1][1].stop + 1 : start].replace("$", " ").split()) in _JOINTS:
        start, content = boxes.pop()
        contents.append(text[content])
    return ", ".join(dict.fromkeys(reversed(contents)))


def stated_answers(text: str) -> Iterator[str]:
    """Yield what a text without tags may state as its answer, the surest first.

    This is the first line with text after the last "answer is" or `####`, the first sentence of that, and the text itself if it
    is short.
    """
    *_, last = [None, *_STATED.finditer(text)]
    if last is not None:
        line = text[last.end() :].strip().partition("\n")[0]
        yield line
        yield re.split(r"\.\s|\.$", line, maxsplit=1)[0]
    if is_short(text):
        yield text


def is_short(text: str) -> bool:
    """Return True if a text is at most one line of 6 words and 100 characters."""
    return len(text) <= 100 and "\n" not in text.strip() and len(text.split()) <= 6


def _boxed(answer: str) -> str:
    """Wrap an answer in `\\boxed`, unless it contains LaTeX delimiters, so that math-verify parses it as one expression."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
