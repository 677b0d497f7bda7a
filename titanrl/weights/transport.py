"""Transports for a rank's bytes. The writer packs them into an arena and offers it; the reader fetches the bytes.

| transport | reader | cost |
|---|---|---|
| `arena` | on the writer's host | none: the reader maps the writer's memory |
| `rdma` | anywhere | one hop: InfiniBand or EFA if Monarch finds ibverbs, otherwise TCP; once per host (`fanout.py`) |
| `store` | anywhere | two hops through torchstore's process |
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from titanrl.base.choices import TransportName
from titanrl.processes.machine import host_id
from titanrl.weights.arena import Arena, MappedArena, sequence_in
from titanrl.weights.records import (
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

_SLOWEST_BYTES_PER_S = 50e6
_SHORTEST_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Payload:
    """One rank's bytes of one version in this process. They never change while the payload exists, unless `mapped` is set."""

    data: torch.Tensor
    """The bytes."""
    mapped: MappedArena | None = None
    """Arena of another process that holds the bytes and may overwrite them; None if this process holds them."""
    sequence: int | None = None
    """Sequence number of the arena while it holds the bytes; None for the writer's arena, whose number is in the manifest."""

    def check(self, manifest: WeightManifest) -> None:
        """Check that the bytes still match the manifest.

        Raises:
            WeightMismatchError: The writer has overwritten the bytes.
        """
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
        """Fetch the bytes.

        Raises:
            WeightMismatchError: The bytes were deleted or overwritten.
        """


class Transport(Source, Protocol):
    """Interface of a transport for both writers and readers."""

    async def offer(self, version: int, arena: Arena) -> TransportHandle:
        """Make the contents of an arena available; return the handle to publish in the manifest."""


class ArenaTransport:
    """Shared memory on one host. Mappings are kept, because their first page faults cost more than all later copies."""

    num_received = 0

    def __init__(self) -> None:
        """Start with no mappings."""
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
        """Start with no registered arenas or receive buffers."""
        self._registered: dict[int, RdmaHandle] = {}
        self._unused: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.num_received = 0
        """Bytes that this process has read."""

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
        """Read the bytes into a buffer of the registered size.

        Raises:
            WeightMismatchError: The writer has overwritten the bytes.
        """
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
        return Payload(data)


def make_transports(names: Sequence[TransportName], run: str, rank: int, store: "WeightStore") -> list[Transport]:
    """Build the named transports, in the given order."""
    transports: dict[TransportName, Transport] = {
        "arena": ArenaTransport(),
        "rdma": RdmaTransport(),
        "store": StoreTransport(run, rank, store),
    }
    return [transports[name] for name in names]
