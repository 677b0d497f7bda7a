"""Environments of a run, in this process or in separate ones.

Separate processes are for native code, blocking calls, or another Python interpreter. A `ProcessEnvironment` implements
`Environment`. Its calls have hard time limits: if a call exceeds its limit, the process is killed and the call raises. A pool
reuses the processes for later episodes and replaces processes that have exited.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titanrl.base.plugins import Plugin, Plugins
from titanrl.environments.child import LENGTH, decoded
from titanrl.environments.factories import KEY, load_factory, plugin_for
from titanrl.environments.interface import (
    Done,
    Environment,
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    InvalidReward,
    Limit,
    Message,
    Observation,
    Prepares,
)
from titanrl.environments.servers import close_shared
from titanrl.processes.children import Channel, Child

_MAX_REPLY_BYTES = 8 << 20  # parsing it takes 0.2 s at worst; valid replies are shorter (`interface.MAX_CHARS`)
_EXIT_DEADLINE_S = 5.0
_BOOTSTRAP = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("an environment needs Python 3.10 or newer, not " + sys.version)
import importlib.util
package, channel, parent = sys.argv[1:]
spec = importlib.util.spec_from_file_location("titanrl", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["titanrl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["titanrl"])
from titanrl.environments.child import main
main(int(channel), int(parent))
"""
"""Program of an environment process. It makes only the package `titanrl` importable, and none of the packages installed next to
it, so that another interpreter uses its own packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of environment processes, and the time limits of their calls."""

    num_processes: int = 8
    """Maximum number of processes, and so of concurrent episodes. Other episodes wait in `reset`."""
    python: Path | str | None = None
    """Interpreter, Python 3.10 or newer; None for the current one. Another one imports the environment from its packages."""
    log: Path | None = None
    """File for the output of the processes; None for the standard error stream."""
    start_s: float = 60.0
    """Time limit in seconds for starting a process, including the imports of the environment."""
    reset_s: float = 60.0
    """Time limit of `reset` in seconds."""
    step_s: float = 60.0
    """Time limit of `step` in seconds."""
    close_s: float = 10.0
    """Time limit of `close` in seconds."""


class Environments:
    """Creates an environment for each episode, and owns the processes that environments share.

    Example:
        environments = Environments("calculator", {"max_calls": 4})
        await environments.start()
        environment = environments.make()
        ...
        await environments.close()
    """

    def __init__(
        self,
        function: object,
        options: Mapping[str, Any] = MappingProxyType({}),
        plugins: Plugins = MappingProxyType({}),
        *,
        processes: ProcessOptions | None = None,
    ) -> None:
        """Load the environment; `make_environment` describes the arguments, and what is raised.

        With `processes`, each environment runs in a separate process; None runs them in this process.
        """
        self._pool = None if processes is None else EnvironmentPool(function, options, plugins, processes=processes)
        self.make: Callable[[], Environment] = (
            load_factory(function, options, plugins) if self._pool is None else self._pool.make
        )
        """Return an environment for one episode."""

    async def start(self) -> None:
        """Start one process as `EnvironmentPool.start` does, or prepare here; raise `EnvironmentFailure` if it fails."""
        if self._pool is not None:
            await self._pool.start()
        elif isinstance(environment := self.make(), Prepares):
            await environment.prepare()

    async def close(self) -> None:
        """Stop the processes that the environments share."""
        if self._pool is not None:
            await self._pool.close()
        await close_shared()


