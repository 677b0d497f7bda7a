"""States and stacks of the processes of a run, read from the outside, which works for any kind of hang."""

import asyncio
import contextlib
import os
import shutil
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.control import LOCK_FILE
from titanrl.base.errors import TitanRLError
from titanrl.processes.children import run_program
from titanrl.processes.machine import process_state

STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a process append the Python stacks of all its threads to its log."""
DUMP_S = 10.0
"""Limit for one dump of a process's stacks, in seconds."""
_AT_ONCE = 4
_STATES = {"R": "alive", "S": "alive", "D": "in the kernel", "T": "stopped by a signal", "t": "stopped by a debugger"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a run."""

    name: str
    """Role and rank, such as `trainer_0`."""
    pid: int
    host: str | None = None
    """Name of its host; None for this machine."""

    @property
    def role(self) -> str:
        """Name of its mesh, such as `generator_0`."""
        return self.name.rpartition("_")[0]

    @property
    def rank(self) -> int:
        """Rank in its mesh."""
        return int(self.name.rpartition("_")[2])

    def __str__(self) -> str:
        """Return name and process id, such as `trainer_0 (process 77)`."""
        return f"{self.name} (process {self.pid})"

    def is_stopped(self) -> bool:
        """Return True if a signal (SIGSTOP, SIGTSTP) has stopped the process."""
        return self.host is None and process_state(self.pid) == "T"

    def is_debugged(self) -> bool:
        """Return True if a debugger or tracer is attached."""
        return self.host is None and self._status("TracerPid") not in ("", "0")

    def _status(self, key: str) -> str:
        """Return a value of `/proc/<pid>/status`; empty if the process is dead."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(f"{key}:"):
                    return line.partition(":")[2].strip()
        return ""

    def handles(self, number: signal.Signals) -> bool:
        """Return True if the process has a handler for a signal; without one, the signal would kill it."""
        return bool(int(self._status("SigCgt") or "0", 16) >> (number - 1) & 1)


def processes_of(run_dir: Path) -> list[Process]:
    """Return this user's processes of a run on this host, by name.

    They are found by the files that they hold open, the lock of the run or a log as standard output, because the text of a file
    could name any process.
    """
    lock, logs = os.path.realpath(run_dir / LOCK_FILE), os.path.realpath(run_dir / "logs")
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            pid, output = int(folder.name), Path(os.readlink(folder / "fd/1"))
            if str(output.parent) == logs and output.suffix == ".log":
                found.append(Process(name=output.stem, pid=pid))
            elif any(os.readlink(file) == lock for file in (folder / "fd").iterdir()):
                found.append(Process(name="controller", pid=pid))
    return sorted(found, key=lambda process: (process.name, process.pid))


async def stacks_of(run_dir: Path) -> str:
    """Return the states and stacks of the processes of a run on this host; raise `TitanRLError` if it has none."""
    processes = await asyncio.to_thread(processes_of, run_dir)
    if not processes:
        raise TitanRLError(f"{run_dir}: no process of the run on this host. Give the directory of a run that is running.")
    return await describe(processes)


async def describe(processes: Sequence[Process]) -> str:
    """Return the states and stacks of processes as text. Each dump has a separate deadline."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def section(process: Process) -> str:
        state = f"on {process.host}"
        if process.host is None:
            letter = process_state(process.pid)  # before the dump, which stops the process; empty if the process is dead
            state = _STATES.get(letter, letter or "exited")
        async with places:
            return f"== {process}, {state}\n{await _stacks(process)}\n"

    return "\n".join(await asyncio.gather(*map(section, processes)))


async def _stacks(process: Process) -> str:
    """Return Python and native stacks of all threads. If py-spy fails, make the process write its Python stacks to its log.

    py-spy can only suspend a running process. A stopped one is read without suspending it, and without native frames.
    """
    if process.host is not None:
        return f"No stacks from another machine. There: py-spy dump --native --pid {process.pid}"
    reasons: list[str] = []
    # Reading native symbols can fail or take too long.
    ways = [("--nonblocking",)] if process.is_stopped() else [("--native",), ()]
    for options in ways:
        text, reason = await _py_spy(process.pid, *options)
        if text:
            return "\n".join([*reasons, text])
        reasons.append(f"py-spy dump {' '.join(options)}: {reason}".replace(" :", ":"))
    if not process.handles(STACKS_SIGNAL):
        return "\n".join([*reasons, "The process cannot write its stacks: it has not installed its signal handler yet."])
    os.kill(process.pid, STACKS_SIGNAL)
    when = "once it continues" if process.is_stopped() else "now"
    return "\n".join([*reasons, f"The process appends the Python stacks of its threads to logs/{process.name}.log {when}."])


async def _py_spy(pid: int, *options: str) -> tuple[str, str]:
    """Run `py-spy dump`; return its output and an empty reason, or an empty output and the reason of the failure."""
    program = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return "", "not installed"
    try:
        code, output, errors = await run_program(program, "dump", *options, "--pid", str(pid), limit_s=DUMP_S)
    except TimeoutError:
        return "", f"no result within {DUMP_S:g} s"
    if code == 0:
        return output, ""
    lines = errors.strip().splitlines()
    return "", lines[-1] if lines else "failed without a message"
