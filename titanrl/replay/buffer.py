"""The buffer's bookkeeping, free of actors: who may generate, which groups are finished, which make the next batch.

A slot is charged when a prompt is admitted and freed only after the generators have pulled the weights trained on it. With B
slots, P groups between two publications and a window of W, no token is trained on more than (B + W - 2) // P publications
after it was sampled; docs/async.md has the argument. Nothing is evicted for its age, so long completions are as likely to be
trained on as short ones.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from titanrl.tables import PackedRecord, RecordTable, Table, pack_record
from titanrl.types import GroupHandle, GroupRecord


class StarvationError(Exception):
    """No batch with a signal came together in time; the text says what was tried and what to change."""


class RolloutError(Exception):
    """A rollout worker failed; the text is its error."""


class ScorerError(RolloutError):
    """The scorer failed on every completion; the text is its first error."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Leave to generate one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: GroupHandle
    """Where its payload goes."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished group that waits for its batch, made ready for it when there is time."""

    record: GroupRecord
    packed: PackedRecord
    has_signal: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, by prompt order."""

    records: RecordTable
    """Groups without signal included, unless they were replaced (`dynamic_sampling`)."""
    num_tried: int
    """Groups of the batch, and those freed without being trained on since the last one."""
    num_without_signal: int
    """Those of them whose rewards were all equal."""
    next_index: int
    """First position of the prompt stream that no batch has gone past: what a resumed run begins with."""
    num_in_flight: int
    """Groups being generated or scored when the batch was taken."""
    num_ready: int
    """Finished groups that were left for a later batch."""
    num_held: int
    """Slots of groups trained on earlier, whose weights the generators had not pulled yet."""
    num_tried_rollouts: int
    """Rollouts of the tried groups, those whose scorer failed included."""
    num_errors: int
    """Rollouts of the tried groups whose scorer failed. They are in no group."""
    first_error: str
    """Error of the first of these rollouts; empty if there is none."""


class GroupBuffer:
    """Slots and records. All methods run on one event loop."""

    def __init__(
        self, *, num_slots: int, num_shards: int, dynamic_sampling: bool, window: int = 1, first_index: int = 0
    ) -> None:
        """Start empty.

        Args:
            num_slots: groups under way or waiting at once.
            num_shards: storage shards payloads are spread over.
            dynamic_sampling: free the slot of a group without signal at once, so that another prompt takes its place.
            window: a group may go into a batch before an older one that is not finished, if fewer than `window` groups then
                have; 1 keeps the order of prompts.
            first_index: first position of the prompt stream; later than 0 after a resume.
        """
        self._free = deque(range(num_slots))
        self._charged: dict[int, tuple[int, int, int]] = {}  # by slot: shard, slot, serial
        self._serials = [0] * num_slots
        self._num_shards = num_shards
        self._dynamic_sampling = dynamic_sampling
        self._window = window
        self._next_index = first_index
        self._in_flight: dict[int, GroupHandle] = {}  # by prompt index, in order of admission
        self._ready: dict[int, _Finished] = {}
        self._overtakers: set[int] = set()  # taken although an older group was still in flight
        self._dropped: list[_Finished] = []  # without signal, freed since the last batch
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def reserve(self, limit: int) -> list[Reservation]:
        """Charge up to `limit` slots, at least one; waits for one to be free."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free)
            return [self._charge() for _ in range(min(limit, len(self._free)))]

    async def commit(self, records: Sequence[GroupRecord]) -> None:
        """Take up finished groups."""
        async with self._changed:
            for record in records:
                self._take_up(record)
            self._changed.notify_all()

    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise: a worker cannot go on."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take_batch(self, num_groups: int) -> Batch:
        """The `num_groups` finished groups that come first in prompt order, at least one of them with a signal; waits for them.

        A group in flight is overtaken by at most `window - 1` younger ones.

        Raises:
            RolloutError: a worker failed.
        """
        async with self._changed:
            while len(picked := self._pick(num_groups)) < num_groups and self._failure is None:
                await self._changed.wait()
        if self._failure is not None:
            raise RolloutError(self._failure)
        return self._take(picked)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, taken or not, so that nobody has anything to do but train."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._free or self._in_flight) or self._failure is not None)

    def why_starved(self, num_groups: int, waited_s: float) -> str:
        """What is to be said when no batch of `num_groups` groups has come together in `waited_s` seconds."""
        tried = [group.record for group in (*self._ready.values(), *self._dropped)]
        under_way = f"{len(self._in_flight)} are under way"
        if self._in_flight:
            under_way += f", the oldest for prompt {next(iter(self._in_flight))}"
        if not tried:
            return (
                f"no group came in {waited_s:g} s; {under_way}; "
                "see logs/rollout_0.log and logs/generator_0_0.log, or raise rollout.starvation_timeout_s"
            )
        with_signal = sum(record.has_payload for record in tried)
        equal = Counter(record.rewards[0] for record in tried if not record.has_payload)
        reasons = ", ".join(f"{count} with every reward {reward:g}" for reward, count in equal.most_common(3))
        return (
            f"no batch of {num_groups} groups with a signal in {waited_s:g} s: {len(tried)} groups finished, "
            f"{with_signal} with a signal; the others: {reasons or 'none'}; {under_way}. If rewards are all low the "
            "task is too hard for the policy (warm_start, an easier data.task_config, a larger rollout.group_size); if all "
            "high it is solved"
        )

    async def release(self, handles: Table) -> None:
        """Free the slots of groups that were trained on, given as a table of `HANDLE`."""
        async with self._changed:
            for handle in handles.tolist():
                self._free_slot(handle)
            self._changed.notify_all()

    def _charge(self) -> Reservation:
        slot, index = self._free.popleft(), self._next_index
        self._next_index += 1
        self._serials[slot] += 1
        handle = GroupHandle(shard=slot % self._num_shards, slot=slot, serial=self._serials[slot])
        self._charged[slot] = (handle.shard, slot, handle.serial)
        self._in_flight[index] = handle
        return Reservation(index, handle)

    def _free_slot(self, handle: tuple[int, int, int]) -> None:
        assert self._charged.pop(handle[1], None) == handle, "slot freed twice, or after it was charged again"
        self._free.append(handle[1])

    def _take_up(self, record: GroupRecord) -> None:
        if self._in_flight.pop(record.index, None) != record.handle:
            raise RuntimeError(f"group {record.index} was committed without a reservation, or twice")
        group = _Finished(record, pack_record(record), record.has_signal)
        if self._dynamic_sampling and not record.has_payload:
            self._drop(group)
        else:
            self._ready[record.index] = group

    def _drop(self, group: _Finished) -> None:
        self._dropped.append(group)
        self._free_slot(self._charged[group.record.handle.slot])

    def _pick(self, num_groups: int) -> list[int]:
        """Indices of the next batch, oldest first; fewer than asked for if it has to wait.

        A whole batch without any signal is freed, since there is nothing to train on; other prompts take its place.
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
                self._drop(self._ready.pop(index))
            self._changed.notify_all()
        return []

    def _take(self, picked: Sequence[int]) -> Batch:
        oldest_in_flight = next(iter(self._in_flight), self._next_index)
        self._overtakers |= {index for index in picked if index > oldest_in_flight}
        groups = [self._ready.pop(index) for index in picked]
        tried = [*groups, *self._dropped]
        self._dropped = []
        return Batch(
            records=RecordTable.join([group.packed for group in groups]),
            num_tried=len(tried),
            num_without_signal=sum(not group.has_signal for group in tried),
            next_index=min([oldest_in_flight, *self._ready]),
            num_in_flight=len(self._in_flight),
            num_ready=len(self._ready),
            num_held=len(self._charged) - len(self._in_flight) - len(self._ready) - len(groups),
            num_tried_rollouts=sum(len(group.record.rewards) + group.record.num_errors for group in tried),
            num_errors=sum(group.record.num_errors for group in tried),
            first_error=next((group.record.first_error for group in tried if group.record.num_errors), ""),
        )
