"""Share a temporary folder and templates between the workers of pytest-xdist, and actors between the tests of a file."""

import asyncio
import fcntl
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from filelock import FileLock


@dataclass
class Looped:
    """Actors that tests share, and the event loop that calls them; tests that are coroutines run in it."""

    runner: asyncio.Runner

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))


def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder that is the same for all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def warm_templates(folder: Path) -> Iterator[str]:
    """Yield the folder of the shared templates. The first worker starts `titanrl warm`, and the last one ends it."""
    mutex, started = FileLock(folder / "warm.lock"), folder / "warm.started"
    with (folder / "warm.users").open("w") as users:
        with mutex:
            if is_only_user(users):
                warm, templates = start_warm()
                started.write_text(f"{warm.pid}\n{templates}")
            fcntl.flock(users, fcntl.LOCK_SH)
            pid, templates = started.read_text().splitlines()
        yield templates
        with mutex:
            if is_only_user(users):
                stop_warm(int(pid))
                assert not os.path.exists(templates)


def is_only_user(users: IO[str]) -> bool:
    """Return True if no other process has locked a file. The kernel unlocks it when a process ends, even if it is killed."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def start_warm(**options: Any) -> tuple["subprocess.Popen[str]", str]:
    """Start `titanrl warm` and wait for its imports; return the process and the folder of its templates."""
    command = [sys.executable, "-m", "titanrl.commands", "warm", "--config", "quickstart"]
    warm = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert warm.stdout is not None
    output = "".join(itertools.takewhile(lambda line: not line.startswith("Ctrl-C"), warm.stdout))
    return warm, output.split("=")[1].strip()


def stop_warm(pid: int) -> None:
    """End `titanrl warm` and wait until it has exited. Another worker may be its parent, so wait for its pidfd."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGINT)
    ended, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert ended, "titanrl warm does not end"
