"""Detection of leaked names in /dev/shm, which no running process uses, even while other tests run."""

import contextlib
import os
import re
from pathlib import Path

MAPPED = re.compile(r" /dev/shm/([^/\s]+)", re.MULTILINE)


def abandoned() -> set[str]:
    """Return the names that no process has mapped or open, except short-lived semaphores.

    A name that one process hands to another while their maps are read can seem unused, so it is looked up twice.
    """
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    return {name for name in names - in_use() - in_use() if Path("/dev/shm", name).exists()}


def in_use() -> set[str]:
    """Return the names that a process has mapped or open; a folder counts if a file in it does."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            found |= set(MAPPED.findall((process / "maps").read_text()))
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= set(MAPPED.findall(f" {os.readlink(descriptor)}"))
    return found
