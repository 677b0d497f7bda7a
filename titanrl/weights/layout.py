"""A rank's state dict as boxes, and boxes as bytes.

FSDP and TP shards are contiguous blocks of the whole tensor; what is not (a lone `_StridedShard`, `Partial`) is refused
rather than guessed, because torch reports a plausible but wrong offset for it.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from titanrl.weights.manifest import Box, ShardEntry


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What this rank publishes of one tensor."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box


def local_shards(state: Mapping[str, torch.Tensor], rank: int) -> Iterator[LocalShard]:
    """The shards this rank must publish: replicas only from their first holder, tied tensors once, empty shards not at all.

    Raises:
        ValueError: a placement whose local part is not one block.
    """
    seen: set[int] = set()
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.data_ptr() in seen and local.numel():
            continue
        seen.add(local.data_ptr())
        box = published_box(name, value, rank)
        if box is not None and box.numel:
            yield LocalShard(name, local, tuple(value.shape), box)


def published_box(name: str, value: torch.Tensor, rank: int) -> Box | None:
    """Which block of a tensor this rank publishes; None if another rank publishes it."""
    if not isinstance(value, DTensor):
        return Box((0,) * value.ndim, tuple(value.shape)) if rank == 0 else None
    check_contiguous(name, value)
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    if any(isinstance(placement, Replicate) and index for placement, index in zip(value.placements, coordinate, strict=True)):
        return None
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Box(tuple(offset), tuple(shape))


def check_contiguous(name: str, value: DTensor) -> None:
    """Refuse placements whose local part is not one block of the whole tensor."""
    for position, placement in enumerate(value.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"{name}: cannot publish a partial sum ({value.placements})")
        if isinstance(placement, _StridedShard):
            split_later = Shard(placement.dim) in value.placements[position + 1 :]
            if not split_later:
                raise ValueError(f"{name}: cannot publish interleaved rows ({value.placements})")


def num_packed_bytes(shards: Sequence[LocalShard], dtype: torch.dtype) -> int:
    """Bytes that `pack` fills."""
    return sum(shard.box.numel * dtype.itemsize for shard in shards)


def pack(shards: Sequence[LocalShard], arena: torch.Tensor, dtype: torch.dtype) -> tuple[ShardEntry, ...]:
    """Cast shards to `dtype` straight into a byte tensor, one after another; returns what lies where."""
    entries, start = [], 0
    for shard in shards:
        view = entry_view(arena, start, shard.box.shape, dtype)
        view.copy_(shard.tensor)
        entries.append(ShardEntry(shard.name, str(dtype), shard.global_shape, shard.box, start))
        start += shard.box.numel * dtype.itemsize
    return tuple(entries)


def entry_view(arena: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies at a byte offset of an arena."""
    num_bytes = Box((0,) * len(shape), shape).numel * dtype.itemsize
    return arena[start : start + num_bytes].view(dtype).view(shape)


def digest(arena: torch.Tensor) -> int:
    """CRC-32 of an arena's bytes."""
    contents: Any = arena.numpy()  # a buffer, which numpy's types only say from Python 3.12 on
    return zlib.crc32(contents)
