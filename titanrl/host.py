"""Identity of the host of this process."""

import functools
import os
from pathlib import Path

HOST_FOLDER = "TITANRL_HOST_FOLDER"
"""Variable with a folder of the run's processes on one host, which only this user can enter; unset where a run has one host.

Hosts that share a machine, such as emulated ones, have different folders."""


@functools.cache
def host_id() -> str:
    """Return an id shared by the processes that can open each other's descriptors: boot, process namespace and folder."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get(HOST_FOLDER, '')}".rstrip()


def process_start(pid: str) -> int:
    """Return the start of a process in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
