"""Ownership of folders, files and sockets: what another user of this machine could have made, or could change.

Names in a folder that others can write, such as the system's temporary folder, may belong to anyone. Root and this user are
trusted. Root can do everything anyway. In a user namespace, the kernel shows one id for root and all others who are not mapped
into it; folders of that id are trusted on the way to a path, except in folders in which everyone can create names.
"""

import errno
import functools
import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

ALLOW = "TITANRL_ALLOW_OPEN_SOCKETS"
"""Environment variable that declares this user the only one of the machine or container. If it is 1, a run starts although
other users could connect to its sockets, or change its caches, directory or cached model."""

SUFFIX = "MONARCH_LOG_SUFFIX"
"""Environment variable with a suffix of the name of Monarch's log."""
NO_LOG = "-" * 256
"""Suffix with which the name is too long for a file, so that torchmonarch 0.7.0 writes to stderr instead."""

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: process, user, group
_MAX_LINKS = 40
_OVERFLOW = 65534
"""User id that the kernel shows for all users outside a user namespace."""


def is_only_user() -> bool:
    """Return True if the environment declares that this machine or container has no other users."""
    return os.environ.get(ALLOW) == "1"


def flaw(path: Path, *, is_shared: bool = False) -> str:
    """Return how another user could change the folder or file that a path names; empty if only this user and root can.

    Every folder and link on the way is checked too, because its owner decides where the path leads. A path that does not exist
    has a flaw if another user could create it. With `is_shared`, everyone may create names in the folder, as in /tmp, if only
    their owners can remove them.
    """
    pending, place, num_links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    while not (found := _flaw_of(place, is_last=False)) and pending:
        name = pending.pop()
        entry = place.parent if name == ".." else place / name
        try:
            status = os.lstat(entry)
            target = os.readlink(entry) if stat.S_ISLNK(status.st_mode) else None
        except FileNotFoundError:
            return _flaw_of(place, is_last=True)
        except OSError as error:
            return f"{entry} cannot be examined ({error.strerror})"
        if target is None:
            place = entry
            continue
        num_links += 1
        if status.st_uid not in _trusted_in(place):
            return f"{entry} is a link of {_user(status.st_uid)}"
        if num_links > _MAX_LINKS:
            return f"{entry} is a loop of links"
        place = Path("/") if target.startswith("/") else place
        pending += reversed([part for part in Path(target).parts if part != "/"])
    return found or _flaw_of(place, is_last=not is_shared)


def own_flaw(folder: Path) -> str:
    """Return the flaw of an existing folder itself, where the user chose its place and trusts the members of its group."""
    status = folder.stat()
    if status.st_uid not in _trusted():
        return f"{folder} belongs to {_user(status.st_uid)}"
    return f"{folder} can be written by every user" if status.st_mode & stat.S_IWOTH else ""


def claim_folder(folder: Path) -> str:
    """Create a folder and its missing parents with mode 0700; return its flaw as in `flaw`, or why it is no folder."""
    missing = [place for place in (folder.absolute(), *folder.absolute().parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        try:
            os.mkdir(place, 0o700)
        except FileExistsError:  # another process was faster; the owner is checked below
            continue
        except OSError as error:
            return f"{place} cannot be created ({error.strerror})"
    return flaw(folder) or ("" if folder.is_dir() else f"{folder} is not a folder")


def is_private(folder: Path) -> bool:
    """Return True for a folder of mode 0700 that belongs to this user, and is no link."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def bind(at: tuple[str, int] | Path) -> socket.socket:
    """Bind a socket to an address and port, or to a path in a private folder, where it replaces one that is not listening.

    Raise `OSError` if the address cannot be used, and `ValueError` if other users can enter the folder.
    """
    if not isinstance(at, Path):
        return socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
    if not is_private(at.parent.resolve(strict=True)):
        raise ValueError(f"{at.parent}: only you may have access to the folder of a Unix socket. Run chmod 700 on it.")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.setblocking(False)
        if bound.connect_ex(str(at)) in (0, errno.EAGAIN):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(at))
        if at.is_socket():
            at.unlink()
        bound.setblocking(True)
        bound.bind(str(at))
        return socket.socket(fileno=bound.detach())


def protect_monarch_log(parent: Path = Path("/tmp")) -> None:
    """Keep other users from choosing the file to which torchmonarch 0.7.0 appends its log.

    Call this before Monarch is imported. The path of the log, `/tmp/<user>/monarch_log.log` (`parent` is another folder in
    tests), cannot be changed, except for a suffix. If the folder is not safe, the suffix is `NO_LOG`, also in child processes.
    """
    if SUFFIX in os.environ:
        return
    try:
        is_safe = not claim_folder(parent / pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:  # the user id has no name, as in some containers
        is_safe = False
    if not is_safe:
        os.environ[SUFFIX] = NO_LOG


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file whose name another user may have chosen; return its descriptor. Raise `OSError`, at once, for a FIFO."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
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


def _flaw_of(place: Path, *, is_last: bool) -> str:
    """Return the flaw of one folder or file. Everyone may write a sticky folder on the way, but not the last one."""
    try:
        status = os.lstat(place)
        trusted = _trusted() if is_last else _trusted_in(place.parent)
    except OSError as error:  # another user has removed it since it was found
        return f"{place} cannot be examined ({error.strerror})"
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
    return {0, os.geteuid()} - _outside()


def _trusted_in(folder: Path) -> set[int]:
    """Return the users whose names in a folder are trusted on the way."""
    return _trusted() if os.lstat(folder).st_mode & stat.S_IWOTH else _trusted() | _outside()


@functools.cache
def _outside() -> set[int]:
    """Return the id of users outside this user namespace, such as root; empty if all users are in it."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return set() if any(first <= _OVERFLOW < first + count for first, _, count in ranges) else {_OVERFLOW}


@functools.cache
def _is_own_group(group: int) -> bool:
    """Return True for the group of root or this user without other members, by the convention that each has such a group."""
    name = _name(os.geteuid())
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return group == 0
    return (group == 0 or entry.gr_name == name) and set(entry.gr_mem) <= {"root", name}


def _user(number: int) -> str:
    return f"the user {_name(number)}"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # the user id has no name, as in some containers
        return str(user)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
