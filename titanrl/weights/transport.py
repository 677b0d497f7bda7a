"""Publishing and fetching a rank's bytes. The writer packs them into an arena and offers it; the reader fetches the bytes.

| transport | reader | cost |
|---|---|---|
| `arena` | on the writer's host | none: the reader maps the writer's memory |
| `rdma` | anywhere | one hop: InfiniBand or EFA if Monarch finds ibverbs, otherwise TCP; once per host (`HostTransport`) |
| `store` | anywhere | two hops through torchstore's process |

An arena is shared memory: a trainer rank writes weights once, and every generator on the same host maps them without a copy. It
is a memfd. It has no name, so it leaves nothing in /dev/shm even if its owner crashes, and the size of the /dev/shm mount does
not matter. Its size is sealed, so readers never get SIGBUS. Its pages are allocated at creation, because page faults would
dominate the first write. The header holds a sequence number that is odd while the arena is being written. A reader compares it
with the manifest's number before and after copying, to detect that the arena was overwritten.

`WeightPublisher` publishes the shards of a trainer rank, and `WeightReader` fetches committed weights and copies them into the
tensors of a generator rank. Both copy with `Copies`, batched tensor copies that cast in the same pass, on a device stream or on
a CPU. There, several threads copy long rows, as many as the variable `THREADS` says, and one thread copies the rest. Large
copies bypass the CPU caches (`_stream.c`); docs/weights.md describes the effect. Threads take the next part when they have
finished one, so that a thread whose core is busy delays a copy by at most one part; OpenMP's barriers make a copy ten times
slower then. On CUDA, host memory is pinned once per arena, so that copies overlap with computation. The device code is written
for CUDA and NPU, but has not been run on either.

The module defines arenas first, then the transports, the fan-out of `rdma` within a host, the copies, and last the publisher
and the reader.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import pickle
import secrets
import socket
import struct
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from titanrl.base.ownership import is_own_peer
from titanrl.processes.machine import HOST_FOLDER, THREADS, host_id, process_start
from titanrl.weights.layout import (
    PackPlan,
    PartOf,
    SliceCopy,
    Target,
    TensorFingerprint,
    digest,
    entry_view,
    held_pieces,
    local_part,
    plan_copies,
    plan_pack,
)
from titanrl.weights.records import (
    VERSIONS_HELD,
    ArenaHandle,
    ByteLayout,
    Commit,
    RdmaHandle,
    StoreHandle,
    TransportHandle,
    WeightManifest,
    WeightMismatchError,
    layout_key,
    overwritten,
    rank_key,
)

if TYPE_CHECKING:
    from titanrl.config.sections import TransportName, Verify
    from titanrl.weights.store import WeightStore

try:
    from titanrl.weights import _stream
except ImportError:
    _stream = None  # type: ignore[assignment]
    logging.getLogger(__name__).warning("titanrl.weights._stream is not built; using torch's slower weight copies")

_HEADER_BYTES = mmap.PAGESIZE
_SEQUENCE = struct.Struct("Q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # linux/fcntl.h; Python names them from 3.13 on
_SLOWEST_BYTES_PER_S = 50e6
_SHORTEST_TIMEOUT_S = 60


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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Payload:
    """One rank's bytes of one version in this process. They never change while the payload exists, unless `mapped` is set."""

    data: torch.Tensor
    mapped: MappedArena | None = None
    """Arena of another process that holds the bytes and may overwrite them; None if this process holds them."""
    sequence: int | None = None
    """Sequence number of the arena while it holds the bytes; None for the writer's arena, whose number is in the manifest."""
    is_reused: bool = True
    """True if the memory is kept for later versions."""

    def check(self, manifest: WeightManifest) -> None:
        """Raise `WeightMismatchError` if the writer has overwritten the bytes."""
        if self.mapped is None:
            return
        expected, found = manifest.sequence if self.sequence is None else self.sequence, self.mapped.sequence
        if found != expected:
            raise overwritten(manifest, found, expected)


class Source(Protocol):
    """Reader's interface of a transport."""

    @property
    def num_received(self) -> int:
        """Bytes that this process has received, not counting shared memory."""

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this process can fetch a handle's bytes with this transport."""

    async def fetch(self, manifest: WeightManifest, handle: Any) -> Payload:
        """Fetch the bytes; raise `WeightMismatchError` if they were deleted or overwritten."""


