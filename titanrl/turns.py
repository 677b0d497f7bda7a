"""Turns of rollouts: their rewards and the tokens that the policy sampled in them, and rewards of single tokens.

Shape suffixes: G rollouts of a group, N rollouts of a batch, K segments of a group, M segments of a batch, U turns of all
segments, one segment after another, E rewards of tokens, T tokens that count in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy in a rollout; all of its tokens are in one segment."""

    segment: int
    """Index of its segment in the rollout."""
    end: int
    """Index after its last token in the segment."""
    reward: float
    """Reward of the turn. That of the episode as a whole is part of the last turn's, so the turns add up to the rollout's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTurns:
    """Numbers of the turns of a group.

    Example: rollouts of two turns and of one turn, each of one segment: `GroupTurns(num_turns=(2, 1), rewards=(0.0, 1.0, 0.5),
    num_sampled=(3, 4, 6))`
    """

    num_turns: tuple[int, ...]
    """Turns of each segment, `[K]`."""
    rewards: tuple[float, ...]
    """Reward of each turn, `[U]`."""
    num_sampled: tuple[int, ...]
    """Tokens of each turn that count in the loss, `[U]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """Rewards of the tokens of a group, if a reward is one of tokens. Tokens without a reward are left out.

    Example: rollouts of five tokens, of which the second and the last have a reward, and of four, of which the last has one:
    `GroupTokens(num_rewards=(2, 1), places=(1, 4, 3), rewards=(0.5, 1.0, 0.25))`
    """

    num_rewards: tuple[int, ...]
    """Rewards of each rollout, `[G]`."""
    places: tuple[int, ...]
    """Index of the rewarded token among those of its rollout that count in the loss, `[E]`."""
    rewards: tuple[float, ...]
    """Its reward, that of its turn or of the rollout included, `[E]`."""


class PackedTokens(NamedTuple):
    """The columns of `GroupTokens` as bytes."""

    num_rewards: bytes
    """int64, `[G]`."""
    places: bytes
    """int64, `[E]`."""
    rewards: bytes
    """float64, `[E]`."""


def pack_tokens(tokens: GroupTokens) -> PackedTokens:
    """Pack the rewards of a group's tokens."""
    return PackedTokens(
        np.array(tokens.num_rewards, "<i8").tobytes(),
        np.array(tokens.places, "<i8").tobytes(),
        np.array(tokens.rewards, "<f8").tobytes(),
    )


class PackedTurns(NamedTuple):
    """The columns of `GroupTurns` as bytes."""

    num_turns: bytes
    """int64, `[K]`."""
    rewards: bytes
    """float64, `[U]`."""
    num_sampled: bytes
    """int64, `[U]`."""


def pack_turns(turns: GroupTurns) -> PackedTurns:
    """Pack the numbers of a group's turns."""
    return PackedTurns(
        np.array(turns.num_turns, "<i8").tobytes(),
        np.array(turns.rewards, "<f8").tobytes(),
        np.array(turns.num_sampled, "<i8").tobytes(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTable:
    """The turns of many groups."""

    num_turns: Counts
    """Turns of each segment, `[M]`."""
    rewards: Values
    """Reward of each turn, `[U]`."""
    num_sampled: Counts
    """Tokens of each turn that count in the loss, `[U]`."""

    @classmethod
    def of_segments(cls, rewards_N: Values, num_segments_N: Counts, num_sampled_M: Counts) -> Self:
        """Return one turn per segment, where turns are not known; the last one of a rollout has its reward."""
        rewards = np.zeros(len(num_sampled_M))
        rewards[np.cumsum(num_segments_N)[num_segments_N > 0] - 1] = rewards_N[num_segments_N > 0]
        return cls(num_turns=np.ones_like(num_sampled_M), rewards=rewards, num_sampled=num_sampled_M)

    @classmethod
    def unpacked(cls, packed: PackedTurns) -> Self:
        """Return the turns of a packed group."""
        return cls(
            num_turns=np.frombuffer(packed.num_turns, "<i8"),
            rewards=np.frombuffer(packed.rewards, "<f8"),
            num_sampled=np.frombuffer(packed.num_sampled, "<i8"),
        )

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Return the turns of several tables, at least one, in their order."""
        return cls(
            num_turns=np.concatenate([table.num_turns for table in tables]),
            rewards=np.concatenate([table.rewards for table in tables]),
            num_sampled=np.concatenate([table.num_sampled for table in tables]),
        )

    def take(self, segments: Counts) -> Self:
        """Return the turns of some segments, given by their places, in this order."""
        turns = ranges((np.cumsum(self.num_turns) - self.num_turns)[segments], self.num_turns[segments])
        return type(self)(num_turns=self.num_turns[segments], rewards=self.rewards[turns], num_sampled=self.num_sampled[turns])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """The rewards of the tokens of many groups; `GroupTokens` describes the columns."""

    num_rewards: Counts
    """Rewards of each rollout, `[N]`."""
    places: Counts
    """Index of each rewarded token in its rollout, `[E]`."""
    rewards: Values
    """Its reward, `[E]`."""

    @classmethod
    def of_turns(cls, turns: TurnTable, num_segments_N: Counts) -> Self:
        """Return the rewards of turns as those of their last tokens, where rewards of tokens are not known."""
        rollout_of_U = np.repeat(np.repeat(np.arange(len(num_segments_N)), num_segments_N), turns.num_turns)
        num_tokens_N = np.bincount(rollout_of_U, turns.num_sampled, len(num_segments_N)).astype(np.int64)
        places = np.cumsum(turns.num_sampled) - (np.cumsum(num_tokens_N) - num_tokens_N)[rollout_of_U] - 1
        has_token = (places >= 0) & (turns.rewards != 0.0)
        num_rewards = np.bincount(rollout_of_U[has_token], minlength=len(num_segments_N)).astype(np.int64)
        return cls(num_rewards=num_rewards, places=places[has_token], rewards=turns.rewards[has_token])

    @classmethod
    def unpacked(cls, packed: PackedTokens) -> Self:
        """Return the rewards of a packed group."""
        return cls(
            num_rewards=np.frombuffer(packed.num_rewards, "<i8"),
            places=np.frombuffer(packed.places, "<i8"),
            rewards=np.frombuffer(packed.rewards, "<f8"),
        )

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Return the rewards of several tables, at least one, in their order."""
        return cls(
            num_rewards=np.concatenate([table.num_rewards for table in tables]),
            places=np.concatenate([table.places for table in tables]),
            rewards=np.concatenate([table.rewards for table in tables]),
        )

    def take(self, rollouts: Counts) -> Self:
        """Return the rewards of some rollouts, given by their places, in this order."""
        own = ranges((np.cumsum(self.num_rewards) - self.num_rewards)[rollouts], self.num_rewards[rollouts])
        return type(self)(num_rewards=self.num_rewards[rollouts], places=self.places[own], rewards=self.rewards[own])

    def by_token(self, num_tokens_N: Counts) -> Values:
        """Return the reward of every token, one rollout after another, `[T]`."""
        starts_N = np.cumsum(num_tokens_N) - num_tokens_N
        rewards_T = np.zeros(int(num_tokens_N.sum()))
        np.add.at(rewards_T, np.repeat(starts_N, self.num_rewards) + self.places, self.rewards)
        return rewards_T


def ranges(starts: Counts, counts: Counts) -> Counts:
    """Return the indices of several ranges, one after another."""
    offsets = np.cumsum(counts) - counts
    indices: Counts = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return indices
