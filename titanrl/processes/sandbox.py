"""Client of the sandbox: pools of confined processes for rewards and for code snippets, forked by a zygote."""

import asyncio
import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from titanrl.base.errors import TitanRLError
from titanrl.carriers.rewards import ProcessFailure, RewardSpec
from titanrl.config.sections import FaultsConfig, SandboxConfig
from titanrl.processes.children import Channel, Child, Respawns
from titanrl.processes.confine import SandboxUnavailable, missing_features
from titanrl.processes.machine import process_state
from titanrl.processes.zygote import COUNT, END, READY, STARTED, Request, ZygoteConfig

FORK_DEADLINE_S = 60.0
"""Maximum wait for a scoring process to become ready, in seconds."""
_LOOK_S = 1.0
"""Part of this wait after which the state of the zygote is read, in seconds; less than the deadline of any request."""

_LOAD_DEADLINE_S = 300.0
_STOP_DEADLINE_S = 5.0
_MAX_FIRST_BYTES = 1 << 16
_MAX_FAILED_STARTS = 10
_STDERR_TAIL_BYTES = 2000
_INHERITED = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE",
              "PYTHONPYCACHEPREFIX"}  # fmt: skip
logger = logging.getLogger(__name__)

MAX_CODE_CHARS = 100_000
"""Maximum length of a snippet."""
_JSON_BYTES_PER_CHAR = 12  # a character outside the basic plane is written as two escapes of six characters


class SandboxDied(TitanRLError):
    """Raised if the scoring processes cannot be used. The pool can be closed and started again."""


class ZygoteDied(SandboxDied):
    """Raised if the zygote was killed or stopped. Its pool starts another one."""


