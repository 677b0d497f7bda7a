"""Rewards of turns and of single tokens: carriers of one group, and tables of many groups.

A loss token is a sampled token that counts in the loss.

Shape suffixes: G rollouts of a group, N rollouts of a batch, K segments of a group, M segments of a batch, U turns of all
segments in segment order, E token rewards, T loss tokens.
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
    """One turn of the policy in a rollout; all its tokens are in one segment."""

    segment: int
    """Index of the segment in the rollout."""
    end: int
    """Index after the turn's last token in the segment."""
    reward: float
    """Reward of the turn. The last turn includes the reward of the whole episode, so turns add up to the rollout's reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTurns:
    """Rewards and token counts of a group's turns.

    Example: two rollouts of one segment each, the first with two turns, the second with one: `GroupTurns(num_turns=(2, 1),
    rewards=(0.0, 1.0, 0.5), num_sampled=(3, 4, 6))`
    """

    num_turns: tuple[int, ...]
    """Turns per segment, `[K]`."""
    rewards: tuple[float, ...]
    """Reward of each turn, `[U]`."""
    num_sampled: tuple[int, ...]
    """Loss tokens per turn, `[U]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """Token rewards of a group, in a sparse format without tokens that have no reward.

    Example: a rollout of five tokens with rewards at the second and the last, and a rollout of four tokens with a reward at the
    last: `GroupTokens(num_rewards=(2, 1), positions=(1, 4, 3), rewards=(0.5, 1.0, 0.25))`
    """

    num_rewards: tuple[int, ...]
    """Rewarded tokens per rollout, `[G]`."""
    positions: tuple[int, ...]
    """Index of each rewarded token among the loss tokens of its rollout, `[E]`."""
    rewards: tuple[float, ...]
    """Reward of each of these tokens, including the reward of its turn or of the rollout, `[E]`."""


class PackedTokens(NamedTuple):
    """Columns of `GroupTokens` as bytes."""

    num_rewards: bytes
    """int64, `[G]`."""
    positions: bytes
    """int64, `[E]`."""
    rewards: bytes
    """float64, `[E]`."""


def pack_tokens(tokens: GroupTokens) -> PackedTokens:
    """Pack the token rewards of a group."""
    return PackedTokens(
        np.array(tokens.num_rewards, "<i8").tobytes(),
        np.array(tokens.positions, "<i8").tobytes(),
        np.array(tokens.rewards, "<f8").tobytes(),
    )


class PackedTurns(NamedTuple):
    """Columns of `GroupTurns` as bytes."""

    num_turns: bytes
    """int64, `[K]`."""
    rewards: bytes
    """float64, `[U]`."""
    num_sampled: bytes
    """int64, `[U]`."""


def pack_turns(turns: GroupTurns) -> PackedTurns:
    """Pack the turns of a group."""
    return PackedTurns(
        np.array(turns.num_turns, "<i8").tobytes(),
        np.array(turns.rewards, "<f8").tobytes(),
        np.array(turns.num_sampled, "<i8").tobytes(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTable:
    """The turns of many groups."""

    num_turns: Counts
    """Turns per segment, `[M]`."""
    rewards: Values
    """Reward of each turn, `[U]`."""
    num_sampled: Counts
    """Loss tokens per turn, `[U]`."""

    @classmethod
    def of_segments(cls, rewards_N: Values, num_segments_N: Counts, num_sampled_M: Counts) -> Self:
        """Build one turn per segment, for unknown turns. The last turn of a rollout gets the rollout's reward."""
        rewards = np.zeros(len(num_sampled_M))
        rewards[np.cumsum(num_segments_N)[num_segments_N > 0] - 1] = rewards_N[num_segments_N > 0]
        return cls(num_turns=np.ones_like(num_sampled_M), rewards=rewards, num_sampled=num_sampled_M)

    @classmethod
    def unpacked(cls, packed: PackedTurns) -> Self:
        """Unpack the turns of a group."""
        return cls(
            num_turns=np.frombuffer(packed.num_turns, "<i8"),
            rewards=np.frombuffer(packed.rewards, "<f8"),
            num_sampled=np.frombuffer(packed.num_sampled, "<i8"),
        )

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Join tables, at least one, into one table."""
        return cls(
            num_turns=np.concatenate([table.num_turns for table in tables]),
            rewards=np.concatenate([table.rewards for table in tables]),
            num_sampled=np.concatenate([table.num_sampled for table in tables]),
        )

    def take(self, segments: Counts) -> Self:
        """Return the turns of the segments at the given indices, in this order."""
        turns = ranges((np.cumsum(self.num_turns) - self.num_turns)[segments], self.num_turns[segments])
        return type(self)(num_turns=self.num_turns[segments], rewards=self.rewards[turns], num_sampled=self.num_sampled[turns])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """Token rewards of many groups; `GroupTokens` describes the columns."""

    num_rewards: Counts
    """Rewarded tokens per rollout, `[N]`."""
    positions: Counts
    """Index of each rewarded token among the loss tokens of its rollout, `[E]`."""
    rewards: Values
    """Reward of each of these tokens, `[E]`."""

    @classmethod
    def of_turns(cls, turns: TurnTable, num_segments_N: Counts) -> Self:
        """Build token rewards from turns, for unknown token rewards: the last token of a turn gets the turn's reward."""
        rollout_of_U = np.repeat(np.repeat(np.arange(len(num_segments_N)), num_segments_N), turns.num_turns)
        num_tokens_N = np.bincount(rollout_of_U, turns.num_sampled, len(num_segments_N)).astype(np.int64)
        positions = np.cumsum(turns.num_sampled) - (np.cumsum(num_tokens_N) - num_tokens_N)[rollout_of_U] - 1
        has_token = (positions >= 0) & (turns.rewards != 0.0)
        num_rewards = np.bincount(rollout_of_U[has_token], minlength=len(num_segments_N)).astype(np.int64)
        return cls(num_rewards=num_rewards, positions=positions[has_token], rewards=turns.rewards[has_token])

    @classmethod
    def unpacked(cls, packed: PackedTokens) -> Self:
        """Unpack the token rewards of a group."""
        return cls(
            num_rewards=np.frombuffer(packed.num_rewards, "<i8"),
            positions=np.frombuffer(packed.positions, "<i8"),
            rewards=np.frombuffer(packed.rewards, "<f8"),
        )

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Join tables, at least one, into one table."""
        return cls(
            num_rewards=np.concatenate([table.num_rewards for table in tables]),
            positions=np.concatenate([table.positions for table in tables]),
            rewards=np.concatenate([table.rewards for table in tables]),
        )

    def take(self, rollouts: Counts) -> Self:
        """Return the token rewards of the rollouts at the given indices, in this order."""
        kept = ranges((np.cumsum(self.num_rewards) - self.num_rewards)[rollouts], self.num_rewards[rollouts])
        return type(self)(num_rewards=self.num_rewards[rollouts], positions=self.positions[kept], rewards=self.rewards[kept])

    def by_token(self, num_tokens_N: Counts) -> Values:
        """Return the reward of every loss token in rollout order, 0 where there is none, `[T]`."""
        starts_N = np.cumsum(num_tokens_N) - num_tokens_N
        rewards_T = np.zeros(int(num_tokens_N.sum()))
        np.add.at(rewards_T, np.repeat(starts_N, self.num_rewards) + self.positions, self.rewards)
        return rewards_T


def ranges(starts: Counts, counts: Counts) -> Counts:
    """Return the concatenated indices of ranges, given their starts and lengths."""
    offsets = np.cumsum(counts) - counts
    indices: Counts = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return indices
