"""Carriers of the replay buffer: reservations, batches and replayed groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from titanrl.replay.payloads import ShardUsage
from titanrl.replay.saved import DropReason
from titanrl.tables import RecordTable
from titanrl.types import GroupHandle


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved slot for one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: GroupHandle
    """Slot and storage shard of its payload."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Groups of earlier batches, drawn for another one."""

    records: RecordTable
    """Records of the groups, with their importance weights."""
    num_stored: int
    """Groups in the memory, also those that are too old or were used too often to be drawn."""
    num_evicted: int
    """Groups that left the memory since the run began, because newer ones needed their place."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, in prompt order."""

    records: RecordTable
    """Records of the new groups. With `dynamic_sampling` all of them have a signal."""
    num_tried: int
    """Groups of the batch, plus groups discarded since the previous batch."""
    num_without_signal: int
    """Tried groups whose rewards were all equal. A group without any reward does not count."""
    next_index: int
    """First position of the prompt stream that no batch has passed; a resumed run starts here."""
    num_in_flight: int
    """Groups being generated or scored when the batch was taken."""
    num_ready: int
    """Finished groups that remain for a later batch."""
    num_held: int
    """Slots of earlier batches that are not freed yet, because the generators have not pulled the weights."""
    num_tried_rollouts: int
    """Rollouts of the tried groups, including those whose reward failed."""
    num_tried_tokens: int
    """Tokens that the generators sampled for the tried groups."""
    num_errors: int
    """Rollouts of the tried groups whose reward failed. They were left out of their groups."""
    first_error: str
    """Error of the first of these rollouts; empty if there is none."""
    drops: Mapping[DropReason, int]
    """Number of groups discarded since the previous batch, by reason."""
    counts: Mapping[str, int]
    """Numbers of the episodes of the tried groups, if an environment was used."""
    usage: ShardUsage
    """Size of the groups in all storage shards."""
    replayed: Replayed | None = None
    """Groups of earlier batches that join this one; None without replay."""

    @property
    def all_records(self) -> RecordTable:
        """Records of new and replayed groups."""
        return self.records if self.replayed is None else self.records + self.replayed.records

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens."""
        return int(self.records.groups["min_version"].min())
