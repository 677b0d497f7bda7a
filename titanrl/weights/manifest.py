"""What was published: which box of which tensor lies where. Pure data, no tensors."""

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Any


class WeightMismatchError(Exception):
    """Published weights are not what the reader expects; the text names the tensor or the version."""


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block of a tensor, in global coordinates."""

    offset: tuple[int, ...]
    """First index of each dimension."""
    shape: tuple[int, ...]
    """Size of each dimension."""

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """The part common to both, or None if there is none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def moved(self, origin: tuple[int, ...], to: tuple[int, ...]) -> "Box":
        """This box in coordinates where `origin` lies at `to`."""
        return Box(tuple(a - o + t for a, o, t in zip(self.offset, origin, to, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """This box as slices of the tensor it is a part of."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def slices_within(self, outer: "Box") -> tuple[slice, ...]:
        """This box as slices of a tensor that holds exactly `outer`."""
        return self.moved(outer.offset, (0,) * len(self.offset)).slices


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a whole tensor, and where it lies in the part that a process holds."""

    box: Box
    """In coordinates of the whole tensor."""
    local: Box
    """In coordinates of the local one."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One box of one tensor inside a rank's bytes."""

    name: str
    """Fully-qualified name in the trainer's state dict."""
    dtype: str
    """Type of the bytes, such as `torch.bfloat16`."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """Which part of it this is."""
    byte_offset: int
    """Where it begins in the rank's bytes."""


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """What lies where in a rank's bytes. The same for every version as long as the weights are spread the same way."""

    rank: int
    """Trainer rank."""
    entries: tuple[ShardEntry, ...]
    """Boxes in the order of their bytes."""
    num_bytes: int
    """Length of the rank's bytes."""
    layout_id: str
    """Hash of the above: equal ids mean equal layouts."""


def make_layout(rank: int, entries: tuple[ShardEntry, ...], num_bytes: int) -> ByteLayout:
    """A layout and its id."""
    text = repr((rank, entries, num_bytes)).encode()
    return ByteLayout(rank, entries, num_bytes, hashlib.blake2b(text, digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """Where another process of this host finds an arena."""

    host: str
    """Boot and process namespace it lives in."""
    pid: int
    """Process that owns it."""
    started: int
    """Start of that process in clock ticks since boot, so that a reused pid is not mistaken for it."""
    fd: int
    """Its file descriptor there."""
    num_bytes: int
    """Bytes it holds, header not counted."""


@dataclass(frozen=True, slots=True)
class RdmaHandle:
    """An arena registered with Monarch, for readers on any host."""

    header: Any
    """`RDMABuffer` of the sequence number."""
    data: Any
    """`RDMABuffer` of the bytes."""
    num_bytes: int
    """Bytes it holds."""


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """Bytes that torchstore holds, for readers on any host."""

    key: str
    """Their key."""


TransportHandle = ArenaHandle | RdmaHandle | StoreHandle


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum of a rank's bytes; see `weights.digest`."""

    kind: str
    """`full`, or `sampled` with the part that was looked at, which changes with the version."""
    value: int
    """The checksum."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Everything one rank published for one version."""

    version: int
    """Policy version."""
    rank: int
    """Trainer rank."""
    layout_id: str
    """What lies where; the layout itself is under `layout_key` in the store."""
    num_bytes: int
    """Length of the rank's bytes."""
    digest: Digest | None
    """Checksum of the bytes; None if they are not verified."""
    sequence: int
    """What the arena's header says while it holds this version."""
    handles: tuple[TransportHandle, ...]
    """Ways to the bytes, the best first."""


def overwritten(manifest: WeightManifest, found: int) -> WeightMismatchError:
    """The error of a reader that came too late."""
    return WeightMismatchError(
        f"version {manifest.version} of rank {manifest.rank} was overwritten while it was read "
        f"(sequence {found}, published as {manifest.sequence})"
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """Made by the controller once every rank has published: the version is whole from here on."""

    version: int
    """Policy version."""
    manifests: tuple[WeightManifest, ...]
    """One per rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(manifest.num_bytes for manifest in self.manifests)


def rank_key(run: str, version: int, rank: int) -> str:
    """Store key of one rank's bytes, where the store carries them."""
    return f"{run}/v{version}/rank{rank}"


def commits_key(run: str) -> str:
    """Store key of the commit records of the versions that can be read, the newest last."""
    return f"{run}/COMMITS"


def layout_key(run: str, layout_id: str) -> str:
    """Store key of a layout."""
    return f"{run}/layout/{layout_id}"
