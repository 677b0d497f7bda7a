"""From a rollout worker to the storage shards and through them to the buffer, many groups a message."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titanrl.replay.actors import Shards, packed
from titanrl.types import GroupRecord, Handle, Rollout


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What goes to one shard."""

    payload: dict[Handle, tuple[bytes, ...]] = field(default_factory=dict)
    records: list[GroupRecord] = field(default_factory=list)


class Outbox:
    """Delivers finished groups to the shards their handles name, which pass the records on.

    One delivery is under way at a time. Groups that finish meanwhile, or in the same tick of the event loop, go together: a
    message costs about as much as many groups in it.
    """

    def __init__(self, shards: Any) -> None:
        """Take the mesh of the shards."""
        self._shards = Shards(shards)
        self._pending: list[tuple[GroupRecord, tuple[Rollout, ...]]] = []
        self._delivering = asyncio.Lock()
        self._next: asyncio.Task[None]

    async def deliver(self, record: GroupRecord, rollouts: tuple[Rollout, ...]) -> None:
        """Hand over a finished group; returns when the buffer has its record."""
        if not self._pending:
            self._next = asyncio.create_task(self._deliver_pending(), name="deliver groups")
        self._pending.append((record, rollouts))
        await asyncio.shield(self._next)

    async def store(self, handle: Handle, rollouts: tuple[Rollout, ...]) -> None:
        """Keep a payload of which the buffer is told nothing."""
        await self._shards[handle.shard].put.call_one({handle: packed(rollouts)})

    async def _deliver_pending(self) -> None:
        async with self._delivering:
            groups, self._pending = self._pending, []
            await self._send(groups)

    async def _send(self, groups: Sequence[tuple[GroupRecord, tuple[Rollout, ...]]]) -> None:
        by_shard: dict[int, _Delivery] = defaultdict(_Delivery)
        for record, rollouts in groups:
            delivery = by_shard[record.handle.shard]
            delivery.records.append(record)
            if record.has_payload:
                delivery.payload[record.handle] = packed(rollouts)
        await asyncio.gather(*(_put(self._shards[shard], delivery) for shard, delivery in by_shard.items()))


async def _put(shard: Any, delivery: _Delivery) -> None:
    await shard.put.call_one(delivery.payload, delivery.records)
