"""Turns of rollouts: their rewards and the tokens that the policy sampled in them.

Shape suffixes: N rollouts, K segments of a group, M segments of a batch, U turns of all segments, one segment after another.
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


def ranges(starts: Counts, counts: Counts) -> Counts:
    """Return the indices of several ranges, one after another."""
    offsets = np.cumsum(counts) - counts
    indices: Counts = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return indices
