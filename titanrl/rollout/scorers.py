"""Verifiers: functions from a completion's text and its prompt's entry to rewards. They run in the sandbox.

Each factory here makes a scorer of one part, `answer`.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from titanrl.sandbox.zygote import Scorer, load

_TAG = re.compile("</?answer>")


def reasoning_gym(task: str, config: Mapping[str, Any]) -> Scorer:
    """The task's own verifier, given what stands in the last `<answer>` tags; 0 without them.

    `config` holds the task's options. Raises ValueError if the task is unknown or its options are wrong.
    """
    from titanrl.data.streams import make_gym_dataset

    dataset = make_gym_dataset(task, dict(config), seed=0, size=1)

    def score(text: str, entry: Mapping[str, Any]) -> Mapping[str, float]:
        answer = last_answer(text)
        if answer is None:
            return {"answer": 0.0}
        return {"answer": min(max(float(dataset.score_answer(answer, entry)), 0.0), 1.0)}

    return score


def exact() -> Scorer:
    """1 if the last `<answer>`, or the whole text if it has no such tags, equals `entry["answer"]`.

    White space counts as one space, numbers by their value: 1.50 equals 1.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> Mapping[str, float]:
        answer = last_answer(text)
        return {"answer": float(_equal(text if answer is None else answer, str(entry["answer"])))}

    return score


def imported(path: str) -> Scorer:
    """The user's own `package.module:function`, called as `function(completion_text, entry) -> float`.

    Raises ValueError if there is no such function.
    """
    function = load(path)
    if not callable(function):
        raise ValueError(f"{path!r} is no function, but {function!r}")
    return lambda text, entry: {"answer": float(function(text, entry))}


def last_answer(text: str) -> str | None:
    """What stands between the last pair of `<answer>` and `</answer>`, stripped; None if there is no pair.

    The same as `reasoning_gym.utils.extract_answer`, but in linear time also for a text full of unclosed tags.
    """
    answer, start = None, None
    for tag in _TAG.finditer(text):
        if start is None and tag[0] == "<answer>":
            start = tag.end()
        elif start is not None and tag[0] == "</answer>":
            answer, start = text[start : tag.start()].strip(), None
    return answer


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
