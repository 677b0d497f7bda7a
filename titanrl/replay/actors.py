"""The buffer and its storage shards as actors."""

from collections.abc import Iterable, Sequence

from titanrl.actors import Actor, concurrent_endpoint
from titanrl.replay.buffer import Batch, GroupBuffer, Reservation
from titanrl.types import GroupRecord, Handle, Rollout


class ReplayBuffer(Actor):
    """Owner of slots and records; it never sees a token."""

    def __init__(self, num_slots: int, num_shards: int, dynamic_sampling: bool, first_index: int) -> None:
        """Start empty; see `GroupBuffer`."""
        self._buffer = GroupBuffer(
            num_slots=num_slots, num_shards=num_shards, dynamic_sampling=dynamic_sampling, first_index=first_index
        )

    @concurrent_endpoint
    async def reserve(self, limit: int) -> list[Reservation]:
        """Leave to generate up to `limit` groups, at least one; waits for it."""
        return await self._buffer.reserve(limit)

    @concurrent_endpoint
    async def commit(self, record: GroupRecord) -> None:
        """Take up a finished group, whose payload is already in its shard."""
        await self._buffer.commit(record)

    @concurrent_endpoint
    async def fail(self, error: str) -> None:
        """A worker cannot go on."""
        await self._buffer.fail(error)

    @concurrent_endpoint
    async def take_batch(self, num_groups: int, timeout_s: float) -> Batch:
        """The next batch; waits for it."""
        return await self._buffer.take_batch(num_groups, timeout_s)

    @concurrent_endpoint
    async def release(self, handles: Sequence[Handle]) -> None:
        """Free the slots of a batch."""
        await self._buffer.release(handles)


class StorageShard(Actor):
    """Holder of payloads: tokens, log-probabilities, masks and versions of groups with a signal."""

    def __init__(self) -> None:
        """Start empty."""
        self._groups: dict[Handle, tuple[Rollout, ...]] = {}

    @concurrent_endpoint
    async def put(self, handle: Handle, rollouts: tuple[Rollout, ...]) -> None:
        """Keep a group's rollouts; whatever the slot held before is gone."""
        for old in [held for held in self._groups if held.slot == handle.slot]:
            del self._groups[old]
        self._groups[handle] = rollouts

    @concurrent_endpoint
    async def get(self, wanted: Iterable[tuple[Handle, int]]) -> list[Rollout]:
        """Single rollouts, by handle and place in the group.

        Raises:
            KeyError: the slot has been used again since.
        """
        return [self._groups[handle][rollout] for handle, rollout in wanted]
