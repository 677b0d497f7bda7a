"""Shared-memory arenas: a trainer rank writes weights once, and every generator on the same host maps them without a copy.

An arena is a memfd. It has no name, so it leaves nothing in /dev/shm even if its owner crashes, and the size of the /dev/shm
mount does not matter. Its size is sealed, so readers never get SIGBUS. Its pages are allocated at creation, because page faults
would dominate the first write. The header holds a sequence number that is odd while the arena is being written. A reader
compares it with the manifest's number before and after copying, to detect that the arena was overwritten.
"""

import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from titanrl.processes.machine import host_id, process_start
from titanrl.weights.records import ArenaHandle, WeightMismatchError

_HEADER_BYTES = mmap.PAGESIZE
_SEQUENCE = struct.Struct("Q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # linux/fcntl.h; Python names them from 3.13 on


class Arena:
    """Shared memory that this process writes."""

    def __init__(self, num_bytes: int) -> None:
        """Create the arena and allocate all its pages.

        Raises:
            OSError: Not enough memory.
        """
        size = _HEADER_BYTES + max(num_bytes, 1)  # neither a torch view nor an RDMA buffer can be empty
        self._fd = os.memfd_create("titanrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self._fd, 0, size)
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.sequence = 0
        self.handle = ArenaHandle(host_id(), os.getpid(), process_start("self"), self._fd, num_bytes)

    @cached_property
    def header(self) -> torch.Tensor:
        """Bytes of the sequence number."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=_SEQUENCE.size)

    @cached_property
    def storage(self) -> torch.Tensor:
        """All bytes after the header (at least one)."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES)

    @cached_property
    def data(self) -> torch.Tensor:
        """Contents, as a tensor that shares the arena's memory."""
        return self.storage[: self.handle.num_bytes]

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        """Mark the arena as being written while the body fills it, then advance to the next even sequence number.

        If the body raises, the arena stays marked until a later write succeeds.
        """
        self._set_sequence(self.sequence + 1 + self.sequence % 2)  # the number is already odd if the previous body raised
        yield self.data
        self._set_sequence(self.sequence + 1)

    def close(self) -> None:
        """Close this process's descriptor. Existing mappings in other processes stay valid."""
        os.close(self._fd)

    def _set_sequence(self, sequence: int) -> None:
        self.sequence = sequence
        _SEQUENCE.pack_into(self._map, 0, sequence)


class OwnerExitedError(WeightMismatchError):
    """The process that owns an arena has exited, or runs as another user."""


class MappedArena:
    """A read-only mapping of an arena that another process on this host writes."""

    def __init__(self, handle: ArenaHandle) -> None:
        """Map an arena.

        Raises:
            OwnerExitedError: The owner has exited, or runs as another user.
            WeightMismatchError: The owner is on another host.
        """
        if handle.host != host_id():
            raise WeightMismatchError(f"weights.transport: the arena is on another host (got {handle.host}). Set it to auto.")
        fd = _open_arena(handle)
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.data = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES)[: handle.num_bytes]

    @property
    def sequence(self) -> int:
        """Current sequence number in the header."""
        return sequence_in(self._map)


def _open_arena(handle: ArenaHandle) -> int:
    """Open an arena through its owner's file descriptor.

    Raises:
        OwnerExitedError: The owner has exited, or runs as another user.
    """
    try:
        if process_start(str(handle.pid)) != handle.started:
            raise ProcessLookupError
        return os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        reason = "is gone"
    except PermissionError:  # root owns the descriptors of an exiting process
        reason = "is gone or runs as another user"
    raise OwnerExitedError(f"process {handle.pid}, which published the weights, {reason}")


def sequence_in(header: Any) -> int:
    """Return the sequence number stored in a header."""
    (sequence,) = _SEQUENCE.unpack_from(header, 0)
    return int(sequence)
