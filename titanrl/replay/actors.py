"""The replay buffer and its storage shards, as actors."""

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanrl.base.files import write_bytes
from titanrl.base.gathering import Gathering
from titanrl.carriers.tables import DoubleArray, Table
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.data.mixture import Mixture
from titanrl.processes.actors import Actor, StoppedError, concurrent_endpoint
from titanrl.replay.batch import Batch, Replayed, Reservation
from titanrl.replay.buffer import GroupBuffer
from titanrl.replay.memory import ReplayMemory, ReplaySettings
from titanrl.replay.payloads import Parts, ShardUsage, shared_payloads
from titanrl.replay.saved import BufferState, Freshness, Move, Restored, Saved, TrainedBatch


class ReplayBuffer(Actor):
    """Actor with the slots and records of groups. Tokens never pass through it."""

    def __init__(
        self,
        num_slots: int,
        window: int,
        dynamic_sampling: bool,
        first_index: int,
        replay: ReplaySettings | None,
        prompts: Callable[[], Mixture],
    ) -> None:
        """Create an empty buffer.

        Args:
            num_slots: See `GroupBuffer`.
            window: See `GroupBuffer`.
            dynamic_sampling: See `GroupBuffer`.
            first_index: See `GroupBuffer`.
            replay: Settings of the replay memory; None disables replay.
            prompts: Factory of the mixture that chooses prompts; called in this process.
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
            The reservations, and the groups whose payloads the shard may delete.
        """
        return await self._buffer.reserve(limit, shard, worker), self._buffer.take_dropped(shard)

    @concurrent_endpoint
    async def reserve_round(self, shard: int, num_shards: int, worker: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Wait until the workers of all shards have called and a slot is free, then reserve all free slots.

        Returns:
            The reservations for all shards in prompt order, and the groups whose payloads the caller's shard may delete.

        Raises:
            StoppedError: A worker or generator died; call again.
        """
        await self._may_begin.wait()
        if self._buffer.has_died(shard, worker):
            return [], []
        return await self._rounds.add({shard: None}, num_shards), self._buffer.take_dropped(shard)

    @concurrent_endpoint
    async def hold_rounds(self) -> None:
        """Prevent new rounds until `rewind`."""
        self._may_begin.clear()
        self._rounds.reset(StoppedError("a worker or generator died"))

    @concurrent_endpoint
    async def rewind(self, handles: Table | None) -> list[int]:
        """Schedule resampling of everything after the last batch, in new rounds; see `GroupBuffer.rewind`."""
        again = await self._buffer.rewind(handles)
        self._may_begin.set()
        return again

    @concurrent_endpoint
    async def lose_shard(self, shard: int, worker: int) -> list[int]:
        """Schedule resampling of a shard's groups; see `GroupBuffer.lose_shard`."""
        return await self._buffer.lose_shard(shard, worker)

    @concurrent_endpoint
    async def return_batch(self, handles: Table) -> list[int]:
        """Accept the return of a batch that cannot be trained on; see `GroupBuffer.return_batch`."""
        return await self._buffer.return_batch(handles)

    @concurrent_endpoint
    async def commit(self, records: Sequence[GroupRecord], usage: ShardUsage) -> None:
        """Add finished groups whose payloads are already stored in one shard."""
        await self._buffer.commit(records, usage)

    @concurrent_endpoint
    async def fail(self, error: str) -> None:
        """Make the next `take_batch` raise the error of a failed worker."""
        await self._buffer.fail(error)

    @concurrent_endpoint
    async def wait_until_failed(self) -> None:
        """Wait until a worker has failed, then raise its error."""
        await self._buffer.wait_until_failed()

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
        """Free the slots of batches, or move their groups to the replay memory; see `GroupBuffer.release`."""
        await self._buffer.release(handles, priorities)

    @concurrent_endpoint
    async def discard(self, handles: Table, before_version: int) -> None:
        """Free the slots of a batch, and of groups with a token older than `before_version`."""
        await self._buffer.discard(handles, before_version)

    @concurrent_endpoint
    async def save(self, path: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Write the state to a file and return the subset that the controller needs; see `GroupBuffer.state`."""
        state = self._buffer.state(trained, from_index)
        prompts = self._buffer.prompts_state(trained, from_index)
        # Pickle before the first await, because later calls change the objects that the state refers to.
        files = {path: pickle.dumps(state, pickle.HIGHEST_PROTOCOL)}
        if prompts is not None:
            files[path.with_name(PROMPTS_FILE)] = pickle.dumps(prompts, pickle.HIGHEST_PROTOCOL)
        saved = Saved(next_index=state.next_index, in_flight=state.in_flight, num_held=len(state.held), payloads=state.payloads)
        for file, content in files.items():
            await asyncio.to_thread(write_bytes, file, content)
        return saved

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return immediately, which shows that the event loop is running."""

    @concurrent_endpoint
    async def load(self, path: Path, freshness: Freshness, num_shards: int) -> Restored:
        """Restore a saved state; see `GroupBuffer.restore`."""
        state = pickle.loads(await asyncio.to_thread(path.read_bytes))
        assert isinstance(state, BufferState), f"{path} is not the state of a buffer"
        file = path.with_name(PROMPTS_FILE)
        prompts = pickle.loads(await asyncio.to_thread(file.read_bytes)) if file.exists() else None
        if self._buffer.mixture.load_state_dict(prompts):
            return self._buffer.restore(state, freshness, num_shards)
        restored = self._buffer.restore(state.without_groups(), freshness, num_shards)
        return replace(restored, too_old=tuple(group.record.index for group in state.ready))


class StorageShard(Actor):
    """Access to the pickled segments of one rollout worker's groups with a signal.

    It runs in the worker's process, and the worker writes to the same `Payloads`. Segments are therefore copied only once, on
    their way to the trainer.
    """

    def __init__(self, number: int, memory_bytes: int, folder: Path) -> None:
        """Open the storage of this process.

        Args:
            number: Number of the shard.
            memory_bytes: Memory limit in bytes. Groups beyond it are moved to files, oldest first.
            folder: Folder for these files.
        """
        self._number = number
        self._payloads = shared_payloads(number, memory_bytes, folder)
        self._saving: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def get(self, wanted: Sequence[tuple[GroupHandle, int]]) -> list[bytes]:
        """Return segments by handle and index among the group's segments.

        Raises:
            KeyError: A slot now holds another group, or none.
        """
        return [bytes(self._payloads.get(handle)[segment]) for handle, segment in wanted]

    @concurrent_endpoint
    async def save(self, folder: Path, handles: Sequence[GroupHandle]) -> None:
        """Start a thread that writes this shard's groups among `handles` to its file. Later calls may delete the groups."""
        held = {handle: self._payloads.get(handle) for handle in handles if handle.shard == self._number}
        self._saving = asyncio.create_task(asyncio.to_thread(_write_groups, shard_file(folder, self._number), held))

    @concurrent_endpoint
    async def finish_save(self) -> None:
        """Wait until the file is on disk."""
        if self._saving is not None:
            await self._saving

    @concurrent_endpoint
    async def load(self, folder: Path, moves: Sequence[Move]) -> None:
        """Read the groups that now belong to this shard. `moves` maps saved handles to current ones."""
        missing = {saved: current for saved, current in moves if current.shard == self._number}
        for shard in {saved.shard for saved in missing}:
            content = pickle.loads(await asyncio.to_thread(shard_file(folder, shard).read_bytes))
            for saved in missing.keys() & content.keys():
                self._payloads.put(missing.pop(saved), content[saved])
        assert not missing, f"{folder} does not have the tokens of {list(missing)}"


def _write_groups(path: Path, groups: Mapping[GroupHandle, Parts]) -> None:
    held = {handle: tuple(bytes(part) for part in parts) for handle, parts in groups.items()}
    write_bytes(path, pickle.dumps(held, pickle.HIGHEST_PROTOCOL))


RECORDS_FILE = "records.pkl"
"""File with the buffer's state in a checkpoint."""
PROMPTS_FILE = "prompts.pkl"
"""File next to it with the state of prompt selection; only with a mixture or a curriculum."""


def shard_file(folder: Path, shard: int) -> Path:
    """Return the file of a storage shard in a checkpoint."""
    return folder / f"groups_{shard}.pkl"