class Transport(Source, Protocol):
    """Interface of a transport for both writers and readers."""

    async def offer(self, version: int, arena: Arena) -> TransportHandle:
        """Make the contents of an arena available; return the handle to publish in the manifest."""


class ArenaTransport:
    """Shared memory on one host. Mappings are kept, because their first page faults cost more than all later copies."""

    num_received = 0

    def __init__(self) -> None:
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    async def offer(self, version: int, arena: Arena) -> ArenaHandle:
        """Return the arena's own handle."""
        return arena.handle

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether the arena is on this host."""
        return isinstance(handle, ArenaHandle) and handle.host == host_id()

    async def fetch(self, manifest: WeightManifest, handle: ArenaHandle) -> Payload:
        """Map the arena instead of copying it."""
        if handle not in self._mapped:
            self._mapped[handle] = MappedArena(handle)
        mapped = self._mapped[handle]
        return Payload(mapped.data, mapped)


class RdmaTransport:
    """One-sided reads by Monarch. Arenas are registered once. Receive buffers are reused after their payload is collected."""

    def __init__(self) -> None:
        self._registered: dict[int, RdmaHandle] = {}
        self._unused: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.num_received = 0

    async def offer(self, version: int, arena: Arena) -> RdmaHandle:
        """Register the arena, unless it is already registered."""
        from monarch.rdma import RDMABuffer

        if arena.handle.fd not in self._registered:
            handle = RdmaHandle(RDMABuffer(arena.header), RDMABuffer(arena.storage), arena.handle.num_bytes)
            self._registered[arena.handle.fd] = handle
        return self._registered[arena.handle.fd]

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is an RDMA handle. Monarch reaches any host."""
        return isinstance(handle, RdmaHandle)

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Read the bytes into a local buffer; check their sequence number before and after."""
        size = handle.data.size()
        unused = self._unused[manifest.rank, size]
        buffer = unused.pop() if unused else torch.empty(size, dtype=torch.uint8)
        payload = Payload(buffer[: handle.num_bytes])
        weakref.finalize(payload, unused.append, buffer)
        await self.read(manifest, handle, buffer)
        return payload

    async def read(self, manifest: WeightManifest, handle: RdmaHandle, buffer: torch.Tensor) -> None:
        """Read the bytes into a buffer of the registered size; raise `WeightMismatchError` if they were overwritten."""
        size = handle.data.size()
        await self._check(manifest, handle)
        await handle.data.read_into(buffer, timeout=_SHORTEST_TIMEOUT_S + int(size / _SLOWEST_BYTES_PER_S))
        await self._check(manifest, handle)
        self.num_received += size

    async def _check(self, manifest: WeightManifest, handle: RdmaHandle) -> None:
        header = torch.empty(handle.header.size(), dtype=torch.uint8)
        await handle.header.read_into(header, timeout=_SHORTEST_TIMEOUT_S)
        found = sequence_in(header.numpy())
        if found != manifest.sequence:
            raise overwritten(manifest, found, manifest.sequence)


class StoreTransport:
    """Tensors in torchstore, one per rank and version. This is the slowest transport. The controller deletes the tensors."""

    def __init__(self, run: str, rank: int, store: "WeightStore") -> None:
        """Store under the name of a run and a trainer rank; readers may pass any rank."""
        self._run, self._rank, self._store = run, rank, store
        self.num_received = 0
        """Bytes that this process has fetched."""

    async def offer(self, version: int, arena: Arena) -> StoreHandle:
        """Copy the bytes into the store."""
        key = rank_key(self._run, version, self._rank)
        await self._store.put(key, arena.data)
        return StoreHandle(key)

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is a store handle. Every process reaches the store."""
        return isinstance(handle, StoreHandle)

    async def fetch(self, manifest: WeightManifest, handle: StoreHandle) -> Payload:
        """Copy the bytes from the store. Stored bytes never change."""
        try:
            data = await self._store.get(handle.key)
        except KeyError:
            raise WeightMismatchError(f"{handle.key} is not in the store because the version was deleted") from None
        assert isinstance(data, torch.Tensor), type(data)
        self.num_received += data.numel()
        return Payload(data, is_reused=False)


_SIZE = struct.Struct("Q")
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A trainer rank's bytes in an arena on this host."""

    handle: ArenaHandle
    """The arena, which the host's receiver owns."""
    sequence: int
    """Sequence number of the arena while it holds the bytes."""


