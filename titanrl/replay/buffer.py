"""The buffer's bookkeeping, free of actors: who may generate, which groups are finished, which make the next batch.

A slot is charged when a prompt is admitted and freed only after the generators have pulled the weights trained on it, so
with `(max_staleness + 1) * groups_per_step` slots nothing can become staler than `max_staleness`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from titanrl.types import GroupRecord, Handle


class StarvationError(Exception):
    """No batch with a signal came together in time; the text says what was tried and what to change."""


class RolloutError(Exception):
    """A rollout worker failed; the text is its error."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Leave to generate one group."""

    index: int
    """Position of its prompt in the stream."""
    handle: Handle
    """Where its payload goes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, by prompt order."""

    records: tuple[GroupRecord, ...]
    """Groups without signal included, unless they were replaced (`dynamic_sampling`)."""
    num_tried: int
    """Groups finished since the last batch."""
    num_without_signal: int
    """Those of them whose rewards were all equal."""
    next_index: int
    """Position of the prompt stream that has not been admitted yet."""


class GroupBuffer:
    """Slots and records. All methods run on one event loop."""

    def __init__(self, *, num_slots: int, num_shards: int, dynamic_sampling: bool, first_index: int = 0) -> None:
        """Start empty.

        Args:
            num_slots: groups under way or waiting at once.
            num_shards: storage shards payloads are spread over.
            dynamic_sampling: free the slot of a group without signal at once, so that another prompt takes its place.
            first_index: first position of the prompt stream; later than 0 after a resume.
        """
        self._free = list(range(num_slots))
        self._generations = [0] * num_slots
        self._num_shards = num_shards
        self._dynamic_sampling = dynamic_sampling
        self._next_index = first_index
        self._in_flight: set[Handle] = set()
        self._ready: dict[int, GroupRecord] = {}
        self._tried: list[GroupRecord] = []
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def reserve(self, limit: int) -> list[Reservation]:
        """Charge up to `limit` slots, at least one; waits for one to be free."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free)
            return [self._charge() for _ in range(min(limit, len(self._free)))]

    async def commit(self, record: GroupRecord) -> None:
        """Take up a finished group."""
        async with self._changed:
            if record.handle not in self._in_flight:
                raise RuntimeError(f"group {record.index} was committed without a reservation, or twice")
            self._in_flight.remove(record.handle)
            self._tried.append(record)
            if self._dynamic_sampling and not record.has_payload:
                self._free_slot(record.handle)
            else:
                self._ready[record.index] = record
            self._changed.notify_all()

    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise: a worker cannot go on."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take_batch(self, num_groups: int, timeout_s: float) -> Batch:
        """The `num_groups` finished groups that come first in prompt order, at least one of them with a signal.

        Raises:
            StarvationError: none came together within `timeout_s`.
            RolloutError: a worker failed.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while not self._batch_is_ready(num_groups):
                    self._recycle_signal_free(num_groups)
                    await self._changed.wait()
        except TimeoutError:
            raise StarvationError(self._why_starved(num_groups, timeout_s)) from None
        if self._failure is not None:
            raise RolloutError(self._failure)
        records = tuple(self._ready.pop(index) for index in sorted(self._ready)[:num_groups])
        tried, self._tried = self._tried, []
        return Batch(records, len(tried), sum(not record.has_signal for record in tried), self._next_index)

    async def release(self, handles: Iterable[Handle]) -> None:
        """Free the slots of groups that were trained on."""
        async with self._changed:
            for handle in handles:
                self._free_slot(handle)
            self._changed.notify_all()

    def _charge(self) -> Reservation:
        slot, index = self._free.pop(0), self._next_index
        self._next_index += 1
        self._generations[slot] += 1
        handle = Handle(shard=slot % self._num_shards, slot=slot, generation=self._generations[slot])
        self._in_flight.add(handle)
        return Reservation(index, handle)

    def _free_slot(self, handle: Handle) -> None:
        assert self._generations[handle.slot] == handle.generation, "slot freed after it was charged again"
        assert handle.slot not in self._free, "slot freed twice"
        self._free.append(handle.slot)

    def _batch_is_ready(self, num_groups: int) -> bool:
        first = [self._ready[index] for index in sorted(self._ready)[:num_groups]]
        return self._failure is not None or (len(first) == num_groups and any(record.has_payload for record in first))

    def _recycle_signal_free(self, num_groups: int) -> None:
        """If a whole batch is ready and none of it has a signal, free it: there is nothing to train on."""
        if len(self._ready) < num_groups:
            return
        for index in sorted(self._ready)[:num_groups]:
            self._free_slot(self._ready.pop(index).handle)
        self._changed.notify_all()

    def _why_starved(self, num_groups: int, timeout_s: float) -> str:
        if not self._tried:
            return (
                f"no group finished in {timeout_s:g} s, {len(self._in_flight)} are under way; "
                "see logs/rollout_0.log and logs/generator_0_0.log, or raise rollout.starvation_timeout_s"
            )
        with_signal = sum(record.has_payload for record in self._tried)
        equal = Counter(record.rewards[0] for record in self._tried if not record.has_payload)
        reasons = ", ".join(f"{count} with every reward {reward:g}" for reward, count in equal.most_common(3))
        return (
            f"no batch of {num_groups} groups with a signal in {timeout_s:g} s: {len(self._tried)} groups finished, "
            f"{with_signal} with a signal; the others: {reasons or 'none'}. If rewards are all low the task is too hard for "
            "the policy (warm_start, an easier data.task_config, a larger rollout.group_size); if all high it is solved"
        )
