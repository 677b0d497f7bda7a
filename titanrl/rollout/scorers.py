"""Scorers: functions from a completion's text and its prompt's entry to rewards. They run in the sandbox.

Each factory here returns a scorer with one part, `answer`. If a scorer raises, its rollout has no reward: it is left out of its
group and counted in `reward/error_frac`.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from titanrl.loading import import_object
from titanrl.sandbox.zygote import Scorer

_TAG = re.compile("</?answer>")


def reasoning_gym(task: str, config: Mapping[str, Any]) -> Scorer:
    """Return the task's own scorer, applied to the text in the last `<answer>` tags; the score is 0 without tags.

    `config` holds the task's options.

    Raises:
        ValueError: The task is unknown, or its options are wrong.
    """
    from titanrl.data.streams import make_gym_dataset

    dataset = make_gym_dataset(task, dict(config), seed=0, size=1)

    def score(text: str, entry: Mapping[str, Any]) -> Mapping[str, float]:
        answer = last_answer(text)
        if answer is None:
            return {"answer": 0.0}
        try:
            reward = float(dataset.score_answer(answer, entry))
        except Exception:  # several tasks raise on a malformed answer, which is a wrong answer
            dataset.score_answer(entry["answer"], entry)  # raises as well if the task's scorer itself is at fault
            reward = 0.0
        return {"answer": min(max(reward, 0.0), 1.0)}

    return score


def exact() -> Scorer:
    """Return a scorer that gives 1 if the answer equals `entry["answer"]`, else 0.

    The answer is the text in the last `<answer>` tags, or the whole text without tags. White space counts as one space.
    Numbers compare by value: 1.50 equals 1.5.
    """

    def score(text: str, entry: Mapping[str, Any]) -> Mapping[str, float]:
        answer = last_answer(text)
        return {"answer": float(_equal(text if answer is None else answer, str(entry["answer"])))}

    return score


def imported(path: str) -> Scorer:
    """Return the scorer of the user: `package.module:function`, called as `function(completion_text, entry) -> float`.

    Raises:
        ValueError: The path cannot be imported, or its object is not callable.
    """
    function = import_object(path, key="data.scorer")
    if not callable(function):
        raise ValueError(f"data.scorer: {path} is not callable (got {function!r}). Name a function.")
    return lambda text, entry: {"answer": function(text, entry)}


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
