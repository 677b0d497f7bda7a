"""Token rewards, from the return value of a reward to the record of a group, with numbers computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rollout.test_group import HANDLE
from titanrl.carriers.rewards import Answers, Score, TokenRewards
from titanrl.carriers.types import Group, GroupTokens, Prompt, Rollout, Segment, Turn
from titanrl.config.data import RewardConfig
from titanrl.rollout.group import mask_truncated, record_of
from titanrl.rollout.scoring import in_turns, rewards_by_token, weighted

TEXTS = {1: "", 2: "ab", 3: "c", 4: " d", 5: "ef"}
"""Texts of tokens; 1 ends the sequence."""


def decode(ids: object) -> str:
    return "".join(TEXTS[token] for token in ids)  # type: ignore[attr-defined]


def answers(*ids: int) -> Answers:
    return Answers(
        entry={}, completions=(decode(ids),), num_tokens=(len(ids),), finish_reasons=("stop",), token_ids=(ids,), decode=decode
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (TokenRewards(tokens=[0.5, 0.0, 0.25, 1.0]), [0.5, 0.0, 0.25, 1.0]),
        (TokenRewards(tokens=[0.5, 0.0, 0.25, 1.0], whole=2.0), [0.5, 0.0, 0.25, 3.0]),
        (TokenRewards(whole=2.0), [0.0, 0.0, 0.0, 2.0]),
        # "abc d": the first token completes "a" and "ab", the third one the last two characters.
        (TokenRewards(steps=[(1, 1.0), (2, 0.5), (3, 0.25)]), [1.5, 0.25, 0.0, 0.0]),
        (TokenRewards(steps=[(5, 2.0), (4, -1.0)], whole=0.5), [0.0, 0.0, 1.0, 0.5]),
    ],
)
def test_each_reward_is_assigned_to_its_token(rewards: TokenRewards, expected: list[float]) -> None:
    assert rewards_by_token(rewards, answers(2, 3, 4, 1), 0) == expected
    assert rewards.total == sum(expected)


def test_character_of_several_tokens_belongs_to_the_last_one() -> None:
    texts = {(7,): "\ufffd", (7, 8): "\ufffd", (7, 8, 9): "\u00e9", (7, 8, 9, 1): "\u00e9"}
    several = replace(answers(1), completions=("\u00e9",), num_tokens=(4,), token_ids=((7, 8, 9, 1),))
    several = replace(several, decode=lambda ids: texts[tuple(ids)])
    assert rewards_by_token(TokenRewards(steps=[(1, 1.0)]), several, 0) == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        (TokenRewards(tokens=[1.0]), "it returned 1 token rewards for a completion of 4 tokens. Return one per sampled token"),
        (TokenRewards(steps=[(6, 1.0)]), "it returned a step that ends after 6 characters, but the completion has 5. Count"),
    ],
)
def test_rewards_that_match_no_token_are_rejected(rewards: TokenRewards, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rewards_by_token(rewards, answers(2, 3, 4, 1), 0)


def test_steps_are_rejected_in_an_environment() -> None:
    with pytest.raises(ValueError, match="with an environment the text is only the last message"):
        rewards_by_token(TokenRewards(steps=[(1, 1.0)]), replace(answers(2, 1), decode=None), 0)


def test_weighted_rewards_are_summed_per_token() -> None:
    scores = {"a": Score.of({"a": 0.5}), "b": Score.of({"b": TokenRewards(tokens=[1.0, 2.0, 4.0])})}
    scores["c"] = Score.of({"c": TokenRewards(steps=[(2, 1.0)])})
    weights = {"a": 2.0, "b": 0.5, "c": -1.0}
    rewards = {name: RewardConfig(function="rewards.py:score", weight=weight) for name, weight in weights.items()}
    assert weighted({"a": scores["a"]}, rewards, answers(2, 3, 1), 0).token_rewards is None
    assert weighted(scores, rewards, answers(2, 3, 1), 0).token_rewards == (0.5 - 1.0, 1.0, 2.0 + 1.0)


def test_token_and_turn_rewards_are_combined() -> None:
    # Two turns in the first segment (tokens 1 and 2, then 3), one in the second (tokens 4 and 5).
    first, second = segment([0, 1, 1, 0, 1]), segment([0, 1, 1])
    turns = (Turn(segment=0, end=3, reward=1.0), Turn(segment=0, end=5, reward=0.0), Turn(segment=1, end=3, reward=-2.0))
    by_token, joined = in_turns([0.5, 0.0, 0.25, 1.0, 1.0], turns, (first, second))
    assert by_token.tolist() == [0.5, 1.0, 0.25, 1.0, -1.0]
    assert [turn.reward for turn in joined] == [1.5, 0.25, 0.0]
    assert [(turn.segment, turn.end) for turn in joined] == [(0, 3), (0, 5), (1, 3)]


def test_reward_of_a_turn_without_tokens_goes_to_the_previous_token() -> None:
    turns = (Turn(segment=0, end=3, reward=1.0), Turn(segment=0, end=3, reward=0.5))
    by_token, joined = in_turns([0.0, 0.25], turns, (segment([0, 1, 1]),))
    assert by_token.tolist() == [0.0, 1.75]
    assert [turn.reward for turn in joined] == [1.25, 0.5]


def segment(mask: list[int], nonfinite: tuple[int, ...] = ()) -> Segment:
    logprobs = np.full(len(mask), -0.5, np.float32)
    logprobs[list(nonfinite)] = np.nan
    sampled = np.array(mask, np.bool_)
    return Segment(token_ids=np.arange(len(mask)), mask=sampled, logprobs=logprobs, versions=np.where(sampled, 0, -1))


def rollout(segments: tuple[Segment, ...], rewards: list[float] | None, turns: tuple[Turn, ...] = ()) -> Rollout:
    by_token = None if rewards is None else np.array(rewards)
    return Rollout(segments=segments, reward=1.0, reward_parts={}, finish_reason="length", turns=turns, token_rewards=by_token)


def tokens_of(trained: Group, whole: Group) -> GroupTokens | None:
    return record_of(trained, HANDLE, has_payload=True, num_overlong=0, whole=whole).tokens


def group_of(*rollouts: Rollout) -> Group:
    prompt = Prompt(index=0, task="a", text="", token_ids=(), entry={})
    return Group(prompt=prompt, rollouts=rollouts, generate_s=0.0, score_s=0.0)


def test_record_has_token_rewards_across_segments() -> None:
    whole = group_of(
        rollout((segment([0, 1, 1]), segment([0, 1])), [0.5, 0.0, 0.25]),
        rollout((segment([0, 1, 1]),), None),
        rollout((segment([0, 1, 1]),), None, (Turn(segment=0, end=2, reward=0.75), Turn(segment=0, end=3, reward=0.25))),
    )
    expected = GroupTokens(num_rewards=(2, 1, 2), positions=(0, 2, 1, 0, 1), rewards=(0.5, 0.25, 1.0, 0.75, 0.25))
    assert tokens_of(whole, whole) == expected
    assert tokens_of(group_of(whole.rollouts[1]), group_of(whole.rollouts[1])) is None


def test_reward_of_an_uncounted_token_goes_to_an_earlier_one() -> None:
    # Of the tokens 1, 2 and 3, the second one has no log-probability, and the third one is cut off.
    whole = group_of(rollout((segment([0, 1, 1, 1], nonfinite=(2,)), segment([0, 1])), [0.5, 0.25, 1.0, 2.0]))
    (made,) = whole.rollouts
    cut = Segment(**{name: getattr(made.segments[0], name)[:3] for name in ("token_ids", "mask", "logprobs", "versions")})
    trained = replace(whole, rollouts=(replace(made, segments=(cut, made.segments[1])),))
    assert tokens_of(trained, whole) == GroupTokens(num_rewards=(4,), positions=(0, 0, 0, 1), rewards=(0.5, 0.25, 1.0, 2.0))
    assert tokens_of(mask_truncated(whole), whole) == GroupTokens(num_rewards=(0,), positions=(), rewards=())
