"""Ownership of folders, files and sockets: what another user of this machine could have made, or could change.

Names in a folder that others can write, such as the system's temporary folder, may belong to anyone. Root and this user are
trusted. Root can do everything anyway.
"""

import errno
import functools
import grp
import os
import pwd
import secrets
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

ALLOW = "TITANRL_ALLOW_OPEN_SOCKETS"
"""Environment variable that declares this user the only one of the machine or container, which permits a start despite it."""

SUFFIX = "MONARCH_LOG_SUFFIX"
"""Environment variable with a suffix of the name of Monarch's log."""

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_MAX_LINKS = 40
_OVERFLOW = 65534
"""User id that the kernel shows for users outside a user namespace."""


def is_only_user() -> bool:
    """Return True if the environment declares that this machine or container has no other users."""
    return os.environ.get(ALLOW) == "1"


def flaw(path: Path, *, is_shared: bool = False) -> str:
    """Return how another user could change the folder or file that a path names; empty if only this user and root can.

    Every folder and link on the way is checked too, because its owner decides where the path leads. A path that does not exist
    has a flaw if another user could create it.

    Args:
        path: Folder or file.
        is_shared: True for a folder like /tmp, in which everyone may create names if only their owners can remove them.
    """
    pending, place, num_links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    found = _flaw_of(place, os.lstat(place), is_last=not pending and not is_shared)
    while pending and not found:
        name = pending.pop()
        if name == "..":
            place = place.parent
            continue
        entry = place / name
        try:
            status = os.lstat(entry)
            target = os.readlink(entry) if stat.S_ISLNK(status.st_mode) else None
        except FileNotFoundError:
            return _flaw_of(place, os.lstat(place), is_last=True)
        except OSError as error:
            return f"{entry} cannot be examined ({error.strerror})"
        if target is None:
            place, found = entry, _flaw_of(entry, status, is_last=not pending and not is_shared)
            continue
        num_links += 1
        if status.st_uid not in _trusted() | _outside():
            return f"{entry} is a link of {_user(status.st_uid)}"
        if num_links > _MAX_LINKS:
            return f"{entry} is a loop of links"
        place = Path("/") if target.startswith("/") else place
        pending += reversed([part for part in Path(target).parts if part != "/"])
    return found


def own_flaw(folder: Path) -> str:
    """Return the flaw of an existing folder itself, where the user chose its place and trusts the members of its group."""
    status = folder.stat()
    if status.st_uid not in _trusted():
        return f"{folder} belongs to {_user(status.st_uid)}"
    return f"{folder} can be written by every user" if status.st_mode & stat.S_IWOTH else ""


def claim_folder(folder: Path) -> str:
    """Create a folder of mode 0700 unless it exists; return its flaw as in `flaw`, empty if it has none."""
    missing = [place for place in (folder.absolute(), *folder.absolute().parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        try:
            os.mkdir(place, 0o700)
        except FileExistsError:  # another process was faster; the owner is checked below
            continue
        except OSError as error:
            return f"{place} cannot be created ({error.strerror})"
    return flaw(folder)


def is_private(folder: Path) -> bool:
    """Return True for a folder of mode 0700 that belongs to this user, and is no link."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def protect_monarch_log(parent: Path = Path("/tmp")) -> None:
    """Keep other users from choosing the file to which torchmonarch 0.7.0 appends its log.

    Call this before Monarch is imported. The path of the log, `/tmp/<user>/monarch_log.log` (`parent` is another folder in
    tests), cannot be changed, except for a suffix. If the folder is not this user's, the suffix is a random one, for which no
    user can have placed a link.
    """
    if SUFFIX in os.environ:
        return
    try:
        is_safe = not claim_folder(parent / pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:  # the user id has no name, as in some containers
        is_safe = False
    if not is_safe:
        os.environ[SUFFIX] = secrets.token_hex(16)


def open_regular(path: str | Path, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """Open a file whose name another user may have chosen, and return its descriptor.

    Raises:
        OSError: It is a link, a FIFO or anything else that is no regular file. The call does not wait.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def is_own_peer(connection: "socket.socket | TransportSocket") -> bool:
    """Return True if a process of this user is at the other end of a connected Unix socket.

    For a client, the kernel answers with the user who started to listen.
    """
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def receive_own(messages: socket.socket, size: int) -> bytes | None:
    """Receive a datagram from a Unix socket with the option `SO_PASSCRED`; return None if another user sent it."""
    data, ancillary, _, _ = messages.recvmsg(size, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
            return data if user == os.geteuid() else None
    return None


def _flaw_of(place: Path, status: os.stat_result, *, is_last: bool) -> str:
    """Return the flaw of one existing folder or file. Everyone may write a sticky folder on the way, but not the last one."""
    trusted = _trusted() if is_last else _trusted() | _outside()
    if status.st_uid not in trusted:
        return f"{place} belongs to {_user(status.st_uid)}"
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not is_last:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"{place} can be written by every user"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"{place} can be written by the group {_group(status.st_gid)}"
    return ""


def _trusted() -> set[int]:
    return {0, os.geteuid()}


@functools.cache
def _outside() -> set[int]:
    """Return the user id that the kernel shows for users outside this user namespace, such as root; empty if there are none."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return set() if any(first <= _OVERFLOW < first + count for first, _, count in ranges) else {_OVERFLOW}


@functools.cache
def _is_own_group(group: int) -> bool:
    """Return True for a group that only this user or root is in, by the convention that every user has such a group."""
    if group == 0:
        return True
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
