"""Temporary folders that are deleted with their process, even after a kill; and private Unix sockets for Monarch in one.

Monarch executes whatever it receives, and torchmonarch 0.7.0 does not authenticate connections. It binds its sockets in Linux's
abstract namespace, which has no permissions, so every user of the machine can list the names and connect. No option changes
that. `private_sockets` therefore replaces the function `bind` for Monarch's library, and turns each abstract name into a file
in a folder that only this user can enter. Monarch asks the kernel for the name of a bound socket, so all processes then connect
to the file. CPython fixed the same vulnerability (CVE-2022-42919) by also using files.

This module imports neither Monarch nor numpy before `private_sockets` is used, because templates import it, too.
"""

import atexit
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import platform
import re
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from titanrl.base.errors import TitanRLError
from titanrl.base.ownership import ALLOW, is_only_user, is_private, open_regular

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


# Monarch's sockets

_SLOT_TYPES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
"""Relocation types (GLOB_DAT, JUMP_SLOT) by machine, whose target holds the address of an imported function."""
_SHT_RELA = 4  # type of an ELF section with relocations
_LISTENING = 0x10000  # flag __SO_ACCEPTCON in /proc/net/unix
_CHOSEN = re.compile(r"@[A-Za-z0-9]{24}")  # abstract names that Monarch chooses
_LIBC = ctypes.CDLL(None, use_errno=True)
_BIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)


class OpenSocketsError(TitanRLError):
    """Other users of this machine could connect to the run's processes, and thus execute code as this user."""


_installed: "list[tuple[ctypes._FuncPointer, TemporaryFolder]]" = []


@contextmanager
def private_sockets() -> Iterator[Path]:
    """Replace Monarch's abstract sockets with private files. Start this process's Monarch host in the body.

    Yield the folder of the sockets, which has mode 0700 and is deleted when the process exits. Raise `OpenSocketsError` if
    other users could connect, unless TITANRL_ALLOW_OPEN_SOCKETS permits that.
    """
    if not _installed:
        from monarch import _rust_bindings

        folder = private_folder()
        replacement = _BIND(partial(_bind_in, folder.path, itertools.count()))
        try:
            _replace_bind(Path(_rust_bindings.__file__), replacement)
        except OpenSocketsError as error:
            _refuse_if_shared(str(error))
        _installed.append((replacement, folder))  # until the process exits, because the library calls it
    path = _installed[0][1].path
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(path)  # where Monarch creates the folder of its other sockets, which are files
    try:
        yield path
    finally:
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before
    if names := abstract_listeners():
        _refuse_if_shared(f"the socket {names[0]} has no file")


def _bind_in(folder: Path, numbers: Iterator[int], descriptor: int, address: int, length: int) -> int:
    """Bind a socket; if its name is abstract, bind it to a new file in the folder instead."""
    raw = ctypes.string_at(address, length)
    if length > 2 and raw[2] == 0 and struct.unpack_from("=H", raw) == (socket.AF_UNIX,):
        raw = struct.pack("=H", socket.AF_UNIX) + os.fsencode(folder / f"{os.getpid()}-{next(numbers)}") + b"\0"
    return int(_LIBC.bind(descriptor, raw, len(raw)))


def _replace_bind(library: Path, replacement: "ctypes._FuncPointer") -> None:
    """Patch a loaded library so that it calls the replacement instead of the function `bind`."""
    offsets = import_slots(library, "bind")
    if not offsets:
        raise OpenSocketsError(f"{library.name} does not import the function bind")
    maps: list[tuple[int, int, int, str]] = []  # start, end, protection and file of each mapping
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, *others = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        bits = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
        protection = sum(bits.get(right, 0) for right in rights)
        maps.append((int(start, 16), int(end, 16), protection, others[3] if len(others) > 3 else ""))
    base = next((first for first, _, _, path in maps if path == str(library.resolve())), None)
    if base is None:
        raise OpenSocketsError(f"{library.name} is not loaded")
    for slot in (base + offset for offset in offsets):
        page = slot & -mmap.PAGESIZE
        protection = next(protection for first, last, protection, _ in maps if first <= slot < last)
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.c_void_p.from_address(slot).value = ctypes.cast(replacement, ctypes.c_void_p).value
        _protect(page, protection)


def abstract_listeners() -> list[str]:
    """Return the abstract socket names chosen by Monarch on which this process listens, as `@name`."""
    open_files = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            open_files.add(os.readlink(entry.path))
        except OSError:  # closed by another thread
            continue
    rows = (line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:])
    return [
        row[7]
        for row in rows
        if len(row) > 7 and _CHOSEN.fullmatch(row[7]) and int(row[3], 16) & _LISTENING and f"socket:[{row[6]}]" in open_files
    ]


def import_slots(library: Path, symbol: str) -> list[int]:
    """Return the slots of an ELF library that hold the address of an imported function, as offsets from its load address."""
    import numpy as np

    types = _SLOT_TYPES.get(platform.machine(), ())
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        headers, (size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)  # ELF64
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers + number * size) for number in range(count)]
        found = []
        for section in sections:
            if section[1] != _SHT_RELA or not section[6]:
                continue
            symbols, strings = sections[section[6]], sections[sections[section[6]][6]]
            relocations = np.frombuffer(data[section[4] : section[4] + section[5]], "<u8").reshape(-1, 3)
            for offset, info, _ in relocations[np.isin(relocations[:, 1] & 0xFFFFFFFF, types)].tolist():
                name = strings[4] + struct.unpack_from("<I", data, symbols[4] + 24 * (info >> 32))[0]
                if data[name : data.find(b"\0", name)] == symbol.encode():
                    found.append(offset)
    return found


def _protect(page: int, protection: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection):
        raise OpenSocketsError(f"mprotect: {os.strerror(ctypes.get_errno())}")


def _refuse_if_shared(reason: str) -> None:
    if not is_only_user():
        raise OpenSocketsError(
            f"every user of this machine could connect to the run's processes and execute code as you, because Monarch's "
            f"sockets cannot be made private ({reason}). If you are the only user of this machine or container, set {ALLOW}=1."
        )
