"""The actors of a run's replay buffer: the buffer, the storage shards in the workers, and the trainer's news of lost shards.

torchmonarch reports the death of a process to callers in other processes only after many seconds. It also starts no endpoint of
an actor while a plain endpoint of that actor runs. A trainer that waits for a shard is therefore notified by another actor in
its process, `ShardNews`. Its fetch then fails immediately.
"""

import asyncio
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanrl.base.errors import TitanRLError
from titanrl.base.files import write_bytes
from titanrl.base.gathering import Gathering
from titanrl.base.pickling import read_saved
from titanrl.carriers.tables import Table
from titanrl.carriers.types import GroupHandle, Segment
from titanrl.data.mixture import Mixture
from titanrl.processes.actors import Actor, ActorError, StoppedError, SupervisionError, ask_actor, cause_of, concurrent_endpoint
from titanrl.replay.buffer import GroupBuffer
from titanrl.replay.groups import (
    BufferState,
    Freshness,
    Move,
    Replayed,
    Reservation,
    Restored,
    Saved,
    TrainedBatch,
)
from titanrl.replay.memory import ReplayMemory, ReplaySettings
from titanrl.replay.payloads import read_groups, shard_file, shared_payloads

RECORDS_FILE = "records.pkl"
"""File with the buffer's state in a checkpoint."""
PROMPTS_FILE = "prompts.pkl"
"""File next to it with the state of prompt selection; only with a mixture or a curriculum."""


