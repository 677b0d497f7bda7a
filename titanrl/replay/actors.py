"""The replay buffer and its storage shards, as actors."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titanrl.actors import Actor, concurrent_endpoint
from titanrl.replay.buffer import Batch, GroupBuffer, Reservation
from titanrl.tables import Table
from titanrl.types import GroupHandle, GroupRecord, Rollout


class ReplayBuffer(Actor):
    """Slots and records of groups. Tokens never pass through this actor."""

    def __init__(self, num_slots: int, num_shards: int, window: int, dynamic_sampling: bool, first_index: int) -> None:
        """Start empty; see `GroupBuffer`."""
        self._buffer = GroupBuffer(
            num_slots=num_slots,
            num_shards=num_shards,
            window=window,
            dynamic_sampling=dynamic_sampling,
            first_index=first_index,
        )

    @concurrent_endpoint
    async def reserve(self, limit: int) -> list[Reservation]:
        """Wait until a slot is free, then reserve up to `limit` slots."""
        return await self._buffer.reserve(limit)

    @concurrent_endpoint
    async def commit(self, records: Sequence[GroupRecord]) -> None:
        """Add finished groups, whose payloads are already in their shards."""
        await self._buffer.commit(records)

    @concurrent_endpoint
    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise, because a worker failed."""
        await self._buffer.fail(error)

    @concurrent_endpoint
    async def take_batch(self, num_groups: int) -> Batch:
        """Wait for the next batch and take it; see `GroupBuffer.take_batch`."""
        return await self._buffer.take_batch(num_groups)

    @concurrent_endpoint
    async def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Explain why no batch was complete in time."""
        return self._buffer.why_starved(num_groups, waited_s)

    @concurrent_endpoint
    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group."""
        await self._buffer.wait_until_full()

    @concurrent_endpoint
    async def release(self, handles: Table) -> None:
        """Free the slots of a batch, given as a table of handles."""
        await self._buffer.release(handles)


def packed(rollouts: Iterable[Rollout]) -> tuple[bytes, ...]:
    """Pickle each rollout. Only the worker that made it and the trainer rank that uses it pay for the conversion."""
    return tuple(pickle.dumps(rollout, pickle.HIGHEST_PROTOCOL) for rollout in rollouts)


class Shards:
    """Storage shards by number. Slicing a mesh takes half a millisecond, so each slice is cached."""

    def __init__(self, mesh: Any) -> None:
        """Wrap the mesh of all shards."""
        self._mesh = mesh
        self._slices: dict[int, Any] = {}

    def __getitem__(self, shard: int) -> Any:
        """Return the actor of one shard."""
        if shard not in self._slices:
            self._slices[shard] = self._mesh.slice(procs=shard)
        return self._slices[shard]


async def fetch(shard: Any, wanted: Sequence[tuple[GroupHandle, int]]) -> list[Rollout]:
    """Fetch rollouts from a shard, by handle and place in the group.

    Raises:
        KeyError: A slot holds another group by now.
    """
    reply: list[bytes] = await shard.get.call_one(wanted)
    return [pickle.loads(rollout) for rollout in reply]


class StorageShard(Actor):
    """Pickled rollouts of the groups with a signal: tokens, log-probabilities, masks and versions."""

    def __init__(self, buffer: Any) -> None:
        """Start empty; `buffer` is the `ReplayBuffer` actor."""
        self._buffer = buffer
        self._groups: dict[int, tuple[GroupHandle, tuple[bytes, ...]]] = {}

    @concurrent_endpoint
    async def put(self, groups: Mapping[GroupHandle, tuple[bytes, ...]], records: Sequence[GroupRecord] = ()) -> None:
        """Store the rollouts of groups, then commit their records. A record never arrives before its payload.

        The new rollouts overwrite the previous contents of their slots.
        """
        for handle, rollouts in groups.items():
            self._groups[handle.slot] = (handle, rollouts)
        if records:
            await self._buffer.commit.call_one(records)

    @concurrent_endpoint
    async def get(self, wanted: Sequence[tuple[GroupHandle, int]]) -> list[bytes]:
        """Return rollouts by handle and place in the group.

        Raises:
            KeyError: A slot holds another group by now.
        """
        found = []
        for handle, rollout in wanted:
            stored, rollouts = self._groups[handle.slot]
            if stored != handle:
                raise KeyError(handle)
            found.append(rollouts[rollout])
        return found
