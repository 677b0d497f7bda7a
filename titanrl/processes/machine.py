"""This machine: its identity, processes and CPU cores. Processes are bound to cores before any library starts threads."""

import functools
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOST_FOLDER = "TITANRL_HOST_FOLDER"
"""Environment variable with the run's folder on this host, which only this user can enter; unset if the run has one host.

Emulated hosts that share a machine have different folders."""
CORES = "TITANRL_CORES"
"""Environment variable with the cores of a new process, from `Cores.text`; unset if the process is not bound."""
THREADS = "TITANRL_THREADS"
"""Environment variable with the number of cores that a process can use while it works, because no other process of the run
needs them then; 1 if unset."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of processes of the same role on one host.

    Example: `Cores(choice="split", first=2, count=4)` for the third and the fourth of four processes
    """

    choice: str
    """`split`, `numa`, or core numbers, such as `0-3,8`."""
    first: int
    """Index of the first of these processes among the role's processes on the host."""
    count: int
    """Number of the role's processes on the host."""

    def text(self, number: int) -> str:
        """Return the value of `CORES` for one of these processes."""
        return f"{self.choice} {self.first + number} {self.count}"


def numbers(text: str) -> set[int]:
    """Parse a Linux CPU list, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def chosen_cores(text: str, usable: Sequence[int], nodes: Sequence[set[int]]) -> set[int]:
    """Return the cores of a process with this value of `CORES`, of the usable ones in order; empty if none is usable."""
    choice, *place = text.split()
    index, count = map(int, place)
    if choice == "split":
        share = len(usable) / count
        first = min(int(index * share), len(usable) - 1)
        return set(usable[first : max(first + 1, int((index + 1) * share))])
    if choice == "numa":
        own = [node & set(usable) for node in nodes if node & set(usable)]
        return own[index * len(own) // count] if own else set()
    return numbers(choice) & set(usable)


def numa_nodes() -> list[set[int]]:
    """Return the cores of each NUMA node of this machine; empty if the kernel does not report them."""
    files = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    return [numbers(file.read_text()) for file in files]


def bind(text: str) -> None:
    """Bind this process, and all threads and processes that it starts, to its cores; do nothing if none is usable."""
    cores = chosen_cores(text, sorted(os.sched_getaffinity(0)), numa_nodes())
    if cores:
        os.sched_setaffinity(0, cores)


@functools.cache
def host_id() -> str:
    """Return an id shared by processes that can open each other's file descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get(HOST_FOLDER, '')}".rstrip()


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as T if a signal has stopped it; empty if it is dead."""
    try:
        return chr(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][0])
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_exited(pidfd: int) -> bool:
    """Return True if the process of a pidfd has exited."""
    exit_poll = select.poll()
    exit_poll.register(pidfd, select.POLLIN)
    return bool(exit_poll.poll(0))


def process_start(pid: str) -> int:
    """Return the start time of a process in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
