"""Sample the memory of the processes of a running command from /proc."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.victims import process_of

INTERVAL_S = 0.1
"""Seconds between two samples. The kernel's own peak per process misses nothing, but includes files and shared memory."""
SUM_GROWTH = 1.02
"""Growth of the resident memory after which the sum over all processes is taken again. The kernel walks all pages for it, and
the processes wait meanwhile when they need new ones."""


@dataclass(slots=True)
class Peak:
    """Peak private and shared memory of a role."""

    private_bytes: int = 0
    """Anonymous memory, including pages still shared with the template process that it was forked from."""
    shared_bytes: int = 0
    """Shared memory touched by a process: the arenas of published weights."""
    at_s: float = 0.0
    """Seconds from the start until the private memory peaked."""


@dataclass(slots=True)
class Memory:
    """Memory peaks of all roles of a run, and of the machine."""

    roles: dict[str, Peak] = field(default_factory=dict)
    """Peaks by name of the log file; processes without one, such as the controller, are added up as `others`."""
    together_bytes: int = 0
    """Peak sum over all processes; memory that several of them share is counted once."""
    least_available_bytes: int = 1 << 62
    """Lowest available memory of the machine."""


class Sampler:
    """Context manager that samples a command and its descendants in a thread, and kills them if memory runs out.

    Example: `with Sampler(process.pid, run_dir) as sampler: process.wait(); sampler.memory.together_bytes`
    """

    def __init__(self, pid: int, run_dir: Path, *, least_available_bytes: int = 0) -> None:
        """Prepare to sample; entering the context starts the thread.

        Args:
            pid: Process of the command.
            run_dir: Run directory, whose pid files name the roles.
            least_available_bytes: Available memory of the machine below which all processes of the command are killed.
        """
        self.memory = Memory()
        self._pid, self._run_dir, self._least = pid, run_dir, least_available_bytes
        self._started = time.monotonic()
        self._together = Together()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        names = roles(self._run_dir)
        private: dict[str, int] = {}
        statuses = {pid: read_status(pid) for pid in descendants(self._pid)}
        for pid, status in statuses.items():
            role = names.get(pid, "others")
            anonymous, touched = status.get("RssAnon", 0), status.get("RssShmem", 0)
            private[role] = private.get(role, 0) + anonymous
            peak = self.memory.roles.setdefault(role, Peak())
            peak.shared_bytes = max(peak.shared_bytes, touched)
        for role, num_bytes in private.items():
            peak = self.memory.roles[role]
            if num_bytes > peak.private_bytes:
                peak.private_bytes, peak.at_s = num_bytes, time.monotonic() - self._started
        self._together.add(statuses)
        self.memory.together_bytes = self._together.peak_bytes
        available = read_fields(Path("/proc/meminfo"))["MemAvailable"]
        self.memory.least_available_bytes = min(self.memory.least_available_bytes, available)
        if available < self._least:
            for pid in descendants(self._pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Together:
    """Peak sum over processes of anonymous and shared memory; memory that several of them share is counted once."""

    def __init__(self) -> None:
        """Start at 0."""
        self.peak_bytes = 0
        self._resident = 0

    def add(self, statuses: Mapping[int, Mapping[str, int]]) -> None:
        """Take the sum over the processes if their resident memory, in their statuses by process id, has grown."""
        private = sum(status.get("RssAnon", 0) for status in statuses.values())
        resident = private + max((status.get("RssShmem", 0) for status in statuses.values()), default=0)
        if resident > SUM_GROWTH * self._resident:
            self._resident = resident
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_bytes, statuses)))


def roles(run_dir: Path) -> Mapping[int, str]:
    """Return the roles of the processes with pid files, by process id."""
    found = {}
    for path in (run_dir / "logs").glob("*.pid"):
        words = path.read_text().split()
        if words:
            found[int(words[0])] = path.stem
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all of its descendants."""
    every = [process_of(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")]
    children: dict[int, list[int]] = {}
    for process in every:
        if process is not None:
            children.setdefault(process.parent, []).append(process.pid)
    waiting = [pid]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children.get(found, [])


def read_status(pid: int) -> Mapping[str, int]:
    """Return the sizes in a process's status, in bytes; empty if the process has exited."""
    try:
        return read_fields(Path(f"/proc/{pid}/status"))
    except OSError:
        return {}


def proportional_bytes(pid: int) -> int:
    """Return a process's share of anonymous and shared memory (PSS) in bytes; 0 if the process has exited."""
    try:
        fields = read_fields(Path(f"/proc/{pid}/smaps_rollup"))
    except OSError:
        return 0
    return fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0)


def read_fields(path: Path) -> Mapping[str, int]:
    """Return the fields of a /proc file that are in kB, converted to bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}
