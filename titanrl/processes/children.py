"""Child processes: their exit, output, replies and replacement; and the states and stacks of the processes of a run.

An environment process is a `Child` that replies on a `Channel`. The sandbox's zygote is a `Child`, too; it forks scoring
processes, each of which replies on a `Channel`. Both are killed with everything that they have started, and neither can make
this process wait longer, or keep more bytes, than the limits of a request.

States and stacks are read from the outside, which works for any kind of hang.
"""

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.control import LOCK_FILE
from titanrl.base.errors import TitanRLError
from titanrl.config.sections import FaultsConfig
from titanrl.processes.machine import has_exited, process_state

_CHUNK_BYTES = 1 << 18


async def run_program(
    *command: str, limit_s: float, text: str = "", environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a program with a text as input; return its exit code, output and errors.

    Raise `OSError` if it cannot be started. If it does not exit in time, kill it and raise `TimeoutError`.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    try:
        output, errors = await asyncio.wait_for(process.communicate(text.encode()), limit_s)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


class Child:
    """A process that this one starts in a session of its own. The running event loop notices its exit."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        stdin: int = subprocess.DEVNULL,
        stdout: int,
        stderr: int,
        on_exit: "Callable[[Child], object]",
    ) -> None:
        """Start the process. It inherits `descriptors` and no environment variables except those of `environment`.

        The event loop calls `on_exit` once, after `exited` is set. Raise `OSError` if the process cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        self._popen = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        """Process id, which is also the id of its process group."""
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Exit code, or minus the number of the signal that ended the process."""
        self._call_on_exit = on_exit
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def has_exited(self) -> bool:
        """True if the process has exited, even if the event loop has not processed the event yet."""
        return self.exited.done() or has_exited(self._pidfd)

    def kill(self) -> None:
        """Kill the process and its children; do nothing if it has exited."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.kill()  # its children; the process group exists until `wait`
        os.close(self._pidfd)
        self.exited.set_result(self._popen.wait())
        self._call_on_exit(self)


class Output:
    """The reading end of a pipe to which a process prints. It keeps the last bytes."""

    def __init__(self, kept_bytes: int, max_bytes: float = math.inf, on_limit: Callable[[], object] = lambda: None) -> None:
        """Start to read. After more than `max_bytes`, call `on_limit` and read no more."""
        self._kept_bytes, self._max_bytes, self._on_limit = kept_bytes, max_bytes, on_limit
        self._ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        """Descriptor for the process, which the caller closes after the start."""
        os.set_blocking(self._ours, False)
        self.kept, self.num_bytes = b"", 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self.read)

    def read(self) -> None:
        """Read what is there, at most a few megabytes at a time, so that the event loop stays responsive."""
        for _ in range(64):
            try:
                chunk = os.read(self._ours, 1 << 16) if self._ours >= 0 else b""
            except BlockingIOError:
                return
            self.num_bytes += len(chunk)
            self.kept = (self.kept + chunk)[-self._kept_bytes :]
            if not chunk or self.num_bytes > self._max_bytes:
                self._stop()
                if chunk:
                    self._on_limit()
                return

    def close(self) -> None:
        """Read what is left, and close the pipe."""
        self.read()
        self._stop()

    def _stop(self) -> None:
        if self._ours >= 0:
            self._loop.remove_reader(self._ours)
            os.close(self._ours)
            self._ours = -1


class Channel:
    """This process's end of a socket to a process that answers one request at a time. Replies are untrusted bytes."""

    def __init__(self, channel: socket.socket, is_complete: Callable[[bytearray], bool]) -> None:
        """Listen on a socket. `is_complete` is True for a complete reply, or for bytes that will not be read further."""
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._is_complete = is_complete
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._max_bytes = 0
        # Of the current request; set by a complete reply or when the socket is closed.
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self.is_closed = False
        """True if the process closed its end of the socket, for example because it died, or if its reply was too long."""
        channel.setblocking(False)
        self._loop.add_reader(channel, self._on_readable)

    @property
    def has_replied(self) -> bool:
        """True if the reply to the last request is complete."""
        return self._is_complete(self._received)

    async def request(self, request: bytes, timeout_s: float, max_bytes: int) -> bytes | None:
        """Send a request and return the reply; None after a timeout.

        If the process died or its reply has more than `max_bytes`, the reply is incomplete or empty. A reply that arrived while
        this event loop was busy is accepted even after the timeout, because the future is checked after the wait.
        """
        self._received.clear()
        self._max_bytes = max_bytes
        self._finished = self._loop.create_future()
        if not self.is_closed:
            self._unsent = memoryview(request)
            self._on_writable()
            if self._unsent:
                self._loop.add_writer(self._channel, self._on_writable)
            await asyncio.wait([self._finished], timeout=timeout_s)
        return bytes(self._received) if self.is_closed or self._finished.done() else None

    def close(self) -> None:
        """Close the socket, which ends the current request. A second call does nothing."""
        self._stop()
        self._channel.close()

    def on_received(self, chunk: bytes) -> None:
        """Handle bytes from the process; empty if it closed its end of the socket."""
        self._received += chunk
        if self.has_replied:
            self._finish()

    def _on_writable(self) -> None:
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            return
        except ConnectionError:  # the process died; what it sent before is still in the socket buffer
            self._unsent = memoryview(b"")
        if not self._unsent:
            self._loop.remove_writer(self._channel)

    def _on_readable(self) -> None:
        try:
            chunk = self._channel.recv(_CHUNK_BYTES)
        except ConnectionResetError:  # the process died before reading the whole request
            chunk = b""
        room = self._max_bytes - len(self._received)
        if not chunk or len(chunk) > room:
            self._stop()
        self.on_received(chunk[:room])

    def _stop(self) -> None:
        if not self.is_closed:
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            self.is_closed = True
            self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)


class RespawnLimitError(TitanRLError):
    """Parts of the run kept dying; the message names them and the last cause."""


class Respawns:
    """Counts replacements within the last `faults.respawn_window_s` seconds, over all sessions of a run."""

    def __init__(self, config: FaultsConfig, now: Callable[[], float] = time.monotonic) -> None:
        """Start without replacements; `now` is a clock in seconds."""
        self.limit = config.max_respawns
        """Number of replacements allowed within the window."""
        self._window_s, self._now = config.respawn_window_s, now
        self._last: deque[tuple[float, str]] = deque()

    @property
    def num_recent(self) -> int:
        """Number of replacements in the window that ends with the most recent one, which is included."""
        return len(self._last)

    def add(self, part: str, cause: str) -> None:
        """Count a replacement of a part, such as `generator_0`, before it starts; raise `RespawnLimitError` at the limit."""
        now = self._now()
        while self._last and self._last[0][0] <= now - self._window_s:
            self._last.popleft()
        if not self.limit:
            raise RespawnLimitError(cause)
        if len(self._last) >= self.limit:
            parts = [earlier for _, earlier in self._last]
            counts = ", ".join(f"{name} {parts.count(name)} times" for name in dict.fromkeys(parts))
            raise RespawnLimitError(
                f"faults.max_respawns: {part} ended after {len(parts)} replacements within {self._window_s:g} s ({counts}; got "
                f"{self.limit}). Last cause: {cause}"
            )
        self._last.append((now, part))


# States and stacks of the processes of a run

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
