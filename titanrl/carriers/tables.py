"""Structured arrays that replace thousands of small objects per step: records of groups, and planned rows.

Shape suffixes: P groups, N rollouts of all groups, M segments of all rollouts, U turns of all segments, T loss tokens,
S sequences of all rows, R rows. Items are concatenated in the order of their containers. A loss token is a sampled token that
counts in the loss.
"""

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from titanrl.base.pickling import pickle_fast
from titanrl.carriers.types import BoolArray, DoubleArray, GroupHandle, GroupRecord, GroupTokens, GroupTurns, IntArray

Table = npt.NDArray[np.void]
"""A structured array with one entry per record and one field per column."""

HANDLE = np.dtype([("shard", "<i8"), ("location", "<i8"), ("serial", "<i8")])
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
PREFIX = np.dtype([("place", "<i8"), ("num_shared", "<i8")])
"""Columns of common prefixes of the segments of a group; see `GroupRecord.prefixes`."""
SPAN = np.dtype([("advantage", "<f8"), ("num_tokens", "<i4")])
"""Columns of spans, which are runs of loss tokens with the same advantage."""
CRITIC_SPAN = np.dtype([*SPAN.descr, ("value", "<f4"), ("target", "<f4")])
"""Columns of spans with a critic, each of one token: also its value, and its return, which the critic learns."""
_GROUP = np.dtype(
    [
        ("index", "<i8"),
        ("handle", HANDLE),
        *((name, "<i8") for name in ("has_payload", "num_rollouts", "prompt_len", "num_truncated", "num_overlong")),
        *((name, "<i8") for name in ("num_nonfinite", "num_errors", "min_version", "max_version")),
        *((name, "<f8") for name in ("generate_s", "score_s", "weight")),
    ]
)
_GROUP_STRUCT = struct.Struct("<13q3d")
assert _GROUP_STRUCT.size == _GROUP.itemsize
_HANDLE_STRUCT, _WEIGHT_STRUCT = struct.Struct("<3q"), struct.Struct("<d")
_HANDLE_START, _WEIGHT_START = 8, _GROUP_STRUCT.size - 8
_NAN = array("d", [math.nan]).tobytes()
_DTYPES = {"q": "<i8", "d": "<f8"}


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
    """Tokens at the start of the sequence that the row stores only once, in preceding sequences of the same group."""
    spans: tuple[tuple[float, int] | tuple[float, int, float, float], ...] = ()
    """Advantage and length of consecutive runs of loss tokens, if the advantages differ; they replace `advantage`. With a
    critic, each token is a span, which also has the columns of `CRITIC_SPAN`."""

    @property
    def num_placed(self) -> int:
        """Tokens that the sequence occupies in its row."""
        return self.length - self.num_shared


Row = tuple[SequencePlan, ...]
"""Sequences packed into one row of tokens."""


pickle_fast(SequencePlan)


class PackedColumns(NamedTuple):
    """The columns of a `TurnTable` or `TokenTable` as bytes, in the order of its fields."""

    counts: bytes
    first: bytes
    second: bytes
    third: bytes = b""


