"""Detect failures of torch's distributed checkpointing: errors, and tensor elements that loading did not write.

Tensors are filled with a marker value before loading and searched for it afterwards. A comparison of tensor names would miss
a slice of a tensor that no file contains. The marker is a NaN with a payload that no arithmetic produces, so checkpoints that
contain NaNs can be loaded.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titanrl.base.errors import TitanRLError, describe
from titanrl.weights.layout import local_part

NEARLY_FULL = 64 << 20
"""Free space in bytes below which an error message mentions the free space."""

MAX_TEXT = 300
"""Maximum length of the description of the cause, in characters."""


class StorageError(TitanRLError):
    """Files of the trainer cannot be written or read; the message names the folder and the cause."""


@contextmanager
def storage_errors(what: str, folder: Path) -> Iterator[None]:
    """Convert I/O errors and torch's `CheckpointException` in the body to `StorageError`.

    torch raises `CheckpointException` on all ranks if any rank fails. It is not a subclass of `Exception`, so it would kill the
    actor, and its message begins with a traceback.

    Args:
        what: Action for the message, such as `save a checkpoint`.
        folder: Folder that is written or read.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise StorageError(f"cannot {what} in {folder}: {describe(cause)[:MAX_TEXT]} on rank {rank}{_free(folder)}") from error
    except (OSError, RuntimeError) as error:  # torch's archive writer raises RuntimeError
        raise StorageError(f"cannot {what} in {folder}: {describe(error)[:MAX_TEXT]}{_free(folder)}") from error


def on_first_rank(what: str, folder: Path, action: Callable[[], None]) -> None:
    """Run an action on the first rank, and raise its `StorageError` on every rank, so that no rank waits for a failed one.

    This is a collective. The other ranks return when the action has ended.

    Args:
        what: Action for the message; see `storage_errors`.
        folder: Folder that is written or read.
        action: Function that writes or reads files.
    """
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            with storage_errors(what, folder):
                action()
        except StorageError as error:
            failed = [str(error)]
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise StorageError(failed[0])


def _free(folder: Path) -> str:
    """Return a remark on the free space of the folder's file system if it is nearly full, else an empty string."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = NEARLY_FULL if existing is None else shutil.disk_usage(existing).free
    return f" ({free:,} bytes are free there)" if free < NEARLY_FULL else ""


MARKS = {torch.float32: (torch.int32, 0x7FA5A5A5), torch.bfloat16: (torch.int16, 0x7FA5)}
"""Integer dtype and bit pattern of the marker, by dtype of the weights."""


def mark(state: Mapping[str, Tensor]) -> None:
    """Fill this rank's shard of each tensor with the marker. Tensors of other dtypes are skipped."""
    for tensor in state.values():
        if tensor.dtype in MARKS:
            kind, bits = MARKS[tensor.dtype]
            local_part(tensor.detach()).view(kind).fill_(bits)


def unwritten(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the tensors whose shard on this rank still contains the marker."""
    found = []
    for name, tensor in state.items():
        kind, bits = MARKS.get(tensor.dtype, (None, 0))
        if kind is not None and (local_part(tensor.detach()).view(kind) == bits).any():
            found.append(name)
    return sorted(found)
