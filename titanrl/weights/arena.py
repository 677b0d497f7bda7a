"""Shared-memory arenas: a trainer rank writes weights once, and every generator on the same host maps them without a copy.

An arena is a memfd. It has no name, so nothing stays in /dev/shm however its owner ends, and the size of the /dev/shm mount
does not matter. Its size is sealed, so a reader never gets SIGBUS. Its pages are allocated when it is created, because a first
write is dominated by page faults. The header holds a sequence number that is odd while the arena is being written. A reader
compares it with the manifest's before and after its copy, and so detects that the arena was overwritten.
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

from titanrl.host import host_id, process_start
from titanrl.weights.manifest import ArenaHandle, WeightMismatchError

_HEADER_BYTES = mmap.PAGESIZE
_SEQUENCE = struct.Struct("Q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # linux/fcntl.h; Python names them from 3.13 on


class Arena:
    """Shared memory that this process writes."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate all pages.

        Raises:
            OSError: not enough memory.
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
        """All bytes after the header; at least one."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES)

    @cached_property
    def data(self) -> torch.Tensor:
        """Contents, as a tensor that shares the memory."""
        return self.storage[: self.handle.num_bytes]

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        """Mark the arena as being written while the body fills it, then give it the next even sequence number.

        If the body raises, the mark stays until a later write succeeds.
        """
        self._set_sequence(self.sequence + 1 + self.sequence % 2)  # odd already if the previous body raised
        yield self.data
        self._set_sequence(self.sequence + 1)

    def close(self) -> None:
        """Close this process's descriptor; readers that have mapped the arena keep their mapping."""
        os.close(self._fd)

    def _set_sequence(self, sequence: int) -> None:
        self.sequence = sequence
        _SEQUENCE.pack_into(self._map, 0, sequence)


class OwnerEndedError(WeightMismatchError):
    """The process that owns an arena has ended, or runs as another user."""


class MappedArena:
    """A read-only mapping of an arena that another process of this host writes."""

    def __init__(self, handle: ArenaHandle) -> None:
        """Map an arena.

        Raises:
            OwnerEndedError: the owner has ended, or runs as another user.
            WeightMismatchError: the owner is on another host.
        """
        if handle.host != host_id():
            raise WeightMismatchError("the weights are in an arena of another host. Set weights.transport to auto")
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
        """Current sequence number of the header."""
        return sequence_in(self._map)


def _open_arena(handle: ArenaHandle) -> int:
    """Open the owner's descriptor of an arena.

    Raises:
        OwnerEndedError: the owner has ended, or runs as another user.
    """
    try:
        if process_start(str(handle.pid)) != handle.started:
            raise ProcessLookupError
        return os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        reason = "is gone"
    except PermissionError:  # the descriptors of a process that is ending belong to root
        reason = "is gone or runs as another user"
    raise OwnerEndedError(f"process {handle.pid}, which published the weights, {reason}")


def sequence_in(header: Any) -> int:
    """Return the sequence number in the bytes of a header."""
    (sequence,) = _SEQUENCE.unpack_from(header, 0)
    return int(sequence)