class Network(Protocol):
    """Interface for reading bytes from other hosts."""

    @property
    def num_received(self) -> int:
        """Bytes that this process has read."""

    async def read(self, manifest: WeightManifest, handle: RdmaHandle, buffer: torch.Tensor) -> None:
        """Read the bytes into a buffer of the registered size; raise `WeightMismatchError` if they were overwritten."""


class Receiver:
    """Cache of the last versions, each received once for any number of requesting processes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._copies: defaultdict[int, dict[int, tuple[Arena, asyncio.Task[HostCopy]]]] = defaultdict(dict)
        """By trainer rank and version."""

    async def receive(self, manifest: WeightManifest) -> HostCopy:
        """Return the copy of a trainer rank's bytes. Receive them first, unless they have arrived or are being received."""
        copies = self._copies[manifest.rank]
        if manifest.version not in copies:
            arena = self._unused(copies, manifest.num_bytes)
            receiving = asyncio.create_task(self._read(manifest, arena), name=f"receive v{manifest.version}")
            copies[manifest.version] = arena, receiving
        return await asyncio.shield(copies[manifest.version][1])  # other callers may wait for it

    def close(self) -> None:
        """Cancel running receptions and close the arenas. Mappings in other processes stay valid."""
        for arena, receiving in (copy for copies in self._copies.values() for copy in copies.values()):
            receiving.cancel()
            arena.close()
        self._copies.clear()

    async def _read(self, manifest: WeightManifest, arena: Arena) -> HostCopy:
        handle = next(handle for handle in manifest.handles if isinstance(handle, RdmaHandle))
        try:
            with arena.writing():
                await self._network.read(manifest, handle, arena.storage)
        except Exception:  # after any error, do not reuse the arena, because bytes may still arrive in it
            if self._copies[manifest.rank].pop(manifest.version, None) is not None:
                arena.close()
            raise
        return HostCopy(arena.handle, arena.sequence)

    @staticmethod
    def _unused(copies: "dict[int, tuple[Arena, asyncio.Task[HostCopy]]]", num_bytes: int) -> Arena:
        """Return an arena for another version. Reuse the oldest version's arena once `VERSIONS_HELD` exist."""
        if len(copies) >= VERSIONS_HELD:
            arena, receiving = copies.pop(min(copies))
            if receiving.done() and arena.handle.num_bytes == num_bytes:
                return arena
            receiving.cancel()
            arena.close()
        return Arena(num_bytes)


