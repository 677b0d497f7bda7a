"""The ways a rank's bytes reach a reader. The writer packs into an arena whatever the way, and offers it; the reader fetches.

| | reader | cost |
|---|---|---|
| `arena` | on the writer's host | none: it maps the writer's memory |
| `rdma` | anywhere | one hop: InfiniBand or EFA where Monarch finds ibverbs, else TCP |
| `store` | anywhere | two hops through torchstore's process |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from titanrl.weights.arena import Arena, MappedArena, host_id, sequence_in
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

TransportName = Literal["arena", "rdma", "store"]
"""Ways that `weights.transport` can force."""

_SLOWEST_BYTES_PER_S = 50e6
_SHORTEST_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Payload:
    """One rank's bytes of one version at a reader."""

    data: torch.Tensor
    """The bytes."""
    mapped: MappedArena | None = None
    """Set where they still belong to the writer, which may overwrite them."""

    def check(self, manifest: WeightManifest) -> None:
        """Make sure that the bytes are still those of the manifest.

        Raises:
            WeightMismatchError: the writer has overwritten them.
        """
        if self.mapped is not None and self.mapped.sequence != manifest.sequence:
            raise overwritten(manifest, self.mapped.sequence)


class Transport(Protocol):
    """One way from a writer to a reader."""

    async def offer(self, version: int, arena: Arena) -> TransportHandle:
        """Writer: let readers have what an arena holds; the handle travels with the manifest."""

    def reaches(self, handle: TransportHandle) -> bool:
        """Reader: whether this way leads here."""

    async def fetch(self, manifest: WeightManifest, handle: Any) -> Payload:
        """Reader: get the bytes.

        Raises:
            WeightMismatchError: they are gone or overwritten.
        """


class ArenaTransport:
    """Shared memory of one host; mappings are kept, because their first pages cost more than all copies after."""

    def __init__(self) -> None:
        """Start without mappings."""
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    async def offer(self, version: int, arena: Arena) -> ArenaHandle:
        """The arena's own handle."""
        return arena.handle

    def reaches(self, handle: TransportHandle) -> bool:
        """Whether the arena is on this host."""
        return isinstance(handle, ArenaHandle) and handle.host == host_id()

    async def fetch(self, manifest: WeightManifest, handle: ArenaHandle) -> Payload:
        """Map the arena; nothing is copied."""
        if handle not in self._mapped:
            self._mapped[handle] = MappedArena(handle)
        mapped = self._mapped[handle]
        return Payload(mapped.data, mapped)


class RdmaTransport:
    """Monarch's one-sided reads. Arenas are registered once, receive buffers are kept."""

    def __init__(self) -> None:
        """Start with nothing registered."""
        self._registered: dict[int, RdmaHandle] = {}
        self._received: dict[int, torch.Tensor] = {}

    async def offer(self, version: int, arena: Arena) -> RdmaHandle:
        """Register the arena, the first time."""
        from monarch.rdma import RDMABuffer

        if arena.handle.fd not in self._registered:
            handle = RdmaHandle(RDMABuffer(arena.header), RDMABuffer(arena.storage), arena.handle.num_bytes)
            self._registered[arena.handle.fd] = handle
        return self._registered[arena.handle.fd]

    def reaches(self, handle: TransportHandle) -> bool:
        """Monarch finds its way."""
        return isinstance(handle, RdmaHandle)

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Read the bytes into memory of this process, between two looks at their sequence number."""
        buffer = self._received.get(manifest.rank)
        if buffer is None or buffer.numel() != handle.data.size():
            self._received[manifest.rank] = buffer = torch.empty(handle.data.size(), dtype=torch.uint8)
        timeout_s = _SHORTEST_TIMEOUT_S + int(buffer.numel() / _SLOWEST_BYTES_PER_S)
        await self._check(manifest, handle)
        await handle.data.read_into(buffer, timeout=timeout_s)
        await self._check(manifest, handle)
        return Payload(buffer[: handle.num_bytes])

    async def _check(self, manifest: WeightManifest, handle: RdmaHandle) -> None:
        header = torch.empty(handle.header.size(), dtype=torch.uint8)
        await handle.header.read_into(header, timeout=_SHORTEST_TIMEOUT_S)
        found = sequence_in(header.numpy())
        if found != manifest.sequence:
            raise overwritten(manifest, found)


class StoreTransport:
    """torchstore's own tensors, the last resort; a version is one tensor a rank, deleted by the controller."""

    def __init__(self, run: str, rank: int, store: WeightStore) -> None:
        """Offer under the name of a run; a reader's rank does not matter."""
        self._run, self._rank, self._store = run, rank, store

    async def offer(self, version: int, arena: Arena) -> StoreHandle:
        """Copy the bytes to the store."""
        key = rank_key(self._run, version, self._rank)
        await self._store.put(key, arena.data)
        return StoreHandle(key)

    def reaches(self, handle: TransportHandle) -> bool:
        """The store is reached from everywhere."""
        return isinstance(handle, StoreHandle)

    async def fetch(self, manifest: WeightManifest, handle: StoreHandle) -> Payload:
        """Copy the bytes from the store; what lies there never changes."""
        try:
            data = await self._store.get(handle.key)
        except KeyError:
            raise WeightMismatchError(f"{handle.key} is not in the store: the version was deleted") from None
        assert isinstance(data, torch.Tensor), type(data)
        return Payload(data)


def make_transports(names: Sequence[TransportName], run: str, rank: int, store: WeightStore) -> list[Transport]:
    """The ways of these names, in their order."""
    made: dict[TransportName, Transport] = {
        "arena": ArenaTransport(),
        "rdma": RdmaTransport(),
        "store": StoreTransport(run, rank, store),
    }
    return [made[name] for name in names]