class ScoringProcess(Channel):
    """A scoring process, and this process's end of the socket to it."""

    def __init__(self, channel: socket.socket, pidfd: int, on_ready: "Callable[[ScoringProcess, bytes], None]") -> None:
        """Listen on the socket. `on_ready` gets the first message, which is empty if the process died before sending one."""
        super().__init__(channel, lambda received: received.endswith(END))
        self._max_bytes = _MAX_FIRST_BYTES
        self._pidfd = pidfd
        self._on_ready: Callable[[ScoringProcess, bytes], None] | None = on_ready
        self.num_served = 0
        """Number of requests."""

    def on_received(self, chunk: bytes) -> None:
        """Handle the first message or a part of a reply."""
        if self._on_ready is None:
            return super().on_received(chunk)
        on_ready, self._on_ready = self._on_ready, None
        on_ready(self, chunk)

    def kill(self) -> None:
        """Kill the process if it is still running, and close the socket and the pidfd."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()
        os.close(self._pidfd)


class ZygoteClient:
    """The client's end of the socket to the zygote, and the pool of idle scoring processes."""

    def __init__(self, specs: Sequence[RewardSpec], config: SandboxConfig) -> None:
        """Start the zygote, which begins to load the rewards."""
        self.flags = b""
        """For each reward, the sum of its `GROUP`, `TOKENS` and `RAW`. Set by `load`."""
        self._specs = specs
        self._slots = asyncio.Semaphore(config.num_processes)
        self._num_spare = config.num_processes
        self._groups_per_process = config.groups_per_process
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._is_disconnected = False
        self._failure: Exception | None = None
        self._num_failed_starts = 0
        self._spare: set[ScoringProcess] = set()  # forked and not in use
        # The processes in `_spare` that have confined themselves. None means that the zygote failed or was stopped.
        self._ready: asyncio.Queue[ScoringProcess | None] = asyncio.Queue()
        self._stderr = os.memfd_create("zygote-stderr")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = ZygoteConfig(
            rewards=tuple(specs),
            memory_bytes=config.memory_bytes,
            # A second line of defense: the wall-clock limit is reached first.
            cpu_s=(math.ceil(config.timeout_s) + 1) * config.groups_per_process,
            groups_per_process=config.groups_per_process,
        )
        inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}  # without secrets
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        with theirs, open(os.memfd_create("zygote-config"), "w+b") as stream:
            pickle.dump(settings, stream)
            stream.seek(0)
            control_fd, config_fd = theirs.fileno(), stream.fileno()
            script = f"from titanrl.processes.zygote import main; main({control_fd}, {os.getpid()}, {config_fd})"
            self._child = Child(
                [sys.executable, "-P", "-c", script],
                # The hash seed is fixed because reasoning-gym's word_ladder depends on it.
                environment={**inherited, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                descriptors=[control_fd, config_fd],
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                on_exit=self._on_exit,
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)

    async def load(self) -> None:
        """Wait until the zygote has loaded the rewards, then request the first scoring processes."""
        either: list[asyncio.Future[Any]] = [self._loaded, self._child.exited]
        await asyncio.wait(either, timeout=_LOAD_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            return self._fork(self._num_spare)
        rewards = f"data.rewards: {', '.join(spec.name for spec in self._specs)}"
        if self._failure is None:
            raise SandboxDied(f"{rewards} did not load within {_LOAD_DEADLINE_S:g} s")
        if self._child.exited.done() and self._child.exited.result() > 0:  # the zygote exited with a traceback
            raise ValueError(f"{rewards} cannot be loaded: {self._stderr_tail()}")
        raise self._failure

    async def request(self, request: bytes, timeout_s: float, max_bytes: int) -> bytes | None:
        """Send a pickled request to an idle process and return the reply; None after a timeout.

        Wait while `num_processes` requests are running. If the process died or its reply has more than `max_bytes`, the reply
        is incomplete. Raise `SandboxDied` if the zygote died, or no process became ready in time.
        """
        async with self._slots:
            reply: bytes | None = b""
            while reply == b"":  # the process was killed before it read the request, which is not at fault: retry
                process = await self._acquire()
                try:
                    reply = await process.request(request, timeout_s, max_bytes)
                finally:
                    self._release(process)
            return reply

    async def _acquire(self) -> ScoringProcess:
        """Wait for an idle confined process and return it. The caller must pass it to `_release` afterwards."""
        while (process := await self._next_ready()) is not None:
            self._spare.remove(process)
            if not process.is_closed:
                return process
            self._replace(process)  # it was killed while idle
        self._ready.put_nowait(None)  # so that the next caller fails as well
        assert self._failure is not None
        raise self._failure

    async def _next_ready(self) -> ScoringProcess | None:
        if not self._ready.empty():  # the usual case, without the cost of a timer
            return self._ready.get_nowait()
        for _ in range(round(FORK_DEADLINE_S / _LOOK_S)):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    return await self._ready.get()
            if process_state(self._child.pid) == "T":
                self._fail(ZygoteDied(f"the sandbox's zygote (process {self._child.pid}) was stopped by a signal"))
        self._fail(ZygoteDied(f"no scoring process was ready within {FORK_DEADLINE_S:g} s"))
        return None

    def _release(self, process: ScoringProcess) -> None:
        """Reuse a process for another group if it replied and has groups left to score; otherwise replace it."""
        process.num_served += 1
        is_idle = process.has_replied and not process.is_closed
        if self._failure is None and is_idle and process.num_served < self._groups_per_process:
            self._spare.add(process)
            self._ready.put_nowait(process)
        else:
            self._replace(process)

    async def check(self) -> None:
        """Raise an error if the zygote is dead.

        Call this after a scoring process died, before treating the death as the fault of its answers. The kernel closes the
        zygote's sockets before it kills the zygote's children, so the closed socket is visible here in time.
        """
        if not self._is_disconnected:
            self._on_control()
        if self._is_disconnected:
            await asyncio.wait([self._child.exited], timeout=_STOP_DEADLINE_S)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Stop the zygote and its scoring processes, and wait until the zygote has exited."""
        if process_state(self._child.pid) == "T":
            self._child.kill()
        self._fail(SandboxDied("the sandbox was closed"))
        if self._loaded.done() and not self._child.exited.done():
            self._control.shutdown(socket.SHUT_WR)  # the zygote kills and reaps its processes, then exits
            await asyncio.wait([self._child.exited], timeout=_STOP_DEADLINE_S)
        self._child.kill()
        await self._child.exited
        if not self._is_disconnected:
            self._disconnect()
        self._control.close()
        os.close(self._stderr)
        for process in self._spare:
            process.kill()

    def _replace(self, process: ScoringProcess) -> None:
        process.kill()
        if not self._is_disconnected:
            self._fork(1)

    def _fork(self, count: int) -> None:
        with suppress(BrokenPipeError):  # the next `_acquire` raises the zygote's failure
            self._control.send(COUNT.pack(count))

    def _on_control(self) -> None:
        """Receive every message that the zygote has sent so far."""
        with suppress(BlockingIOError):
            while not self._is_disconnected:
                self._receive()

    def _receive(self) -> None:
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self._control, len(READY) + len(self._specs), 2, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the zygote died before reading a request
            message, descriptors, flags = b"", [], 0
        if not message:
            self._disconnect()
        elif flags & socket.MSG_CTRUNC:
            self._fail(SandboxDied("this process has too many open files. Raise the limit (ulimit -n)."))
            self._disconnect()
        elif descriptors:
            self._spare.add(ScoringProcess(socket.socket(fileno=descriptors[0]), descriptors[1], self._on_ready))
        else:
            self.flags = message.removeprefix(READY)
            self._loaded.set_result(None)

    def _on_ready(self, process: ScoringProcess, message: bytes) -> None:
        if self._failure is not None:  # `stop` will kill the process
            return
        if message == READY:
            self._num_failed_starts = 0
            return self._ready.put_nowait(process)
        self._spare.remove(process)
        self._replace(process)
        self._num_failed_starts += 1
        if message:
            self._fail(SandboxUnavailable(message.decode()))
        elif self._num_failed_starts > _MAX_FAILED_STARTS:
            self._fail(SandboxDied(f"{self._num_failed_starts} scoring processes in a row died before they were confined"))

    def _on_exit(self, zygote: Child) -> None:
        text = f"the sandbox's zygote (process {zygote.pid}) exited with status {zygote.exited.result()}. {self._stderr_tail()}"
        self._fail(ZygoteDied(text.strip()))

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._control)
        self._is_disconnected = True

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put_nowait(None)

    def _stderr_tail(self) -> str:
        """Return the last line of the zygote's standard error, followed by the tail of its output."""
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES)).decode(errors="replace").strip()
        return f"{tail.splitlines()[-1]}\n{tail}" if tail else ""


