"""Rewards of turns and of single tokens: carriers of one group, and tables of many groups.

A loss token is a sampled token that counts in the loss.

Shape suffixes: G rollouts of a group, N rollouts of a batch, K segments of a group, M segments of a batch, U turns of all
segments in segment order, E token rewards, T loss tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

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


class PackedColumns(NamedTuple):
    """The columns of one `TurnTable` or `TokenTable` as bytes, in the order of its fields."""

    counts: bytes
    first: bytes
    second: bytes


PackedTurns = PackedTokens = PackedColumns  # the names in checkpoints of earlier versions


INT64, FLOAT64 = {"kind": "<i8"}, {"kind": "<f8"}
"""Metadata of a column of a `Ragged`: its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged:
    """Columns of many items, each with its dtype: first the number of entries of each item, then the entries of all items."""

    @classmethod
    def columns(cls) -> list[tuple[str, Any]]:
        """Return names and dtypes of the columns."""
        return [(name, column.metadata["kind"]) for name, column in cls.__dataclass_fields__.items()]

    @classmethod
    def pack(cls, values: object) -> PackedColumns:
        """Pack the columns of an object that has the same fields as tuples."""
        return PackedColumns(*[np.array(getattr(values, name), kind).tobytes() for name, kind in cls.columns()])

    @classmethod
    def unpacked(cls, packed: PackedColumns) -> Self:
        """Unpack the columns that `pack` packed."""
        build: Callable[..., Self] = cls
        return build(**{name: np.frombuffer(data, kind) for (name, kind), data in zip(cls.columns(), packed, strict=True)})

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Join tables, at least one, into one table."""
        build: Callable[..., Self] = cls
        return build(**{name: np.concatenate([getattr(table, name) for table in tables]) for name, _ in cls.columns()})

    def take(self, items: Counts) -> Self:
        """Return the entries of the items at the given indices, in this order."""
        first, *others = [name for name, _ in self.columns()]
        counts = getattr(self, first)
        entries = ranges((np.cumsum(counts) - counts)[items], counts[items])
        return replace(self, **{first: counts[items]}, **{name: getattr(self, name)[entries] for name in others})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTable(Ragged):
    """The turns of the segments of many groups; `GroupTurns` describes the columns."""

    num_turns: Counts = field(metadata=INT64)
    rewards: Values = field(metadata=FLOAT64)
    num_sampled: Counts = field(metadata=INT64)

    @classmethod
    def of_segments(cls, rewards_N: Values, num_segments_N: Counts, num_sampled_M: Counts) -> Self:
        """Build one turn per segment, for unknown turns. The last turn of a rollout gets the rollout's reward."""
        rewards = np.zeros(len(num_sampled_M))
        rewards[np.cumsum(num_segments_N)[num_segments_N > 0] - 1] = rewards_N[num_segments_N > 0]
        return cls(num_turns=np.ones_like(num_sampled_M), rewards=rewards, num_sampled=num_sampled_M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable(Ragged):
    """Token rewards of the rollouts of many groups; `GroupTokens` describes the columns."""

    num_rewards: Counts = field(metadata=INT64)
    positions: Counts = field(metadata=INT64)
    rewards: Values = field(metadata=FLOAT64)

    @classmethod
    def of_turns(cls, turns: TurnTable, num_segments_N: Counts) -> Self:
        """Build token rewards from turns, for unknown token rewards: the last token of a turn gets the turn's reward."""
        rollout_of_U = np.repeat(np.repeat(np.arange(len(num_segments_N)), num_segments_N), turns.num_turns)
        num_tokens_N = np.bincount(rollout_of_U, turns.num_sampled, len(num_segments_N)).astype(np.int64)
        positions = np.cumsum(turns.num_sampled) - (np.cumsum(num_tokens_N) - num_tokens_N)[rollout_of_U] - 1
        has_token = (positions >= 0) & (turns.rewards != 0.0)
        num_rewards = np.bincount(rollout_of_U[has_token], minlength=len(num_segments_N)).astype(np.int64)
        return cls(num_rewards=num_rewards, positions=positions[has_token], rewards=turns.rewards[has_token])

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
