"""The buffer and its storage shards as actors."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titanrl.actors import Actor, concurrent_endpoint
from titanrl.replay.buffer import Batch, GroupBuffer, Reservation
from titanrl.tables import Table
from titanrl.types import GroupHandle, GroupRecord, Rollout


class ReplayBuffer(Actor):
    """Owner of slots and records; it never sees a token."""

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
        """Leave to generate up to `limit` groups, at least one; waits for it."""
        return await self._buffer.reserve(limit)

    @concurrent_endpoint
    async def commit(self, records: Sequence[GroupRecord]) -> None:
        """Take up finished groups, whose payloads are already in their shards."""
        await self._buffer.commit(records)

    @concurrent_endpoint
    async def fail(self, error: str) -> None:
        """A worker cannot go on."""
        await self._buffer.fail(error)

    @concurrent_endpoint
    async def take_batch(self, num_groups: int) -> Batch:
        """The next batch; waits for it."""
        return await self._buffer.take_batch(num_groups)

    @concurrent_endpoint
    async def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Why no batch has come together."""
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
    """Rollouts as a shard keeps them: only who made them and who trains on them pays for taking them apart."""
    return tuple(pickle.dumps(rollout, pickle.HIGHEST_PROTOCOL) for rollout in rollouts)


class Shards:
    """The storage shards by number. Slicing a mesh costs half a millisecond, so each slice is made once."""

    def __init__(self, mesh: Any) -> None:
        """Take the mesh of all shards."""
        self._mesh = mesh
        self._slices: dict[int, Any] = {}

    def __getitem__(self, shard: int) -> Any:
        """The actor of one shard."""
        if shard not in self._slices:
            self._slices[shard] = self._mesh.slice(procs=shard)
        return self._slices[shard]


async def fetch(shard: Any, wanted: Sequence[tuple[GroupHandle, int]]) -> list[Rollout]:
    """Single rollouts of a shard, by handle and place in the group.

    Raises:
        KeyError: a slot has been used again since.
    """
    answer: list[bytes] = await shard.get.call_one(wanted)
    return [pickle.loads(rollout) for rollout in answer]


class StorageShard(Actor):
    """Holder of payloads: tokens, log-probabilities, masks and versions of groups with a signal, packed."""

    def __init__(self, buffer: Any) -> None:
        """Start empty; `buffer` is the actor of the `ReplayBuffer`."""
        self._buffer = buffer
        self._groups: dict[int, tuple[GroupHandle, tuple[bytes, ...]]] = {}

    @concurrent_endpoint
    async def put(self, groups: Mapping[GroupHandle, tuple[bytes, ...]], records: Sequence[GroupRecord] = ()) -> None:
        """Keep the rollouts of groups, then pass on the records of finished ones, so that none is without its payload.

        Whatever the slots of the groups held before is gone.
        """
        for handle, rollouts in groups.items():
            self._groups[handle.slot] = (handle, rollouts)
        if records:
            await self._buffer.commit.call_one(records)

    @concurrent_endpoint
    async def get(self, wanted: Sequence[tuple[GroupHandle, int]]) -> list[bytes]:
        """Single rollouts, by handle and place in the group.

        Raises:
            KeyError: the slot has been used again since.
        """
        return [self._group(handle)[rollout] for handle, rollout in wanted]

    def _group(self, handle: GroupHandle) -> tuple[bytes, ...]:
        held, rollouts = self._groups[handle.slot]
        if held != handle:
            raise KeyError(handle)
        return rollouts
