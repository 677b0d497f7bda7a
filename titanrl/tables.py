"""Many small carriers as columns: what is made, sent and read by the thousand in a step.

Shape suffixes: P groups, N rollouts of all groups one after another, S sequences of all rows one after another, R rows.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from titanrl.types import NOT_MEASURED, CorrectionTotals, GroupHandle, GroupRecord, IntArray, Row, SequencePlan

Table = npt.NDArray[np.void]
"""A structured array: one record an entry, one field a column."""
DoubleArray = npt.NDArray[np.float64]

HANDLE = np.dtype([("shard", "<i8"), ("slot", "<i8"), ("serial", "<i8")])
"""Columns of handles, as `GroupHandle` has them."""
SEQUENCE = np.dtype(
    [
        ("handle", HANDLE),
        ("rollout", "<i4"),
        ("length", "<i4"),
        ("advantage", "<f8"),
        ("weight", "<f8"),
        ("num_shared", "<i4"),
    ]
)
"""Columns of planned sequences, as `SequencePlan` has them."""
_GROUP = np.dtype(
    [
        ("index", "<i8"),
        ("handle", HANDLE),
        ("has_payload", "<i8"),
        ("num_rollouts", "<i8"),
        ("prompt_len", "<i8"),
        ("num_truncated", "<i8"),
        ("num_overlong", "<i8"),
        ("num_nonfinite", "<i8"),
        ("num_errors", "<i8"),
        ("min_version", "<i8"),
        ("max_version", "<i8"),
        ("generate_s", "<f8"),
        ("score_s", "<f8"),
    ]
)
_GROUP_STRUCT = struct.Struct("<13q2d")
assert _GROUP_STRUCT.size == _GROUP.itemsize


class PackedRecord(NamedTuple):
    """A group's numbers as bytes, so that many groups become columns by joining them."""

    group: bytes
    """Its `_GROUP`."""
    rewards: bytes
    """float64, `[G]`."""
    lengths: bytes
    """int64, `[G]`."""
    num_sampled: bytes
    """int64, `[G]`."""
    reward_parts: Mapping[str, bytes]
    """float64 by part, `[G]`."""


def pack_record(record: GroupRecord) -> PackedRecord:
    """The numbers of a record; the name of its task stays behind."""
    handle = record.handle
    group = _GROUP_STRUCT.pack(
        record.index,
        handle.shard,
        handle.slot,
        handle.serial,
        record.has_payload,
        len(record.rewards),
        record.prompt_len,
        record.num_truncated,
        record.num_overlong,
        record.num_nonfinite,
        record.num_errors,
        record.min_version,
        record.max_version,
        record.generate_s,
        record.score_s,
    )
    return PackedRecord(
        group=group,
        rewards=array("d", record.rewards).tobytes(),
        lengths=array("q", record.lengths).tobytes(),
        num_sampled=array("q", record.num_sampled).tobytes(),
        reward_parts={part: array("d", values).tobytes() for part, values in record.reward_parts.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordTable:
    """The records of many groups. `GroupRecord` says what the columns mean."""

    groups: Table
    """One entry for each group, `[P]`."""
    rewards: DoubleArray
    """Rewards, group after group, `[N]`."""
    lengths: IntArray
    """Tokens of the whole sequences, `[N]`."""
    num_sampled: IntArray
    """Tokens that count in the loss, `[N]`."""
    reward_parts: Mapping[str, DoubleArray]
    """By part the values of all groups that have it, group after group."""

    @classmethod
    def of(cls, records: Iterable[GroupRecord]) -> Self:
        """The records as columns, in their order."""
        return cls.join([pack_record(record) for record in records])

    @classmethod
    def join(cls, packed: Sequence[PackedRecord]) -> Self:
        """Columns of packed records, in their order."""
        parts = dict.fromkeys(part for record in packed for part in record.reward_parts)
        return cls(
            groups=np.frombuffer(b"".join([record.group for record in packed]), _GROUP),
            rewards=np.frombuffer(b"".join([record.rewards for record in packed]), "<f8"),
            lengths=np.frombuffer(b"".join([record.lengths for record in packed]), "<i8"),
            num_sampled=np.frombuffer(b"".join([record.num_sampled for record in packed]), "<i8"),
            reward_parts={
                part: np.frombuffer(b"".join([record.reward_parts.get(part, b"") for record in packed]), "<f8")
                for part in parts
            },
        )

    def __len__(self) -> int:
        """Groups."""
        return len(self.groups)

    @property
    def handles(self) -> Table:
        """Where the payloads lie, `[P]` of `HANDLE`."""
        return self.groups["handle"]

    @property
    def starts(self) -> IntArray:
        """Place of each group's first rollout, `[P]`."""
        counts: IntArray = self.groups["num_rollouts"]
        return np.cumsum(counts) - counts

    @property
    def group_of(self) -> IntArray:
        """Place of each rollout's group, `[N]`."""
        return np.repeat(np.arange(len(self)), self.groups["num_rollouts"])

    def by_index(self) -> Self:
        """The same groups in the order of prompts, without the parts of the reward."""
        order = np.argsort(self.groups["index"], kind="stable")
        if np.array_equal(order, np.arange(len(self))):
            return self
        counts, starts = self.groups["num_rollouts"][order], self.starts[order]
        offsets = np.cumsum(counts) - counts
        rollouts = np.arange(len(self.rewards)) + np.repeat(starts - offsets, counts)
        return type(self)(
            groups=self.groups[order],
            rewards=self.rewards[rollouts],
            lengths=self.lengths[rollouts],
            num_sampled=self.num_sampled[rollouts],
            reward_parts={},
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows of planned sequences as columns; iterating makes a `Row` of `SequencePlan` of each."""

    sequences: Table
    """All sequences, row after row, `[S]` of `SEQUENCE`."""
    ends: IntArray
    """Place after the last sequence of each row, `[R]`."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.ends)

    def __iter__(self) -> Iterator[Row]:
        """The rows, one after another."""
        start, plans = 0, [_sequence_plan(*columns) for columns in self.sequences.tolist()]
        for end in self.ends.tolist():
            yield tuple(plans[start:end])
            start = end

    def __eq__(self, other: object) -> bool:
        """Whether all rows are the same."""
        if not isinstance(other, RowTable):
            return NotImplemented
        return np.array_equal(self.ends, other.ends) and np.array_equal(self.sequences, other.sequences)

    __hash__ = None  # type: ignore[assignment]  # its arrays could be changed


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that run through the model at once, by data-parallel rank. A rank without rows runs one empty row."""

    rows: tuple[RowTable, ...]
    """`rows[dp_rank]`."""
    correction: CorrectionTotals = NOT_MEASURED
    """The off-policy correction over the whole step, where the config has it measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Everything ranks must agree on for one optimizer step; metadata only."""

    microbatches: tuple[MicroBatch, ...]
    """In order."""
    num_placed: int
    """Tokens of all packed rows. A prompt shared by sequences of one row counts once."""
    packing_efficiency: float
    """Share of the token places of all rows that hold a token."""


def _sequence_plan(
    handle: tuple[int, int, int], rollout: int, length: int, advantage: float, weight: float, num_shared: int
) -> SequencePlan:
    shard, slot, serial = handle
    return SequencePlan(
        handle=GroupHandle(shard=shard, slot=slot, serial=serial),
        rollout=rollout,
        length=length,
        advantage=advantage,
        weight=weight,
        num_shared=num_shared,
    )
