"""Fixed payload layouts: columns of arrays and tensors in one memory-mapped file."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from titanrl.replay.columns import Columns, Path, is_tensor, leaf_name, leaves_of, single

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Field:
    """One column.

    Example: `Field(path=("obs", "image"), dtype=np.dtype("uint8"), shape=(84, 84), row_bytes=7056, is_tensor=False)`
    """

    path: Path
    """Nested keys of the column."""
    dtype: Any
    """Element type, from numpy or torch."""
    shape: tuple[int, ...]
    """Shape of an item."""
    row_bytes: int
    """Bytes per item."""
    is_tensor: bool
    """True for a torch tensor, False for a numpy array."""


Layout = tuple[Field, ...]


def layout_of(example: Any) -> Layout:
    """Derive the layout from one example item.

    Raises:
        ValueError: A leaf is not an array, a tensor or a number, or it has no elements.
    """
    fields = []
    for path, leaf in leaves_of(single(example)):
        if isinstance(leaf, list) or (not is_tensor(leaf) and leaf.dtype == object):
            raise ValueError(
                f"{leaf_name(path)}: a shared buffer stores arrays, tensors and numbers (got {type(leaf[0]).__name__}). "
                "Convert it, or use PrioritizedReplay in one process."
            )
        row_bytes = int(leaf.nbytes)
        if not row_bytes:
            raise ValueError(f"{leaf_name(path)}: an item has no elements (got shape {list(leaf.shape[1:])}). Remove it.")
        fields.append(Field(path, leaf.dtype, tuple(leaf.shape[1:]), row_bytes, is_tensor(leaf)))
    return tuple(fields)


def file_size(layout: Layout, num_rows: int) -> int:
    """Return the size in bytes of a file with `num_rows` rows."""
    return sum(-(-field.row_bytes * num_rows // ALIGNMENT) * ALIGNMENT for field in layout)


def template(layout: Layout) -> Columns:
    """Return columns without rows, for validating payloads."""
    return Columns(0, {field.path: _column(field, bytearray(field.row_bytes), 1, 0)[:0] for field in layout})


def map_file(path: FilePath, layout: Layout, num_rows: int) -> Columns:
    """Map a file into memory. All processes that map it share the rows."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), file_size(layout, num_rows))
    return Columns(num_rows, dict(_columns(layout, memory, num_rows)))


def create_file(path: FilePath, size: int) -> None:
    """Create a file and allocate its disk space, so that writes to the mapped memory never fail.

    Raises:
        ValueError: The folder has not enough space.
    """
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ValueError(
                f"folder: no room for a shard of {size:,} bytes (got {path.parent}: {error.strerror}). "
                "Use a folder on another disk, a smaller capacity, or smaller items."
            ) from None


def _columns(layout: Layout, memory: mmap.mmap, num_rows: int) -> Iterator[tuple[Path, Any]]:
    offset = 0
    for field in layout:
        yield field.path, _column(field, memory, num_rows, offset)
        offset += file_size((field,), num_rows)


def _column(field: Field, memory: Any, num_rows: int, offset: int) -> Any:
    count = num_rows * int(np.prod(field.shape, dtype=np.int64))
    if field.is_tensor:
        import torch

        return torch.frombuffer(memory, dtype=field.dtype, count=count, offset=offset).reshape(num_rows, *field.shape)
    return np.frombuffer(memory, field.dtype, count, offset).reshape(num_rows, *field.shape)
