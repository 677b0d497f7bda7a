"""The replay buffer and its storage shards, as actors."""

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanrl.actors import Actor, StoppedError, concurrent_endpoint
from titanrl.data.mixture import Mixture
from titanrl.files import write_bytes
from titanrl.gathering import Gathering
from titanrl.replay.batch import Batch, Replayed, Reservation
from titanrl.replay.buffer import GroupBuffer
from titanrl.replay.memory import ReplayMemory, ReplaySettings
from titanrl.replay.payloads import Parts, Payloads, ShardUsage
from titanrl.replay.saved import BufferState, Freshness, Move, Restored, Saved, TrainedBatch
from titanrl.tables import DoubleArray, Table
from titanrl.types import GroupHandle, GroupRecord, Rollout


class ReplayBuffer(Actor):
    """Slots and records of groups. Tokens never pass through this actor."""

    def __init__(
        self,
        num_slots: int,
        window: int,
        dynamic_sampling: bool,
        first_index: int,
        replay: ReplaySettings | None,
        prompts: Callable[[], Mixture],
    ) -> None:
        """Start empty; see `GroupBuffer`.

        Args:
            num_slots: see there.
            window: see there.
            dynamic_sampling: see there.
            first_index: see there.
            replay: settings of the memory; None makes none.
            prompts: makes the choice of prompts, in this process.
        """
        self._buffer = GroupBuffer(
            num_slots=num_slots,
            window=window,
            dynamic_sampling=dynamic_sampling,
            first_index=first_index,
            memory=None if replay is None else ReplayMemory(replay),
            mixture=prompts(),
        )
        self._rounds: Gathering[None, list[Reservation]] = Gathering(lambda workers: self._buffer.reserve_round(len(workers)))
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    @concurrent_endpoint
    async def reserve(self, limit: int, shard: int, worker: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Wait until a slot is free, then reserve up to `limit` slots for payloads in a shard.

        Args:
            limit: Largest number of slots.
            shard: Number of the shard.
            worker: Number of workers that the shard had before the caller.

        Returns:
            The reservations, and the groups that the shard may delete.
        """
        return await self._buffer.reserve(limit, shard, worker), self._buffer.take_dropped(shard)

    @concurrent_endpoint
    async def reserve_round(self, shard: int, num_shards: int, worker: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Wait until the worker of every shard calls and a slot is free, then reserve all free slots.

        Returns:
            The reservations for all shards, in prompt order, and the groups that the caller's shard may delete.

        Raises:
            StoppedError: A worker or generator has ended; the caller calls again.
        """
        await self._may_begin.wait()
        if self._buffer.has_ended(shard, worker):
            return [], []
        return await self._rounds.add({shard: None}, num_shards), self._buffer.take_dropped(shard)

    @concurrent_endpoint
    async def hold_rounds(self) -> None:
        """Let no round begin until `rewind`."""
        self._may_begin.clear()
        self._rounds.reset(StoppedError("a worker or generator has ended"))

    @concurrent_endpoint
    async def rewind(self, handles: Table | None) -> list[int]:
        """Sample everything after the last batch again, in new rounds; see `GroupBuffer.rewind`."""
        again = await self._buffer.rewind(handles)
        self._may_begin.set()
        return again

    @concurrent_endpoint
    async def lose_shard(self, shard: int, worker: int) -> list[int]:
        """Sample again what a shard held; see `GroupBuffer.lose_shard`."""
        return await self._buffer.lose_shard(shard, worker)

    @concurrent_endpoint
    async def give_back(self, handles: Table) -> list[int]:
        """Take back a batch that cannot be trained on; see `GroupBuffer.give_back`."""
        return await self._buffer.give_back(handles)

    @concurrent_endpoint
    async def commit(self, records: Sequence[GroupRecord], usage: ShardUsage) -> None:
        """Add finished groups of one shard, whose payloads are already in it."""
        await self._buffer.commit(records, usage)

    @concurrent_endpoint
    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise, because a worker failed."""
        await self._buffer.fail(error)

    @concurrent_endpoint
    async def take_batch(self, num_groups: int) -> Batch:
        """Wait for the next batch and take it; see `GroupBuffer.take_batch`."""
        return await self._buffer.take_batch(num_groups)

    @concurrent_endpoint
    async def replay(self, version: int, beta: float) -> Replayed:
        """Draw groups of earlier batches; see `ReplayMemory.draw`."""
        return self._buffer.replay(version, beta)

    @concurrent_endpoint
    async def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Explain why no batch was complete in time."""
        return self._buffer.why_starved(num_groups, waited_s)

    @concurrent_endpoint
    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group."""
        await self._buffer.wait_until_full()

    @concurrent_endpoint
    async def release(self, handles: Table, priorities: DoubleArray | None) -> None:
        """Free the slots of batches, or move their groups to the memory; see `GroupBuffer.release`."""
        await self._buffer.release(handles, priorities)

    @concurrent_endpoint
    async def discard(self, handles: Table, before_version: int) -> None:
        """Free the slots of a batch, and those of groups with a token older than `before_version`."""
        await self._buffer.discard(handles, before_version)

    @concurrent_endpoint
    async def save(self, path: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Write the state to a file; return the controller's part of it. See `GroupBuffer.state`."""
        state = self._buffer.state(trained, from_index)
        prompts = self._buffer.prompts_state(trained, from_index)
        # At once, because later calls change what the state refers to.
        files = {path: pickle.dumps(state, pickle.HIGHEST_PROTOCOL)}
        if prompts is not None:
            files[path.with_name(PROMPTS_FILE)] = pickle.dumps(prompts, pickle.HIGHEST_PROTOCOL)
        saved = Saved(next_index=state.next_index, in_flight=state.in_flight, num_held=len(state.held), payloads=state.payloads)
        for file, content in files.items():
            await asyncio.to_thread(write_bytes, file, content)
        return saved

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return, which shows that the event loop runs."""

    @concurrent_endpoint
    async def load(self, path: Path, freshness: Freshness, num_shards: int) -> Restored:
        """Continue with a state; see `GroupBuffer.restore`."""
        state = pickle.loads(await asyncio.to_thread(path.read_bytes))
        assert isinstance(state, BufferState), f"{path} is not the state of a buffer"
        file = path.with_name(PROMPTS_FILE)
        prompts = pickle.loads(await asyncio.to_thread(file.read_bytes)) if file.exists() else None
        if self._buffer.mixture.load_state_dict(prompts):
            return self._buffer.restore(state, freshness, num_shards)
        restored = self._buffer.restore(state.without_groups(), freshness, num_shards)
        return replace(restored, too_old=tuple(group.record.index for group in state.ready))


def packed(rollouts: Iterable[Rollout]) -> tuple[bytes, ...]:
    """Pickle each segment. Only the worker that made it and the trainer rank that uses it pay for the conversion."""
    return tuple(pickle.dumps(segment, pickle.HIGHEST_PROTOCOL) for rollout in rollouts for segment in rollout.segments)


class StorageShard(Actor):
    """Pickled segments of the groups with a signal that one rollout worker made. It lives in the worker's process."""

    def __init__(self, number: int, buffer: Any, memory_bytes: int, folder: Path) -> None:
        """Start empty.

        Args:
            number: Number of the shard.
            buffer: The `ReplayBuffer` actor.
            memory_bytes: Bytes to hold in memory; further groups are moved to files.
            folder: Folder for these files.
        """
        self._number, self._buffer = number, buffer
        self._payloads = Payloads(memory_bytes, folder)
        self._saving: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def put(
        self,
        groups: Mapping[GroupHandle, tuple[bytes, ...]],
        records: Sequence[GroupRecord] = (),
        dropped: Sequence[GroupHandle] = (),
    ) -> None:
        """Store the segments of groups, then commit their records. A record never arrives before its payload.

        The new segments overwrite the previous contents of their slots. Those of `dropped` groups are deleted.
        """
        self._payloads.drop(dropped)
        for handle, segments in groups.items():
            self._payloads.put(handle, segments)
        if records:
            await self._buffer.commit.call_one(records, self._payloads.usage)

    @concurrent_endpoint
    async def get(self, wanted: Sequence[tuple[GroupHandle, int]]) -> list[bytes]:
        """Return segments by handle and index among the group's segments.

        Raises:
            KeyError: A slot holds another group by now.
        """
        return [bytes(self._payloads.get(handle)[segment]) for handle, segment in wanted]

    @concurrent_endpoint
    async def save(self, folder: Path, handles: Sequence[GroupHandle]) -> None:
        """Start to write this shard's groups among `handles` to a file of its own, in a thread. Later calls may delete them."""
        held = {handle: self._payloads.get(handle) for handle in handles if handle.shard == self._number}
        self._saving = asyncio.create_task(asyncio.to_thread(_write_groups, shard_file(folder, self._number), held))

    @concurrent_endpoint
    async def finish_save(self) -> None:
        """Wait until the file is on disk."""
        if self._saving is not None:
            await self._saving

    @concurrent_endpoint
    async def load(self, folder: Path, moves: Sequence[Move]) -> None:
        """Read the groups that belong to this shard now, given as their handles when they were written, and now."""
        own = {before: now for before, now in moves if now.shard == self._number}
        for shard in {before.shard for before in own}:
            content = pickle.loads(await asyncio.to_thread(shard_file(folder, shard).read_bytes))
            for before in own.keys() & content.keys():
                self._payloads.put(own.pop(before), content[before])
        assert not own, f"{folder} does not have the tokens of {list(own)}"


def _write_groups(path: Path, groups: Mapping[GroupHandle, Parts]) -> None:
    held = {handle: tuple(bytes(part) for part in parts) for handle, parts in groups.items()}
    write_bytes(path, pickle.dumps(held, pickle.HIGHEST_PROTOCOL))


RECORDS_FILE = "records.pkl"
"""File of the buffer's state in a checkpoint."""
PROMPTS_FILE = "prompts.pkl"
"""File beside it with the state of the choice of prompts, with a mixture or a curriculum."""


def shard_file(folder: Path, shard: int) -> Path:
    """Return the file of a storage shard in a checkpoint."""
    return folder / f"groups_{shard}.pkl"