class HostTransport:
    """RDMA transport that sends each rank's bytes over the network once per host. It can be pickled before its first use.

    The first rank that needs bytes becomes the host's receiver and reads them by RDMA into its own arenas. The other ranks
    request them over a socket in the host's folder, and map the receiver's arenas like those of a trainer rank on their host.
    The receiver also fetches versions that only one rank requests, such as a replacement that catches up.

    A receiver serves for one term. When it exits, even during a transfer, its connections break. The next term starts with the
    first rank that links its listening socket to the term's name. These names stay until the folder is deleted. Therefore a
    name always refers to a process that is listening or has exited, and no two ranks receive at the same time.

    The arena of the oldest version is reused. No rank is reading it, because all pulls of a run hold leases of `WeightSync`,
    which keeps only the last two versions readable. A reader without a lease detects the reuse by the sequence number, as with
    arenas of trainer ranks.
    """

    def __init__(self, network: Network | None = None, name: str | None = None) -> None:
        """Create a transport. Those of one name, or pickled from one, share the bytes that one process of a host receives."""
        self._name = name or secrets.token_hex(4)
        self._network = network or RdmaTransport()
        self._term = 0
        self._receiver: Receiver | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    @property
    def num_received(self) -> int:
        """Bytes that this process has received on behalf of its host."""
        return self._network.num_received

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is an RDMA handle and the host has a shared folder."""
        return isinstance(handle, RdmaHandle) and HOST_FOLDER in os.environ

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Map the host's copy of the bytes. If the receiver exits, retry with its successor, or become the successor."""
        while True:
            receiver = self._lead()
            if receiver is not None:
                return self._payload(await receiver.receive(manifest))
            try:
                reply = await self._request(manifest)
                if isinstance(reply, HostCopy):
                    return self._payload(reply)
            except (ConnectionError, EOFError, OwnerExitedError):
                self._term += 1
            else:
                raise reply

    def close(self) -> None:
        """Stop receiving. This transport must not be used afterwards; ranks that still need bytes elect another receiver."""
        if self._serving is not None:
            self._serving.add_done_callback(lambda serving: serving.result().close())
        if self._receiver is not None:
            self._receiver.close()
        self._mapped.clear()

    @property
    def _path(self) -> Path:
        return Path(os.environ[HOST_FOLDER], f"weights-{self._name}.{self._term}")

    def _lead(self) -> Receiver | None:
        """Return the receiver if this process serves the host or can become its receiver now; otherwise None."""
        if self._receiver is None:
            listener = _listen(self._path)
            if listener is not None:
                self._receiver = Receiver(self._network)
                self._serving = asyncio.create_task(asyncio.start_unix_server(self._serve, sock=listener))
        return self._receiver

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._receiver is not None, "the server starts after the receiver"
        with contextlib.suppress(ConnectionError, EOFError):  # the other process has exited
            _check_peer(writer)
            manifest = await _receive(reader)
            try:
                reply: HostCopy | Exception = await self._receiver.receive(manifest)
            except Exception as error:  # the requesting process raises it
                from titanrl.processes.actors import portable  # imports Monarch, which a reader on the same host does not need

                reply = portable(error)
            await _send(writer, reply)
        writer.close()

    async def _request(self, manifest: WeightManifest) -> HostCopy | Exception:
        """Return the reply of the receiver, in another process; raise `ConnectionError` or `EOFError` if it has exited."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            _check_peer(writer)
            await _send(writer, manifest)
            reply: HostCopy | Exception = await _receive(reader)
            return reply
        finally:
            writer.close()

    def _payload(self, copy: HostCopy) -> Payload:
        if any(handle.pid != copy.handle.pid for handle in self._mapped):
            self._mapped.clear()  # they belong to a receiver that has exited
        if copy.handle not in self._mapped:
            self._mapped[copy.handle] = MappedArena(copy.handle)
        mapped = self._mapped[copy.handle]
        return Payload(mapped.data, mapped, copy.sequence)


def _listen(path: Path) -> socket.socket | None:
    """Return a socket that listens at a path; None if the path exists. The path appears only once the socket is listening."""
    listener, temporary = socket.socket(socket.AF_UNIX), path.with_name(f"{path.name}.{os.getpid()}")
    listener.bind(str(temporary))
    listener.listen(_BACKLOG)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        listener.close()
        return None
    finally:
        temporary.unlink()
    listener.setblocking(False)
    return listener


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Refuse a process of another user at the other end, because messages are unpickled."""
    if not is_own_peer(writer.get_extra_info("socket")):
        writer.close()
        raise ConnectionRefusedError("a process of another user is at the other end")


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message)
    writer.write(_SIZE.pack(len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    """Read a pickled message. Unpickling is safe: `_check_peer` has shown that a process of the same user sent it."""
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))


# Copies

_CUDA_HOST_REGISTER_DEFAULT, _CUDA_HOST_REGISTER_READ_ONLY = 0, 8  # cudaHostRegister's flags
_STREAMED_FROM_BYTES = 8 << 20
"""Minimum total size of copies that bypass the caches. Smaller copies stay cached for the process that reads them next."""
_SHORTEST_ROW_BYTES = 512
"""Minimum length of streamed rows. The partial cache lines at the ends of a row are always stored normally."""
PIECE_BYTES = 1 << 20
"""Size of the pieces into which copies are split."""
PART_PIECES = 4
"""Pieces of the parts that threads take: at most 4 MB, under a millisecond."""
_pinned: set[int] = set()
"""Addresses that `pin` registered."""


class Rows(NamedTuple):
    """A copy of equally long, contiguous rows, from address to address. The fields match `Copy` in `_stream.c`."""

    target: int
    source: int
    num_rows: int
    length: int
    """Elements per row."""
    target_stride: int
    """Bytes between the starts of target rows."""
    source_stride: int
    """Bytes between the starts of source rows."""
    item: int
    """Bytes per element; 0 casts float32 to bfloat16."""


