"""Sample the memory of the processes of a running command from /proc."""

import contextlib
import itertools
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
SAMPLES_PER_SUM = 10
"""Samples between two sums over all processes, which are expensive: the kernel walks all pages."""


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
        for number in itertools.count():
            if self._closed.wait(INTERVAL_S):
                return
            self.sample(with_sum=number % SAMPLES_PER_SUM == 0)

    def sample(self, *, with_sum: bool) -> None:
        """Take one sample; with `with_sum`, also of the sum over all processes."""
        names = roles(self._run_dir)
        private: dict[str, int] = {}
        for pid in descendants(self._pid):
            status = read_status(pid)
            role = names.get(pid, "others")
            anonymous, touched = status.get("RssAnon", 0), status.get("RssShmem", 0)
            private[role] = private.get(role, 0) + anonymous
            peak = self.memory.roles.setdefault(role, Peak())
            peak.shared_bytes = max(peak.shared_bytes, touched)
        for role, num_bytes in private.items():
            peak = self.memory.roles[role]
            if num_bytes > peak.private_bytes:
                peak.private_bytes, peak.at_s = num_bytes, time.monotonic() - self._started
        if with_sum:
            together = sum(map(proportional_bytes, descendants(self._pid)))
            self.memory.together_bytes = max(self.memory.together_bytes, together)
        available = read_fields(Path("/proc/meminfo"))["MemAvailable"]
        self.memory.least_available_bytes = min(self.memory.least_available_bytes, available)
        if available < self._least:
            for pid in descendants(self._pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


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
