"""Structured arrays that replace thousands of small objects per step: records of groups, and planned rows.

Shape suffixes: P groups, N rollouts of all groups, M segments of all rollouts, S sequences of all rows, R rows. Items are
concatenated in the order of their containers. A loss token is a sampled token that counts in the loss.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from titanrl.base.pickling import pickle_fast
from titanrl.carriers.turns import INT64, PackedColumns, Ragged, TokenTable, TurnTable, ranges
from titanrl.carriers.types import NOT_MEASURED, CorrectionTotals, GroupHandle, GroupRecord, IntArray

Table = npt.NDArray[np.void]
"""A structured array with one entry per record and one field per column."""
DoubleArray = npt.NDArray[np.float64]

HANDLE = np.dtype([("shard", "<i8"), ("slot", "<i8"), ("serial", "<i8")])
"""Columns of handles; see `GroupHandle`."""
SEQUENCE = np.dtype(
    [
        ("handle", HANDLE),
        ("rollout", "<i4"),
        ("segment", "<i4"),
        ("length", "<i4"),
        ("advantage", "<f8"),
        ("weight", "<f8"),
        ("num_shared", "<i4"),
        ("num_spans", "<i4"),
    ]
)
"""Columns of planned sequences; see `SequencePlan`. `rollout` is the index of the rollout in its group."""
SPAN = np.dtype([("advantage", "<f8"), ("num_tokens", "<i4")])
"""Columns of spans, which are runs of loss tokens with the same advantage."""
_COUNTS = (
    "prompt_len",
    "num_truncated",
    "num_overlong",
    "num_nonfinite",
    "num_errors",
    "min_version",
    "max_version",
)
_GROUP = np.dtype(
    [
        ("index", "<i8"),
        ("handle", HANDLE),
        *((name, "<i8") for name in ("has_payload", "num_rollouts", *_COUNTS)),
        *((name, "<f8") for name in ("generate_s", "score_s", "weight")),
    ]
)
_GROUP_STRUCT = struct.Struct("<13q3d")
assert _GROUP_STRUCT.size == _GROUP.itemsize
_HANDLE_STRUCT, _WEIGHT_STRUCT = struct.Struct("<3q"), struct.Struct("<d")
_HANDLE_START, _WEIGHT_START = 8, _GROUP_STRUCT.size - 8
_NAN = array("d", [math.nan]).tobytes()
_counts_of = attrgetter(*_COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """A segment planned as a sequence of an optimizer step."""

    handle: GroupHandle
    """Location of the group's payload."""
    segment: int
    """Index among the segments of the group."""
    length: int
    """Tokens in the sequence."""
    advantage: float
    """A_i of the tokens; their mean if there are `spans`."""
    weight: float
    """w_i, the loss weight of each sampled token, from the step's global counts."""
    num_shared: int = 0
    """Tokens at the start of the sequence that the row stores only once, in the preceding sequence of the same group."""
    spans: tuple[tuple[float, int], ...] = ()
    """Advantage and length of consecutive runs of loss tokens, if the advantages differ; they replace `advantage`."""

    @property
    def num_placed(self) -> int:
        """Tokens that the sequence occupies in its row."""
        return self.length - self.num_shared


Row = tuple[SequencePlan, ...]
"""Sequences packed into one row of tokens."""


pickle_fast(SequencePlan)


