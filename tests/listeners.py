"""Helpers that find the sockets on which processes listen, and those that other users or machines can reach."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.foreign import as_nobody


def family(pid: int) -> set[int]:
    """Return a process and all its descendants; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {pid} | {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set()


def listeners(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which processes listen: `tcp 127.0.0.1:5000`, `unix /path` or `unix @name`."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor.path).removeprefix("socket:[").removesuffix("]"))
    return {address for inode, address in (*_unix(), *_tcp()) if inode in inodes}


def exposed(pids: Iterable[int]) -> set[str]:
    """Return the listeners reachable from other machines, or from every user of this machine by abstract name."""
    found = set()
    for listener in listeners(pids):
        kind, _, address = listener.partition(" ")
        if kind == "unix":
            found |= {listener} if address.startswith("@") else set()
        elif not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback:
            found.add(listener)
    return found


def reachable_by_nobody(pids: Iterable[int]) -> set[str]:
    """Return the Unix sockets to which another user's process can connect. Only root can start such a process."""
    names = [listener.removeprefix("unix ") for listener in listeners(pids) if listener.startswith("unix ")]
    with as_nobody(lambda: "\n".join(name for name in names if _connects(name)).encode()) as found:
        return set(found.read().decode().split())


def _connects(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(name.replace("@", "\0", 1) if name.startswith("@") else name)
        return True
    return False


def _unix() -> list[tuple[str, str]]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]]
    return [(row[6], f"unix {row[7]}") for row in rows if len(row) > 7 and int(row[3], 16) & 0x10000]


def _tcp() -> list[tuple[str, str]]:
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A":  # TCP_LISTEN
                address, port = row[1].split(":")
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                found.append((row[9], f"tcp {ipaddress.ip_address(b''.join(words))}:{int(port, 16)}"))
    return found
