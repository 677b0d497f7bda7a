"""Objects that the episodes of an event loop share, such as pools and servers, and processes of servers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from titanrl.environments.interface import EnvironmentFailure
from titanrl.processes.children import Child, Output

_KEPT_BYTES = 1000
_EXIT_DEADLINE_S = 2.0
_EXEC = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
"""Program that makes the kernel kill the process with its parent, as `confine.end_with_parent` does, and executes a command."""


@runtime_checkable
class _Closable(Protocol):
    async def close(self) -> None: ...


class _Server(_Closable, Protocol):
    @property
    def has_ended(self) -> bool: ...

    async def open(self) -> None: ...


T = TypeVar("T")
S = TypeVar("S", bound=_Server)

_started: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Task[Any]] = {}


async def shared(key: Hashable, start: Callable[[], Awaitable[T]]) -> T:
    """Return the object of this event loop with this key; `start` creates it on first use, and again after a failure.

    An object with a method `close` is closed by `close_shared`.
    """
    for loop, name in [place for place in _started if place[0].is_closed()]:
        del _started[loop, name]

    async def started() -> T:
        try:
            return await start()
        except BaseException:  # also if no use waits for it any more, so that no later one gets this exception
            if _started.get(place) is asyncio.current_task():
                del _started[place]
            raise

    place = (asyncio.get_running_loop(), key)
    if place not in _started:
        _started[place] = asyncio.create_task(started())
    result: T = await asyncio.shield(_started[place])
    return result


async def forget(key: Hashable, used: _Closable) -> None:
    """Close a shared object, so that the next use starts another one. Do nothing if another use has done so."""
    place = (asyncio.get_running_loop(), key)
    task = _started.get(place)
    if task is not None and task.done() and task.result() is used:
        del _started[place]
        await used.close()


async def opened(server: S) -> S:
    """Open a server and return it; close it if that fails."""
    try:
        await server.open()
    except BaseException:  # including cancellation
        await server.close()
        raise
    return server


async def running(key: Hashable, make: Callable[[], S]) -> S:
    """Return the server of this event loop with this key. Open it on first use, and another one after it has ended."""

    async def start() -> S:
        return await opened(make())

    server = await shared(key, start)
    if server.has_ended:
        await forget(key, server)
        server = await shared(key, start)
    return server


async def close_shared() -> None:
    """Close what the episodes of this event loop share."""
    loop = asyncio.get_running_loop()
    tasks = [_started.pop(place) for place in [place for place in _started if place[0] is loop]]
    await asyncio.gather(*map(_close, tasks))


async def _close(task: asyncio.Task[Any]) -> None:
    try:
        made = await task
    except Exception:  # those who waited for it have got the exception
        return
    if isinstance(made, _Closable):
        await made.close()


class ServerProcess:
    """A server that an environment starts: a process that ends with this one, together with the processes it starts.

    What it writes to its standard error stream is read, and only the end is kept, for messages.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        key: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        stream: int | None = None,
    ) -> None:
        """Start a command, which is looked up in the path. It inherits `descriptors`, and messages have the configuration key.

        `stream` is the descriptor of its standard input and output; None for none, with the output like the errors.

        Raises:
            EnvironmentFailure: The process cannot be started.
        """
        self._output = Output(_KEPT_BYTES)
        theirs = self._output.theirs
        try:
            self._child = Child(
                [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command],
                environment=environment,
                descriptors=descriptors,
                stdin=subprocess.DEVNULL if stream is None else stream,
                stdout=theirs if stream is None else stream,
                stderr=theirs,
                on_exit=lambda child: None,
            )
        except OSError as error:
            self._output.close()
            raise EnvironmentFailure(f"{key}: cannot be started: {error.strerror} (got {command[0]!r})") from error
        finally:
            os.close(theirs)

    @property
    def has_exited(self) -> bool:
        """True if the process has exited."""
        return self._child.has_exited

    @property
    def account(self) -> str:
        """The end of a sentence, with the exit code of the process and the end of its output; empty without either."""
        code = self._child.exited.result() if self._child.exited.done() else None
        self._output.read()
        output = self._output.kept.decode(errors="replace").strip()
        how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        return f"{how}; its output ends with: {output}" if output else how

    def kill(self) -> None:
        """Kill the process and its children."""
        self._child.kill()

    async def exited(self, timeout_s: float = _EXIT_DEADLINE_S) -> None:
        """Wait until the process has exited, or the time is over."""
        await asyncio.wait([self._child.exited], timeout=timeout_s)

    async def close(self, timeout_s: float = 0.0) -> None:
        """Kill the process after giving it time to exit, and stop reading its output."""
        try:
            await self.exited(timeout_s)
        finally:  # also if the wait is cancelled
            self.kill()
        await self.exited()
        self._output.close()
