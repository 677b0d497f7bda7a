"""`plan_copies`: pure planning of slice copies from published byte layouts into a reader's parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from titanrl.weights.manifest import Box, ByteLayout, Piece, ShardEntry, WeightMismatchError


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to fill, described by the blocks that this reader holds."""

    global_shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: str
    """Element type, such as `torch.bfloat16`."""
    pieces: tuple[Piece, ...]
    """Blocks that this reader holds."""


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """A copy from a slice of a published box to a slice of a target."""

    name: str
    """Tensor name."""
    rank: int
    """Trainer rank that published the box."""
    entry: ShardEntry
    """Published box."""
    source: tuple[slice, ...]
    """Slices of the published box."""
    destination: tuple[slice, ...]
    """Slices of the target's local tensor."""


def plan_copies(layouts: Sequence[ByteLayout], targets: Mapping[str, Target]) -> tuple[SliceCopy, ...]:
    """Return copies that write each element of every target exactly once.

    Raises:
        WeightMismatchError: A tensor is missing, unexpected, of another shape or dtype, or not covered exactly.
    """
    published: dict[str, list[tuple[int, ShardEntry]]] = defaultdict(list)
    for layout in layouts:
        for entry in layout.entries:
            published[entry.name].append((layout.rank, entry))
    needed = {name for name, target in targets.items() if prod(target.global_shape)}  # empty tensors are not published
    missing, extra = sorted(needed - published.keys()), sorted(published.keys() - targets.keys())
    if missing or extra:
        raise WeightMismatchError(f"tensors not published: {missing}; tensors published but not expected: {extra}")
    return tuple(copy for name, target in targets.items() for copy in fill(name, target, published[name]))


def fill(name: str, target: Target, sources: Sequence[tuple[int, ShardEntry]]) -> list[SliceCopy]:
    """Return the copies that fill one target."""
    for _, entry in sources:
        if (entry.global_shape, entry.dtype) != (target.global_shape, target.dtype):
            raise WeightMismatchError(
                f"{name}: published as {entry.dtype}{list(entry.global_shape)}, "
                f"expected as {target.dtype}{list(target.global_shape)}"
            )
    return [copy for piece in target.pieces for copy in fill_piece(name, piece, sources)]


def fill_piece(name: str, piece: Piece, sources: Sequence[tuple[int, ShardEntry]]) -> list[SliceCopy]:
    """Return the copies that fill one block of a target."""
    copies: list[SliceCopy] = []
    covered: list[Box] = []
    for rank, entry in sources:
        common = entry.box.intersection(piece.box)
        if common is not None:
            covered.append(common)
            inside = common.moved(piece.box.offset, piece.local.offset)
            copies.append(SliceCopy(name, rank, entry, common.slices_within(entry.box), inside.slices))
    check_covered(name, piece.box, covered)
    return copies


def check_covered(name: str, wanted: Box, covered: Sequence[Box]) -> None:
    """Check that boxes within another box fill it exactly: they do not overlap, and their sizes add up.

    Raises:
        WeightMismatchError: Some boxes overlap, or elements are missing.
    """
    if len(covered) > 1 and wanted.offset:
        low = np.array([box.offset for box in covered])
        high = low + np.array([box.shape for box in covered])
        overlap = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(axis=2)
        np.fill_diagonal(overlap, False)
        if overlap.any():
            raise WeightMismatchError(f"{name}: published twice at {covered[int(overlap.any(axis=1).argmax())]}")
    elif len(covered) > 1:
        raise WeightMismatchError(f"{name}: published twice")
    found = sum(box.numel for box in covered)
    if found != wanted.numel:
        raise WeightMismatchError(f"{name}: only {found} of {wanted.numel} elements published")
