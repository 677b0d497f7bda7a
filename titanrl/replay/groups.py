"""Data of the run's buffer: reservations, finished groups, batches, errors, and the state in a checkpoint with its rules for a
resume.

A resumed run continues with the finished groups and resamples the prompts that were in flight. It also resamples finished
groups that could exceed the staleness bound. That happens only if the run resumes with fewer slots or another publication
interval, or after an additional publication by the user.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from titanrl.base.errors import TitanRLError
from titanrl.carriers.tables import HANDLE, PackedRecord, RecordTable, Table
from titanrl.carriers.types import DoubleArray, GroupHandle, GroupRecord
from titanrl.data.mixture import Draw

DropReason = Literal["no signal", "no reward", "filtered", "too small", "too old"]
"""Reason for discarding a group: no tokens to train on, no completion with a reward, `rollout.group_filter`, fewer completions
with a reward than `rollout.min_group_size`, or its age."""
TrainedBatch = tuple[Table, DoubleArray | None]
"""Handles of the groups in a batch that was trained on, and their replay priorities."""
Move = tuple[GroupHandle, GroupHandle]
"""Handle of a group when it was saved, and its current handle."""


class StarvationError(TitanRLError):
    """No batch with a signal was complete in time; the message names the cause and a fix."""


def versions_behind(published: Sequence[int], version: int) -> int:
    """Return the number of versions published after `version`."""
    return len(published) - bisect_right(published, version)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved slot for one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: GroupHandle
    """Location of its payload."""
    draw: Draw


@dataclass(frozen=True, slots=True)
class ShardUsage:
    """Size of the groups in a storage shard."""

    num_bytes: int
    num_spilled_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished group. Its record is packed at commit time, so that taking a batch is fast."""

    record: GroupRecord
    packed: PackedRecord
    rewards_differ: bool

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
class Replayed:
    """Groups of earlier batches that were drawn for another batch."""

    records: RecordTable
    """Records of the groups, with their importance weights."""
    num_stored: int
    """Groups in the memory, including those that are too old or were used too often to be drawn."""
    num_evicted: int
    """Groups evicted from the memory by newer ones since the start of the run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step, in prompt order."""

    records: RecordTable
    """Records of the new groups. With `dynamic_sampling`, every group has a signal."""
    num_tried: int
    """Groups of the batch, plus groups discarded since the previous batch."""
    num_equal_rewards: int
    """Tried groups whose rewards were all equal, excluding groups without any reward."""
    first_untaken: int
    """First position of the prompt stream that was neither taken nor discarded. A run that resumes without the finished groups
    (`BufferState.next_index` is later) starts here."""
    num_in_flight: int
    """Groups being generated or scored when the batch was taken."""
    num_ready: int
    """Finished groups that remain for a later batch."""
    num_unreleased: int
    """Slots of earlier batches that are not freed yet, because new requests could still get older weights."""
    num_tried_rollouts: int
    """Rollouts of the tried groups, including those whose reward failed."""
    num_tried_tokens: int
    """Tokens that the generators sampled for the tried groups."""
    num_errors: int
    """Rollouts of the tried groups whose reward failed. They were excluded from their groups."""
    first_error: str
    """Error of the first of these rollouts; empty if there is none."""
    drops: Mapping[DropReason, int]
    """Number of groups discarded since the previous batch, by reason."""
    counts: Mapping[str, int]
    """Episode counts of the tried groups, if an environment was used: sums, except the largest `slowest_ms`."""
    usage: ShardUsage
    environment: Mapping[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)
    """Values that environments reported for the tried groups, by task and name: their sum, and the number of rollouts."""
    replayed: Replayed | None = None
    """Groups of earlier batches that were added to this one; None without replay."""
    prompts: Mapping[str, float] = field(default_factory=dict)
    """Metrics of prompt selection, with a mixture or a curriculum."""
    drops_by_task: Mapping[str, int] = field(default_factory=dict)
    """Number of groups discarded since the previous batch, by task."""

    @property
    def all_records(self) -> RecordTable:
        """Records of new and replayed groups."""
        return self.records if self.replayed is None else self.records + self.replayed.records

    @property
    def work(self) -> dict[str, int]:
        """Work on the tried groups, by the names of the counts of a run."""
        return {
            "prompts": self.num_tried,
            "rollouts": self.num_tried_rollouts,
            "environment_steps": self.counts.get("turns", 0),
            "generated_tokens": self.num_tried_tokens,
        }

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens."""
        return int(self.records.groups["min_version"].min())


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """State of a buffer between two steps. A batch that was taken but not trained on is treated as not taken."""

    next_index: int
    """First position of the prompt stream that was not admitted."""
    in_flight: tuple[int, ...] = ()
    """Earlier positions to sample again, in any order: their groups were being generated, or lost their tokens."""
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
    has_scored: bool
    """True after the first group with a reward."""
    memory: Mapping[str, Any] | None

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
    """Subset of a `BufferState` for the controller."""

    next_index: int
    in_flight: tuple[int, ...]
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


def split_by_freshness(state: BufferState, freshness: Freshness, num_slots: int) -> tuple[list[Finished], list[int]]:
    """Return the finished groups to keep and the positions to sample again, both oldest first.

    The oldest positions get the slots, finished or not, so that no group waits for a slot held by a younger one.
    """
    by_index: dict[int, Finished | None] = dict.fromkeys(state.in_flight) | {group.record.index: group for group in state.ready}
    kept, again = [], []
    for rank, (index, group) in enumerate(sorted(by_index.items(), key=lambda item: item[0])):
        num_before = len(state.held) + rank
        if group is not None and num_before < num_slots:
            # The groups that hold slots are trained on before it.
            age = versions_behind(freshness.published, group.record.min_version) + num_before // freshness.groups_per_publish
            if age <= freshness.bound:
                kept.append(group)
                continue
        again.append(index)
    return kept, again


def moved_batch(batch: TrainedBatch, moves: Mapping[GroupHandle, GroupHandle]) -> TrainedBatch:
    """Return a batch with current handles, without groups that were not restored."""
    handles, priorities = batch
    keys = handles_of(handles)
    kept = [i for i, handle in enumerate(keys) if handle in moves]
    current = [moves[keys[i]] for i in kept]
    table = np.array([(handle.shard, handle.location, handle.serial) for handle in current], HANDLE)
    return table, None if priorities is None else priorities[kept]


def handles_of(table: Table) -> list[GroupHandle]:
    """Return the handles in a table of `HANDLE`."""
    return [GroupHandle(shard=shard, location=location, serial=serial) for shard, location, serial in table.tolist()]


def joined(batches: Sequence[TrainedBatch]) -> TrainedBatch:
    """Join batches, so that their slots are freed together. Groups without a priority get NaN."""
    handles = np.concatenate([table for table, _ in batches])
    if all(values is None for _, values in batches):
        return handles, None
    values = [np.full(len(table), np.nan) if priorities is None else priorities for table, priorities in batches]
    return handles, np.concatenate(values)
