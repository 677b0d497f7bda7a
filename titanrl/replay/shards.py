"""Storage shards: the payloads of groups in the rollout workers, and the way of the trainer's processes to them.

torchmonarch reports the death of a process to callers in other processes only after many seconds. It also starts no endpoint of
an actor while a plain endpoint of that actor runs. A trainer that waits for a shard is therefore notified by another actor in
its process, `ShardNews`. Its fetch then fails immediately.
"""

import asyncio
import mmap
import pickle
import resource
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from titanrl.base.errors import TokensLostError
from titanrl.base.files import writing_file
from titanrl.base.pickling import read_saved
from titanrl.carriers.types import GroupHandle, Segment
from titanrl.processes.actors import Actor, ActorError, SupervisionError, ask_actor, cause_of, concurrent_endpoint
from titanrl.replay.groups import Move, ShardUsage

Parts = tuple[bytes | memoryview, ...]


class Payloads:
    """Pickled segments by handle. When they exceed the memory limit, the oldest groups are moved to files.

    Any thread may call the methods; only `put` waits for the disk, and only if there is no room. The files are unnamed. The
    operating system deletes a file when its group is dropped, or when the process exits or crashes.
    """

    def __init__(self, memory_bytes: int, folder: Path) -> None:
        """Create an empty storage. `folder` must exist once a file is needed."""
        self._limit, self._folder = memory_bytes, folder
        self._lock = threading.Lock()
        self._spilling = threading.Lock()
        self._groups: dict[int, tuple[GroupHandle, Parts]] = {}  # by location
        self._in_memory: dict[int, int] = {}  # bytes by location, oldest first
        self._in_files: dict[int, int] = {}  # bytes by location
        self._num_memory_bytes = 0
        # A mapping keeps the descriptor of its file, so this process needs as many as the system lets it have.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    @property
    def usage(self) -> ShardUsage:
        """Size of all stored groups."""
        with self._lock:
            spilled = sum(self._in_files.values())
            return ShardUsage(num_bytes=self._num_memory_bytes + spilled, num_spilled_bytes=spilled)

    def has_room(self, parts: Sequence[bytes]) -> bool:
        """Return whether a group with these parts fits into memory beside the others."""
        with self._lock:
            return self._num_memory_bytes + sum(map(len, parts)) <= self._limit

    def put(self, handle: GroupHandle, parts: Sequence[bytes]) -> None:
        """Store a group in place of the previous one in its location.

        Raise `OSError` if a group beyond the memory limit cannot be written to a file; this one is then not stored.
        """
        size = sum(map(len, parts))
        with self._lock:
            self._forget(handle.location)
            self._groups[handle.location] = (handle, tuple(parts))
            self._in_memory[handle.location] = size
            self._num_memory_bytes += size
        try:
            self._spill()
        except OSError:
            self.drop([handle])
            raise

    def get(self, handle: GroupHandle) -> Parts:
        """Return the parts of a group. Raise `KeyError` if the location now holds another group, or none."""
        with self._lock:
            stored, parts = self._groups[handle.location]
        if stored != handle:
            raise KeyError(handle)
        return parts

    def drop(self, handles: Iterable[GroupHandle]) -> None:
        """Delete groups. Ignore handles whose location now holds another group, or none."""
        with self._lock:
            for handle in handles:
                if handle.location in self._groups and self._groups[handle.location][0] == handle:
                    self._forget(handle.location)

    def _forget(self, location: int) -> None:
        self._groups.pop(location, None)
        self._num_memory_bytes -= self._in_memory.pop(location, 0)
        self._in_files.pop(location, None)

    def _spill(self) -> None:
        """Move groups to files, oldest first, until the others are within the memory limit. Readers do not wait meanwhile."""
        with self._spilling:
            while True:
                with self._lock:
                    if self._num_memory_bytes <= self._limit:
                        return
                    location, size = next(iter(self._in_memory.items()))
                    stored = self._groups[location]
                handle, parts = stored
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    file.writelines(parts)
                    file.flush()
                    view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
                ends = list(accumulate(map(len, parts)))
                spilled = handle, tuple(view[start:end] for start, end in zip([0, *ends], ends, strict=False))
                with self._lock:
                    if self._groups.get(location) is stored:  # else it was dropped or replaced
                        self._forget(location)
                        self._groups[location], self._in_files[location] = spilled, size


