"""Identity of this process's host."""

import functools
import os
from pathlib import Path

HOST_FOLDER = "TITANRL_HOST_FOLDER"
"""Environment variable with the run's folder on this host, which only this user can enter; unset if the run has one host.

Emulated hosts that share a machine have different folders."""


@functools.cache
def host_id() -> str:
    """Return an id shared by processes that can open each other's file descriptors.

    The id combines the boot id, the PID namespace and the host folder.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get(HOST_FOLDER, '')}".rstrip()


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as T if a signal has stopped it; empty if it is dead."""
    try:
        return chr(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][0])
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_start(pid: str) -> int:
    """Return the start time of a process in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
