"""Failures of torch's distributed checkpointing, as one line that names the folder and the cause."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from titanrl.errors import TitanRLError

NEARLY_FULL = 64 << 20
"""Free space in bytes below which a failure mentions it."""


class StorageError(TitanRLError):
    """Files of the trainer cannot be written or read; the text names folder and cause."""


@contextmanager
def storage_errors(what: str, folder: Path) -> Iterator[None]:
    """Raise `StorageError` in place of errors of the operating system, and of torch's exception for a failure on any rank.

    That exception is not an `Exception`, so it would end the actor, and its text begins with a traceback.

    Args:
        what: Action for the message, such as `save a checkpoint`.
        folder: Folder that is written or read.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise StorageError(f"cannot {what} in {folder}: {_cause(cause)} on rank {rank}{_free(folder)}") from error
    except (OSError, RuntimeError) as error:  # torch's writer of archives raises the latter
        raise StorageError(f"cannot {what} in {folder}: {_cause(error)}{_free(folder)}") from error


def _cause(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _free(folder: Path) -> str:
    """Return a remark on the free space of a folder's file system if there is little."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = NEARLY_FULL if existing is None else shutil.disk_usage(existing).free
    return f" ({free:,} bytes are free there)" if free < NEARLY_FULL else ""
