"""Transports for a rank's bytes. The writer packs them into an arena and offers it; the reader fetches the bytes.

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

The module defines arenas first, then the transports, and last the fan-out of `rdma` within a host.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import pickle
import secrets
import socket
import struct
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from titanrl.base.ownership import is_own_peer
from titanrl.processes.machine import HOST_FOLDER, host_id, process_start
from titanrl.weights.records import (
    VERSIONS_HELD,
    ArenaHandle,
    RdmaHandle,
    StoreHandle,
    TransportHandle,
    WeightManifest,
    WeightMismatchError,
    overwritten,
    rank_key,
)

if TYPE_CHECKING:
    from titanrl.weights.store import WeightStore


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
    """Open an arena through its owner's file descriptor."""
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
        """Serve one request from another process on this host."""
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
