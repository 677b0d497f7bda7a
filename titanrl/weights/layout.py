"""A state dict as boxes, and boxes as bytes.

A DTensor's local part is one box of the whole tensor, or several: `_StridedShard` interleaves, and torch's own offset
(`compute_local_shape_and_global_offset`) is then that of the first box only. So the indices a rank holds are worked out here,
dimension by dimension, and cut into contiguous runs. The trainer's side and the reader's use the same functions.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titanrl.weights.manifest import Box, ByteLayout, Piece, ShardEntry, make_layout, whole

Indices = npt.NDArray[np.int64]
Run = tuple[int, int]
"""First index and length."""

_ALIGNMENT = 64
"""Entries begin at multiples of a cache line, so that any type can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Split:
    """One cut of a dimension: into `factor` parts, each of these into `num_chunks`, of which the rank takes number `index`."""

    num_chunks: int
    """Ranks that share the dimension."""
    index: int
    """Place of this rank among them."""
    factor: int = 1
    """Parts that are cut one by one; 1 is a plain shard."""


def held_indices(size: int, splits: Sequence[Split]) -> Indices:
    """Indices of a dimension that are left after cuts, in the order they are held; chunks are those of `torch.chunk`."""
    indices = np.arange(size)
    for split in splits:
        parts = [_chunk(indices, split.factor, part) for part in range(split.factor)]
        indices = np.concatenate([_chunk(part, split.num_chunks, split.index) for part in parts])
    return indices


def _chunk(indices: Indices, num_chunks: int, index: int) -> Indices:
    width = -(-len(indices) // num_chunks)
    return indices[index * width : (index + 1) * width]


def index_runs(indices: Indices) -> list[Run]:
    """Indices as contiguous runs, in their order."""
    if not len(indices):
        return []
    edges = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[start]), end - start) for start, end in itertools.pairwise(edges)]


def dim_splits(placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], dim: int) -> list[Split]:
    """The cuts of one tensor dimension, in the order they are made.

    Mesh dimensions cut from left to right, but a `_StridedShard` whose factor is the number of parts that the cuts to its right
    make (FSDP over TP) stands for a plain cut after those; with uneven sizes only this order gives what FSDP2 holds.
    """
    ordered: list[Split] = []
    for placement, num_chunks, index in reversed(list(zip(placements, mesh_shape, coordinate, strict=True))):
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim:
            continue
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        if factor > 1 and factor == prod(split.num_chunks for split in ordered):
            ordered.append(Split(num_chunks, index))
        else:
            ordered.insert(0, Split(num_chunks, index, factor))
    return ordered


def box_pieces(runs: Sequence[Sequence[Run]]) -> tuple[Piece, ...]:
    """The boxes that runs of each dimension make, and where they lie in the local tensor."""
    starts = [list(itertools.accumulate((length for _, length in dim), initial=0))[:-1] for dim in runs]
    numbered = [list(zip(dim, places, strict=True)) for dim, places in zip(runs, starts, strict=True)]
    pieces = []
    for choice in itertools.product(*numbered):
        shape = tuple(length for (_, length), _ in choice)
        box = Box(tuple(first for (first, _), _ in choice), shape)
        pieces.append(Piece(box, Box(tuple(place for _, place in choice), shape)))
    return tuple(pieces)


