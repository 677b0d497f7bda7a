"""Layout of a state dict: the boxes of its tensors that a rank holds, and their offsets in the rank's bytes.

The local tensor of a DTensor is one box of the full tensor, or several boxes, because `_StridedShard` interleaves. torch's
`compute_local_shape_and_global_offset` returns the offset of the first box only. This module therefore computes the indices
that a rank holds in each dimension and splits them into contiguous runs. Publisher and reader share these functions.

`LiveState` and `TensorFingerprint` detect when a plan must be made again, `plan_copies` plans what a reader copies, and
`digest` is the checksum of the bytes.
"""

import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titanrl.weights.records import Box, ByteLayout, Digest, Piece, ShardEntry, WeightMismatchError, make_layout, whole

if TYPE_CHECKING:
    from titanrl.config.sections import Verify

Indices = npt.NDArray[np.int64]
Run = tuple[int, int]
"""First index and length of contiguous indices."""

_ALIGNMENT = 64
"""Alignment of entries in bytes: a cache line, so that a tensor of any dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a dimension into `factor` parts, each of which is split into `num_chunks`; the rank holds one per part."""

    num_chunks: int
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
    offset: tuple[int, ...]
    """First index of the block in each dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the block."""
        return self.local.dtype


def held_pieces(name: str, value: torch.Tensor | PartOf) -> tuple[Piece, ...]:
    """Return the boxes of a tensor that this rank holds; none if its shard is empty."""
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


def is_first_holder(value: torch.Tensor, rank: int, first: int) -> bool:
    """Return whether this rank publishes its shard of a tensor. Of several replicas, only the first one is published.

    A tensor on a submesh (such as a norm that TP does not shard) is replicated on the other submeshes. Only the submesh that
    contains `first`, the lowest rank that has a tensor of this name, publishes it.
    """
    if not isinstance(value, DTensor):
        return rank == first
    if first not in value.device_mesh.mesh:
        return False
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    return not any(isinstance(placement, Replicate) and at for placement, at in zip(value.placements, coordinate, strict=True))


def first_holders(names: Sequence[Collection[str]]) -> dict[str, int]:
    """Return the lowest rank that has a tensor of each name, without those that rank 0 has. `names` are those of each rank."""
    first: dict[str, int] = {}
    for rank in reversed(range(len(names))):
        first |= dict.fromkeys(names[rank], rank)
    return {name: rank for name, rank in first.items() if rank}