class ReplayBuffer(GroupBuffer, Actor):
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
        """Create an empty buffer. `GroupBuffer` describes the other arguments.

        Args:
            replay: Settings of the replay memory; None disables replay.
            prompts: Factory of the mixture that chooses prompts; called in this process.
        """
        super().__init__(
            num_slots=num_slots,
            dynamic_sampling=dynamic_sampling,
            window=window,
            first_index=first_index,
            memory=None if replay is None else ReplayMemory(replay),
            mixture=prompts(),
        )
        reserve_round = super().reserve_round
        self._rounds: Gathering[None, list[Reservation]] = Gathering(lambda workers: reserve_round(len(workers)))
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    @concurrent_endpoint
    async def reserve(self, limit: int, shard: int, worker: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Reserve slots for payloads in a shard. Also return the groups whose payloads the shard may delete."""
        return await super().reserve(limit, shard, worker), self.take_dropped(shard)

    @concurrent_endpoint
    async def reserve_round(self, shard: int, num_shards: int, worker: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Wait until the workers of all shards have called and a slot is free, then reserve all free slots.

        Returns:
            The reservations for all shards in prompt order, and the groups whose payloads the caller's shard may delete.

        Raises:
            StoppedError: A worker or generator died; call again.
        """
        await self._may_begin.wait()
        if self.has_died(shard, worker):
            return [], []
        return await self._rounds.add({shard: None}, num_shards), self.take_dropped(shard)

    @concurrent_endpoint
    async def hold_rounds(self) -> None:
        """Prevent new rounds until `rewind`."""
        self._may_begin.clear()
        self._rounds.reset(StoppedError("a worker or generator died"))

    @concurrent_endpoint
    async def rewind(self, handles: Table | None) -> list[int]:
        """Schedule resampling of everything after the last batch, in new rounds."""
        again = await super().rewind(handles)
        self._may_begin.set()
        return again

    commit = concurrent_endpoint(GroupBuffer.commit)
    fail = concurrent_endpoint(GroupBuffer.fail)
    wait_until_failed = concurrent_endpoint(GroupBuffer.wait_until_failed)
    take_batch = concurrent_endpoint(GroupBuffer.take_batch)
    wait_until_full = concurrent_endpoint(GroupBuffer.wait_until_full)
    release = concurrent_endpoint(GroupBuffer.release)
    discard = concurrent_endpoint(GroupBuffer.discard)
    lose_shard = concurrent_endpoint(GroupBuffer.lose_shard)
    return_batch = concurrent_endpoint(GroupBuffer.return_batch)

    @concurrent_endpoint
    async def replay(self, version: int, beta: float) -> Replayed:
        """Draw groups of earlier batches."""
        return super().replay(version, beta)

    @concurrent_endpoint
    async def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Explain why no batch was complete in time."""
        return super().why_starved(num_groups, waited_s)

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return immediately, which shows that the event loop is running."""

    @concurrent_endpoint
    async def save(self, path: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Write the state to a file and return the subset that the controller needs; see `GroupBuffer.state`."""
        state = self.state(trained, from_index)
        prompts = self.prompts_state(trained, from_index)
        # Pickle before the first await, because later calls change the objects that the state refers to.
        files = {path: pickle.dumps(state, pickle.HIGHEST_PROTOCOL)}
        if prompts is not None:
            files[path.with_name(PROMPTS_FILE)] = pickle.dumps(prompts, pickle.HIGHEST_PROTOCOL)
        saved = Saved(next_index=state.next_index, in_flight=state.in_flight, num_held=len(state.held), payloads=state.payloads)
        for file, content in files.items():
            await asyncio.to_thread(write_bytes, file, content)
        return saved

    @concurrent_endpoint
    async def load(self, path: Path, freshness: Freshness, num_shards: int) -> Restored:
        """Restore a saved state; see `GroupBuffer.restore`."""
        state, _ = read_saved(await asyncio.to_thread(path.read_bytes))
        assert isinstance(state, BufferState), f"{path} is not the state of a buffer"
        file = path.with_name(PROMPTS_FILE)
        prompts = read_saved(await asyncio.to_thread(file.read_bytes))[0] if file.exists() else None
        if self.mixture.load_state_dict(prompts):
            return self.restore(state, freshness, num_shards)
        restored = self.restore(state.without_groups(), freshness, num_shards)
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

        def write() -> None:
            groups = {handle: tuple(bytes(part) for part in parts) for handle, parts in held.items()}
            write_bytes(shard_file(folder, self._number), pickle.dumps(groups, pickle.HIGHEST_PROTOCOL))

        self._saving = asyncio.create_task(asyncio.to_thread(write))

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
            content = await asyncio.to_thread(read_groups, shard_file(folder, shard))
            for saved in missing.keys() & content.keys():
                self._payloads.put(missing.pop(saved), content[saved])
        assert not missing, f"{folder} does not have the tokens of {list(missing)}"


class TokensLostError(TitanRLError):
    """Tokens of a batch are lost because the rollout worker that held them died."""


class ShardDirectory:
    """The `StorageShard` actors by number, shared by all actors of a process, which run on different event loops."""

    def __init__(self) -> None:
        """Start without shards."""
        self._lock = threading.Lock()
        self._shards: dict[int, Any] = {}
        self._fetches: dict[asyncio.Future[None], int] = {}

    def use(self, number: int, shard: Any | None) -> None:
        """Replace a shard, with None until its successor exists. Running fetches from the previous one fail."""
        with self._lock:
            self._shards[number] = shard
            lost = [died for died, source in self._fetches.items() if source == number]

        def finish(died: "asyncio.Future[None]") -> None:
            if not died.done():
                died.set_result(None)

        for died in lost:
            died.get_loop().call_soon_threadsafe(finish, died)

    async def fetch(self, number: int, wanted: Sequence[tuple[GroupHandle, int]]) -> list[Segment]:
        """Fetch segments from a shard, by handle and index among the group's segments.

        Raises:
            TokensLostError: The process that held them died.
        """
        lost = TokensLostError(f"the storage shard that held {wanted[0][0]} died")
        died = asyncio.get_running_loop().create_future()
        with self._lock:
            shard = self._shards[number]
            self._fetches[died] = number
        reply: asyncio.Future[list[bytes]] | None = None
        try:
            if shard is None:
                raise lost
            reply = ask_actor(shard.get, wanted)
            await asyncio.wait({reply, died}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise lost
            return [pickle.loads(segment) for segment in reply.result()]
        except (ActorError, SupervisionError) as error:
            if isinstance(cause_of(error), KeyError | SupervisionError):
                raise lost from None
            raise
        finally:
            if reply is not None:
                reply.cancel()
            with self._lock:
                del self._fetches[died]


SHARDS = ShardDirectory()
"""Shards known to this process."""


class ShardNews(Actor):
    """Actor that informs the process of a trainer rank about new and lost storage shards."""

    @concurrent_endpoint
    async def use(self, number: int, shard: Any | None) -> None:
        """Replace a shard in this process; see `ShardDirectory.use`."""
        SHARDS.use(number, shard)