class Copies:
    """Copies between pairs of tensors with equal shapes, planned once and run any number of times."""

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], streamed_from_bytes: int = _STREAMED_FROM_BYTES
    ) -> None:
        """Plan the copies. The plan keeps the tensors alive; their memory must not be reallocated."""
        self._targets, self._sources = list(targets), list(sources)
        pairs = list(zip(self._targets, self._sources, strict=True))
        is_large = sum(target.nbytes for target in targets) >= streamed_from_bytes
        rows = [as_rows(*pair) if is_large and _stream is not None else None for pair in pairs]
        pieces = [piece for row in rows if row is not None for piece in split(row, PIECE_BYTES)]
        self._parts = [np.array(pieces[i : i + PART_PIECES], np.int64) for i in range(0, len(pieces), PART_PIECES)]
        self._others = [pair for pair, row in zip(pairs, rows, strict=True) if row is None]

    @property
    def device(self) -> torch.device:
        """Device of the first target or first source, whichever is not the CPU; otherwise the CPU."""
        tensors = self._targets[:1] + self._sources[:1]
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def run(self) -> None:
        """Copy each source into its target, in any thread. Copies on a device are only queued."""
        if self._parts:
            TEAM.run(self._parts)
        if self._others:
            targets, sources = map(list, zip(*self._others, strict=True))
            with torch.no_grad(), one_thread():
                torch._foreach_copy_(targets, sources, non_blocking=True)


def as_rows(target: torch.Tensor, source: torch.Tensor) -> Rows | None:
    """Describe a copy for `_stream`; return None for copies left to torch: on a device, with other casts, of short
    rows, of rows that are not contiguous, or of more than two dimensions after merging those contiguous in both tensors."""
    is_cast = (target.dtype, source.dtype) == (torch.bfloat16, torch.float32)
    if not (target.is_cpu and source.is_cpu and (is_cast or target.dtype == source.dtype)):
        return None
    dims: list[tuple[int, int, int]] = []  # merged: size, target stride and source stride, in elements
    for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True):
        if dims and dims[-1][1:] == (size * to, size * of):
            dims[-1] = (dims[-1][0] * size, to, of)
        elif size != 1:
            dims.append((size, to, of))
    *outer, (length, *strides) = dims or [(1, 1, 1)]
    if len(outer) > 1 or strides != [1, 1] or length * target.itemsize < _SHORTEST_ROW_BYTES:
        return None
    num_rows, target_stride, source_stride = outer[0] if outer else (1, 0, 0)
    return Rows(
        target=target.data_ptr(),
        source=source.data_ptr(),
        num_rows=num_rows,
        length=length,
        target_stride=target_stride * target.itemsize,
        source_stride=source_stride * source.itemsize,
        item=0 if is_cast else target.itemsize,
    )


def split(row: Rows, most_bytes: int) -> Iterator[Rows]:
    """Split a copy into copies of at most `most_bytes` written bytes."""
    written, read = (row.item, row.item) if row.item else (torch.bfloat16.itemsize, torch.float32.itemsize)
    length = min(row.length, most_bytes // written)
    num_rows = max(1, most_bytes // (length * written))
    for first_row in range(0, row.num_rows, num_rows):
        for first in range(0, row.length, length):
            yield row._replace(
                target=row.target + first_row * row.target_stride + first * written,
                source=row.source + first_row * row.source_stride + first * read,
                num_rows=min(num_rows, row.num_rows - first_row),
                length=min(length, row.length - first),
            )


Table = np.ndarray[Any, np.dtype[np.int64]]
"""Part of a copy, int64 `[rows, fields of Rows]`, for `_stream`."""


class Team:
    """The threads that run the copies of this process, one copy at a time."""

    def __init__(self) -> None:
        """Start no thread yet, because the process may still fork."""
        self._running = threading.Lock()

    @cached_property
    def num_threads(self) -> int:
        """Number of cores that the run leaves to this process while it copies, from the variable `THREADS`; 1 without it."""
        return min(int(os.environ.get(THREADS, "1")), len(os.sched_getaffinity(0)))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="copy")

    def run(self, parts: Sequence[Table]) -> None:
        """Let each thread, one of them the caller's, take the next part until none is left. Calls wait for each other."""
        left = iter(parts)

        def run_parts() -> None:
            for part in left:
                _stream.run(part)

        with self._running:
            helpers = [self._pool.submit(run_parts) for _ in range(min(self.num_threads, len(parts)) - 1)]
            run_parts()
            for helper in helpers:
                helper.result()


TEAM = Team()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread within the body, in the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CopyOut:
    """Runner of copies from a device or from this process's memory into shared memory."""

    def __init__(self) -> None:
        self._stream: Any = None

    async def run(self, copies: Copies) -> None:
        """Fill CPU tensors and return when they are complete. Do not write to the sources before that."""
        if copies.device.type == "cpu":
            copies.run()
            return
        device: Any = torch.get_device_module(copies.device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())  # wait for the kernels that write the weights
        with device.stream(self._stream):
            copies.run()
        await asyncio.to_thread(self._stream.synchronize)


def copy_in(copies: Copies) -> None:
    """Fill a model's tensors from CPU tensors; return when they are complete."""
    copies.run()
    if copies.device.type != "cpu":
        torch.get_device_module(copies.device).current_stream().synchronize()


def pin(data: torch.Tensor, device: torch.device, *, read_only: bool) -> None:
    """Pin shared memory with CUDA, so that copies need no staging buffer. Do nothing for other devices."""
    if device.type != "cuda":
        return
    flags = _CUDA_HOST_REGISTER_READ_ONLY if read_only else _CUDA_HOST_REGISTER_DEFAULT
    error = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags))
    if error == 0:
        _pinned.add(data.data_ptr())
        return
    warnings.warn(
        f"cannot pin {data.numel()} bytes of shared memory, so copies are slower (got CUDA error {error})", stacklevel=2
    )
    with suppress(RuntimeError):  # CUDA keeps the error until the next kernel starts, which then fails
        torch.zeros(1, device=device)


