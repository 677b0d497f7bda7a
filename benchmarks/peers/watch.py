"""Sample CPU time and memory of a command and its descendants from /proc."""

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.resident import Together, descendants, read_status, roles

INTERVAL_S = 0.5
"""Seconds between two samples of CPU time."""


class Watch:
    """Context manager that samples in a thread.

    Example: `with Watch(process.pid, run_dir) as watch: process.wait(); watch.memory.peak_bytes`
    """

    def __init__(self, pid: int, run_dir: Path) -> None:
        """Prepare to sample a command; the pid files in the run directory name the roles."""
        self.cpu_s: list[tuple[float, Mapping[str, float]]] = []
        """Times, and the CPU seconds used until then by role. Processes that have exited count with their last sample."""
        self.memory = Together()
        self.others_share = 0.0
        """Share of the cores that processes outside the command used. Figures of a run with more than a few percent mislead."""
        self._pid, self._run_dir, self._closed = pid, run_dir, threading.Event()
        self._started = self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        """Start sampling."""
        self._started, self._busy_s = time.monotonic(), busy_seconds()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop sampling."""
        self._closed.set()
        self._thread.join()
        busy_s = busy_seconds() - self._busy_s
        own_s = sum(self.cpu_s[-1][1].values()) if self.cpu_s else 0.0
        seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        self.others_share = max(0.0, busy_s - own_s) / seconds

    def _run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        while not self._closed.wait(INTERVAL_S):
            names, pids = roles(self._run_dir), list(descendants(self._pid))
            for pid in pids:
                if (seconds := cpu_seconds(pid)) is not None:
                    seen[pid] = (role_of(pid, names, self._pid), seconds)
            totals: dict[str, float] = {}
            for role, seconds in seen.values():
                totals[role] = totals.get(role, 0.0) + seconds
            self.cpu_s.append((time.time(), totals))
            self.memory.add({pid: read_status(pid) for pid in pids})


def role_of(pid: int, names: Mapping[int, str], command: int) -> str:
    """Return `main` for the command itself, the name of its log without numbers, or `others`."""
    return "main" if pid == command else re.sub(r"(_\d+)+$", "", names.get(pid, "others"))


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of a process with its threads; None if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have used since it started."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