T = TypeVar("T")
OnRespawn = Callable[[str, float], None]
"""Callback with the cause of a zygote's death, and the time in seconds until another one had replaced it."""


def log_respawn(cause: str, seconds: float) -> None:
    """Log that a zygote was replaced."""
    logger.warning("%s; replaced after %.1f s", cause, seconds)


class SandboxPool:
    """Confined processes that answer requests. When their zygote dies, another one replaces it, and requests are sent again.

    The pool belongs to the event loop that starts it, in any thread. Its processes are killed when that thread exits.
    """

    name: str
    """Name of the pool, for error messages."""
    reason: str
    """Start of the message for a machine that cannot confine a process."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: SandboxConfig,
        faults: FaultsConfig | None = None,
        on_respawn: OnRespawn = log_respawn,
    ) -> None:
        """Keep the settings; `start` starts the processes. `faults` limits the replacements of the zygote."""
        self._specs, self._config, self._on_respawn = specs, config, on_respawn
        self._faults = faults or FaultsConfig()
        self._zygote: ZygoteClient | None = None
        self._is_closed = True
        self._flags = b""  # for each reward, the sum of its `GROUP`, `TOKENS` and `RAW`

    async def start(self) -> None:
        """Load the rewards, and start the processes.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A reward or module cannot be loaded.
            SandboxDied: Loading took too long, or the pool was closed.
            RespawnLimitError: The zygote was killed too often.
        """
        assert self._is_closed, "the pool has already been started"
        if missing := missing_features():
            raise SandboxUnavailable(
                f"{self.reason} only in confined processes, and this machine lacks {'; and '.join(missing)}. "
                "Use a machine that has it: there is no unconfined mode."
            )
        self._is_closed, self._respawns, self._replacing = False, Respawns(self._faults), asyncio.Lock()
        try:
            await self._load()
            await self._check()
        except BaseException:  # including cancellation
            await self.close()
            raise

    async def close(self) -> None:
        """Kill all processes and wait until they have exited. Pending requests raise `SandboxDied`.

        The pool can be started again.
        """
        if not self._is_closed:
            self._is_closed = True
            await self._end()
            async with self._replacing:  # it fails soon, because its zygote was stopped
                await self._end()

    async def _check(self) -> None:
        """Check that the processes work; `start` fails if this raises."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxDied(f"the {self.name} is closed or was never started")

    async def _request(
        self, request: Request, timeout_s: float, max_bytes: int, parse: Callable[[bytes], Awaitable[T | None]]
    ) -> T | ProcessFailure:
        """Send a request to a confined process, and return the parsed reply, or the reason why there is none.

        `parse` returns None for an invalid reply. No reply has more than `max_bytes`.
        """
        pickled = pickle.dumps(request)
        while True:
            async with self._replacing:  # wait for a replacement
                zygote = self._zygote
            if zygote is None:
                raise SandboxDied("the sandbox is closed or was never started")
            try:
                reply = await zygote.request(pickled, timeout_s, max_bytes)
                if reply is None:
                    return "timeout"
                parsed = await parse(reply)
                if parsed is not None:
                    return parsed
                await zygote.check()
                return "crash"
            except ZygoteDied as error:
                await self._replace(zygote, str(error))

    async def _load(self) -> None:
        """Start a zygote and wait until it has loaded the rewards; try again if it is killed."""
        is_loaded = False
        while not is_loaded:
            if self._is_closed:
                raise SandboxDied("the sandbox was closed")
            zygote = self._zygote = ZygoteClient(self._specs, self._config)
            try:
                await zygote.load()
                is_loaded = True
            except ZygoteDied as error:
                self._respawns.add("the sandbox", str(error))
            finally:
                if not is_loaded:
                    await self._end()
        self._flags = zygote.flags

    async def _replace(self, dead: ZygoteClient, cause: str) -> None:
        """Replace a dead zygote, unless another request has done so."""
        async with self._replacing:
            if self._zygote is not dead:
                return
            started = time.perf_counter()
            await self._end()
            self._respawns.add("the sandbox", cause)
            await self._load()
            self._on_respawn(cause, time.perf_counter() - started)

    async def _end(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnippetResult:
    """The result of running a snippet.

    Example: `SnippetResult(status="ok", output="6\\n")` for `print(2 * 3)` and for `2 * 3`
    """

    status: Literal["ok", "error", "timeout", "crash"]
    """`error`: the code raised; `timeout`: it took too long; `crash`: its process died, for example out of memory."""
    output: str = ""
    """Printed text, followed by the value of the last statement if it is an expression. The model controls this text."""
    error: str = ""
    """Traceback; empty unless the status is `error`."""


class SnippetPool(SandboxPool):
    """Runs code snippets that a model wrote, each in a confined process, which is killed afterwards."""

    name, reason = "snippet pool", "model-written code runs"

    def __init__(self, config: SandboxConfig, modules: Sequence[str] = ()) -> None:
        """Keep the settings. The processes import `modules` in advance, so that importing them in a snippet costs nothing."""
        factory = "titanrl.processes.zygote:snippet_runner"
        super().__init__(
            [RewardSpec(name="python", factory=factory, kwargs={"modules": tuple(modules)}, returns_text=True)], config
        )

    async def run(self, code: str, *, max_output_chars: int) -> SnippetResult:
        """Run a snippet. Wait while `num_processes` others are running.

        Args:
            code: Python source.
            max_output_chars: Maximum length of the output, and of the error. Longer output loses its end, longer errors their
                start.

        Raises:
            SandboxDied: The pool is closed.
            RespawnLimitError: The zygote died too often.
        """
        self._check_open()
        limit = max_output_chars + 100  # with room for a note about dropped characters

        async def parse(reply: bytes) -> SnippetResult | None:
            """Parse a reply. It is untrusted, because the code may have written it."""
            try:
                parsed = json.loads(reply.removeprefix(STARTED).removesuffix(END))
            except (ValueError, RecursionError):
                return None
            match parsed:
                case {"text": {"output": str(output), "error": str(error)}}:
                    return SnippetResult(status="error" if error else "ok", output=output[:limit], error=error[:limit])
                case {"error": str(error)}:  # an exception that the runner could not catch
                    return SnippetResult(status="error", error=error[:limit])
            return None

        request: Request = (0, {"max_output_chars": max_output_chars}, (code,), (0,), ("stop",), (), ())
        result = await self._request(request, self._config.timeout_s, 2 * _JSON_BYTES_PER_CHAR * limit, parse)
        return SnippetResult(status=result) if isinstance(result, str) else result