def local_part(value: "torch.Tensor | PartOf") -> torch.Tensor:
    """Return this rank's shard of a tensor without copying, like `DTensor.to_local()` but without its autograd overhead."""
    if isinstance(value, PartOf):
        return value.local
    return value._local_tensor if isinstance(value, DTensor) else value


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A rank's byte layout and the source of each of its entries."""

    layout: ByteLayout
    sources: tuple[tuple[str, Box | None], ...]
    """Name and block of the local tensor for each entry; None selects the entire local tensor."""

    def targets(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """Return the entries as views of a byte tensor."""
        return [entry_view(arena, entry) for entry in self.layout.entries]

    def local_blocks(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the blocks of this rank's shards that fill the entries."""
        parts = {name: local_part(value) for name, value in state.items()}
        with torch.no_grad():
            return [parts[name] if block is None else parts[name][block.slices] for name, block in self.sources]


def plan_pack(
    state: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype,
    keep: Collection[str] = (),
    first: Mapping[str, int] | None = None,
) -> PackPlan:
    """Plan the bytes that this rank publishes: the first replica of each shard, tied tensors once, and no empty shards.

    Tensors are cast to `dtype`, except for those in `keep` (buffers). `first` is the lowest rank that has a tensor of each
    name; 0 for missing ones.

    Raises:
        ValueError: A tensor is a partial sum or has an unsupported placement.
    """
    entries: list[ShardEntry] = []
    sources: list[tuple[str, Box | None]] = []
    start = 0
    for name in first_names(state):
        value = state[name]
        if not is_first_holder(value, rank, (first or {}).get(name, 0)):
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


def entry_view(arena: torch.Tensor, entry: ShardEntry) -> torch.Tensor:
    """Return an entry as a view of a byte tensor."""
    dtype = TORCH_DTYPES[entry.dtype]
    num_bytes = entry.box.numel * dtype.itemsize
    return arena[entry.byte_offset : entry.byte_offset + num_bytes].view(dtype).view(entry.box.shape)


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""torch's dtypes by their string form, such as `torch.bfloat16`."""


class LiveState:
    """Cache of `module.state_dict(keep_vars=True)`, refreshed only after the module has replaced a tensor.

    The set of submodules must not change. State-dict hooks may rename tensors but not create them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots = [slot for part in module.modules() for slot in (part._parameters, part._buffers)]
        self._held: list[torch.Tensor | None] = []
        self._tensors: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the module's own parameters and persistent buffers, by name. Callers must not write to them."""
        held = [value for slot in self._slots for value in slot.values()]
        if not self._tensors or not identical(held, self._held):
            state = self._module.state_dict(keep_vars=True)
            self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            assert {*map(id, self._tensors.values())} <= {*map(id, held)}, "a state-dict hook created a tensor"
            self._held = held
        return self._tensors


class TensorFingerprint:
    """Record of the identity and memory of named tensors. While it matches, their views and addresses stay valid."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | PartOf]) -> None:
        self._names, self._tensors = list(tensors), list(tensors.values())
        self._locals = [local_part(tensor) for tensor in self._tensors]
        self._wrappers = [pair for pair in zip(self._tensors, self._locals, strict=True) if pair[0] is not pair[1]]
        # Aliases keep the current memory, shapes and strides. `is_set_to` compares them without allocating. Publications run
        # with cold caches, where Python objects for every shape and stride of every tensor would cost half a millisecond.
        self._aliases = [local.detach() for local in self._locals]
        self._dtypes = [local.dtype for local in self._locals]

    def matches(self, tensors: Mapping[str, torch.Tensor | PartOf]) -> bool:
        """Return whether these are the recorded tensors, with the same memory, shapes, strides and dtypes."""
        return (
            list(tensors) == self._names
            and identical(tensors.values(), self._tensors)
            and all(local_part(value) is local for value, local in self._wrappers)
            and all(map(torch.Tensor.is_set_to, self._locals, self._aliases))
            and [local.dtype for local in self._locals] == self._dtypes
        )


def identical(some: Collection[object], others: Collection[object]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to fill, described by the blocks that this reader holds."""

    global_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """A copy from a slice of a box that a trainer rank published to a slice of a target's local tensor."""

    name: str
    rank: int
    entry: ShardEntry
    source: tuple[slice, ...]
    destination: tuple[slice, ...]


def plan_copies(layouts: Sequence[ByteLayout], targets: Mapping[str, Target]) -> tuple[SliceCopy, ...]:
    """Return copies that write each element of every target once; raise `WeightMismatchError` if the layouts do not fit."""
    published: dict[str, list[tuple[int, ShardEntry]]] = defaultdict(list)
    for layout in layouts:
        for entry in layout.entries:
            published[entry.name].append((layout.rank, entry))
    needed = {name for name, target in targets.items() if prod(target.global_shape)}  # empty tensors are not published
    missing, extra = sorted(needed - published.keys()), sorted(published.keys() - targets.keys())
    if missing or extra:
        raise WeightMismatchError(f"tensors not published: {missing}; tensors published but not expected: {extra}")
    copies = []
    for name, target in targets.items():
        for _, entry in published[name]:
            if (entry.global_shape, entry.dtype) != (target.global_shape, target.dtype):
                raise WeightMismatchError(
                    f"{name}: published as {entry.dtype}{list(entry.global_shape)}, "
                    f"expected as {target.dtype}{list(target.global_shape)}"
                )
        for piece in target.pieces:
            covered: list[Box] = []
            for rank, entry in published[name]:
                common = entry.box.intersection(piece.box)
                if common is not None:
                    covered.append(common)
                    inside = common.moved(piece.box.offset, piece.local.offset)
                    copies.append(SliceCopy(name, rank, entry, common.slices_within(entry.box), inside.slices))
            _check_covered(name, piece.box, covered)
    return tuple(copies)


def _check_covered(name: str, wanted: Box, covered: Sequence[Box]) -> None:
    """Raise `WeightMismatchError` unless boxes within another box fill it exactly: no overlap, and their sizes add up."""
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


_WORD = 8
_BLOCK_WORDS = 1 << 13
_STRIDE_WORDS = 1 << 15
_PAGE_WORDS = 1 << 9
_NUM_PAGES = _STRIDE_WORDS // _PAGE_WORDS


def digest(data: torch.Tensor, verify: "Verify", version: int) -> Digest | None:
    """Compute the checksum of a byte tensor; return None if `verify` is `off`.

    A checksum adds up the 64-bit words of each block and hashes the sums. It detects a changed bit, swapped blocks, and a block
    from another version. docs/weights.md lists its cost.

    `sampled` covers one 4 KiB page of every 256 KiB block and the incomplete block at the end. The page changes with the
    version.
    """
    if verify == "off":
        return None
    if verify == "full":
        return Digest("full", _checksum(data, _BLOCK_WORDS, slice(None)))
    page = version % _NUM_PAGES
    words = slice(page * _PAGE_WORDS, (page + 1) * _PAGE_WORDS)
    return Digest(f"sampled {page}", _checksum(data, _STRIDE_WORDS, words))


def _checksum(data: torch.Tensor, block_words: int, words: slice) -> int:
    """Return the CRC-32 of the word sums of each block, and of the bytes after the last complete block."""
    contents = data.numpy()
    num_blocks = contents.size // (block_words * _WORD)
    end = num_blocks * block_words * _WORD
    blocks = contents[:end].view(np.uint64).reshape(num_blocks, block_words)
    sums = blocks[:, words].sum(axis=1, dtype=np.uint64)
    return zlib.crc32(contents[end:].tobytes(), zlib.crc32(sums.tobytes()))