PackedTurns = PackedTokens = PackedColumns  # the names in checkpoints of earlier versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged:
    """Columns of many items: first the number of entries of each item, then columns with the entries of all items."""

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the columns."""
    kinds: ClassVar[str] = ""
    """Type of each column as a code of `array`, if the columns can be packed."""

    @classmethod
    def pack(cls, values: GroupTurns | GroupTokens) -> PackedColumns:
        """Pack the columns of an object that has the same fields as tuples."""
        columns = zip(cls.names, cls.kinds, strict=True)
        return PackedColumns(*[array(kind, getattr(values, name)).tobytes() for name, kind in columns])

    @classmethod
    def unpacked(cls, packed: Sequence[PackedColumns]) -> Self:
        """Join the columns of objects, at least one, that `pack` or `packed` packed."""
        build: Callable[..., Self] = cls
        columns = zip(cls.names, cls.kinds, zip(*packed, strict=True), strict=False)
        return build(**{name: np.frombuffer(b"".join(column), _DTYPES[kind]) for name, kind, column in columns})

    @property
    def packed(self) -> PackedColumns:
        """The columns as bytes."""
        return PackedColumns(*[getattr(self, name).tobytes() for name in self.names])

    def replaced(self, packed: Sequence[PackedColumns | None], counts: Sequence[int]) -> Self:
        """Replace runs of items by packed ones. Each run has an entry in `packed`, None if it stays, and in `counts`."""
        known = [columns for columns in packed if columns is not None]
        if len(known) == len(packed):
            return self.unpacked(known)
        is_known = np.repeat([columns is not None for columns in packed], counts)
        items = np.arange(len(is_known))
        items[is_known] = len(items) + np.arange(np.count_nonzero(is_known))
        return self.unpacked([self.packed, *known]).take(items)

    def take(self, items: IntArray) -> Self:
        """Return the entries of the items at the given indices, in this order."""
        first, *others = self.names
        counts = getattr(self, first)
        entries = ranges((np.cumsum(counts) - counts)[items], counts[items])
        return replace(self, **{first: counts[items]}, **{name: getattr(self, name)[entries] for name in others})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTable(Ragged):
    """The turns of the segments of many groups; `GroupTurns` describes the columns."""

    names, kinds = ("num_turns", "rewards", "num_sampled", "states"), "qdqq"
    num_turns: IntArray
    rewards: DoubleArray
    num_sampled: IntArray
    states: IntArray

    @classmethod
    def unpacked(cls, packed: Sequence[PackedColumns]) -> Self:
        """Join the columns; `states` are 0 in checkpoints of earlier releases, which lack them."""
        return super(TurnTable, cls).unpacked(
            [each if each.third else each._replace(third=bytes(len(each.first))) for each in packed]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable(Ragged):
    """Token rewards of the rollouts of many groups; `GroupTokens` describes the columns."""

    names, kinds = ("num_rewards", "positions", "rewards"), "qqd"
    num_rewards: IntArray
    positions: IntArray
    rewards: DoubleArray

    @classmethod
    def of_turns(cls, turns: TurnTable, num_segments_N: IntArray) -> Self:
        """Build the token rewards of groups without any: the last loss token of a turn gets its reward. N are the rollouts."""
        rollout_of_U = np.repeat(np.repeat(np.arange(len(num_segments_N)), num_segments_N), turns.num_turns)
        num_tokens_N = np.bincount(rollout_of_U, turns.num_sampled, len(num_segments_N)).astype(np.int64)
        positions = np.cumsum(turns.num_sampled) - (np.cumsum(num_tokens_N) - num_tokens_N)[rollout_of_U] - 1
        has_token = (positions >= 0) & (turns.rewards != 0.0)
        num_rewards = np.bincount(rollout_of_U[has_token], minlength=len(num_segments_N)).astype(np.int64)
        return cls(num_rewards=num_rewards, positions=positions[has_token], rewards=turns.rewards[has_token])

    def by_token(self, num_tokens_N: IntArray) -> DoubleArray:
        """Return the reward of every loss token in rollout order, 0 where there is none, `[T]`."""
        starts_N = np.cumsum(num_tokens_N) - num_tokens_N
        rewards_T = np.zeros(int(num_tokens_N.sum()))
        np.add.at(rewards_T, np.repeat(starts_N, self.num_rewards) + self.positions, self.rewards)
        return rewards_T


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the concatenated indices of ranges, given their starts and lengths."""
    offsets = np.cumsum(counts) - counts
    indices: IntArray = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return indices


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
    truncated: tuple[int, ...] = ()
    """Indices of the rollouts truncated at the length limit."""
    prefixes: bytes = b""
    """`PREFIX`, `[K]`; empty if only the prompt is shared."""

    def with_weight(self, weight: float) -> Self:
        """Return the record with an importance weight, which multiplies the group's loss weights."""
        return self._replace(group=self.group[:_WEIGHT_START] + _WEIGHT_STRUCT.pack(weight))

    def at(self, handle: GroupHandle) -> Self:
        """Return the record with another payload location."""
        location = _HANDLE_STRUCT.pack(handle.shard, handle.location, handle.serial)
        return self._replace(group=self.group[:_HANDLE_START] + location + self.group[_HANDLE_START + len(location) :])


