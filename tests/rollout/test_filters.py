"""Group filters, with a hand-made group."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.rollout.test_group import PROMPT, completion
from titanrl.carriers.rewards import Scored
from titanrl.carriers.types import Group, ScorerFailure
from titanrl.rollout.group import ScoredGroup, keeps, rollouts_of, scored_group

SCORES = [Scored(reward=1.25, parts={"right": 1.0, "short": 0.25}), Scored(reward=0.0, parts={"right": 0.0})]
GROUP = Group(
    prompt=PROMPT,
    rollouts=rollouts_of(PROMPT, [completion([7, 1]), completion([8, 8, 8], cut=True)], SCORES),
    generate_s=0.5,
    score_s=0.1,
    failures=(ScorerFailure(completion=completion([9]), error="ZeroDivisionError"),),
)


def decode(token_ids: Sequence[int]) -> str:
    return "-".join(map(str, token_ids))


def test_filter_receives_texts_rewards_parts_lengths_and_entry() -> None:
    group = scored_group(GROUP, decode)
    short = group.parts["short"]
    assert (short[0], np.isnan(short[1])) == (0.25, True)
    assert group == ScoredGroup(
        index=7,
        task="sums",
        entry={"answer": "2"},
        completions=("7-1", "8-8-8"),
        rewards=(1.25, 0.0),
        parts={"right": (1.0, 0.0), "short": short},
        num_tokens=(2, 3),
        finish_reasons=("stop", "length"),
        num_errors=1,
    )


def test_filter_cannot_change_the_entry_of_later_epochs() -> None:
    keeps(lambda group: group.entry.clear() is None, GROUP, decode, "own.py:keep")  # type: ignore[attr-defined]
    assert GROUP.prompt.entry == {"answer": "2"}


@pytest.mark.parametrize("kept", [True, False, np.True_, np.False_])
def test_return_value_of_the_filter_decides(kept: Any) -> None:
    assert keeps(lambda group: kept, GROUP, decode, "own.py:keep") is bool(kept)


@pytest.mark.parametrize(
    ("keep", "problem"),
    [
        (
            lambda group: None,
            r"own\.py:keep must return True or False \(got None\)\. Write it as `def keep\(group: ",
        ),
        (lambda group: np.ones(2), r"must return True or False \(got array\(\[1\., 1\.\]\)\)"),
        (lambda group: 0.5, r"must return True or False \(got 0\.5\)"),
        (lambda group: group.entry["level"], r"own\.py:keep raised KeyError: 'level' \(got group 7\)\. Correct it\."),
    ],
    ids=["none", "array", "number", "raises"],
)
def test_error_names_an_invalid_filter(keep: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.group_filter: .*{problem}"):
        keeps(keep, GROUP, decode, "own.py:keep")
