"""Records that describe published weights: boxes, byte layouts, handles, manifests and commits. They contain no tensors."""

import hashlib
import pickle
from dataclasses import dataclass, field
from math import prod
from typing import Any

from titanrl.base.errors import TitanRLError

VERSIONS_HELD = 2
"""Number of versions that stay readable, so that one can be read while the next one is written."""


class WeightMismatchError(TitanRLError):
    """Published weights differ from what the reader expects; the message names the tensor or version."""


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block of a tensor: its first index and its size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the overlap with another box, or None if they do not overlap."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def moved(self, origin: tuple[int, ...], to: tuple[int, ...]) -> "Box":
        """Return this box shifted by the vector from `origin` to `to`."""
        return Box(tuple(a - o + t for a, o, t in zip(self.offset, origin, to, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box from the full tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def slices_within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor holding exactly `outer`."""
        return self.moved(outer.offset, (0,) * len(self.offset)).slices


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers an entire tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, as a box of the full tensor and of a process's local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One box of one tensor within a rank's bytes."""

    name: str
    """Fully-qualified name in the trainer's state dict."""
    dtype: str
    """Element type as text, such as `torch.bfloat16`."""
    global_shape: tuple[int, ...]
    box: Box
    byte_offset: int
    """Offset of the box in the rank's bytes."""


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Offsets of all boxes in a trainer rank's bytes. The layout depends on the sharding, not on the version."""

    rank: int
    entries: tuple[ShardEntry, ...]
    """Boxes in byte order."""
    num_bytes: int
    layout_id: str
    """Hash of the other fields; equal ids mean equal layouts."""


def make_layout(rank: int, entries: tuple[ShardEntry, ...], num_bytes: int) -> ByteLayout:
    """Build a layout and compute its id."""
    text = repr((rank, entries, num_bytes)).encode()
    return ByteLayout(rank, entries, num_bytes, hashlib.blake2b(text, digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """Address of an arena for other processes on its host."""

    host: str
    """Boot id and process namespace of the owner."""
    pid: int
    started: int
    """Start of the owner in clock ticks since boot. It distinguishes the owner from a later process with the same pid."""
    fd: int
    """File descriptor of the arena in the owner."""
    num_bytes: int
    """Size of the contents, without the header."""


@dataclass(frozen=True, slots=True)
class RdmaHandle:
    """An arena registered with Monarch, for readers on any host."""

    header: Any
    """`RDMABuffer` of the sequence number."""
    data: Any
    """`RDMABuffer` of the contents."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """A tensor in torchstore, for readers on any host."""

    key: str


TransportHandle = ArenaHandle | RdmaHandle | StoreHandle


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum of a rank's bytes; see `layout.digest`."""

    kind: str
    """`full`, or `sampled` followed by the number of the page that was read."""
    value: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Description of a trainer rank's bytes of one version."""

    version: int
    rank: int
    layout_id: str
    """Id of the byte layout. The layout is in the store under `layout_key`."""
    num_bytes: int
    digest: Digest | None
    """Checksum of the bytes; None with `verify: off`."""
    sequence: int
    """Sequence number of the arena while it holds this version."""
    handles: tuple[TransportHandle, ...]
    """Handles of the bytes, one per transport, in order of preference."""
    base: "WeightManifest | None" = None
    """With adapters, the rank's bytes of the base, which a reader needs once; its version counts the bases. None without."""
    scale: float = 1.0
    """With adapters, the factor of the product of their matrices."""


def overwritten(manifest: WeightManifest, found: int, expected: int) -> WeightMismatchError:
    """Build the error for an overwritten version, whose arena has an unexpected sequence number."""
    return WeightMismatchError(
        f"version {manifest.version} of rank {manifest.rank} was overwritten while it was read "
        f"(sequence {found}, published as {expected})"
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """Record of a complete version: the manifests of all ranks. The controller creates it after every rank has published."""

    version: int
    manifests: tuple[WeightManifest, ...]
    _pickled: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, tuple[int, bytes]]:
        """Pickle the manifests once, because the record is sent to each replica, and has a manifest per trainer rank."""
        if not self._pickled:
            self._pickled.append(pickle.dumps(self.manifests, pickle.HIGHEST_PROTOCOL))
        return _unpickled, (self.version, self._pickled[0])

    @property
    def num_bytes(self) -> int:
        """Total size of all ranks' bytes, without the base."""
        return sum(manifest.num_bytes for manifest in self.manifests)

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices, the same on all ranks."""
        return self.manifests[0].scale

    @property
    def base(self) -> tuple[WeightManifest, ...]:
        """Manifests of the base on which the version's adapters are; empty without adapters."""
        return tuple(manifest.base for manifest in self.manifests if manifest.base is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAdapter:
    """A LoRA adapter that generators hold beside the policy's until it is dropped. Its bytes are in the store."""

    number: int
    """Number that requests name; above that of the policy's adapter."""
    version: int
    """Policy version of its tokens."""
    commit: Commit
    """Its bytes on all trainer ranks, as version `number`."""


def _unpickled(version: int, manifests: bytes) -> Commit:
    return Commit(version, pickle.loads(manifests))


def rank_key(run: str, version: int, rank: int) -> str:
    """Return the store key of one rank's bytes for the `store` transport."""
    return f"{run}/v{version}/rank{rank}"


def base_run(run: str) -> str:
    """Return the prefix of the store's keys of the base, beside those of the adapters."""
    return f"{run}/base"


def adapters_run(run: str) -> str:
    """Return the prefix of the store's keys of the adapters that generators hold beside the policy's."""
    return f"{run}/adapters"


def layout_key(run: str, layout_id: str) -> str:
    """Return the store key of a byte layout."""
    return f"{run}/layout/{layout_id}"