def unpin(address: int) -> None:
    """Release what `pin` registered, if anything, before the memory at an address is unmapped."""
    if address in _pinned:
        _pinned.discard(address)
        torch.cuda.cudart().cudaHostUnregister(address)


Targets = Mapping[str, torch.Tensor | PartOf]
"""Tensors to fill, by the trainer's tensor names."""


class WeightPublisher:
    """Publisher of this rank's shards of each version, cast to the generators' dtype. Its calls must not overlap."""

    def __init__(
        self,
        run: str,
        rank: int,
        store: "WeightStore",
        dtype: torch.dtype,
        transports: "Sequence[TransportName]",
        verify: "Verify" = "sampled",
        num_arenas: int = VERSIONS_HELD,
        first: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare to publish parameters, cast to `dtype`, under the name of a run, which is the prefix of the store's keys.

        The manifests offer `transports` in this order. `verify` is the portion of the bytes that the digest covers. Of the
        memory for two publications, `num_arenas` are allocated in advance; the other when it is needed. `first` is the
        publishing rank of each tensor that rank 0 does not have (`weights.layout.first_holders`).
        """
        self._first = first
        self._run, self._rank, self._store = run, rank, store
        self._dtype, self._verify = dtype, verify
        known: dict[TransportName, Transport] = {
            "arena": ArenaTransport(),
            "rdma": RdmaTransport(),
            "store": StoreTransport(run, rank, store),
        }
        self._transports = [known[name] for name in transports]
        self._copy_out = CopyOut()
        self._planned: TensorFingerprint | None = None
        self._plan: PackPlan
        self._blocks: list[torch.Tensor]
        self._arenas: list[Arena] = []
        self._num_arenas = num_arenas
        self._copies: list[Copies] = []
        self._num_published = 0

    async def prepare(self, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> None:
        """Plan the layout of a state dict and allocate `num_arenas`. Without this call, the first `publish` does so.

        Args:
            state: The model's state dict. The plan is reused as long as the dict holds the same tensors in the same memory.
                Pass the module's own tensors, because `state_dict()` detaches them unless `keep_vars=True`.
            keep: Names of tensors that keep their dtype (buffers); always the same ones.

        Raises:
            ValueError: A tensor cannot be published, or the total size has changed; the message names the cause.
            OSError: Not enough memory.
        """
        if self._planned is not None and self._planned.matches(state):
            return
        planned, plan = TensorFingerprint(state), plan_pack(state, self._rank, self._dtype, keep, self._first)
        for _ in range(0 if self._arenas else self._num_arenas):
            self._allocate(plan.layout.num_bytes, state)
        allocated = self._arenas[0].handle.num_bytes
        if plan.layout.num_bytes != allocated:
            raise ValueError(
                f"weights: the size of trainer rank {self._rank}'s shards must stay {allocated} bytes during a run "
                f"(got {plan.layout.num_bytes}). Start a new run for a model of a different size."
            )
        key = layout_key(self._run, plan.layout.layout_id)
        if not await self._store.exists(key):
            await self._store.put(key, plan.layout)
        self._plan, self._planned, self._blocks = plan, planned, plan.local_blocks(state)
        self._copies = [Copies(plan.targets(arena.data), self._blocks) for arena in self._arenas]

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> WeightManifest:
        """Copy the weights into an arena; the caller may change them afterwards. The last two publications stay readable.

        `launch.generators.WeightSync` publishes only when no replica reads the version to be overwritten; a reader without a
        lease detects by the sequence number that its bytes were overwritten.

        See `prepare` for `state`, `keep`, and the `ValueError` and `OSError` that it raises.
        """
        await self.prepare(state, keep)
        slot = self._num_published % VERSIONS_HELD  # counts publications, because versions may skip numbers
        layout = self._plan.layout
        if slot == len(self._arenas):
            self._allocate(layout.num_bytes, state)
            self._copies.append(Copies(self._plan.targets(self._arenas[slot].data), self._blocks))
        arena = self._arenas[slot]
        with arena.writing() as data:
            await self._copy_out.run(self._copies[slot])
        self._num_published += 1
        return WeightManifest(
            version=version,
            rank=self._rank,
            layout_id=layout.layout_id,
            num_bytes=layout.num_bytes,
            digest=digest(data, self._verify, version),
            sequence=arena.sequence,
            handles=tuple([await transport.offer(version, arena) for transport in self._transports]),
        )

    def close(self) -> None:
        """Release the arenas. The publisher must not be used afterwards."""
        for arena in self._arenas:
            arena.close()

    def _allocate(self, num_bytes: int, state: Mapping[str, torch.Tensor]) -> None:
        """Allocate the memory of one publication, pinned for copies from the device of the state."""
        arena = Arena(num_bytes)
        device = next((local_part(value).device for value in state.values()), torch.device("cpu"))
        pin(arena.storage, device, read_only=False)
        self._arenas.append(arena)


class CopyPlan:
    """Slice copies from published bytes into tensors, planned once per layout and bound once per address of the bytes."""

    def __init__(self, layouts: Sequence[ByteLayout], targets: Targets) -> None:
        """Plan the copies; raise `WeightMismatchError` or `ValueError` unless they fill every target."""
        self.layout_ids = [layout.layout_id for layout in layouts]
        self._planned = TensorFingerprint(targets)
        wanted = {name: Target(tuple(t.shape), str(t.dtype), held_pieces(name, t)) for name, t in targets.items()}
        self._slices: tuple[SliceCopy, ...] = plan_copies(layouts, wanted)
        self._filled = [local_part(targets[part.name])[part.destination] for part in self._slices]
        self._copies: dict[tuple[int, ...], Copies] = {}

    def fits(self, layout_ids: Sequence[str], targets: Targets) -> bool:
        """Return whether the plan is for these layouts and for these targets at their current addresses."""
        return self.layout_ids == layout_ids and self._planned.matches(targets)

    def run(self, data: Mapping[int, torch.Tensor], *, is_reused: bool) -> None:
        """Copy from the bytes of each trainer rank, given by rank, into the targets. The copies from
        memory that `is_reused`, at the same address for later versions, are kept for them."""
        where = tuple(data[rank].data_ptr() for rank in sorted(data))
        if (copies := self._copies.get(where)) is None:
            copies = Copies(self._filled, [entry_view(data[part.rank], part.entry)[part.source] for part in self._slices])
            if is_reused:
                if len(self._copies) >= VERSIONS_HELD:  # publishers reuse this many arenas
                    self._copies.clear()
                self._copies[where] = copies
        copy_in(copies)


class WeightReader:
    """Reader of committed versions into tensors of this process. It can be pickled before its first use.

    Fetch and copy one version after the other. A copy may run in another thread than the event loop of the fetches.
    """

    def __init__(self, run: str, store: "WeightStore", verify: "Verify" = "sampled", name: str | None = None) -> None:
        """Prepare to read the versions published under the name of a run. `verify="off"` ignores their digests; otherwise the
        publisher has chosen what they cover. Readers of one `name` share what they receive from other hosts.
        """
        self._run, self._store, self._verify = run, store, verify
        # Tried in this order for each offered handle. Over several hosts, `HostTransport` maps what RDMA would copy per rank.
        self._sources: list[Source] = [
            ArenaTransport(),
            HostTransport(name=name),
            RdmaTransport(),
            StoreTransport(run, 0, store),
        ]
        self._bytes_reported = 0
        self._layouts: dict[str, ByteLayout] = {}
        self._pinned: dict[int, weakref.finalize[..., MappedArena]] = {}
        self.plan: CopyPlan | None = None
        """Plan of the last copy, which is reused while layouts and targets stay the same."""

    async def fetch(self, commit: Commit) -> "FetchedWeights":
        """Make all bytes of a version accessible. Bytes in arenas on this host are mapped instead of copied."""
        stale = [manifest.rank for manifest in commit.manifests if manifest.version != commit.version]
        if stale:
            raise WeightMismatchError(f"version {commit.version}: the manifests of ranks {stale} are of another version")
        for layout_id in (manifest.layout_id for manifest in commit.manifests):
            if layout_id not in self._layouts:  # read from the store once
                try:
                    self._layouts[layout_id] = await self._store.get(layout_key(self._run, layout_id))
                except KeyError:
                    raise WeightMismatchError(f"layout {layout_id} of the weights is not in the store") from None
        layouts = [self._layouts[manifest.layout_id] for manifest in commit.manifests]
        payloads = await asyncio.gather(*(self._payload(manifest) for manifest in commit.manifests))
        return FetchedWeights(self, commit, layouts, payloads)

    def take_received(self) -> int:
        """Return the bytes that this process has received since the previous call, not counting shared memory."""
        total = sum(source.num_received for source in self._sources)
        received, self._bytes_reported = total - self._bytes_reported, total
        return received

    def verify(self, manifest: WeightManifest, payload: Payload) -> None:
        """Raise `WeightMismatchError` if the length or digest of one rank's bytes differs from what the rank published."""
        bytes_of = f"version {manifest.version} of rank {manifest.rank}"
        if payload.data.numel() != manifest.num_bytes:
            raise WeightMismatchError(f"{bytes_of} must have {manifest.num_bytes} bytes (got {payload.data.numel()})")
        if self._verify == "off" or manifest.digest is None:
            return
        kind: Verify = "full" if manifest.digest.kind == "full" else "sampled"
        found = digest(payload.data, kind, manifest.version)
        payload.check(manifest)  # report overwritten bytes as overwritten, not as corrupt
        if found != manifest.digest:
            raise WeightMismatchError(f"{bytes_of} does not match its published digest ({manifest.digest.kind})")

    def pin(self, payload: Payload, device: torch.device) -> None:
        """Pin a mapping for fast copies to a device, unless it is already pinned."""
        address = payload.data.data_ptr()
        if payload.mapped is not None and (address not in self._pinned or not self._pinned[address].alive):
            pin(payload.data, device, read_only=True)
            self._pinned[address] = weakref.finalize(payload.mapped, unpin, address)

    def close(self) -> None:
        """Release the pinned mappings and stop receiving. The reader must not be used afterwards."""
        for release in self._pinned.values():
            release()
        self._pinned.clear()
        for source in self._sources:
            if isinstance(source, HostTransport):
                source.close()

    async def _payload(self, manifest: WeightManifest) -> Payload:
        """Fetch a rank's bytes through the first offered transport that is reachable from this process."""
        for handle in manifest.handles:
            for source in self._sources:
                if source.reaches(handle):
                    payload = await source.fetch(manifest, handle)
                    payload.check(manifest)
                    return payload
        raise WeightMismatchError(
            f"weights.transport: no offered transport reaches this host from trainer rank {manifest.rank} "
            f"(got {[type(handle).__name__ for handle in manifest.handles]}). Set it to auto."
        )


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A complete version that is accessible in this process but not yet copied into a model."""

    reader: WeightReader
    commit: Commit
    layouts: Sequence[ByteLayout] = field(repr=False)
    payloads: Sequence[Payload] = field(repr=False)

    def copy_into(self, targets: Targets) -> None:
        """Fill every target. All checks that are possible in advance run before the first write.

        The plan is reused as long as the targets are the same objects in the same memory.

        Raises:
            WeightMismatchError: A tensor is missing, unexpected, or has another shape or dtype; the bytes do not match their
                digest; or the writer overwrote them during the copy, and the targets now hold a mixture of versions.
            ValueError: A target has an unsupported placement.
        """
        reader, ranks = self.reader, list(zip(self.commit.manifests, self.payloads, strict=True))
        if reader.plan is None or not reader.plan.fits([layout.layout_id for layout in self.layouts], targets):
            reader.plan = CopyPlan(self.layouts, targets)
        for manifest, payload in ranks:
            reader.verify(manifest, payload)
        device = next((local_part(target).device for target in targets.values()), torch.device("cpu"))
        for payload in self.payloads:
            reader.pin(payload, device)
        is_reused = all(payload.is_reused for payload in self.payloads)
        reader.plan.run({manifest.rank: payload.data for manifest, payload in ranks}, is_reused=is_reused)
        for manifest, payload in ranks:
            payload.check(manifest)
