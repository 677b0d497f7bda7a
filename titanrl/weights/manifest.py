"""What was published: which box of which tensor lies where. Pure data, no tensors."""

from dataclasses import dataclass
from math import prod


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

    def slices_within(self, outer: "Box") -> tuple[slice, ...]:
        """This box as slices of a tensor that holds exactly `outer`."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.offset, self.shape, outer.offset, strict=True))


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
class WeightManifest:
    """Everything one rank published for one version."""

    version: int
    """Policy version."""
    rank: int
    """Trainer rank."""
    entries: tuple[ShardEntry, ...]
    """Boxes in the order of their bytes."""
    num_bytes: int
    """Length of the rank's bytes."""
    digest: int
    """CRC-32 of the bytes."""
    arena: ArenaHandle | None
    """Arena that holds the bytes; None if the store does."""
    sequence: int
    """What the arena's header says while it holds them; 0 without an arena."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Written by the controller once every rank has published: the version is whole from here on."""

    version: int
    """Policy version."""
    manifests: tuple[WeightManifest, ...]
    """One per rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(manifest.num_bytes for manifest in self.manifests)


def rank_key(run: str, version: int, rank: int) -> str:
    """Store key of one rank's bytes."""
    return f"{run}/v{version}/rank{rank}"


def commit_key(run: str, version: int) -> str:
    """Store key of a version's commit record."""
    return f"{run}/v{version}/COMMIT"
