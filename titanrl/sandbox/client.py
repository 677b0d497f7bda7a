"""The pool's ends of the sockets to the zygote and to the scoring processes that the zygote forks."""

import asyncio
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from titanrl.config.sections import SandboxConfig
from titanrl.errors import TitanRLError
from titanrl.sandbox.confine import SandboxUnavailable
from titanrl.sandbox.scores import RewardSpec
from titanrl.sandbox.zygote import COUNT, END, GROUP, READY, TOKENS, Order

FORK_DEADLINE_S = 60.0
"""Longest wait for a scoring process that is ready."""

_LOAD_DEADLINE_S = 300.0
_STOP_DEADLINE_S = 5.0
_MAX_REPLY_BYTES = 32 << 20
_MAX_STILLBORN = 10
_STDERR_TAIL_BYTES = 2000
_INHERITED = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
_PYCACHE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}


class SandboxDied(TitanRLError):
    """The scoring processes died. Close the pool; it can be started again."""


class ScoringProcess:
    """The pool's end of the socket to one scoring process."""

    def __init__(self, channel: socket.socket, pidfd: int, on_ready: "Callable[[ScoringProcess, bytes], None]") -> None:
        """Listen on the channel.

        Call `on_ready` once, with the first message. The message is empty if the process died before.
        """
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._pidfd = pidfd
        self._on_ready: Callable[[ScoringProcess, bytes], None] | None = on_ready
        self._received = bytearray()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._replied: asyncio.Future[None] = self._loop.create_future()
        self.num_served = 0
        channel.setblocking(False)
        self._loop.add_reader(channel, self._on_readable)

    @property
    def ended(self) -> bool:
        """True if the process closed its end: it served its last group, or it died."""
        return self._ended.done()

    @property
    def is_idle(self) -> bool:
        """True if the process replied to the last request and is still alive."""
        return self._replied.done() and not self.ended

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send the answers and return the reply; None after a timeout.

        If the process died, the reply is incomplete or empty. A reply that arrived while this event loop was busy counts as
        in time, because the future is checked after the wait.
        """
        self._received.clear()
        self._replied = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.sock_sendall(self._channel, request)
        except TimeoutError:
            return None
        except ConnectionError:  # the process died; bytes that it sent before are still in the socket
            pass
        await asyncio.wait([self._ended, self._replied], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._replied.done():
            self.num_served += 1
        return bytes(self._received) if self.ended or self._replied.done() else None

    def kill(self) -> None:
        """Kill the process if it is still running, and close its descriptors."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._end()
        os.close(self._pidfd)
        self._channel.close()

    def _on_readable(self) -> None:
        try:
            chunk = self._channel.recv(1 << 16)
        except ConnectionResetError:  # the process died with a request unread
            chunk = b""
        if not chunk or len(self._received) + len(chunk) > _MAX_REPLY_BYTES:
            self._end()
        if self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready(self, chunk)
        else:
            self._received += chunk
            if chunk.endswith(END) and not self._replied.done():
                self._replied.set_result(None)

    def _end(self) -> None:
        self._loop.remove_reader(self._channel)
        if not self._ended.done():
            self._ended.set_result(None)


