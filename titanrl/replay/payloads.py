"""Storage of group payloads in memory, with overflow into memory-mapped files, and their files in a checkpoint."""

import mmap
import pickle
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from titanrl.base.pickling import read_saved
from titanrl.carriers.types import GroupHandle
from titanrl.replay.groups import ShardUsage

Parts = tuple[bytes | memoryview, ...]


class Payloads:
    """Pickled segments by handle. When they exceed the memory limit, the oldest groups are moved to files.

    Any thread may call the methods. The files are unnamed. The operating system deletes a file when its group is dropped, or
    when the process exits or crashes.
    """

    def __init__(self, memory_bytes: int, folder: Path) -> None:
        """Create an empty storage. `folder` must exist once a file is needed."""
        self._limit, self._folder = memory_bytes, folder
        self._lock = threading.Lock()
        self._groups: dict[int, tuple[GroupHandle, Parts]] = {}  # by slot
        self._in_memory: dict[int, int] = {}  # bytes by slot, oldest first
        self._in_files: dict[int, int] = {}  # bytes by slot
        self._num_memory_bytes = 0

    @property
    def usage(self) -> ShardUsage:
        """Size of all stored groups."""
        with self._lock:
            spilled = sum(self._in_files.values())
            return ShardUsage(num_bytes=self._num_memory_bytes + spilled, num_spilled_bytes=spilled)

    def put(self, handle: GroupHandle, parts: Sequence[bytes]) -> None:
        """Store a group in place of the previous one in its slot."""
        size = sum(map(len, parts))
        with self._lock:
            self._forget(handle.slot)
            self._groups[handle.slot] = (handle, tuple(parts))
            self._in_memory[handle.slot] = size
            self._num_memory_bytes += size
            while self._num_memory_bytes > self._limit:
                self._spill(next(iter(self._in_memory)))

    def get(self, handle: GroupHandle) -> Parts:
        """Return the parts of a group.

        Raises:
            KeyError: The slot now holds another group, or none.
        """
        with self._lock:
            stored, parts = self._groups[handle.slot]
        if stored != handle:
            raise KeyError(handle)
        return parts

    def drop(self, handles: Iterable[GroupHandle]) -> None:
        """Delete groups. Ignore handles whose slot now holds another group, or none."""
        with self._lock:
            for handle in handles:
                if handle.slot in self._groups and self._groups[handle.slot][0] == handle:
                    self._forget(handle.slot)

    def _forget(self, slot: int) -> None:
        self._groups.pop(slot, None)
        self._num_memory_bytes -= self._in_memory.pop(slot, 0)
        self._in_files.pop(slot, None)

    def _spill(self, slot: int) -> None:
        handle, parts = self._groups[slot]
        size = self._in_memory.pop(slot)
        self._num_memory_bytes -= size
        self._in_files[slot] = size
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.writelines(parts)
            file.flush()
            view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        spilled, start = [], 0
        for part in parts:
            spilled.append(view[start : start + len(part)])
            start += len(part)
        self._groups[slot] = (handle, tuple(spilled))


_shared: dict[int, Payloads] = {}


def shared_payloads(number: int, memory_bytes: int, folder: Path) -> Payloads:
    """Return the storage of a shard in this process. The first call creates it.

    A rollout worker writes to it, and the `StorageShard` actor in the same process reads from it, on another event loop.
    """
    return _shared.setdefault(number, Payloads(memory_bytes, folder))


def read_groups(path: Path) -> dict[GroupHandle, tuple[bytes, ...]]:
    """Return the groups in a file of a checkpoint. Trainer ranks unpickle their segments."""
    groups: dict[GroupHandle, tuple[bytes, ...]]
    groups, is_earlier = read_saved(path.read_bytes())
    if not is_earlier:
        return groups
    return {handle: tuple(pickle.dumps(read_saved(part)[0], -1) for part in parts) for handle, parts in groups.items()}


def shard_file(folder: Path, shard: int) -> Path:
    """Return the file of a storage shard in a checkpoint."""
    return folder / f"groups_{shard}.pkl"
