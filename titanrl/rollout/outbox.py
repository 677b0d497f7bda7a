"""Stores the tokens of finished groups in the worker's process, and commits their records to the buffer in batches."""

import asyncio
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from titanrl.carriers.types import Group, GroupRecord, Rollout
from titanrl.processes.actors import ask_actor
from titanrl.replay.shards import Payloads

MAX_HELD = 8
"""Number of queued groups at which they are sent without waiting for an older one. This bounds the size of a message."""


_Finished = tuple[GroupRecord, tuple[Rollout, ...], Group | None]
Dump = Callable[[Sequence[tuple[Group, str]]], object]


def status_of(record: GroupRecord) -> str:
    """Return the status of a group for a dump: `kept`, or the reason why it is not trained on."""
    if not record.rewards:
        return "no reward"
    return record.rejection or ("kept" if record.has_payload else "no signal")


class Outbox:
    """Queue of finished groups.

    One delivery runs at a time. Groups that finish during a delivery, or in the same tick of the event loop, share the next
    message, because a message has a high fixed cost. If batches keep the order of prompts, a group also waits for older groups
    of this worker, because no batch can contain it before them.
    """

    def __init__(self, payloads: Payloads, buffer: Any, *, in_order: bool, dump: Dump | None = None) -> None:
        """Start with an empty queue.

        Args:
            payloads: Storage of the tokens, from which the worker's `StorageShard` reads.
            buffer: The `ReplayBuffer` actor.
            in_order: True if batches keep the order of prompts.
            dump: Function that writes groups and their statuses to disk before they are delivered.
        """
        self._payloads, self._buffer, self._in_order, self._dump = payloads, buffer, in_order, dump
        self._unfinished: dict[int, None] = {}  # prompt indices, oldest first
        self._pending: list[_Finished] = []
        self._due = asyncio.Event()
        self._delivering = asyncio.Lock()
        self._next: asyncio.Task[None]

    def begin(self, index: int) -> None:
        """Register a group by its prompt index, before it is generated. Call this in the order of prompts."""
        self._unfinished[index] = None

    def reset(self) -> None:
        """Discard all unfinished and pending groups, because their round was abandoned."""
        self._unfinished.clear()
        if self._pending:
            self._next.cancel()
            self._pending = []
        self._due.clear()

    async def deliver(self, record: GroupRecord, rollouts: tuple[Rollout, ...], whole: Group | None = None) -> None:
        """Queue a finished group and wait until the buffer has its record.

        Args:
            record: Summary of the group.
            rollouts: Rollouts to train on.
            whole: The group as sampled, for a dump.
        """
        self._unfinished.pop(record.index, None)
        if not self._pending:
            self._next = asyncio.create_task(self._deliver_pending(), name="deliver groups")
        self._pending.append((record, rollouts, whole))
        if self._is_due():
            self._due.set()
        await asyncio.shield(self._next)

    async def _deliver_pending(self) -> None:
        async with self._delivering:
            await self._due.wait()
            self._due.clear()
            groups, self._pending = self._pending, []
            await self._send(groups)

    def _is_due(self) -> bool:
        """Return True if a batch can use one of the queued groups, or if many groups are queued."""
        oldest_unfinished = next(iter(self._unfinished), math.inf)
        oldest = min(record.index for record, _, _ in self._pending)
        return not self._in_order or oldest < oldest_unfinished or len(self._pending) >= MAX_HELD

    async def _send(self, groups: Sequence[_Finished]) -> None:
        if self._dump is not None:
            whole = [(group, status_of(record)) for record, _, group in groups if group is not None]
            await asyncio.to_thread(self._dump, whole)
        # Store the tokens first: the trainer may fetch them as soon as the buffer has the record.
        for record, rollouts, _ in groups:
            if record.has_payload:
                self._payloads.put(record.handle, packed(rollouts))
        await ask_actor(self._buffer.commit, [record for record, _, _ in groups], self._payloads.usage)


def packed(rollouts: Iterable[Rollout]) -> tuple[bytes, ...]:
    """Pickle each segment, so that only the worker that creates it and the trainer rank that uses it convert it."""
    return tuple(pickle.dumps(segment, pickle.HIGHEST_PROTOCOL) for rollout in rollouts for segment in rollout.segments)
