"""Layout of a state dict: the boxes of its tensors that a rank holds, and their offsets in the rank's bytes.

The local tensor of a DTensor is one box of the full tensor, or several boxes, because `_StridedShard` interleaves. torch's
`compute_local_shape_and_global_offset` returns the offset of the first box only. This module therefore computes the indices
that a rank holds in each dimension and splits them into contiguous runs. Publisher and reader share these functions.
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
"""First index and length of contiguous indices."""

_ALIGNMENT = 64
"""Alignment of entries in bytes: a cache line, so that a tensor of any dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a dimension into `factor` parts, each of which is split into `num_chunks`; the rank holds one per part."""

    num_chunks: int
    """Ranks that share the dimension."""
    index: int
    """Index of the chunk that this rank holds."""
    factor: int = 1
    """Parts that are split separately; 1 for a plain shard."""


def held_indices(size: int, splits: Sequence[Split]) -> Indices:
    """Return the indices of a dimension that a rank holds after all splits, in local order. Chunks follow `torch.chunk`."""
    indices = np.arange(size)
    for split in splits:
        parts = [_chunk(indices, split.factor, part) for part in range(split.factor)]
        indices = np.concatenate([_chunk(part, split.num_chunks, split.index) for part in parts])
    return indices


def _chunk(indices: Indices, num_chunks: int, index: int) -> Indices:
    width = -(-len(indices) // num_chunks)
    return indices[index * width : (index + 1) * width]


def index_runs(indices: Indices) -> list[Run]:
    """Split indices into contiguous runs, keeping their order."""
    if not len(indices):
        return []
    edges = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[start]), end - start) for start, end in itertools.pairwise(edges)]


def dim_splits(placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], dim: int) -> list[Split]:
    """Return the splits of one tensor dimension, in the order in which they apply.

    Mesh dimensions split from left to right, with one exception. A `_StridedShard` whose factor equals the number of parts
    that the splits to its right produce (FSDP over TP) is a plain split applied after them. For uneven sizes, only this order
    yields the shards that FSDP2 holds.
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
    """Combine the runs of each dimension into boxes, with their offsets in the local tensor."""
    starts = [list(itertools.accumulate((length for _, length in dim), initial=0))[:-1] for dim in runs]
    numbered = [list(zip(dim, offsets, strict=True)) for dim, offsets in zip(runs, starts, strict=True)]
    pieces = []
    for choice in itertools.product(*numbered):
        shape = tuple(length for (_, length), _ in choice)
        box = Box(tuple(first for (first, _), _ in choice), shape)
        pieces.append(Piece(box, Box(tuple(offset for _, offset in choice), shape)))
    return tuple(pieces)


@dataclass(frozen=True, slots=True, eq=False)
class PartOf:
    """A rank's block of a tensor, for shardings that a DTensor cannot describe. Other ranks hold the other blocks."""

    local: torch.Tensor
    """The block, as a view of the memory to write."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """First index of the block in each dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.local.dtype


def held_pieces(name: str, value: torch.Tensor | PartOf) -> tuple[Piece, ...]:
    """Return the boxes of a tensor that this rank holds; none if its shard is empty.

    Raises:
        ValueError: The tensor is a partial sum or has an unsupported placement.
    """
    if isinstance(value, PartOf):
        inside = whole(tuple(value.local.shape))
        return (Piece(Box(value.offset, inside.shape), inside),) if inside.numel else ()
    if not isinstance(value, DTensor):
        everything = whole(tuple(value.shape))
        return (Piece(everything, everything),) if everything.numel else ()
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise ValueError(f"{name}: partial sums cannot be published (got {value.placements}). Reduce the tensor first.")
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    indices = [
        held_indices(size, dim_splits(value.placements, value.device_mesh.shape, coordinate, dim))
        for dim, size in enumerate(value.shape)
    ]
    expected, found = [len(dim) for dim in indices], list(local_part(value).shape)
    if expected != found and 0 not in expected:
        raise ValueError(f"{name}: the local shape must be {expected} for placements {value.placements} (got {found})")
    return box_pieces([index_runs(dim) for dim in indices])


def is_first_holder(value: torch.Tensor, rank: int) -> bool:
    """Return whether this rank publishes its shard of a tensor. Of several replicas, only the first one is published.

    A tensor on a submesh (such as a norm that TP does not shard) is replicated on the other submeshes. Only the submesh that
    contains rank 0 publishes it.
    """
    if not isinstance(value, DTensor):
        return rank == 0
    if 0 not in value.device_mesh.mesh:
        return False
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    return not any(isinstance(placement, Replicate) and at for placement, at in zip(value.placements, coordinate, strict=True))


def local_part(value: "torch.Tensor | PartOf") -> torch.Tensor:
    """Return this rank's shard of a tensor without copying, like `DTensor.to_local()` but without its autograd overhead."""
    if isinstance(value, PartOf):
        return value.local
    return value._local_tensor if isinstance(value, DTensor) else value


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A rank's byte layout and the source of each of its entries."""

    layout: ByteLayout
    """Offsets of the entries in the rank's bytes."""
    sources: tuple[tuple[str, Box | None], ...]
    """Name and block of the local tensor for each entry; None selects the entire local tensor."""

    def targets(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """Return the entries as views of a byte tensor."""
        return [entry_view(arena, entry) for entry in self.layout.entries]

    def local_blocks(self, parts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the blocks of the local tensors that fill the entries."""
        with torch.no_grad():
            return [parts[name] if block is None else parts[name][block.slices] for name, block in self.sources]


def plan_pack(state: Mapping[str, torch.Tensor], rank: int, dtype: torch.dtype, keep: Collection[str] = ()) -> PackPlan:
    """Plan the bytes that this rank publishes: the first replica of each shard, tied tensors once, and no empty shards.

    Args:
        state: The model's state dict.
        rank: This trainer rank.
        dtype: Dtype to cast tensors to.
        keep: Names of tensors that keep their dtype (buffers).

    Raises:
        ValueError: A tensor is a partial sum or has an unsupported placement.
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
    """Return the names in a state dict, with only the first name of each tied tensor.

    Tensors are tied if they have the same elements in the same order. Strides must match as well, because the transposed view
    of a square matrix has the same address and shape.
    """
    seen: set[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = set()
    names = []
    for name, value in state.items():
        local = local_part(value)
        key = (local.data_ptr(), local.dtype, local.shape, local.stride())
        if local.numel() and key in seen:
            continue
        seen.add(key)
        names.append(name)
    return names


def local_parts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every tensor in a state dict, without copying."""
    return {name: local_part(value) for name, value in state.items()}


def entry_view(arena: torch.Tensor, entry: ShardEntry) -> torch.Tensor:
    """Return an entry as a view of a byte tensor."""
    dtype = TORCH_DTYPES[entry.dtype]
    num_bytes = entry.box.numel * dtype.itemsize
    return arena[entry.byte_offset : entry.byte_offset + num_bytes].view(dtype).view(entry.box.shape)


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""torch's dtypes by their string form, such as `torch.bfloat16`."""
