"""Which bytes go where: a pure function from manifests and the reader's parameters to slice copies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanrl.weights.manifest import Box, ShardEntry, WeightManifest, WeightMismatchError


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to be filled, or the part of it that this reader holds."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Type it is held in."""
    box: Box
    """Which part of it is held."""


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """Copy a part of a published box into a part of a target."""

    name: str
    """The tensor."""
    rank: int
    """Whose bytes."""
    entry: ShardEntry
    """The published box."""
    source: tuple[slice, ...]
    """Part of the published box."""
    destination: tuple[slice, ...]
    """Part of the target."""


def plan_copies(manifests: Sequence[WeightManifest], targets: Mapping[str, Target]) -> tuple[SliceCopy, ...]:
    """Copies that fill every target completely, each element once.

    Raises:
        WeightMismatchError: a tensor is missing, extra, of another shape or type, or not covered exactly.
    """
    published: dict[str, list[tuple[int, ShardEntry]]] = defaultdict(list)
    for manifest in manifests:
        for entry in manifest.entries:
            published[entry.name].append((manifest.rank, entry))
    missing, extra = sorted(targets.keys() - published.keys()), sorted(published.keys() - targets.keys())
    if missing or extra:
        raise WeightMismatchError(f"tensors not published: {missing}; tensors published but not wanted: {extra}")
    return tuple(copy for name, target in targets.items() for copy in fill(name, target, published[name]))


def fill(name: str, target: Target, sources: Sequence[tuple[int, ShardEntry]]) -> list[SliceCopy]:
    """The copies that fill one target."""
    copies: list[SliceCopy] = []
    covered: list[Box] = []
    for rank, entry in sources:
        if (entry.global_shape, entry.dtype) != (target.global_shape, target.dtype):
            raise WeightMismatchError(
                f"{name}: published as {entry.dtype}{list(entry.global_shape)}, "
                f"wanted as {target.dtype}{list(target.global_shape)}"
            )
        common = entry.box.intersection(target.box)
        if common is None:
            continue
        if any(common.intersection(box) for box in covered):
            raise WeightMismatchError(f"{name}: published twice at {common}")
        covered.append(common)
        copies.append(SliceCopy(name, rank, entry, common.slices_within(entry.box), common.slices_within(target.box)))
    if sum(box.numel for box in covered) != target.box.numel:
        raise WeightMismatchError(f"{name}: only {sum(box.numel for box in covered)} of {target.box.numel} elements published")
    return copies
