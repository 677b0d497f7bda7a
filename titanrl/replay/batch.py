"""Data types of the replay buffer: reservations, batches and replayed groups."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.data.mixture import Draw
from titanrl.replay.payloads import ShardUsage
from titanrl.replay.saved import DropReason, Finished, LastBatch


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved slot for one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: GroupHandle
    """Slot and storage shard of its payload."""
    draw: Draw
    """The prompt."""


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
    """The groups of one optimizer step, in prompt order."""

    records: RecordTable
    """Records of the new groups. With `dynamic_sampling`, every group has a signal."""
    num_tried: int
    """Groups of the batch, plus groups discarded since the previous batch."""
    num_without_signal: int
    """Tried groups whose rewards were all equal, excluding groups without any reward."""
    next_index: int
    """First position of the prompt stream that was neither taken nor discarded; a resumed run starts here."""
    num_in_flight: int
    """Groups being generated or scored when the batch was taken."""
    num_ready: int
    """Finished groups that remain for a later batch."""
    num_held: int
    """Slots of earlier batches that are not freed yet, because the generators have not pulled the new weights."""
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
    """Episode counts of the tried groups, if an environment was used."""
    usage: ShardUsage
    """Size of the groups in all storage shards."""
    environment: Mapping[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)
    """Values that environments reported for the tried groups, by task and name: their sum, and the number of rollouts."""
    replayed: Replayed | None = None
    """Groups of earlier batches that were added to this one; None without replay."""
    prompts: Mapping[str, float] = field(default_factory=dict)
    """Metrics of prompt selection, with a mixture or a curriculum."""
    drops_by_task: Mapping[str, int] = field(default_factory=dict)
    """Number of groups discarded since the previous batch, by task."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Finished],
        last: LastBatch,
        usage: Sequence[ShardUsage],
        **numbers: Any,
    ) -> Self:
        """Build a batch from finished groups.

        Args:
            groups: Groups of the batch, in prompt order.
            last: Groups discarded since the previous batch.
            usage: Size of each storage shard.
            numbers: Remaining fields.
        """
        tried = [*groups, *last.discarded]
        failed = [group.record for group in tried if group.record.num_errors]
        return cls(
            records=RecordTable.join([group.packed for group in groups]),
            num_tried=len(tried),
            num_without_signal=sum(bool(group.record.rewards) and not group.has_signal for group in tried),
            num_tried_rollouts=sum(len(group.record.rewards) + group.record.num_errors for group in tried),
            num_tried_tokens=sum(group.record.num_generated for group in tried),
            num_errors=sum(record.num_errors for record in failed),
            first_error=min(failed, key=lambda record: record.index).first_error if failed else "",
            drops=dict(last.drops or {}),
            counts=sum((Counter(group.record.counts) for group in tried), Counter[str]()),
            usage=ShardUsage(
                num_bytes=sum(shard.num_bytes for shard in usage),
                num_spilled_bytes=sum(shard.num_spilled_bytes for shard in usage),
            ),
            drops_by_task=Counter(group.record.task for group in last.discarded),
            environment=_summed_by_task([group.record for group in tried]),
            **numbers,
        )

    @property
    def all_records(self) -> RecordTable:
        """Records of new and replayed groups."""
        return self.records if self.replayed is None else self.records + self.replayed.records

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens."""
        return int(self.records.groups["min_version"].min())


def _summed_by_task(records: Sequence[GroupRecord]) -> dict[str, dict[str, tuple[float, int]]]:
    """Add up the values that environments reported, by task and name. Prompt order makes the sums reproducible."""
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for record in sorted(records, key=lambda record: record.index):
        for name, (total, num) in record.metrics.items():
            of_task = sums.setdefault(record.task, {})
            earlier = of_task.get(name, (0.0, 0))
            of_task[name] = earlier[0] + total, earlier[1] + num
    return sums
