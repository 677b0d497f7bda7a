"""Temporary folders that are deleted with their process, even after a kill."""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from titanrl.base.ownership import is_private, open_regular

PREFIX = "titanrl-"
_LOCK = "owner.lock"
_MAX_PATH = 107
"""Longest path of a Unix socket, in bytes."""
_MAX_APPENDED = 44
"""Bytes that `private_sockets` and Monarch append to the path of the folder's parent."""
_FOLDERS: "set[TemporaryFolder]" = set()


class TemporaryFolder:
    """A folder that only this user can enter, deleted when the process exits.

    If the process is killed, the folder is deleted when another `TemporaryFolder` is created in the same parent.
    """

    def __init__(self, parent: str | None = None) -> None:
        """Create the folder, in the system's temporary folder by default."""
        parent = parent or tempfile.gettempdir()
        # Delete folders whose owner was killed. Other users can create names in the parent, also links, FIFOs and folders.
        for lock in Path(parent).glob(f"{PREFIX}*/{_LOCK}"):
            if not is_private(lock.parent):
                continue
            with contextlib.suppress(OSError), open(open_regular(lock, os.O_RDONLY)) as file:  # still in use
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.path / f"{_LOCK}.new").open("w")  # the kernel releases the lock even after a kill
        with contextlib.suppress(OSError):  # on a file system without locks, the folder is not deleted after a kill
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / f"{_LOCK}.new").rename(self.path / _LOCK)
        _FOLDERS.add(self)

    def delete(self) -> None:
        """Delete the folder and its content. A second call does nothing."""
        _FOLDERS.discard(self)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def private_folder() -> TemporaryFolder:
    """Create a folder that only this user can enter, with a path short enough for Unix sockets in it."""
    usual = tempfile.gettempdir()
    parent = usual if len(os.fsencode(usual)) + _MAX_APPENDED <= _MAX_PATH else "/tmp"
    return TemporaryFolder(parent)


@atexit.register
def delete_all() -> None:
    """Delete all temporary folders of this process. Call it explicitly before an exit without exit handlers."""
    for folder in tuple(_FOLDERS):
        folder.delete()
