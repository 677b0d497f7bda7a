"""The socket in the directory of a running run, through which other processes of its user steer it.

`titanrl steer`, the board and your own programs call `steer`; the run answers with `listen`. A connection carries one JSON
object in each direction, on one line each. docs/howto/steer.md describes them.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from titanrl.base.errors import TitanRLError
from titanrl.base.ownership import is_own_peer

SOCKET = "steer.sock"
"""Name of the socket in the run directory."""
LOCK_FILE = "run.lock"
"""File of a run directory that its controller keeps locked; it contains the controller's process id and host name."""
MAX_BYTES = 1 << 16
"""Maximum length of a request or a reply."""
REPLY_S = 30.0
"""Time limit for a request and its reply, in seconds. The controller answers between two events, within milliseconds."""

Action = Literal["status", "pause", "resume", "set"]
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function of the run that answers a request."""


class SteeringError(TitanRLError):
    """The run cannot be reached, or has refused the request; the message says why."""


async def steer(run_dir: Path, action: Action, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to the run that uses a directory, and return its reply.

    Args:
        run_dir: Run directory, of a run of this user.
        action: `status`, `pause`, `resume`, or `set` to change keys.
        values: New values of the keys to `set`, as JSON has them.

    Returns:
        `step` (steps taken), `num_steps`, `state` (`starting`, `training`, `pausing`, `paused` or `ending`), `text` (one line
        for a person) and `keys`, the current value of each key that can be changed.

    Raises:
        SteeringError: No run answers, or the run has refused the request. Nothing was changed.
    """
    request = json.dumps({"action": action, "values": dict(values or {})}).encode() + b"\n"
    if len(request) > MAX_BYTES:
        raise SteeringError(f"steer: a request must not be longer than {MAX_BYTES:,} bytes (got {len(request):,}). Shorten it.")
    try:
        async with asyncio.timeout(REPLY_S):
            reply = await _exchange(run_dir, request)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        what = "refuses connections" if isinstance(error, ConnectionRefusedError) else "has no socket"
        what = what if run_dir.is_dir() else "does not exist"
        raise SteeringError(
            f"{run_dir}: no run answers here, because the directory {what} (got {SOCKET}). Give the directory of a run that "
            "is running, on the host of its controller."
        ) from None
    except TimeoutError:
        raise SteeringError(
            f"{run_dir}: the run did not answer within {REPLY_S:g} s. Try again, or look at its logs."
        ) from None
    except OSError as error:
        raise SteeringError(f"{run_dir}: the run cannot be reached ({error.strerror or error}).") from error
    try:
        answered = json.loads(reply)
    except ValueError:
        raise SteeringError(f"{run_dir}: the run ended before it answered. Look at its console.") from None
    if not isinstance(answered, dict) or "error" in answered:
        raise SteeringError(str(answered["error"]) if isinstance(answered, dict) else f"{run_dir}: unknown reply")
    return answered


async def _exchange(run_dir: Path, request: bytes) -> bytes:
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX))
        connection.setblocking(False)
        with _short(run_dir) as folder:
            await asyncio.get_running_loop().sock_connect(connection, f"{folder}/{SOCKET}")
        if not is_own_peer(connection):
            raise PermissionError(1, "it belongs to another user")
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_BYTES)
        undo.pop_all()  # the writer closes it
    try:
        writer.write(request)
        return await reader.readline()
    finally:
        writer.close()


class Control:
    """The socket of a run. Create one with `listen`."""

    def __init__(self, server: asyncio.Server, path: Path) -> None:
        self._server, self._path = server, path

    def close(self) -> None:
        """Remove the socket."""
        self._server.close()
        self._path.unlink(missing_ok=True)


async def listen(run_dir: Path, answer: Answer) -> Control:
    """Answer requests at the socket of a run directory, whose lock this process holds.

    Only processes of this user can connect: the socket has mode 0600, and the kernel tells the user of each connection.
    `answer` may raise a `TitanRLError`, `TypeError` or `ValueError` to refuse a request. Raise `OSError` if the file system
    cannot hold sockets, or the name is taken by something that cannot be removed.
    """
    path = run_dir / SOCKET
    path.unlink(missing_ok=True)  # of a run that was killed; the lock excludes others
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)  # the kernel gives this mode to the file, so it never has another one
        with _short(run_dir) as folder:
            listener.bind(f"{folder}/{SOCKET}")
        undo.callback(path.unlink, missing_ok=True)
        server = await asyncio.start_server(partial(_handle, answer), sock=listener, limit=MAX_BYTES)
        undo.pop_all()  # the server closes it
    return Control(server, path)


async def _handle(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if not is_own_peer(writer.get_extra_info("socket")):
            return
        async with asyncio.timeout(REPLY_S):
            line = await reader.readline()
        writer.write(json.dumps(_reply(answer, line)).encode() + b"\n")
    except (OSError, ValueError):  # a client that hangs, leaves, or sends too much
        return
    finally:
        writer.close()


def _reply(answer: Answer, line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {"error": "steer: a request is one JSON object on one line. See docs/howto/steer.md."}
    if not isinstance(request, dict):
        return {"error": f"steer: a request is a JSON object (got {type(request).__name__}). See docs/howto/steer.md."}
    try:
        return answer(request)
    except (TitanRLError, TypeError, ValueError) as error:
        return {"error": str(error)}


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, since the address of a socket has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
