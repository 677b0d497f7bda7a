"""Temporary folders that belong to a process."""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "titanrl-"
_LOCK = "owner.lock"
_FOLDERS: "set[TemporaryFolder]" = set()


class TemporaryFolder:
    """A folder that only this user can enter, deleted when the process exits.

    The folder of a process that was killed is deleted when another one is made beside it.
    """

    def __init__(self, parent: str | None = None) -> None:
        """Make the folder.

        Args:
            parent: Folder to make it in; the system's by default.
        """
        parent = parent or tempfile.gettempdir()
        _delete_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.path / f"{_LOCK}.new").open("w")  # the kernel releases it when the process ends, however it ends
        with contextlib.suppress(OSError):  # a file system without locks: the folder is not deleted after a kill
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / f"{_LOCK}.new").rename(self.path / _LOCK)
        _FOLDERS.add(self)

    def delete(self) -> None:
        """Delete the folder with everything in it. A second call does nothing."""
        _FOLDERS.discard(self)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


@atexit.register
def delete_all() -> None:
    """Delete every folder of this process; for programs that exit without exit handlers."""
    for folder in tuple(_FOLDERS):
        folder.delete()


def _delete_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:  # of another user, or in use
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
