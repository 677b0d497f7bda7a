"""Locks on run directories, so that only one process at a time uses a directory."""

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path

from titanrl.base.control import LOCK_FILE
from titanrl.base.files import naming, why_no_folder, why_not_writable
from titanrl.base.ownership import ALLOW, is_only_user, open_regular, own_flaw
from titanrl.config.errors import ConfigError

_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Lock on a run directory. The kernel releases it when the process exits for any reason."""

    def __init__(self, path: Path) -> None:
        """Lock an existing directory. Raise `BlockingIOError` if another process holds the lock."""
        self.path = path
        self._file = os.fdopen(_open_lock(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems cannot lock; runs with different names are still safe
                self._file.close()
                raise
        with naming(path):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()} {socket.gethostname()}\n")
            self._file.flush()

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._file.close()

    def abandon(self) -> None:
        """Release the lock on a new directory without a run. Delete the directory, and its parent if that is then empty."""
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        self.release()
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()
            self.path.parent.rmdir()


def claim_new_run(wanted: Path) -> RunLock:
    """Create and lock `wanted`; if it contains a run or is locked, use `wanted-<n>` with the next free number.

    Raise `ConfigError` if the directory exists and another user could change it, or it cannot be locked.
    """
    path = wanted
    while (lock := _claim_without_run(path)) is None:
        taken = [re.fullmatch(re.escape(wanted.name) + r"-(\d+)", path.name) for path in wanted.parent.iterdir()]
        path = wanted.with_name(f"{wanted.name}-{max([1, *(int(match[1]) for match in taken if match)]) + 1}")
    return lock


def claim_run(run_dir: Path) -> RunLock:
    """Lock the directory of a run that is to be resumed. Raise `ConfigError` if it is still active or cannot be used."""
    _check_folder(run_dir)
    try:
        return RunLock(run_dir)
    except BlockingIOError:
        raise _still_active(run_dir) from None


def check_idle(run_dir: Path) -> None:
    """Raise `ConfigError` if a process holds the lock of a run directory, as `claim_run` does, but without writing to it."""
    _check_folder(run_dir)
    with contextlib.suppress(FileNotFoundError):
        descriptor = _open_lock(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _still_active(run_dir) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        finally:
            os.close(descriptor)


def check_new_run(wanted: Path) -> None:
    """Raise `ConfigError` if `claim_new_run` could not lock a directory, without creating or writing anything."""
    if not _is_taken(wanted) and wanted.is_dir():
        _check_owner(wanted)
        with contextlib.suppress(FileNotFoundError):
            os.close(_open_lock(wanted, os.O_RDONLY))


def _open_lock(run_dir: Path, flags: int) -> int:
    """Open the lock file; it must be a regular file."""
    try:
        return open_regular(run_dir / LOCK_FILE, flags)
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise ConfigError(
            f"output_dir: {LOCK_FILE} in the directory of a run must be a regular file (got {run_dir / LOCK_FILE}). "
            "Delete it, or choose another output_dir or name."
        ) from None


def _is_taken(path: Path) -> bool:
    """Return True if a path holds a run, or is no directory."""
    return holds_run(path) or (os.path.lexists(path) and not path.is_dir())


def _check_owner(run_dir: Path) -> None:
    if not is_only_user() and (found := own_flaw(run_dir)):
        raise ConfigError(
            f"output_dir: other users must not be able to replace the files of a run ({found}). Choose another output_dir or "
            f"name, or set {ALLOW}=1 if you are the only user of this machine or container."
        )


def _check_folder(run_dir: Path) -> None:
    if why := why_no_folder(run_dir):
        raise ConfigError(f"--resume: the run directory {why} (got {run_dir}). Give the directory of an earlier run.")
    if why := why_not_writable(run_dir):
        raise ConfigError(
            f"--resume: a run continues in its directory, which must be writable, but {why} (got {run_dir}). "
            "Correct the permissions, or copy the directory."
        )


def _still_active(run_dir: Path) -> ConfigError:
    owner = (run_dir / LOCK_FILE).read_text(encoding="utf-8").split()
    who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
    return ConfigError(
        f"--resume: the run is still active in {who} (got {run_dir}). Wait until it has finished, or interrupt it."
    )


def holds_run(path: Path) -> bool:
    """Return True if a run was started in a directory."""
    return any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))


def _claim_without_run(path: Path) -> RunLock | None:
    """Lock a directory; return None if it contains a run, is locked, or is no directory."""
    if _is_taken(path):
        return None
    if path.is_dir():
        _check_owner(path)
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(BlockingIOError):
        lock = RunLock(path)
        if not holds_run(path):  # a run may have started and finished in the meantime
            return lock
        lock.release()
    return None
