"""Token rewards: assigns the rewards of steps in a text to tokens, and combines rewards of tokens and turns."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titanrl.carriers.rewards import Answers, TokenRewards
from titanrl.carriers.turns import Turn, Values
from titanrl.carriers.types import Segment


class TokenCredit:
    """Sums the rewards of one completion, per token if any of them is `TokenRewards`."""

    def __init__(self, answers: Answers, index: int) -> None:
        """Start with an empty sum for the completion with the given index."""
        self._answers, self._index = answers, index
        self._whole = 0.0
        self._by_token: list[float] | None = None

    def add(self, weight: float, reward: float | TokenRewards) -> None:
        """Add a reward times its weight.

        Raises:
            ValueError: The token rewards do not fit the completion; see `rewards_by_token`.
        """
        if not isinstance(reward, TokenRewards):
            self._whole += weight * reward
            return
        added = rewards_by_token(reward, self._answers, self._index)
        earlier = self._by_token or [0.0] * len(added)
        self._by_token = [before + weight * value for before, value in zip(earlier, added, strict=True)]

    @property
    def rewards(self) -> tuple[float, ...] | None:
        """Reward of each token, with the rewards of the complete text added to the last one; None without token rewards."""
        if not self._by_token:
            return None if self._by_token is None else ()
        *others, last = self._by_token
        return (*others, last + self._whole)


def rewards_by_token(rewards: TokenRewards, answers: Answers, index: int) -> list[float]:
    """Return the reward of each sampled token of a completion.

    Raises:
        ValueError: The numbers of rewards and tokens differ, or a step does not end within the text.
    """
    num_tokens = answers.num_tokens[index]
    if len(rewards.tokens) not in (0, num_tokens):
        rule = f"it returned {len(rewards.tokens)} token rewards for a completion of {num_tokens} tokens"
        raise ValueError(f"{rule}. Return one per sampled token, including the end-of-sequence token.")
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
        rule = f"it returned a step (ending at {end}), but with an environment the text is only the last message"
        raise ValueError(f"{rule}. Return token rewards instead, or turn rewards from the environment.")
    if end > len(text):
        rule = f"it returned a step that ends after {end} characters, but the completion has {len(text)}"
        raise ValueError(f"{rule}. Count characters from the start of the completion.")
    ids, expected = answers.token_ids[index], text[:end]
    return bisect_left(range(1, len(ids)), True, key=lambda num: decode(ids[:num])[:end] == expected)


def in_turns(rewards: Sequence[float], turns: Sequence[Turn], segments: Sequence[Segment]) -> tuple[Values, tuple[Turn, ...]]:
    """Combine the token rewards and the turn rewards of an episode.

    Args:
        rewards: Rewards of all sampled tokens.
        turns: Turns with their rewards, excluding the rewards of their tokens.
        segments: Segments of the episode.

    Returns:
        Rewards of all sampled tokens, where the last token of each turn includes the reward of the turn, and the turns with
        rewards that include their tokens.
    """
    sampled = [np.cumsum(segment.mask) for segment in segments]
    before = np.cumsum([0, *(int(counts[-1]) for counts in sampled)])
    ends = [int(before[turn.segment] + (sampled[turn.segment][turn.end - 1] if turn.end else 0)) for turn in turns]
    by_token = np.array(rewards, np.float64)
    sums = [float(by_token[start:end].sum()) for start, end in zip([0, *ends], ends, strict=False)]
    for turn, end in zip(turns, ends, strict=True):
        by_token[max(end, 1) - 1] += turn.reward
    return by_token, tuple(replace(turn, reward=turn.reward + of_tokens) for turn, of_tokens in zip(turns, sums, strict=True))
