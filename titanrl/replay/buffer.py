"""The buffer's bookkeeping, without actors: it reserves slots, collects finished groups, and picks the next batch.

A slot is reserved when a prompt is admitted. It is freed only after the generators have pulled the weights trained on its
group. With B slots, P groups between two publications and a window of W, no token is trained on more than (B + W - 2) // P
publications after it was sampled; docs/async.md proves it. The buffer never discards a group because of its age, so long
completions are as likely to be trained on as short ones.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from titanrl.tables import PackedRecord, RecordTable, Table, pack_record
from titanrl.types import GroupHandle, GroupRecord


class StarvationError(Exception):
    """No batch with a signal was complete in time; the text names the cause and what to change."""


class RolloutError(Exception):
    """A rollout worker failed; the text is the worker's exception."""


class ScorerError(RolloutError):
    """The scorer failed on every completion; the text has its first exception."""


def scorer_failed(tried: str, error: str) -> ScorerError:
    """Return the exception for a scorer that failed on everything that was tried."""
    return ScorerError(
        f"data.scorer: the scorer failed on {tried} (first error: {error}). Correct the scorer; if it lacks time or memory, "
        "raise sandbox.timeout_s or sandbox.memory_bytes."
    )


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved slot for one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: GroupHandle
    """Slot and storage shard of its payload."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished group that waits for a batch, packed when it is committed so that taking a batch is fast."""

    record: GroupRecord
    packed: PackedRecord
    has_signal: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, in prompt order."""

    records: RecordTable
    """Records of the groups. With `dynamic_sampling` all of them have a signal."""
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
    """Rollouts of the tried groups, including those whose scorer failed."""
    num_errors: int
    """Rollouts of the tried groups whose scorer failed. They were left out of their groups."""
    first_error: str
    """Error of the first of these rollouts; empty if there is none."""


class GroupBuffer:
    """Slots and records of groups. All methods run on one event loop."""

    def __init__(
        self, *, num_slots: int, num_shards: int, dynamic_sampling: bool, window: int = 1, first_index: int = 0
    ) -> None:
        """Start empty.

        Args:
            num_slots: Limit of groups that are in flight, finished or not yet released.
            num_shards: Storage shards that payloads are spread over.
            dynamic_sampling: Discard a group without signal and free its slot at once, so that another prompt replaces it.
            window: Limit of how far a batch may leave prompt order: at most `window - 1` younger groups overtake a group in
                flight. 1 keeps the order of prompts.
            first_index: First position of the prompt stream; greater than 0 after a resume.
        """
        self._free = deque(range(num_slots))
        self._reserved: dict[int, tuple[int, int, int]] = {}  # by slot: shard, slot, serial
        self._serials = [0] * num_slots
        self._num_shards = num_shards
        self._dynamic_sampling = dynamic_sampling
        self._window = window
        self._next_index = first_index
        self._in_flight: dict[int, GroupHandle] = {}  # by prompt index, oldest first
        self._ready: dict[int, _Finished] = {}
        self._overtakers: set[int] = set()  # taken while an older group was in flight
        self._discarded: list[_Finished] = []  # since the last batch; without signal or without any reward
        self._has_scored = False  # True after the first group with a reward
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def reserve(self, limit: int) -> list[Reservation]:
        """Wait until a slot is free, then reserve up to `limit` slots."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free)
            return [self._reserve() for _ in range(min(limit, len(self._free)))]

    async def commit(self, records: Sequence[GroupRecord]) -> None:
        """Add finished groups."""
        async with self._changed:
            for record in records:
                self._add(record)
            self._changed.notify_all()

    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise, because a worker failed."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take_batch(self, num_groups: int) -> Batch:
        """Wait for `num_groups` finished groups and take the first ones in prompt order, at least one of them with a signal.

        At most `window - 1` younger groups overtake a group in flight.

        Raises:
            RolloutError: A worker failed.
            ScorerError: The scorer failed on every rollout of the first `num_groups` groups.
        """
        async with self._changed:
            while len(picked := self._pick(num_groups)) < num_groups and self._failure is None:
                if not self._has_scored and len(self._discarded) >= num_groups:
                    raise self._scorer_error()
                await self._changed.wait()
        if self._failure is not None:
            raise RolloutError(self._failure)
        return self._take(picked)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, taken or not. The rollout workers are idle then."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._free or self._in_flight) or self._failure is not None)

    def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Explain why no batch of `num_groups` groups was complete after `waited_s` seconds."""
        tried = [group.record for group in (*self._ready.values(), *self._discarded)]
        in_flight = f"groups in flight: {len(self._in_flight)}"
        if self._in_flight:
            in_flight += f", the oldest for prompt {next(iter(self._in_flight))}"
        if not tried:
            return (
                f"rollout.starvation_timeout_s: no group finished in {waited_s:g} s; {in_flight}. "
                "See logs/rollout_0.log and logs/generator_0_0.log, or raise the timeout."
            )
        with_signal = sum(record.has_payload for record in tried)
        equal = Counter(record.rewards[0] for record in tried if record.rewards and not record.has_payload)
        reasons = [f"{count} with every reward {reward:g}" for reward, count in equal.most_common(3)]
        if unscored := [record for record in tried if not record.rewards]:
            reasons.append(f"{len(unscored)} whose scorer always failed ({unscored[0].first_error}; see data.scorer)")
        others = ", ".join(reasons) or "none"
        return (
            f"rollout.starvation_timeout_s: no batch of {num_groups} groups with a signal in {waited_s:g} s. "
            f"{len(tried)} groups finished, {with_signal} with a signal; the others: {others}; {in_flight}. "
            "If rewards are all low, the task is too hard for the policy: use warm_start, an easier data.task_config or "
            "a larger rollout.group_size. If they are all high, the task is solved."
        )

    async def release(self, handles: Table) -> None:
        """Free the slots of groups that were trained on, given as a table of `HANDLE`."""
        async with self._changed:
            for handle in handles.tolist():
                self._free_slot(handle)
            self._changed.notify_all()

    def _reserve(self) -> Reservation:
        slot, index = self._free.popleft(), self._next_index
        self._next_index += 1
        self._serials[slot] += 1
        handle = GroupHandle(shard=slot % self._num_shards, slot=slot, serial=self._serials[slot])
        self._reserved[slot] = (handle.shard, slot, handle.serial)
        self._in_flight[index] = handle
        return Reservation(index, handle)

    def _free_slot(self, handle: tuple[int, int, int]) -> None:
        assert self._reserved.pop(handle[1], None) == handle, "slot freed twice, or after it was reserved again"
        self._free.append(handle[1])

    def _add(self, record: GroupRecord) -> None:
        if self._in_flight.pop(record.index, None) != record.handle:
            raise RuntimeError(f"group {record.index} was committed without a reservation, or twice")
        self._has_scored |= bool(record.rewards)
        group = _Finished(record, pack_record(record), record.has_signal)
        if not record.rewards or (self._dynamic_sampling and not record.has_payload):
            self._discard(group)
        else:
            self._ready[record.index] = group

    def _discard(self, group: _Finished) -> None:
        """Free the slot of a group that will not be trained on, so that another prompt replaces it."""
        self._discarded.append(group)
        self._free_slot(self._reserved[group.record.handle.slot])

    def _scorer_error(self) -> ScorerError:
        records = [group.record for group in self._discarded]
        num_rollouts = sum(record.num_errors for record in records)
        return scorer_failed(f"all {num_rollouts} completions of the first {len(records)} groups", records[0].first_error)

    def _pick(self, num_groups: int) -> list[int]:
        """Return the indices of the next batch, oldest first; fewer than `num_groups` if the batch is not complete.

        A complete batch without any signal is discarded, because there is nothing to train on.
        """
        while len(self._ready) >= num_groups:
            oldest_in_flight = next(iter(self._in_flight), self._next_index)
            self._overtakers = {index for index in self._overtakers if index > oldest_in_flight}
            ready = sorted(self._ready)
            in_order = [index for index in ready if index < oldest_in_flight]
            overtaking = ready[len(in_order) :][: self._window - 1 - len(self._overtakers)]
            picked = [*in_order, *overtaking][:num_groups]
            if len(picked) < num_groups or any(self._ready[index].record.has_payload for index in picked):
                return picked
            for index in picked:
                self._discard(self._ready.pop(index))
            self._changed.notify_all()
        return []

    def _take(self, picked: Sequence[int]) -> Batch:
        oldest_in_flight = next(iter(self._in_flight), self._next_index)
        self._overtakers |= {index for index in picked if index > oldest_in_flight}
        groups = [self._ready.pop(index) for index in picked]
        tried = [*groups, *self._discarded]
        failed = [group.record for group in tried if group.record.num_errors]
        self._discarded = []
        return Batch(
            records=RecordTable.join([group.packed for group in groups]),
            num_tried=len(tried),
            num_without_signal=sum(bool(group.record.rewards) and not group.has_signal for group in tried),
            next_index=min([oldest_in_flight, *self._ready]),
            num_in_flight=len(self._in_flight),
            num_ready=len(self._ready),
            num_held=len(self._reserved) - len(self._in_flight) - len(self._ready) - len(groups),
            num_tried_rollouts=sum(len(group.record.rewards) + group.record.num_errors for group in tried),
            num_errors=sum(record.num_errors for record in failed),
            first_error=min(failed, key=lambda record: record.index).first_error if failed else "",
        )
