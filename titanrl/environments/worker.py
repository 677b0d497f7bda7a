"""Environments in processes of their own: for native code, blocking calls, or another Python interpreter.

A `ProcessEnvironment` is an environment itself. Its calls have hard time limits: beyond one, the process is killed and the call
raises. A pool keeps the processes for later episodes and replaces those that have ended.
"""

import asyncio
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titanrl.environments.child import LENGTH, Request, decoded
from titanrl.environments.errors import EnvironmentDied, EnvironmentFailure, EnvironmentTimeout
from titanrl.environments.interface import Done, Episode, Message, Observation
from titanrl.environments.registry import KEY, plugin_for
from titanrl.plugins import Plugin, Plugins

_MAX_REPLY_BYTES = 64 << 20
_EXIT_DEADLINE_S = 5.0
_BOOTSTRAP = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("an environment needs Python 3.10 or newer, not " + sys.version)
import importlib.util
place, channel, parent = sys.argv[1:]
spec = importlib.util.spec_from_file_location("titanrl", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["titanrl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["titanrl"])
from titanrl.environments.child import main
main(int(channel), int(parent))
"""
"""Program of a process. Another interpreter gets this package alone, and not those that are installed beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Processes of environments, and the time limits of their calls."""

    num_processes: int = 8
    """Episodes at once; further ones wait in `reset`."""
    python: Path | str | None = None
    """Interpreter, 3.10 or newer; None is this one. Another one imports the environment from its own packages."""
    log: Path | None = None
    """File for the output of the processes; None is the standard error stream."""
    start_s: float = 60.0
    """Limit in seconds of the start of a process, with the imports of the environment."""
    reset_s: float = 60.0
    """Limit of the start of an episode."""
    step_s: float = 60.0
    """Limit of the answer to a message."""
    close_s: float = 10.0
    """Limit of the end of an episode."""


class EnvironmentPool:
    """Makes environments that run in processes of their own. It belongs to the event loop that uses it.

    Example:
        pool = EnvironmentPool("my_games.py:Chess", {"skill": 3}, processes=ProcessOptions(num_processes=16))
        await pool.start()
        environment = pool.make()  # for one episode
        observation = await environment.reset(episode)
        ...
        await environment.close()  # the process is free for another episode
        await pool.close()
    """

    def __init__(
        self,
        function: object,
        options: Mapping[str, Any] = MappingProxyType({}),
        plugins: Plugins = MappingProxyType({}),
        *,
        processes: ProcessOptions = ProcessOptions(),
    ) -> None:
        """Keep the settings.

        Args:
            function: Name of a built-in environment, import path, class or function.
            options: Keywords of the function.
            plugins: Objects of the user; `data.environment.function` replaces `function`.
            processes: Number, interpreter, log and time limits of the processes.

        Raises:
            ValueError: An object of Python is to run in another interpreter, or cannot be sent to another process.
        """
        self._function = plugin_for(function, plugins) or str(function)
        if processes.python is not None and isinstance(self._function, Plugin) and self._function.is_object:
            raise ValueError(
                f"{KEY}.python: another interpreter imports the environment itself, and cannot have an object of this one "
                f"(got {str(processes.python)!r}). Give the import path of the environment, or remove python."
            )
        self.processes = processes
        self._options = dict(options)
        self._slots = asyncio.Semaphore(processes.num_processes)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()  # until they have exited
        self._is_closed = False

    async def start(self) -> None:
        """Start one process, to find out whether the environment can be loaded.

        Raises:
            EnvironmentFailure: It cannot.
        """
        self.give_back(await self.take())

    def make(self) -> "ProcessEnvironment":
        """Return an environment for one episode."""
        return ProcessEnvironment(self)

    async def close(self) -> None:
        """Kill every process and wait until they have exited. Calls of running episodes raise `EnvironmentDied`."""
        self._is_closed = True
        for process in self._running:
            process.kill()
        await asyncio.gather(*[process.exited() for process in self._running])
        self._idle.clear()

    async def take(self) -> "_Process":
        """Wait for a process, and start one if none is idle. The caller must pass it to `give_back`.

        Raises:
            EnvironmentFailure: A process cannot be started, or the environment cannot be loaded in it.
        """
        await self._slots.acquire()
        try:
            while self._idle:
                process = self._idle.pop()
                if not process.ended:
                    return process
                process.kill()
            return await self._started()
        except BaseException:  # also when cancelled
            self._slots.release()
            raise

    def give_back(self, process: "_Process", *, is_clean: bool = True) -> None:
        """Keep a process for another episode, or kill it if its last one did not end well."""
        if is_clean and not process.ended and not self._is_closed:
            self._idle.append(process)
        else:
            process.kill()
        self._slots.release()

    async def _started(self) -> "_Process":
        if self._is_closed:
            raise EnvironmentDied(f"{KEY}: the pool of environment processes is closed")
        process = _Process(self.processes.python, self.processes.log, on_exit=self._running.discard)
        self._running.add(process)
        path = [str(place) for place in sys.path] if self.processes.python is None else []
        try:
            await process.connect()
            await process.ask(("load", (self._function, self._options, path)), self.processes.start_s, "start")
        except BaseException:  # also when cancelled
            process.kill()
            raise
        return process


class ProcessEnvironment:
    """An environment in a process of its own, for one episode; made by `EnvironmentPool`."""

    def __init__(self, pool: EnvironmentPool) -> None:
        """Keep the pool; `reset` takes a process."""
        self._pool = pool
        self._process: _Process | None = None

    async def reset(self, episode: Episode) -> Observation:
        """Start the episode in a free process.

        Raises:
            EnvironmentTimeout: The environment took too long; its process was killed.
            EnvironmentDied: The process ended.
            EnvironmentFailure: The environment raised, or did not return an observation.
        """
        assert self._process is None, "an environment serves one episode"
        self._process = await self._pool.take()
        fields = {"task_id": episode.task_id, "question": episode.question, "entry": dict(episode.entry), "seed": episode.seed}
        result = await self._ask("reset", (fields,), self._pool.processes.reset_s)
        if isinstance(result, Done):
            raise EnvironmentFailure(f"{KEY}: reset returned Done. Return an Observation with the first message.")
        return result

    async def step(self, message: Message) -> Observation | Done:
        """Answer a message of the policy; raises as `reset` does."""
        return await self._ask("step", (dict(message),), self._pool.processes.step_s)

    async def close(self) -> None:
        """End the episode and free the process; raises as `reset` does, if the process did not end before."""
        process, self._process = self._process, None
        if process is None:
            return
        is_clean = False
        try:
            if not process.ended:
                await process.ask(("close", ()), self._pool.processes.close_s, "close")
                is_clean = True
        finally:
            self._pool.give_back(process, is_clean=is_clean)

    async def _ask(self, name: str, arguments: tuple[Any, ...], limit_s: float) -> Observation | Done:
        assert self._process is not None, f"{name} is called between reset and close"
        reply = await self._process.ask((name, arguments), limit_s, name)
        try:
            return decoded(reply)
        except (ValueError, TypeError) as error:
            raise EnvironmentFailure(f"{KEY}: the reply to {name} is invalid: {error}") from error


class _Process:
    """A process, and this side of its socket."""

    def __init__(self, python: Path | str | None, log: Path | None, on_exit: "Callable[[_Process], None]") -> None:
        """Start the process."""
        self._log = log
        self._when_exited = on_exit
        self._replies = _Replies()
        self._transport: asyncio.Transport | None = None
        self._was_killed = False
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._popen = _start(python, theirs.fileno(), log)
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def ended(self) -> bool:
        """True if the process has ended, or will at once. The loop may not have noticed it yet."""
        if self._was_killed or self._exited.done() or self._replies.ended.done():
            return True
        exit_poll = select.poll()
        exit_poll.register(self._pidfd, select.POLLIN)
        return bool(exit_poll.poll(0))

    async def connect(self) -> None:
        """Listen on the socket."""
        self._transport, _ = await self._loop.create_connection(lambda: self._replies, sock=self._ours)

    async def ask(self, request: Request, limit_s: float, what: str) -> dict[str, Any]:
        """Send a request and return its reply. If that fails, or is cancelled, the process is killed.

        Raises:
            EnvironmentTimeout: There is none in time.
            EnvironmentDied: The process ended.
            EnvironmentFailure: The environment raised; the process goes on.
        """
        assert self._transport is not None
        try:
            body = pickle.dumps(request, protocol=4)
        except Exception as error:  # pickling runs code of the user's classes
            cause = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(f"{KEY}: the arguments of {what} cannot be sent to a process: {cause}") from error
        try:
            reply = self._replies.expect()
            self._transport.write(LENGTH.pack(len(body)) + body)
            either: list[asyncio.Future[Any]] = [reply, self._replies.ended]
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # also when cancelled: the process may be in the middle of a call
            self.kill()
            raise
        if reply.done():
            return self._checked(reply.result(), what)
        if not self._replies.ended.done():
            self.kill()
            raise EnvironmentTimeout(f"{KEY}: {what} took longer than {limit_s:g} s, so its process was killed{self._where()}")
        raise EnvironmentDied(f"{KEY}: its process ended during {what} ({await self._how()}){self._where()}")

    def kill(self) -> None:
        """Kill the process, with those that it has started."""
        self._was_killed = True
        if not self._exited.done():
            self._kill_group()
        if self._transport is None:
            self._ours.close()
        else:
            self._transport.abort()

    async def exited(self) -> None:
        """Wait until the process has exited."""
        await asyncio.wait([self._exited], timeout=_EXIT_DEADLINE_S)

    def _checked(self, body: bytes, what: str) -> dict[str, Any]:
        try:
            reply = json.loads(body)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise EnvironmentFailure(f"{KEY}: the reply to {what} is invalid (got {body!r:.80}), so its process was killed")
        if "error" in reply:
            raise EnvironmentFailure(f"{KEY}: {what} raised {reply['error']}{self._where()}")
        return reply

    async def _how(self) -> str:
        """Return the way in which the process ended."""
        await asyncio.wait([self._exited], timeout=_EXIT_DEADLINE_S)
        self.kill()  # if it only closed its socket
        if not self._exited.done():
            return "it closed its connection"
        code = self._exited.result()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _where(self) -> str:
        return "" if self._log is None else f" (output: {self._log})"

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._kill_group()  # processes that the environment started; the group exists until `wait`
        self._exited.set_result(self._popen.wait())
        os.close(self._pidfd)
        self._when_exited(self)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


class _Replies(asyncio.Protocol):
    """Reads replies from the socket. It sets futures as bytes arrive, so a reply is in time even if this loop was busy."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._reply: asyncio.Future[bytes] = loop.create_future()
        self._received = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    def expect(self) -> "asyncio.Future[bytes]":
        """Return the future of the next reply."""
        self._received.clear()
        self._reply = asyncio.get_running_loop().create_future()
        return self._reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < LENGTH.size or self._reply.done():
            return
        (length,) = LENGTH.unpack_from(self._received)
        if length > _MAX_REPLY_BYTES:
            self._reply.set_result(b"a reply that is too long")
        elif len(self._received) >= LENGTH.size + length:
            self._reply.set_result(bytes(self._received[LENGTH.size : LENGTH.size + length]))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _start(python: Path | str | None, channel: int, log: Path | None) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own. The hash seed is fixed, so that a seed gives the same episode."""
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    if python is not None:
        environment = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    place = Path(__file__).resolve().parents[1]  # of the package titanrl
    arguments = [str(python or sys.executable), "-c", _BOOTSTRAP, str(place), str(channel), str(os.getpid())]
    output = os.dup(2) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[channel],
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFailure(f"{KEY}.python: cannot be started: {error.strerror} (got {str(python)!r})") from error
    finally:
        os.close(output)