class PackedRecord(NamedTuple):
    """The numbers of a group as bytes. Joining the bytes of many groups yields columns."""

    group: bytes
    """One entry of `_GROUP`."""
    rewards: bytes
    """float64, `[G]`."""
    num_segments: bytes
    """int64, `[G]`."""
    lengths: bytes
    """int64, `[K]`."""
    num_sampled: bytes
    """int64, `[K]`."""
    reward_parts: Mapping[str, bytes]
    """float64, `[G]`, by reward part."""
    task: int = 0
    """Index of the group's task."""
    turns: PackedColumns | None = None
    """Turns of the segments; None if each segment is one turn."""
    tokens: PackedColumns | None = None
    """Token rewards; None if no reward returned any."""

    @property
    def no_part(self) -> bytes:
        """Values of a reward part that this group lacks: NaN as float64, `[G]`."""
        return _NAN * (len(self.rewards) // len(_NAN))

    def with_weight(self, weight: float) -> Self:
        """Return the record with an importance weight, which multiplies the group's loss weights."""
        return self._replace(group=self.group[:_WEIGHT_START] + _WEIGHT_STRUCT.pack(weight))

    def at(self, handle: GroupHandle) -> Self:
        """Return the record with another payload location."""
        location = _HANDLE_STRUCT.pack(handle.shard, handle.slot, handle.serial)
        return self._replace(group=self.group[:_HANDLE_START] + location + self.group[_HANDLE_START + len(location) :])


def pack_record(record: GroupRecord, task: int = 0) -> PackedRecord:
    """Pack the numbers of a record. Strings are dropped, and the task is stored as an index."""
    handle = record.handle
    place = record.index, handle.shard, handle.slot, handle.serial, record.has_payload, len(record.rewards)
    group = _GROUP_STRUCT.pack(*place, *_counts_of(record), record.generate_s, record.score_s, 1.0)
    return PackedRecord(
        group=group,
        rewards=array("d", record.rewards).tobytes(),
        num_segments=array("q", record.num_segments or (1,) * len(record.rewards)).tobytes(),
        lengths=array("q", record.lengths).tobytes(),
        num_sampled=array("q", record.num_sampled).tobytes(),
        reward_parts={part: array("d", values).tobytes() for part, values in record.reward_parts.items()},
        task=task,
        turns=None if record.turns is None else TurnTable.pack(record.turns),
        tokens=None if record.tokens is None else TokenTable.pack(record.tokens),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordTable:
    """The records of many groups as columns; `GroupRecord` describes them."""

    groups: Table
    """One entry per group, `[P]`; `weight` is the importance weight, 1 for a group that was not replayed."""
    rewards: DoubleArray
    """Reward of each rollout, `[N]`."""
    num_segments: IntArray
    """Segments per rollout, `[N]`."""
    lengths: IntArray
    """Tokens per segment, `[M]`."""
    num_sampled: IntArray
    """Loss tokens per segment, `[M]`."""
    reward_parts: Mapping[str, DoubleArray]
    """Values by reward part, `[N]`; NaN where a rollout lacks the part."""
    tasks: IntArray
    """Index of each group's task, `[P]`; 0 without a mixture."""
    known_turns: TurnTable | None = None
    """Turns of the segments; None if each segment is one turn."""
    known_tokens: TokenTable | None = None
    """Token rewards; None if no reward returned any."""

    @classmethod
    def of(cls, records: Iterable[GroupRecord]) -> Self:
        """Build the table of these records, in the same order."""
        return cls.join([pack_record(record) for record in records])

    @classmethod
    def join(cls, packed: Sequence[PackedRecord]) -> Self:
        """Build the table of these packed records, in the same order."""
        parts = dict.fromkeys(part for record in packed for part in record.reward_parts)
        return cls(
            groups=np.frombuffer(b"".join([record.group for record in packed]), _GROUP),
            rewards=np.frombuffer(b"".join([record.rewards for record in packed]), "<f8"),
            num_segments=np.frombuffer(b"".join([record.num_segments for record in packed]), "<i8"),
            lengths=np.frombuffer(b"".join([record.lengths for record in packed]), "<i8"),
            num_sampled=np.frombuffer(b"".join([record.num_sampled for record in packed]), "<i8"),
            reward_parts={
                part: np.frombuffer(b"".join([record.reward_parts.get(part) or record.no_part for record in packed]), "<f8")
                for part in parts
            },
            tasks=np.array([record.task for record in packed], np.int64),
            known_turns=TurnTable.join([*map(_turns_of, packed)]) if any(record.turns for record in packed) else None,
            known_tokens=TokenTable.join([*map(_tokens_of, packed)]) if any(record.tokens for record in packed) else None,
        )

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    @property
    def handles(self) -> Table:
        """Payload locations, `[P]` of `HANDLE`."""
        return self.groups["handle"]

    @cached_property
    def starts(self) -> IntArray:
        """Index of each group's first rollout, `[P]`."""
        counts: IntArray = self.groups["num_rollouts"]
        return np.cumsum(counts) - counts

    @cached_property
    def group_of(self) -> IntArray:
        """Index of each rollout's group, `[N]`."""
        return np.repeat(np.arange(len(self)), self.groups["num_rollouts"])

    @cached_property
    def segment_starts(self) -> IntArray:
        """Index of each rollout's first segment, `[N]`."""
        return np.cumsum(self.num_segments) - self.num_segments

    @cached_property
    def rollout_of(self) -> IntArray:
        """Index of each segment's rollout, `[M]`."""
        return np.repeat(np.arange(len(self.rewards)), self.num_segments)

    @cached_property
    def num_sampled_by_rollout(self) -> IntArray:
        """Loss tokens per rollout, `[N]`."""
        sums: IntArray = np.bincount(self.rollout_of, self.num_sampled, len(self.rewards)).astype(np.int64)
        return sums

    @property
    def turns(self) -> TurnTable:
        """Turns of the segments; one turn per segment if turns are not known."""
        if self.known_turns is None:
            return TurnTable.of_segments(self.rewards, self.num_segments, self.num_sampled)
        return self.known_turns

    @property
    def tokens(self) -> TokenTable:
        """Token rewards, derived from the rewards of turns if they are not known."""
        return self.known_tokens or TokenTable.of_turns(self.turns, self.num_segments)

    @cached_property
    def num_turns_by_rollout(self) -> IntArray:
        """Turns per rollout, `[N]`."""
        sums: IntArray = np.bincount(self.rollout_of, self.turns.num_turns, len(self.rewards)).astype(np.int64)
        return sums

    def __add__(self, other: Self) -> Self:
        """Append the groups of another table."""
        nan = [np.full(len(table.rewards), np.nan) for table in (self, other)]
        parts = dict.fromkeys([*self.reward_parts, *other.reward_parts])
        return type(self)(
            groups=np.concatenate([self.groups, other.groups]),
            rewards=np.concatenate([self.rewards, other.rewards]),
            num_segments=np.concatenate([self.num_segments, other.num_segments]),
            lengths=np.concatenate([self.lengths, other.lengths]),
            num_sampled=np.concatenate([self.num_sampled, other.num_sampled]),
            reward_parts={
                part: np.concatenate([self.reward_parts.get(part, nan[0]), other.reward_parts.get(part, nan[1])])
                for part in parts
            },
            tasks=np.concatenate([self.tasks, other.tasks]),
            known_turns=TurnTable.join([self.turns, other.turns]) if self.known_turns or other.known_turns else None,
            known_tokens=TokenTable.join([self.tokens, other.tokens]) if self.known_tokens or other.known_tokens else None,
        )

    def by_index(self) -> Self:
        """Return the table with groups sorted by prompt index."""
        indices = self.groups["index"]
        return self if (indices[:-1] <= indices[1:]).all() else self.take(np.argsort(indices, kind="stable"))

    def take(self, order: IntArray) -> Self:
        """Return the groups at the given indices, in this order."""
        rollouts = ranges(self.starts[order], self.groups["num_rollouts"][order])
        segments = ranges(self.segment_starts[rollouts], self.num_segments[rollouts])
        return type(self)(
            groups=self.groups[order],
            rewards=self.rewards[rollouts],
            num_segments=self.num_segments[rollouts],
            lengths=self.lengths[segments],
            num_sampled=self.num_sampled[segments],
            reward_parts={part: values[rollouts] for part, values in self.reward_parts.items()},
            tasks=self.tasks[order],
            known_turns=None if self.known_turns is None else self.known_turns.take(segments),
            known_tokens=None if self.known_tokens is None else self.known_tokens.take(rollouts),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans(Ragged):
    """Token advantages of many segments, as spans: runs of loss tokens with the same advantage."""

    num_spans: IntArray = field(metadata=INT64)
    """Spans per segment, `[M]`."""
    table: Table = field(metadata={"kind": SPAN})
    """Spans of all segments in segment order, as a table of `SPAN`."""

    @property
    def segment_of(self) -> IntArray:
        """Index of each span's segment."""
        return np.repeat(np.arange(len(self.num_spans)), self.num_spans)


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows of planned sequences as a table. Iterating yields each row as a `Row` of `SequencePlan`."""

    sequences: Table
    """Sequences of all rows, `[S]` of `SEQUENCE`."""
    ends: IntArray
    """Index after the last sequence of each row, `[R]`."""
    spans: Table = field(default_factory=lambda: np.zeros(0, SPAN))
    """Spans of all sequences (`num_spans` of each) in sequence order, as a table of `SPAN`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends)

    def __iter__(self) -> Iterator[Row]:
        """Yield each row."""
        spans = iter(self.spans.tolist())
        start, plans = (
            0,
            [
                SequencePlan(
                    handle=GroupHandle(shard=shard, slot=slot, serial=serial),
                    segment=segment,
                    length=length,
                    advantage=advantage,
                    weight=weight,
                    num_shared=num_shared,
                    spans=tuple(islice(spans, num_spans)),
                )
                for (
                    shard,
                    slot,
                    serial,
                ), _, segment, length, advantage, weight, num_shared, num_spans in self.sequences.tolist()
            ],
        )
        for end in self.ends.tolist():
            yield tuple(plans[start:end])
            start = end

    def __eq__(self, other: object) -> bool:
        """Return True if all rows are equal."""
        if not isinstance(other, RowTable):
            return NotImplemented
        pairs = ((self.ends, other.ends), (self.sequences, other.sequences), (self.spans, other.spans))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]  # the arrays are mutable


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that the ranks process in one forward-backward pass. A rank without rows runs one empty row."""

    rows: tuple[RowTable, ...]
    """Rows by data-parallel rank."""
    correction: CorrectionTotals = NOT_MEASURED
    """Totals of the off-policy correction over the whole step, if the config measures them."""

    @property
    def sizes(self) -> dict[str, int]:
        """Number of rows and tokens over all ranks. The ranks compare these values to detect different plans."""
        return {
            "rows": sum(map(len, self.rows)),
            "tokens": sum(int((table.sequences["length"] - table.sequences["num_shared"]).sum()) for table in self.rows),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The plan of an optimizer step, on which all ranks must agree; it contains no tokens."""

    microbatches: tuple[MicroBatch, ...]
    """Micro-batches in execution order."""
    advantages_N: DoubleArray = field(compare=False)
    """Advantage of each rollout of the batch, with groups in prompt order."""
    num_placed: int
    """Tokens in all packed rows; a prompt shared by sequences of one row counts once."""
    packing_efficiency: float
    """Fraction of row positions that hold a token."""
    spans: "Spans | None" = field(default=None, compare=False)
    """Token advantages, if they differ within a rollout; `advantages_N` then has their means."""


def _turns_of(record: PackedRecord) -> TurnTable:
    if record.turns is not None:
        return TurnTable.unpacked(record.turns)
    num_segments, num_sampled = np.frombuffer(record.num_segments, "<i8"), np.frombuffer(record.num_sampled, "<i8")
    return TurnTable.of_segments(np.frombuffer(record.rewards, "<f8"), num_segments, num_sampled)


def _tokens_of(record: PackedRecord) -> TokenTable:
    if record.tokens is not None:
        return TokenTable.unpacked(record.tokens)
    return TokenTable.of_turns(_turns_of(record), np.frombuffer(record.num_segments, "<i8"))
