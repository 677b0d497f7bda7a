"""Records of published weights: boxes of tensors, byte layouts, manifests and commits. Pure data, no tensors."""

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Any

from titanrl.errors import TitanRLError

VERSIONS_HELD = 2
"""Versions that stay readable: while one is written, the previous one can be read."""


class WeightMismatchError(TitanRLError):
    """Published weights do not match the reader's expectation; the message names the tensor or the version."""


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block of a tensor, in coordinates of the whole tensor."""

    offset: tuple[int, ...]
    """First index of each dimension."""
    shape: tuple[int, ...]
    """Size of each dimension."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the overlap of both boxes, or None if there is none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def moved(self, origin: tuple[int, ...], to: tuple[int, ...]) -> "Box":
        """Return this box in coordinates in which `origin` is at `to`."""
        return Box(tuple(a - o + t for a, o, t in zip(self.offset, origin, to, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box from the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def slices_within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that holds exactly `outer`."""
        return self.moved(outer.offset, (0,) * len(self.offset)).slices


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, in coordinates of the whole tensor and of a process's local tensor."""

    box: Box
    """The block in coordinates of the whole tensor."""
    local: Box
    """The same block in coordinates of the local tensor."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One box of one tensor inside a rank's bytes."""

    name: str
    """Fully-qualified name in the trainer's state dict."""
    dtype: str
    """Element type as text, such as `torch.bfloat16`."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """Block of the whole tensor."""
    byte_offset: int
    """First byte of the box in the rank's bytes."""


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Places of all boxes in a rank's bytes. It changes only with the sharding, not with the version."""

    rank: int
    """Trainer rank."""
    entries: tuple[ShardEntry, ...]
    """Boxes in the order of their bytes."""
    num_bytes: int
    """Length of the rank's bytes."""
    layout_id: str
    """Hash of the other fields; equal ids mean equal layouts."""


def make_layout(rank: int, entries: tuple[ShardEntry, ...], num_bytes: int) -> ByteLayout:
    """Build a layout with its id."""
    text = repr((rank, entries, num_bytes)).encode()
    return ByteLayout(rank, entries, num_bytes, hashlib.blake2b(text, digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """Address of an arena for other processes of its host."""

    host: str
    """Boot id and process namespace of the owner."""
    pid: int
    """Process that owns the arena."""
    started: int
    """Start of that process in clock ticks since boot, which distinguishes it from a later process with the same pid."""
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
    """Size of the contents."""


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """A tensor in torchstore, for readers on any host."""

    key: str
    """Key of the tensor."""


TransportHandle = ArenaHandle | RdmaHandle | StoreHandle


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum of a rank's bytes; see `weights.digest`."""

    kind: str
    """`full`, or `sampled` and the number of the page that was read."""
    value: int
    """The checksum itself."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The record of one rank's bytes of one version."""

    version: int
    """Policy version."""
    rank: int
    """Trainer rank."""
    layout_id: str
    """Id of the byte layout, which is in the store under `layout_key`."""
    num_bytes: int
    """Length of the rank's bytes."""
    digest: Digest | None
    """Checksum of the bytes; None with `verify: off`."""
    sequence: int
    """Sequence number of the arena while it holds this version."""
    handles: tuple[TransportHandle, ...]
    """Handles of the bytes, one per transport, the preferred one first."""


def overwritten(manifest: WeightManifest, found: int, expected: int) -> WeightMismatchError:
    """Build the error of a reader whose version was overwritten: its arena has another sequence number than expected."""
    return WeightMismatchError(
        f"version {manifest.version} of rank {manifest.rank} was overwritten while it was read "
        f"(sequence {found}, published as {expected})"
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a complete version, which the controller creates after every rank has published."""

    version: int
    """Policy version."""
    manifests: tuple[WeightManifest, ...]
    """Manifests, one per rank."""

    @property
    def num_bytes(self) -> int:
        """Total size of all ranks' bytes."""
        return sum(manifest.num_bytes for manifest in self.manifests)


def rank_key(run: str, version: int, rank: int) -> str:
    """Return the store key of one rank's bytes for the `store` transport."""
    return f"{run}/v{version}/rank{rank}"


def commits_key(run: str) -> str:
    """Return the store key of the commit records of all readable versions, which are ordered from oldest to newest."""
    return f"{run}/COMMITS"


def layout_key(run: str, layout_id: str) -> str:
    """Return the store key of a byte layout."""
    return f"{run}/layout/{layout_id}"
