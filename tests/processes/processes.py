"""Helpers for watching processes."""

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec

import pytest

from titanrl.processes import confine

P = ParamSpec("P")

needs_confinement = pytest.mark.skipif(
    bool(confine.missing_features()) and "CI" not in os.environ,
    reason=f"this machine cannot confine a process, since it lacks {'; '.join(confine.missing_features())}",
)
"""Marker for tests that confine processes. They are skipped where confinement is impossible, except in CI."""


def parents() -> dict[int, int]:
    """Return the parent of every process, including zombies."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def children(parent: int) -> set[int]:
    return {pid for pid, ppid in parents().items() if ppid == parent}


def descendants(parent: int) -> set[int]:
    return children(parent).union(*map(descendants, children(parent)))


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait for the processes to exit; return those still running after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    running = set()
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            running.add(pid)
        os.close(pidfd)
    return running


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_leaked(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Return how many file descriptors the second of two calls leaves open.

    The calls are made in a new process: in pytest's, threads of the meshes that other tests have used open and close some.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        before, after = (alone.submit(_descriptors_after, function, *args, **kwargs).result(120.0) for _ in range(2))
    return after - before


def _descriptors_after(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> int:
    function(*args, **kwargs)
    return num_descriptors(os.getpid())