def pack_record(record: GroupRecord, task: int = 0) -> PackedRecord:
    """Pack the numbers of a record. Strings are dropped, and the task is stored as an index."""
    handle = record.handle
    group = _GROUP_STRUCT.pack(
        record.index,
        handle.shard,
        handle.location,
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
        1.0,
    )
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
        truncated=record.truncated,
        prefixes=array("q", chain.from_iterable(record.prefixes)).tobytes(),
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
    known_truncated: BoolArray | None = None
    """True for the rollouts truncated at the length limit, `[N]`; None if none is."""
    known_turns: TurnTable | None = None
    """Turns of the segments; None if each segment is one turn."""
    known_tokens: TokenTable | None = None
    """Token rewards; None if no reward returned any."""
    known_prefixes: Table | None = None
    """Common prefixes of the segments, `[M]` of `PREFIX`; None if all groups only share their prompts."""

    @classmethod
    def of(cls, records: Iterable[GroupRecord]) -> Self:
        """Build the table of these records, in the same order."""
        return cls.join([pack_record(record) for record in records])

    @classmethod
    def join(cls, packed: Sequence[PackedRecord]) -> Self:
        """Build the table of these packed records, in the same order."""
        parts = dict.fromkeys(part for record in packed for part in record.reward_parts)
        table = cls(
            groups=np.frombuffer(b"".join([record.group for record in packed]), _GROUP),
            rewards=np.frombuffer(b"".join([record.rewards for record in packed]), "<f8"),
            num_segments=np.frombuffer(b"".join([record.num_segments for record in packed]), "<i8"),
            lengths=np.frombuffer(b"".join([record.lengths for record in packed]), "<i8"),
            num_sampled=np.frombuffer(b"".join([record.num_sampled for record in packed]), "<i8"),
            reward_parts={
                part: np.frombuffer(
                    b"".join([record.reward_parts.get(part) or _NAN * (len(record.rewards) // 8) for record in packed]), "<f8"
                )
                for part in parts
            },
            tasks=np.array([record.task for record in packed], np.int64),
        )
        if any(record.truncated for record in packed):
            is_truncated = table.is_truncated.copy()
            for start, record in zip(table.starts.tolist(), packed, strict=True):
                is_truncated[start + np.array(record.truncated, np.int64)] = True
            table = replace(table, known_truncated=is_truncated)
        if any(record.turns for record in packed):
            num_segments = [len(record.lengths) // 8 for record in packed]
            table = replace(table, known_turns=table.turns.replaced([record.turns for record in packed], num_segments))
        if any(record.tokens for record in packed):
            num_rollouts = [len(record.rewards) // 8 for record in packed]
            table = replace(table, known_tokens=table.tokens.replaced([record.tokens for record in packed], num_rollouts))
        if any(record.prefixes for record in packed):
            ends = np.cumsum([len(record.lengths) // 8 for record in packed]).tolist()
            known = [
                np.frombuffer(record.prefixes, PREFIX) if record.prefixes else table.prefixes[start:end]
                for record, start, end in zip(packed, [0, *ends], ends, strict=False)
            ]
            table = replace(table, known_prefixes=np.concatenate(known))
        return table

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
        """Turns of the segments. If they are not known, one per segment, of which a rollout's last one gets its reward."""
        if self.known_turns is not None:
            return self.known_turns
        rewards, has_segment_N = np.zeros(len(self.num_sampled)), self.num_segments > 0
        rewards[np.cumsum(self.num_segments)[has_segment_N] - 1] = self.rewards[has_segment_N]
        ones, zeros = np.ones_like(self.num_sampled), np.zeros_like(self.num_sampled)
        return TurnTable(num_turns=ones, rewards=rewards, num_sampled=self.num_sampled, states=zeros)

    @property
    def tokens(self) -> TokenTable:
        """Token rewards, derived from the rewards of turns if they are not known."""
        return self.known_tokens or TokenTable.of_turns(self.turns, self.num_segments)

    @property
    def prefixes(self) -> Table:
        """Common prefixes of the segments, `[M]` of `PREFIX`. If none are known, the first segments of rollouts share the
        prompt except its last token, which predicts the first token of each completion."""
        if self.known_prefixes is not None:
            return self.known_prefixes
        is_first = np.zeros(len(self.lengths), np.bool_)
        is_first[self.segment_starts[self.num_segments > 0]] = True
        prefixes = np.zeros(len(self.lengths), PREFIX)
        prefixes["place"][np.lexsort((-self.lengths, ~is_first))] = np.arange(len(self.lengths))
        prompt_lens = self.groups["prompt_len"][self.group_of[self.rollout_of]]
        prefixes["num_shared"] = np.where(is_first, np.maximum(prompt_lens - 1, 0), 0)
        return prefixes

    @property
    def is_truncated(self) -> BoolArray:
        """True for the rollouts truncated at the length limit, `[N]`."""
        return np.zeros(len(self.rewards), np.bool_) if self.known_truncated is None else self.known_truncated

    @cached_property
    def num_turns_by_rollout(self) -> IntArray:
        """Turns per rollout, `[N]`."""
        sums: IntArray = np.bincount(self.rollout_of, self.turns.num_turns, len(self.rewards)).astype(np.int64)
        return sums

    def __add__(self, other: Self) -> Self:
        """Append the groups of another table."""
        nan = [np.full(len(table.rewards), np.nan) for table in (self, other)]
        parts = dict.fromkeys([*self.reward_parts, *other.reward_parts])
        columns = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in ("groups", "tasks", "rewards", "num_segments", "lengths", "num_sampled")
        }
        truncated = self.known_truncated is not None or other.known_truncated is not None
        turns, tokens = self.known_turns or other.known_turns, self.known_tokens or other.known_tokens
        prefixes = self.known_prefixes is not None or other.known_prefixes is not None
        return replace(
            self,
            **columns,
            reward_parts={
                part: np.concatenate([self.reward_parts.get(part, nan[0]), other.reward_parts.get(part, nan[1])])
                for part in parts
            },
            known_truncated=np.concatenate([self.is_truncated, other.is_truncated]) if truncated else None,
            known_turns=TurnTable.unpacked([self.turns.packed, other.turns.packed]) if turns else None,
            known_tokens=TokenTable.unpacked([self.tokens.packed, other.tokens.packed]) if tokens else None,
            known_prefixes=np.concatenate([self.prefixes, other.prefixes]) if prefixes else None,
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
            known_truncated=None if self.known_truncated is None else self.known_truncated[rollouts],
            known_turns=None if self.known_turns is None else self.known_turns.take(segments),
            known_tokens=None if self.known_tokens is None else self.known_tokens.take(rollouts),
            known_prefixes=None if self.known_prefixes is None else self.known_prefixes[segments],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans(Ragged):
    """Token advantages of many segments, as spans: runs of loss tokens with the same advantage."""

    names = ("num_spans", "table")
    num_spans: IntArray
    """Spans per segment, `[M]`."""
    table: Table
    """Spans of all segments in segment order, as a table of `SPAN` or `CRITIC_SPAN`."""

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
    """Spans of all sequences (`num_spans` of each) in sequence order, as a table of `SPAN` or `CRITIC_SPAN`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Row]:
        spans = iter(self.spans.tolist())
        plans = []
        for handle, _, segment, length, advantage, weight, num_shared, num_spans in self.sequences.tolist():
            shard, location, serial = handle
            plan = SequencePlan(
                handle=GroupHandle(shard=shard, location=location, serial=serial),
                segment=segment,
                length=length,
                advantage=advantage,
                weight=weight,
                num_shared=num_shared,
                spans=tuple(islice(spans, num_spans)),
            )
            plans.append(plan)
        start = 0
        for end in self.ends.tolist():
            yield tuple(plans[start:end])
            start = end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowTable):
            return NotImplemented
        pairs = ((self.ends, other.ends), (self.sequences, other.sequences), (self.spans, other.spans))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]  # the arrays are mutable


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroups:
    """Groups of an optimizer step whose losses are recorded token by token."""

    step: int
    """Step that is taken, from 1."""
    update: int
    """Optimizer step on the batch, from 0."""
    indices: Mapping[GroupHandle, int]
    """Prompt index by location of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that the ranks process in one forward-backward pass. A rank without rows runs one empty row."""

    rows: tuple[RowTable, ...]
    """Rows by data-parallel rank."""
    mean_weight: float = 1.0
    """Mean weight of the off-policy correction over the whole step, if the config measures it."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus in this step; None uses that of the config."""
    recorded: RecordedGroups | None = None
    """Groups whose losses are recorded; None if none are."""

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