class ZygoteClient:
    """The pool's end of the socket to the zygote, and the idle scoring processes."""

    def __init__(self, specs: Sequence[RewardSpec], config: SandboxConfig) -> None:
        """Start the zygote, which then loads the rewards."""
        self.slots = asyncio.Semaphore(config.num_processes)
        """Limit of scoring processes in use at once."""
        self.are_groups: tuple[bool, ...] = ()
        """For each reward, True if it scores all completions of a prompt in one call; known after `load`."""
        self.take_token_ids: tuple[bool, ...] = ()
        """For each reward, True if it takes the ids of tokens; known after `load`."""
        self._specs = specs
        self._num_ahead = config.num_processes
        self._groups_per_process = config.groups_per_process
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._hung_up = False
        self._failure: Exception | None = None
        self._num_stillborn = 0
        self._ahead: set[ScoringProcess] = set()  # forked, not in use
        # Confined processes among `_ahead`. None marks the end: the zygote failed or was stopped.
        self._ready: asyncio.Queue[ScoringProcess | None] = asyncio.Queue()
        self._stderr = os.memfd_create("zygote-stderr")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = _start_zygote(theirs.fileno(), self._stderr, _order(specs, config))
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def load(self) -> None:
        """Wait until the zygote has loaded the rewards, then request the first scoring processes.

        Raises:
            ValueError: A reward does not load.
            SandboxDied: Loading takes too long, or the zygote was killed.
        """
        await asyncio.wait([self._loaded, self._exited], timeout=_LOAD_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            return self._fork(self._num_ahead)
        rewards = f"data.rewards: {', '.join(spec.name for spec in self._specs)}"
        if self._failure is None:
            raise SandboxDied(f"{rewards} did not load within {_LOAD_DEADLINE_S:g} s")
        if self._popen.returncode > 0:  # the zygote itself ended, with a traceback
            raise ValueError(f"{rewards} cannot be loaded: {self._stderr_tail()}")
        raise self._failure

    async def take(self) -> ScoringProcess:
        """Wait for an idle confined process and take it. The caller must pass it to `give_back`.

        Raises:
            SandboxDied: The zygote died, or no process is ready in time.
        """
        try:
            async with asyncio.timeout(FORK_DEADLINE_S):
                while (process := await self._ready.get()) is not None:
                    self._ahead.remove(process)
                    if not process.ended:
                        return process
                    self._replace(process)  # something killed it while it was idle
        except TimeoutError:
            raise SandboxDied(f"no scoring process was ready within {FORK_DEADLINE_S:g} s") from None
        self._ready.put_nowait(None)  # for the next caller
        assert self._failure is not None
        raise self._failure

    def give_back(self, process: ScoringProcess) -> None:
        """Keep a process for another group if it replied and may serve one more; otherwise replace it."""
        if self._failure is None and process.is_idle and process.num_served < self._groups_per_process:
            self._ahead.add(process)
            self._ready.put_nowait(process)
        else:
            self._replace(process)

    async def check(self) -> None:
        """Raise if the zygote is dead. Call this after a scoring process died, before its answers are blamed.

        The kernel closes the zygote's sockets before it kills the zygote's children, so the socket already shows the end.
        """
        if not self._hung_up:
            self._on_control()
        if self._hung_up:
            await asyncio.wait([self._exited], timeout=_STOP_DEADLINE_S)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Stop the zygote and its scoring processes, and wait until the zygote has exited."""
        self._fail(SandboxDied("the scoring pool was closed"))
        if self._loaded.done() and not self._exited.done():
            self._control.shutdown(socket.SHUT_WR)  # the zygote kills and reaps its processes, then exits
            await asyncio.wait([self._exited], timeout=_STOP_DEADLINE_S)
        self._popen.kill()
        await self._exited
        if not self._hung_up:
            self._hang_up()
        self._control.close()
        os.close(self._stderr)
        for process in self._ahead:
            process.kill()

    def _replace(self, process: ScoringProcess) -> None:
        process.kill()
        if not self._hung_up:
            self._fork(1)

    def _fork(self, count: int) -> None:
        with suppress(BrokenPipeError):  # the next `take` raises the zygote's failure
            self._control.send(COUNT.pack(count))

    def _on_control(self) -> None:
        """Read every message that the zygote has sent so far."""
        with suppress(BlockingIOError):
            while not self._hung_up:
                self._receive()

    def _receive(self) -> None:
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self._control, len(READY) + len(self._specs), 2, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the zygote died with a request unread
            message, descriptors, flags = b"", [], 0
        if not message:
            self._hang_up()
        elif flags & socket.MSG_CTRUNC:
            self._fail(SandboxDied("this process cannot open more files: raise its limit (ulimit -n)"))
            self._hang_up()
        elif descriptors:
            self._ahead.add(ScoringProcess(socket.socket(fileno=descriptors[0]), descriptors[1], self._on_ready))
        else:
            self.are_groups = tuple(bool(flags & GROUP) for flags in message.removeprefix(READY))
            self.take_token_ids = tuple(bool(flags & TOKENS) for flags in message.removeprefix(READY))
            self._loaded.set_result(None)

    def _on_ready(self, process: ScoringProcess, message: bytes) -> None:
        if self._failure is not None:  # `stop` kills the process
            return
        if message == READY:
            self._num_stillborn = 0
            return self._ready.put_nowait(process)
        self._ahead.remove(process)
        self._replace(process)
        self._num_stillborn += 1
        if message:
            self._fail(SandboxUnavailable(message.decode()))
        elif self._num_stillborn > _MAX_STILLBORN:
            self._fail(SandboxDied(f"{self._num_stillborn} scoring processes in a row died before they were confined"))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._fail(SandboxDied(f"the zygote exited with status {self._popen.wait()}. {self._stderr_tail()}"))
        self._exited.set_result(None)

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._control)
        self._hung_up = True

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put_nowait(None)

    def _stderr_tail(self) -> str:
        """Return the last line that the zygote wrote, then the lines before it."""
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES)).decode(errors="replace").strip()
        return f"{tail.splitlines()[-1]}\n{tail}" if tail else ""


def _start_zygote(control_fd: int, stderr: int, order: Order) -> "subprocess.Popen[bytes]":
    """Start a new Python process that imports the same modules as this one and inherits no tokens or keys.

    The hash seed is fixed because reasoning-gym's word_ladder depends on it.
    """
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED | _PYCACHE}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    with open(os.memfd_create("zygote-order"), "w+b") as stream:
        pickle.dump(order, stream)
        stream.seek(0)
        script = f"from titanrl.sandbox.zygote import main; main({control_fd}, {os.getpid()}, {stream.fileno()})"
        return subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[control_fd, stream.fileno()],
            env={**inherited, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def _order(specs: Sequence[RewardSpec], config: SandboxConfig) -> Order:
    return Order(
        rewards=tuple(specs),
        memory_bytes=config.memory_bytes,
        # A second line of defence: the wall-clock limit comes first.
        cpu_s=(math.ceil(config.timeout_s) + 1) * config.groups_per_process,
        groups_per_process=config.groups_per_process,
    )
