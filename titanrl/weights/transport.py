"""Transports for a rank's bytes. The writer always packs into an arena and offers it; the reader fetches the bytes.

| | reader | cost |
|---|---|---|
| `arena` | on the writer's host | none: the reader maps the writer's memory |
| `rdma` | anywhere | one hop: InfiniBand or EFA where Monarch finds ibverbs, else TCP; once per host (`fanout.py`) |
| `store` | anywhere | two hops through torchstore's process |
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from titanrl.config.choices import TransportName
from titanrl.host import host_id
from titanrl.weights.arena import Arena, MappedArena, sequence_in
from titanrl.weights.manifest import (
    ArenaHandle,
    RdmaHandle,
    StoreHandle,
    TransportHandle,
    WeightManifest,
    WeightMismatchError,
    overwritten,
    rank_key,
)
from titanrl.weights.store import WeightStore

_SLOWEST_BYTES_PER_S = 50e6
_SHORTEST_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Payload:
    """One rank's bytes of one version in this process. Unless `mapped` is set, they stay unchanged while the payload exists."""

    data: torch.Tensor
    """The bytes."""
    mapped: MappedArena | None = None
    """Arena of another process that holds the bytes and may overwrite them; None if this process holds them."""
    sequence: int | None = None
    """Sequence number of that arena while it holds the bytes; None if it is the writer's, whose manifest has the number."""

    def check(self, manifest: WeightManifest) -> None:
        """Check that the bytes are still those of the manifest.

        Raises:
            WeightMismatchError: the writer has overwritten the bytes.
        """
        if self.mapped is None:
            return
        expected, found = manifest.sequence if self.sequence is None else self.sequence, self.mapped.sequence
        if found != expected:
            raise overwritten(manifest, found, expected)


class Source(Protocol):
    """A way by which a reader gets bytes."""

    @property
    def num_received(self) -> int:
        """Bytes that this process has received other than through shared memory."""

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this transport can fetch a handle's bytes in this process."""

    async def fetch(self, manifest: WeightManifest, handle: Any) -> Payload:
        """Fetch the bytes.

        Raises:
            WeightMismatchError: the bytes are gone or overwritten.
        """


class Transport(Source, Protocol):
    """A way for bytes from a writer to a reader."""

    async def offer(self, version: int, arena: Arena) -> TransportHandle:
        """Make the contents of an arena available and return a handle, which travels with the manifest."""


class ArenaTransport:
    """Shared memory of one host. Mappings are kept, because their first page faults cost more than all later copies."""

    num_received = 0

    def __init__(self) -> None:
        """Start without mappings."""
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    async def offer(self, version: int, arena: Arena) -> ArenaHandle:
        """Return the arena's own handle."""
        return arena.handle

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether the arena is on this host."""
        return isinstance(handle, ArenaHandle) and handle.host == host_id()

    async def fetch(self, manifest: WeightManifest, handle: ArenaHandle) -> Payload:
        """Map the arena without a copy."""
        if handle not in self._mapped:
            self._mapped[handle] = MappedArena(handle)
        mapped = self._mapped[handle]
        return Payload(mapped.data, mapped)


class RdmaTransport:
    """One-sided reads by Monarch. Arenas are registered once; a receive buffer is reused once its payload is gone."""

    def __init__(self) -> None:
        """Start without registered arenas and receive buffers."""
        self._registered: dict[int, RdmaHandle] = {}
        self._unused: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.num_received = 0
        """Bytes that this process has read."""

    async def offer(self, version: int, arena: Arena) -> RdmaHandle:
        """Register the arena, unless it is registered already."""
        from monarch.rdma import RDMABuffer

        if arena.handle.fd not in self._registered:
            handle = RdmaHandle(RDMABuffer(arena.header), RDMABuffer(arena.storage), arena.handle.num_bytes)
            self._registered[arena.handle.fd] = handle
        return self._registered[arena.handle.fd]

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is an RDMA handle; Monarch reaches any host."""
        return isinstance(handle, RdmaHandle)

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Read the bytes into a buffer of this process, and check their sequence number before and after."""
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
            WeightMismatchError: the writer has overwritten the bytes.
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
    """Tensors in torchstore, the slowest transport: one per rank and version, which the controller deletes."""

    def __init__(self, run: str, rank: int, store: WeightStore) -> None:
        """Offer under the name of a run; readers may pass any rank."""
        self._run, self._rank, self._store = run, rank, store
        self.num_received = 0
        """Bytes that this process has fetched."""

    async def offer(self, version: int, arena: Arena) -> StoreHandle:
        """Copy the bytes into the store."""
        key = rank_key(self._run, version, self._rank)
        await self._store.put(key, arena.data)
        return StoreHandle(key)

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is a store handle; every process reaches the store."""
        return isinstance(handle, StoreHandle)

    async def fetch(self, manifest: WeightManifest, handle: StoreHandle) -> Payload:
        """Copy the bytes from the store, where they never change."""
        try:
            data = await self._store.get(handle.key)
        except KeyError:
            raise WeightMismatchError(f"{handle.key} is not in the store, because the version was deleted") from None
        assert isinstance(data, torch.Tensor), type(data)
        self.num_received += data.numel()
        return Payload(data)


def make_transports(names: Sequence[TransportName], run: str, rank: int, store: WeightStore) -> list[Transport]:
    """Build the transports of these names, in their order."""
    made: dict[TransportName, Transport] = {
        "arena": ArenaTransport(),
        "rdma": RdmaTransport(),
        "store": StoreTransport(run, rank, store),
    }
    return [made[name] for name in names]
