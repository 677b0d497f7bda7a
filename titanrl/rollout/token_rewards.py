"""Rewards of tokens: the token that completes each step of a text, and the rewards of a rollout's tokens."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from titanrl.rewards import Answers, TokenRewards
from titanrl.turns import Turn, Values
from titanrl.types import Segment


class TokenCredit:
    """Adds the rewards of one completion up, by token if one of them is `TokenRewards`."""

    def __init__(self, answers: Answers, index: int) -> None:
        """Start without a reward, for the completion of this number."""
        self._answers, self._index = answers, index
        self._whole = 0.0
        self._by_token: list[float] | None = None

    def add(self, weight: float, reward: float | TokenRewards) -> None:
        """Add a reward times its weight.

        Raises:
            ValueError: See `rewards_by_token`.
        """
        if not isinstance(reward, TokenRewards):
            self._whole += weight * reward
            return
        own = rewards_by_token(reward, self._answers, self._index)
        earlier = self._by_token or [0.0] * len(own)
        self._by_token = [before + weight * value for before, value in zip(earlier, own, strict=True)]

    @property
    def rewards(self) -> tuple[float, ...] | None:
        """Reward of each token, that of the whole completion as part of the last one's; None without rewards of tokens."""
        if not self._by_token:
            return None if self._by_token is None else ()
        *others, last = self._by_token
        return (*others, last + self._whole)


def rewards_by_token(rewards: TokenRewards, answers: Answers, index: int) -> list[float]:
    """Return the reward of each sampled token of a completion.

    Raises:
        ValueError: There are not as many rewards as tokens, or a step does not end in the text.
    """
    num_tokens = answers.num_tokens[index]
    if len(rewards.tokens) not in (0, num_tokens):
        rule = f"it returned {len(rewards.tokens)} rewards of tokens for a completion of {num_tokens}"
        raise ValueError(f"{rule}. Return one per sampled token, with the end-of-sequence token.")
    by_token = list(rewards.tokens) or [0.0] * num_tokens
    for end, reward in rewards.steps:
        by_token[_token_at(end, answers, index)] += reward
    if by_token:
        by_token[-1] += rewards.whole
    return by_token


def _token_at(end: int, answers: Answers, index: int) -> int:
    """Return the index of the token that completes the first `end` characters of a completion."""
    text, decode = answers.completions[index], answers.decode
    if decode is None:
        rule = f"it returned a step (that ends at {end}), but in an environment the text is the last message only"
        raise ValueError(f"{rule}. Return rewards of tokens instead, or rewards of turns from the environment.")
    if end > len(text):
        rule = f"it returned a step that ends after {end} characters of a text of {len(text)}"
        raise ValueError(f"{rule}. Count the characters of the completion.")
    ids, expected = answers.token_ids[index], text[:end]
    return bisect_left(range(1, len(ids)), True, key=lambda num: decode(ids[:num])[:end] == expected)


def in_turns(rewards: Sequence[float], turns: Sequence[Turn], segments: Sequence[Segment]) -> tuple[Values, tuple[Turn, ...]]:
    """Join rewards of the tokens of an episode with those of its turns.

    Args:
        rewards: Rewards of all sampled tokens.
        turns: Turns with their rewards, which do not include those of tokens.
        segments: Segments of the episode.

    Returns:
        Rewards of all sampled tokens, the last one of each turn with that of the turn, and turns with all of their rewards.
    """
    sampled = [np.cumsum(segment.mask) for segment in segments]
    before = np.cumsum([0, *(int(counts[-1]) for counts in sampled)])
    ends = [int(before[turn.segment] + (sampled[turn.segment][turn.end - 1] if turn.end else 0)) for turn in turns]
    by_token = np.array(rewards, np.float64)
    sums = [float(by_token[start:end].sum()) for start, end in zip([0, *ends], ends, strict=False)]
    for turn, end in zip(turns, ends, strict=True):
        by_token[max(end, 1) - 1] += turn.reward
    whole = [Turn(segment=turn.segment, end=turn.end, reward=turn.reward + own) for turn, own in zip(turns, sums, strict=True)]
    return by_token, tuple(whole)
