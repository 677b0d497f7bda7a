"""Find and signal the processes of a running command, through the pid files of its run directory."""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanrl.carriers.record import read_lines

KINDS = ("generator", "rollout", "scoring", "trainer", "store", "evaluator")
"""Kinds of victims. A rollout worker's process also holds its storage shard."""
SIGNALS: Mapping[str, int] = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}
"""Faults that a process cannot avoid, by the names that results use."""
_ZYGOTE, _TEMPLATE = "titanrl.processes.zygote", "titanrl.processes.templates"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine. Its start time distinguishes it from a later one with the same id."""

    pid: int
    """Process id."""
    parent: int
    """Process id of the parent."""
    started: int
    """Start time, in clock ticks since boot."""

    @property
    def is_gone(self) -> bool:
        """True if the process has exited, even if its parent has not reaped it yet."""
        now = process_of(self.pid)
        return now is None or now.started != self.started

    def children(self) -> "list[Process]":
        """Return the live children."""
        every = [process_of(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")]
        return [process for process in every if process is not None and process.parent == self.pid]

    def command_line(self) -> str:
        """Return the command line; empty if the process has exited."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            return ""


def process_of(pid: int) -> Process | None:
    """Return a live process, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces
    return None if fields[0] in "ZX" else Process(pid, int(fields[1]), int(fields[19]))


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that can be signaled."""

    kind: str
    """One of `KINDS`, or `zygote` or `template`."""
    part: str
    """Name in the events of the run, such as `generator_0`; for a scoring process, the name of its worker."""
    process: Process
    """Process to signal."""
    zygote: Process | None = None
    """Parent of a scoring process."""

    def hit(self, number: int) -> bool:
        """Send a signal; return False if the process has already exited."""
        if self.process.is_gone:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
            return True
        return False

    def siblings(self) -> set[int]:
        """Return the ids of the live scoring processes of the same worker; empty for other kinds."""
        return set() if self.zygote is None else {process.pid for process in self.zygote.children()}


def victims(run_dir: Path) -> list[Victim]:
    """Return the live processes of a run, except the controller."""
    found = []
    for file in sorted((run_dir / "logs").glob("*.pid")):
        part = file.stem.rpartition("_")[0]
        kind = part.split("_")[0]
        process = _named_by(file) if kind in KINDS else None
        if process is None:
            continue
        found.append(Victim(kind, part, process))
        if kind == "rollout":
            zygotes = [child for child in process.children() if _ZYGOTE in child.command_line()]
            found += [Victim("zygote", f"{part} sandbox", zygote) for zygote in zygotes]
            found += [Victim("scoring", part, child, zygote) for zygote in zygotes for child in zygote.children()]
        elif kind == "generator":
            parent = process_of(process.parent)
            if parent is not None and _TEMPLATE in parent.command_line():
                found.append(Victim("template", "template_generator", parent))
    return found


def _named_by(file: Path) -> Process | None:
    """Return the process of a pid file; None if the file is missing or still empty."""
    with contextlib.suppress(FileNotFoundError, IndexError):
        return process_of(int(file.read_text().split()[0]))
    return None


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events recorded so far."""
    file = run_dir / "events.jsonl"
    return list(read_lines(file)) if file.exists() else []


class NewEvents:
    """Incremental reader of a run's events, so that frequent polling is cheap."""

    def __init__(self, run_dir: Path) -> None:
        """Start before the first event."""
        self._file, self._inode, self._offset = run_dir / "events.jsonl", 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events recorded since the last call; all events if a restart has rewritten the file."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def is_recovery(event: Mapping[str, Any], part: str, since: float) -> bool:
    """Return True if an event after the unix time `since` reports that `part`, or the entire session, was replaced."""
    if event["time"] < since:
        return False
    return bool((event["kind"] == "restart" and not event["failed"]) or (event["kind"] == "respawn" and event["part"] == part))
