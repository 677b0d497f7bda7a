"""Byte arenas that processes of one host share: written once by a trainer rank, read by every generator, copied by nobody.

An arena is a memfd: it has no name, so nothing is left in /dev/shm however its owner ends, and a small /dev/shm mount does not
matter. Its size is sealed, so a reader cannot be hit by SIGBUS, and its pages are allocated when it is made: page faults, not
bytes, are what a first write costs. A header carries a sequence number, odd while the arena is being written: a reader that
sees another number than the manifest's, before or after its copy, has not read that version.
"""

import fcntl
import functools
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from titanrl.weights.manifest import ArenaHandle, WeightMismatchError

_HEADER_BYTES = mmap.PAGESIZE
_SEQUENCE = struct.Struct("Q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # linux/fcntl.h; Python names them from 3.13 on


class Arena:
    """Shared bytes that this process writes."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate all pages now.

        Raises:
            OSError: not enough memory.
        """
        size = _HEADER_BYTES + max(num_bytes, 1)  # torch has no view of no bytes, RDMA no buffer
        self._fd = os.memfd_create("titanrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self._fd, 0, size)
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.sequence = 0
        self.handle = ArenaHandle(host_id(), os.getpid(), process_start("self"), self._fd, num_bytes)

    @cached_property
    def header(self) -> torch.Tensor:
        """The bytes of the sequence number."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=_SEQUENCE.size)

    @cached_property
    def storage(self) -> torch.Tensor:
        """All bytes after the header, at least one."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES)

    @cached_property
    def data(self) -> torch.Tensor:
        """The bytes, as a tensor that shares them."""
        return self.storage[: self.handle.num_bytes]

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        """Mark the arena as being written while the body fills it; `sequence` is then the number of what it holds.

        If the body fails the mark stays, until another fills it.
        """
        self._set_sequence(self.sequence + 1 + self.sequence % 2)  # a body that failed has left it odd
        yield self.data
        self._set_sequence(self.sequence + 1)

    def close(self) -> None:
        """Give up this process's hold; readers that have mapped it keep their view."""
        os.close(self._fd)

    def _set_sequence(self, sequence: int) -> None:
        self.sequence = sequence
        _SEQUENCE.pack_into(self._map, 0, sequence)


class MappedArena:
    """Shared bytes that another process of this host writes, read-only."""

    def __init__(self, handle: ArenaHandle) -> None:
        """Map an arena.

        Raises:
            WeightMismatchError: its owner is gone, or on another host.
        """
        if handle.host != host_id():
            raise WeightMismatchError("weights lie in an arena of another host; set weights.transport to auto")
        try:
            if process_start(str(handle.pid)) != handle.started:
                raise FileNotFoundError
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightMismatchError(f"process {handle.pid}, which published the weights, is gone") from None
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
            self.data = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES)[: handle.num_bytes]

    @property
    def sequence(self) -> int:
        """What the header says now."""
        return sequence_in(self._map)


def sequence_in(header: Any) -> int:
    """The sequence number that a header's bytes hold."""
    (sequence,) = _SEQUENCE.unpack_from(header, 0)
    return int(sequence)


@functools.cache
def host_id() -> str:
    """What processes that can open each other's descriptors have in common: the boot and the process namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def process_start(pid: str) -> int:
    """Start of a process in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