@dataclass(frozen=True, slots=True, eq=False)
class PartOf:
    """A block of a tensor whose other blocks other ranks hold, cut where no DTensor would be."""

    local: torch.Tensor
    """The block; a view of where it is to be written."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the block begins in it."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""
        return self.local.dtype


def held_pieces(name: str, value: torch.Tensor | PartOf) -> tuple[Piece, ...]:
    """The boxes of a tensor that this rank holds; none if its shard is empty.

    Raises:
        ValueError: a partial sum, or a placement that is not understood.
    """
    if isinstance(value, PartOf):
        inside = whole(tuple(value.local.shape))
        return (Piece(Box(value.offset, inside.shape), inside),) if inside.numel else ()
    if not isinstance(value, DTensor):
        everything = whole(tuple(value.shape))
        return (Piece(everything, everything),) if everything.numel else ()
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise ValueError(f"{name}: cannot publish a partial sum ({value.placements})")
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    indices = [
        held_indices(size, dim_splits(value.placements, value.device_mesh.shape, coordinate, dim))
        for dim, size in enumerate(value.shape)
    ]
    expected, found = [len(dim) for dim in indices], list(local_part(value).shape)
    if expected != found and 0 not in expected:
        raise ValueError(f"{name}: placements {value.placements} should leave {expected}, but the rank holds {found}")
    return box_pieces([index_runs(dim) for dim in indices])


def is_first_holder(value: torch.Tensor, rank: int) -> bool:
    """Whether this rank publishes a tensor's shard: of replicas only the first does.

    A tensor on a part of the mesh (a norm that TP leaves alone) is repeated on its other parts; the one with rank 0 counts.
    """
    if not isinstance(value, DTensor):
        return rank == 0
    if 0 not in value.device_mesh.mesh:
        return False
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    return not any(isinstance(placement, Replicate) and at for placement, at in zip(value.placements, coordinate, strict=True))


def local_part(value: "torch.Tensor | PartOf") -> torch.Tensor:
    """What this rank holds of a tensor, without a copy. `to_local()` would return the same, fifty times slower."""
    if isinstance(value, PartOf):
        return value.local
    return value._local_tensor if isinstance(value, DTensor) else value


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What a rank publishes: a layout, and for each of its entries where the bytes come from."""

    layout: ByteLayout
    """What lies where."""
    sources: tuple[tuple[str, Box | None], ...]
    """Tensor and block of its local part, for each entry; None is all of it."""

    def targets(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """The entries as tensors inside a byte tensor."""
        return [entry_view(arena, entry) for entry in self.layout.entries]

    def local_blocks(self, parts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The blocks of a state dict's local parts that belong there."""
        with torch.no_grad():
            return [parts[name] if block is None else parts[name][block.slices] for name, block in self.sources]


def plan_pack(state: Mapping[str, torch.Tensor], rank: int, dtype: torch.dtype, keep: Collection[str] = ()) -> PackPlan:
    """Plan what this rank publishes: replicas only from their first holder, tied tensors once, empty shards not at all.

    Args:
        state: the model's state dict.
        rank: this trainer rank.
        dtype: what tensors are cast to.
        keep: names of tensors that keep their type (buffers).

    Raises:
        ValueError: a partial sum, or a placement that is not understood.
    """
    entries: list[ShardEntry] = []
    sources: list[tuple[str, Box | None]] = []
    start = 0
    for name in first_names(state):
        value = state[name]
        if not is_first_holder(value, rank):
            continue
        published = value.dtype if name in keep else dtype
        for piece in held_pieces(name, value):
            entries.append(ShardEntry(name, str(published), tuple(value.shape), piece.box, start))
            is_all = piece.local.shape == tuple(local_part(value).shape)
            sources.append((name, None if is_all else piece.local))
            start += -(-piece.box.numel * published.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PackPlan(make_layout(rank, tuple(entries), start), tuple(sources))


def first_names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a state dict without those of tensors that were there before (tied weights)."""
    seen: set[tuple[int, torch.Size]] = set()
    names = []
    for name, value in state.items():
        local = local_part(value)
        key = (local.data_ptr(), local.shape)
        if local.numel() and key in seen:
            continue
        seen.add(key)
        names.append(name)
    return names


def local_parts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank holds of a state dict, without a copy."""
    return {name: local_part(value) for name, value in state.items()}


def entry_view(arena: torch.Tensor, entry: ShardEntry) -> torch.Tensor:
    """The tensor that lies at an entry's place in a byte tensor."""
    dtype = TORCH_DTYPES[entry.dtype]
    num_bytes = entry.box.numel * dtype.itemsize
    return arena[entry.byte_offset : entry.byte_offset + num_bytes].view(dtype).view(entry.box.shape)


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""torch's types by their text."""
