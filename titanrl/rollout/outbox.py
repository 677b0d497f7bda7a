"""From a rollout worker to the storage shards and the buffer, many groups a message."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from titanrl.replay.actors import Shards, packed
from titanrl.types import GroupRecord, Handle, Rollout


class Outbox:
    """Delivers finished groups: first the payload to its shard, then the record to the buffer, so that no record is without
    its payload.

    One delivery is under way at a time. Groups that finish meanwhile, or in the same tick of the event loop, go together: a
    message costs about as much as many groups in it.
    """

    def __init__(self, buffer: Any, shards: Any) -> None:
        """Take the buffer's actor and the mesh of the shards."""
        self._buffer, self._shards = buffer, Shards(shards)
        self._pending: list[tuple[GroupRecord, tuple[Rollout, ...]]] = []
        self._delivering = asyncio.Lock()
        self._next: asyncio.Task[None]

    async def deliver(self, record: GroupRecord, rollouts: tuple[Rollout, ...]) -> None:
        """Hand over a finished group; returns when the buffer has it."""
        if not self._pending:
            self._next = asyncio.create_task(self._deliver_pending(), name="deliver groups")
        self._pending.append((record, rollouts))
        await asyncio.shield(self._next)

    async def put(self, groups: Mapping[Handle, tuple[Rollout, ...]]) -> None:
        """Store payloads, each in the shard its handle names."""
        by_shard: dict[int, dict[Handle, tuple[bytes, ...]]] = defaultdict(dict)
        for handle, rollouts in groups.items():
            by_shard[handle.shard][handle] = packed(rollouts)
        await asyncio.gather(*(_put(self._shards[shard], held) for shard, held in by_shard.items()))

    async def _deliver_pending(self) -> None:
        async with self._delivering:
            groups, self._pending = self._pending, []
            await self._send(groups)

    async def _send(self, groups: list[tuple[GroupRecord, tuple[Rollout, ...]]]) -> None:
        await self.put({record.handle: rollouts for record, rollouts in groups if record.has_payload})
        await self._buffer.commit.call_one([record for record, _ in groups])


async def _put(shard: Any, groups: Mapping[Handle, tuple[bytes, ...]]) -> None:
    await shard.put.call_one(groups)