_shared: dict[int, Payloads] = {}


def shared_payloads(number: int, memory_bytes: int, folder: Path) -> Payloads:
    """Return the storage of a shard in this process. The first call creates it.

    A rollout worker writes to it, and the `StorageShard` actor in the same process reads from it, on another event loop.
    """
    return _shared.setdefault(number, Payloads(memory_bytes, folder))


def write_groups(path: Path, groups: Mapping[GroupHandle, Parts]) -> None:
    """Write a file of a checkpoint. Only one group at a time is in memory twice."""
    with writing_file(path) as file:
        for handle, parts in groups.items():
            pickle.dump((handle, tuple(map(bytes, parts))), file, pickle.HIGHEST_PROTOCOL)


def read_groups(path: Path) -> Iterator[tuple[GroupHandle, tuple[bytes, ...]]]:
    """Yield the groups in a file of a checkpoint. Trainer ranks unpickle their segments."""
    with path.open("rb") as file:
        while file.peek(1):
            content = read_saved(file)
            yield from content.items() if isinstance(content, dict) else [content]  # earlier versions wrote one dictionary


def shard_file(folder: Path, shard: int) -> Path:
    """Return the file of a storage shard in a checkpoint."""
    return folder / f"groups_{shard}.pkl"


class StorageShard(Actor):
    """Access to the pickled segments of one rollout worker's groups with a signal.

    It runs in the worker's process, and the worker writes to the same `Payloads`. Segments are therefore copied only once, on
    their way to the trainer.
    """

    def __init__(self, number: int, memory_bytes: int, folder: Path) -> None:
        """Open the storage of this process. Groups beyond the memory limit are moved to files in `folder`, oldest first."""
        self._number = number
        self._payloads = shared_payloads(number, memory_bytes, folder)
        self._saving: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def get(self, wanted: Sequence[tuple[GroupHandle, int]]) -> list[bytes]:
        """Return segments by handle and index in the group. Raise `KeyError` as `Payloads.get` does."""
        return [bytes(self._payloads.get(handle)[segment]) for handle, segment in wanted]

    @concurrent_endpoint
    async def save(self, folder: Path, handles: Sequence[GroupHandle]) -> None:
        """Start a thread that writes this shard's groups among `handles` to its file. Later calls may delete the groups."""
        held = {handle: self._payloads.get(handle) for handle in handles if handle.shard == self._number}
        earlier = self._saving

        async def write() -> None:
            if earlier is not None:  # a checkpoint that failed may still be written to the same file
                await asyncio.wait({earlier})
            await asyncio.to_thread(write_groups, shard_file(folder, self._number), held)

        self._saving = asyncio.create_task(write())

    @concurrent_endpoint
    async def finish_save(self) -> None:
        """Wait until the file is on disk."""
        if self._saving is not None:
            await self._saving

    @concurrent_endpoint
    async def load(self, folder: Path, moves: Sequence[Move]) -> None:
        """Read the groups that now belong to this shard. `moves` maps saved handles to current ones."""
        missing = {saved: current for saved, current in moves if current.shard == self._number}

        def read() -> None:
            for shard in {saved.shard for saved in missing}:
                for saved, parts in read_groups(shard_file(folder, shard)):
                    if saved in missing:
                        self._payloads.put(missing.pop(saved), parts)

        await asyncio.to_thread(read)
        assert not missing, f"{folder} does not have the tokens of {list(missing)}"


class ShardDirectory:
    """The `StorageShard` actors by number, shared by all actors of a process, which run on different event loops."""

    def __init__(self) -> None:
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
        """Fetch segments by handle and index in the group; `wanted` has at least one. `use` has been called for `number`.

        Raise `TokensLostError` if the shard no longer has the groups, usually because its process died.
        """
        lost = TokensLostError(f"the storage shard that held {wanted[0][0]} died, or no longer has it")
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
            return [read_saved(segment) for segment in reply.result()]
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
