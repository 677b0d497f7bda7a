"""Buffer state in a checkpoint, and how a resumed run continues from it.

A resumed run continues with the finished groups and resamples the prompts that were in flight. It also resamples finished
groups that could exceed the staleness bound. That happens only if the run resumes with fewer slots or another publication
interval, or after an additional publication by the user.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from titanrl.carriers.tables import HANDLE, DoubleArray, PackedRecord, Table
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.replay.memory import Stored

DropReason = Literal["no signal", "no reward", "filtered", "too small", "too old"]
"""Reason for discarding a group: equal rewards, no completion with a reward, `rollout.group_filter`, fewer completions with a
reward than `rollout.min_group_size`, or its age."""
TrainedBatch = tuple[Table, DoubleArray | None]
"""Handles of the groups in a batch that was trained on, and their replay priorities."""
Move = tuple[GroupHandle, GroupHandle]
"""Handle of a group when it was saved, and its current handle."""


def versions_behind(published: Sequence[int], version: int) -> int:
    """Return the number of versions published after `version`."""
    return len(published) - bisect_right(published, version)


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished group. Its record is packed at commit time, so that taking a batch is fast."""

    record: GroupRecord
    packed: PackedRecord
    has_signal: bool

    def stored(self, priority: float) -> Stored:
        """Return the group in the form that the replay memory stores."""
        record = self.record
        return Stored(handle=record.handle, record=self.packed, min_version=record.min_version, priority=priority)

    def has_tokens_in(self, shard: int) -> bool:
        """Return True if a storage shard holds the group's tokens."""
        return self.record.has_payload and self.record.handle.shard == shard

    def without_tokens(self) -> "Finished":
        """Return the group for a buffer whose shards do not store its tokens."""
        return replace(self, record=replace(self.record, has_payload=False))

    def at(self, handle: GroupHandle) -> "Finished":
        """Return the group with a new location of its tokens."""
        return replace(self, record=replace(self.record, handle=handle), packed=self.packed.at(handle))


@dataclass(frozen=True, slots=True)
class LastBatch:
    """State that the last batch reset, kept in case the batch is returned."""

    discarded: Sequence[Finished] = ()
    """Groups discarded before the batch."""
    drops: Mapping[DropReason, int] | None = None
    """Number of these groups by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """State of a buffer between two steps. A batch that was taken but not trained on is treated as not taken."""

    next_index: int
    """First position of the prompt stream that was not admitted."""
    in_flight: tuple[int, ...] = ()
    """Earlier positions whose groups were being generated, oldest first."""
    ready: tuple[Finished, ...] = ()
    """Finished groups waiting for a batch, oldest first."""
    held: tuple[Finished, ...] = ()
    """Groups trained on since the last publication. They keep their slots until the next one."""
    trained: tuple[TrainedBatch, ...] = ()
    """Batches of these groups, including replayed groups."""
    overtakers: frozenset[int] = frozenset()
    """Positions trained on while an older group was in flight."""
    discarded: tuple[Finished, ...] = ()
    """Groups discarded since the last batch that was trained on."""
    drops: Mapping[DropReason, int]
    """Number of these groups by reason."""
    has_scored: bool
    """True after the first group with a reward."""
    memory: Mapping[str, Any] | None
    """State of the replay memory; None without replay."""

    def without_groups(self) -> "BufferState":
        """Return the state for a run whose tasks have changed, which resamples finished groups with other prompts."""
        unfinished = sorted([*self.in_flight, *(group.record.index for group in self.ready)])
        return replace(self, in_flight=tuple(unfinished), ready=(), memory=None)

    @property
    def payloads(self) -> list[GroupHandle]:
        """Handles of the groups whose tokens a resumed run needs."""
        kept = self.ready if self.memory is None else (*self.ready, *self.held)
        stored = [] if self.memory is None else [group.handle for group in self.memory["groups"]]
        return [*(group.record.handle for group in kept if group.record.has_payload), *stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Subset of a buffer's state for the controller."""

    next_index: int
    """First position of the prompt stream that was not admitted."""
    in_flight: tuple[int, ...]
    """Earlier positions that a resumed run samples again."""
    num_held: int
    """Slots of groups trained on since the last publication."""
    payloads: list[GroupHandle]
    """Handles of the groups whose tokens the storage shards must write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of restoring a buffer's state."""

    moves: list[Move]
    """Groups whose tokens the storage shards must read."""
    trained: list[TrainedBatch]
    """Batches trained on since the last publication, with current handles."""
    num_ready: int
    """Finished groups that were kept."""
    num_in_flight: int
    """Number of positions to sample again because their groups were in flight."""
    too_old: tuple[int, ...]
    """Positions of finished groups to sample again because they could become too old or the tasks have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """Age limit for restored groups; see docs/async.md."""

    published: tuple[int, ...]
    """Versions published so far, newest last."""
    groups_per_publish: int
    """Groups trained on between two publications."""
    bound: int
    """Largest age of a token when it is trained on, in published versions."""

    def holds(self, group: Finished, num_before: int) -> bool:
        """Return True if a group can be trained on within the bound after `num_before` other groups that hold slots."""
        age = versions_behind(self.published, group.record.min_version)
        return age + num_before // self.groups_per_publish <= self.bound


def split_by_freshness(state: BufferState, freshness: Freshness, num_slots: int) -> tuple[list[Finished], list[int]]:
    """Return the finished groups to keep and the positions to sample again, both oldest first.

    The oldest positions get the slots, finished or not, so that no group waits for a slot held by a younger one.
    """
    by_index: dict[int, Finished | None] = dict.fromkeys(state.in_flight) | {group.record.index: group for group in state.ready}
    kept, again = [], []
    for rank, (index, group) in enumerate(sorted(by_index.items(), key=lambda item: item[0])):
        num_before = len(state.held) + rank
        if group is not None and num_before < num_slots and freshness.holds(group, num_before):
            kept.append(group)
        else:
            again.append(index)
    return kept, again


def moved_batch(batch: TrainedBatch, moves: Mapping[GroupHandle, GroupHandle]) -> TrainedBatch:
    """Return a batch with current handles, without groups that were not restored."""
    handles, priorities = batch
    keys = handles_of(handles)
    kept = [i for i, handle in enumerate(keys) if handle in moves]
    current = [moves[keys[i]] for i in kept]
    table = np.array([(handle.shard, handle.slot, handle.serial) for handle in current], HANDLE)
    return table, None if priorities is None else priorities[kept]


def handles_of(table: Table) -> list[GroupHandle]:
    """Return the handles in a table of `HANDLE`."""
    return [GroupHandle(shard=shard, slot=slot, serial=serial) for shard, slot, serial in table.tolist()]


def joined(batches: Sequence[TrainedBatch]) -> TrainedBatch:
    """Join batches, so that their slots are freed together. Groups without a priority get NaN."""
    handles = np.concatenate([table for table, _ in batches])
    if all(values is None for _, values in batches):
        return handles, None
    values = [np.full(len(table), np.nan) if priorities is None else priorities for table, priorities in batches]
    return handles, np.concatenate(values)