class EnvironmentPool:
    """Creates environments that run in separate processes. A pool belongs to the event loop that uses it.

    Example:
        pool = EnvironmentPool("my_games.py:Chess", {"skill": 3}, processes=ProcessOptions(num_processes=16))
        await pool.start()
        environment = pool.make()  # for one episode
        observation = await environment.reset(episode)
        ...
        await environment.close()  # the process can now run another episode
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
        """Keep the settings; processes start on demand. The arguments are those of `Environments`.

        Raises:
            ValueError: A Python object was passed together with another interpreter, or it cannot be sent to another process.
        """
        self._function = plugin_for(function, plugins) or str(function)
        if processes.python is not None and isinstance(self._function, Plugin) and self._function.is_object:
            raise ValueError(
                f"{KEY}.python: another interpreter imports the environment itself, so it cannot use an object from this one "
                f"(got {str(processes.python)!r}). Pass the import path of the environment, or remove python."
            )
        self.processes = processes
        self._options = dict(options)
        self._slots = asyncio.Semaphore(processes.num_processes)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()  # until they have exited
        self._is_closed = False

    async def start(self) -> None:
        """Start one process, to check that the environment can be loaded; raise `EnvironmentFailure` if it cannot."""
        self.release(await self.acquire())

    def make(self) -> "ProcessEnvironment":
        """Return an environment for one episode."""
        return ProcessEnvironment(self)

    async def close(self) -> None:
        """Kill all processes and wait until they have exited. Calls of running episodes raise `EnvironmentDied`."""
        self._is_closed = True
        for process in self._running:
            process.kill()
        await asyncio.gather(*[process.exited() for process in self._running])
        self._idle.clear()

    async def acquire(self) -> "_Process":
        """Wait for a slot; return an idle or a new process, for `release`; raise `EnvironmentFailure` if none starts."""
        await self._slots.acquire()
        try:
            while self._idle:
                process = self._idle.pop()
                if not process.has_exited:
                    return process
                process.kill()
            if self._is_closed:
                raise EnvironmentDied(f"{KEY}: the pool of environment processes is closed")
            process = _Process(self.processes.python, self.processes.log, on_exit=self._running.discard)
            self._running.add(process)
            path = [str(entry) for entry in sys.path] if self.processes.python is None else []
            try:
                await process.request("start", (self._function, self._options, path), self.processes.start_s)
            except BaseException:  # including cancellation
                process.kill()
                raise
            return process
        except BaseException:  # including cancellation
            self._slots.release()
            raise

    def release(self, process: "_Process", *, is_clean: bool = True) -> None:
        """Keep a process for another episode, or kill it if the last one was not closed properly."""
        if is_clean and not process.has_exited and not self._is_closed:
            self._idle.append(process)
        else:
            process.kill()
        self._slots.release()


class ProcessEnvironment:
    """An environment in a separate process, for one episode. `EnvironmentPool.make` creates it."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._process: _Process | None = None

    async def reset(self, episode: Episode) -> Observation:
        """Wait for a process and start the episode in it.

        Raises:
            EnvironmentTimeout: The environment took too long; its process was killed.
            EnvironmentDied: The process died.
            EnvironmentFailure: The environment raised, or did not return an observation.
        """
        assert self._process is None, "an environment is used for one episode only"
        self._process = await self._pool.acquire()
        fields = {"task_id": episode.task_id, "question": episode.question, "entry": dict(episode.entry), "seed": episode.seed}
        result = await self._request("reset", (fields,), self._pool.processes.reset_s)
        if isinstance(result, Done):
            raise EnvironmentFailure(f"{KEY}: reset must not return Done. Return an Observation with the first messages.")
        return result

    async def step(self, message: Message) -> Observation | Done:
        """Process a message of the policy. Raise the same exceptions as `reset`."""
        return await self._request("step", (dict(message),), self._pool.processes.step_s)

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
        """Judge an episode that a limit ended; None if the environment does not. Raise the same exceptions as `reset`."""
        assert self._process is not None, "judge_truncated must be called between reset and close"
        arguments = (None if message is None else dict(message), limit)
        reply = await self._process.request("judge_truncated", arguments, self._pool.processes.step_s)
        if reply == {"done": None}:
            return None
        done = self._decoded("judge_truncated", reply)
        if isinstance(done, Observation):
            raise EnvironmentFailure(f"{KEY}: judge_truncated must not return an Observation. Return Done or None.")
        return done

    async def close(self) -> None:
        """End the episode and release its process. Raise the same exceptions as `reset`, unless the process exited before."""
        process, self._process = self._process, None
        if process is None:
            return
        is_clean = False
        try:
            if not process.has_exited:
                await process.request("close", (), self._pool.processes.close_s)
                is_clean = True
        finally:
            self._pool.release(process, is_clean=is_clean)

    async def _request(self, name: str, arguments: tuple[Any, ...], limit_s: float) -> Observation | Done:
        assert self._process is not None, f"{name} must be called between reset and close"
        return self._decoded(name, await self._process.request(name, arguments, limit_s))

    def _decoded(self, name: str, reply: Mapping[str, Any]) -> Observation | Done:
        try:
            return decoded(reply)
        except EnvironmentFailure as error:
            raise type(error)(f"{KEY}: the reply to {name} is invalid: {error}") from error


