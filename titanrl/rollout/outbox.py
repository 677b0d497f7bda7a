"""From a rollout worker to the storage shards and through them to the buffer, many groups a message."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titanrl.replay.actors import Shards, packed
from titanrl.types import GroupHandle, GroupRecord, Rollout

MAX_HELD = 8
"""Finished groups that wait for an older one; more go without it, so that no message grows with the batch."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What goes to one shard."""

    payload: dict[GroupHandle, tuple[bytes, ...]] = field(default_factory=dict)
    records: list[GroupRecord] = field(default_factory=list)


class Outbox:
    """Delivers finished groups to the shards their handles name, which pass the records on.

    One delivery is under way at a time. Groups that finish meanwhile, or in the same tick of the event loop, go together: a
    message costs about as much as many groups in it. Where batches keep the order of prompts, a group also waits for older
    ones of this worker, because no batch can have it before them.
    """

    def __init__(self, shards: Any, *, in_order: bool) -> None:
        """Take the mesh of the shards, and whether a group is of no use before all older ones have finished."""
        self._shards, self._in_order = Shards(shards), in_order
        self._unfinished: dict[int, None] = {}  # by prompt index, in order of admission
        self._pending: list[tuple[GroupRecord, tuple[Rollout, ...]]] = []
        self._due = asyncio.Event()
        self._delivering = asyncio.Lock()
        self._next: asyncio.Task[None]

    def begin(self, index: int) -> None:
        """Take note of a group under way, by its prompt's index; they begin in the order of prompts."""
        self._unfinished[index] = None

    async def deliver(self, record: GroupRecord, rollouts: tuple[Rollout, ...]) -> None:
        """Hand over a finished group; returns when the buffer has its record."""
        self._unfinished.pop(record.index, None)
        if not self._pending:
            self._next = asyncio.create_task(self._deliver_pending(), name="deliver groups")
        self._pending.append((record, rollouts))
        if self._is_due():
            self._due.set()
        await asyncio.shield(self._next)

    async def store(self, handle: GroupHandle, rollouts: tuple[Rollout, ...]) -> None:
        """Keep a payload of which the buffer is told nothing."""
        await self._shards[handle.shard].put.call_one({handle: packed(rollouts)})

    async def _deliver_pending(self) -> None:
        async with self._delivering:
            await self._due.wait()
            self._due.clear()
            groups, self._pending = self._pending, []
            await self._send(groups)

    def _is_due(self) -> bool:
        """Whether a batch may have use for one of the finished groups, or there are many."""
        oldest_unfinished = next(iter(self._unfinished), math.inf)
        oldest = min(record.index for record, _ in self._pending)
        return not self._in_order or oldest < oldest_unfinished or len(self._pending) >= MAX_HELD

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
