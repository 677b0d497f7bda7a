"""Child processes: their exit, their output, their replies within limits of time and length, and their replacement.

An environment process is a `Child` that replies on a `Channel`. The sandbox's zygote is a `Child`, too; it forks scoring
processes, each of which replies on a `Channel`. Both are killed with everything that they have started, and neither can make
this process wait longer, or keep more bytes, than the limits of a request.
"""

import asyncio
import math
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from titanrl.base.errors import TitanRLError
from titanrl.config.sections import FaultsConfig
from titanrl.processes.machine import has_exited

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