class _Process:
    """An environment process, and the parent's end of its socket."""

    def __init__(self, python: Path | str | None, log: Path | None, on_exit: "Callable[[_Process], None]") -> None:
        """Start the process in a new session. The hash seed is fixed, so that equal seeds give equal episodes."""
        self._log_hint = "" if log is None else f" (output: {log})"
        variables = {"PYTHONHASHSEED": "0", **os.environ}
        if python is not None:
            variables = {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        package = Path(__file__).resolve().parents[1]
        ours, theirs = socket.socketpair()
        output = os.dup(2) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._child = Child(
                [str(python or sys.executable), "-c", _BOOTSTRAP, str(package), str(theirs.fileno()), str(os.getpid())],
                environment=variables,
                descriptors=[theirs.fileno()],
                stdout=output,
                stderr=output,
                on_exit=lambda child: on_exit(self),
            )
        except OSError as error:
            ours.close()
            raise EnvironmentFailure(f"{KEY}.python: cannot be started: {error.strerror} (got {str(python)!r})") from error
        finally:
            os.close(output)
            theirs.close()
        self._channel = Channel(ours, _is_complete)

    @property
    def has_exited(self) -> bool:
        """True if the process has exited or is about to, even if the event loop has not processed the event yet."""
        return self._channel.is_closed or self._child.has_exited

    async def request(self, name: str, arguments: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
        """Call a method of the process and return its reply.

        The process is killed if the call is cancelled, or if there is no valid reply in time. It keeps running if the
        environment raises. `name` is that of a method of `child._Host`.

        Raises:
            EnvironmentTimeout: No reply arrived in time.
            EnvironmentDied: The process died.
            EnvironmentFailure: The environment raised, the arguments cannot be pickled, or the reply is invalid.
        """
        try:
            body = pickle.dumps((name, arguments), protocol=4)
        except Exception as error:  # pickling runs user code
            cause = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(f"{KEY}: the arguments of {name} cannot be sent to a process: {cause}") from error
        try:
            reply = await self._channel.request(LENGTH.pack(len(body)) + body, limit_s, LENGTH.size + _MAX_REPLY_BYTES)
        except BaseException:  # including cancellation: the process may be in the middle of a call
            self.kill()
            raise
        if reply is None:
            self.kill()
            raise EnvironmentTimeout(f"{KEY}: {name} took longer than {limit_s:g} s, so its process was killed{self._log_hint}")
        if not _is_complete(reply):
            await self.exited()
            self.kill()  # in case it only closed its socket
            reason = "it closed its connection"
            if self._child.exited.done():
                code = self._child.exited.result()
                reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise EnvironmentDied(f"{KEY}: its process died during {name} ({reason}){self._log_hint}")
        (length,) = LENGTH.unpack_from(reply)
        if length > _MAX_REPLY_BYTES:
            self.kill()
            rule = f"the reply to {name} is longer than {_MAX_REPLY_BYTES >> 20} MiB"
            raise EnvironmentFailure(f"{KEY}: {rule}, so its process was killed{self._log_hint}")
        body = reply[LENGTH.size : LENGTH.size + length]
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            self.kill()
            raise EnvironmentFailure(f"{KEY}: the reply to {name} is invalid (got {body!r:.80}), so its process was killed")
        if "error" in parsed:
            kind = InvalidReward if parsed.get("is_reward") is True else EnvironmentFailure
            failure = EnvironmentTimeout if parsed.get("is_timeout") is True else kind
            raise failure(f"{KEY}: {name} raised {str(parsed['error'])[:2000]}{self._log_hint}")
        return parsed

    def kill(self) -> None:
        self._child.kill()
        self._channel.close()

    async def exited(self) -> None:
        await asyncio.wait([self._child.exited], timeout=_EXIT_DEADLINE_S)


def _is_complete(received: bytes | bytearray) -> bool:
    """Return True for a complete reply, and for one that is too long according to its first bytes."""
    if len(received) < LENGTH.size:
        return False
    length: int = LENGTH.unpack_from(received)[0]
    return length > _MAX_REPLY_BYTES or len(received) >= LENGTH.size + length
