"""A listener that serves an ASGI application on a socket, with uvicorn's HTTP protocol.

It uses uvicorn's protocol without `uvicorn.Server`, which takes over the signals of the process and polls ten times per second.
`tests/serving/test_listening.py` fails if these internal interfaces change.
"""

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

Application = Callable[[Any, Any, Any], Awaitable[None]]

MAX_CONNECTIONS = 1024
"""Connections that are open at the same time; others are closed at once."""
HEAD_S = 60.0
"""Time limit for the head of a request, in seconds, from the connection or from its first byte."""
MAX_HEAD_BYTES = 1 << 16
"""Longest head of a request, in bytes."""
IDLE_S = 75.0
"""Time without a request after which a connection is closed, in seconds."""


class _Connection(HttpToolsProtocol):
    """A connection with a deadline and a size limit for the head of each request."""

    _head: asyncio.TimerHandle | None = None
    _is_in_head = True
    _is_repeated = False  # the head that is parsed
    _num_bytes = 0  # of the head, without the part that arrived with what is before it

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self in self.connections:  # not if it was one too many
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_waiting = self._is_waiting
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # a wish, such as for HTTP/2, that a server may ignore
            self._ignore_upgrade()
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if not self._is_in_head:
            self._num_bytes = 0
        elif self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {MAX_HEAD_BYTES} bytes.")
        if not self._is_waiting:
            self._end_head()
        elif is_waiting and self._head is None:
            self._await_head()

    def _ignore_upgrade(self) -> None:
        """Parse the rest of a request with a parser that has seen its head without the upgrade, which would end the request."""
        self.cycle.more_body, self._is_repeated = True, True
        self.parser = httptools.HttpRequestParser(self)
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))
        self._is_repeated = False

    def on_message_begin(self) -> None:
        if not self._is_repeated:
            self._is_in_head = True
            super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self._is_repeated:
            self._is_in_head = False
            super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # those after a body have no limit, and no use
            super().on_header(name, value)

    @property
    def _is_waiting(self) -> bool:
        """True if the head of a request is due."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None before a request

    def _await_head(self) -> None:
        self._head = asyncio.get_running_loop().call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class Listener:
    """A socket at which an application is served. Create one with `listen`."""

    def __init__(self, server: asyncio.Server, state: ServerState, url: str, path: Path | None) -> None:
        self._server, self._state, self._path = server, state, path
        self.url = url
        """Base URL, such as `http://127.0.0.1:8000`; `unix:PATH` of a Unix socket."""

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, let the running requests finish within a time limit, and cancel the others."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = set(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def listen(app: Application, at: tuple[str, int] | Path) -> Listener:
    """Serve an application on an address and port (0 selects a free one), or on a Unix socket, on the running event loop.

    A Unix socket must be in a folder that only this user can enter.

    Raises:
        OSError: The address cannot be used.
        ValueError: Other users can enter the folder of the Unix socket.
    """
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(IDLE_S),
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def connect() -> asyncio.Protocol:
        return _Connection(config=config, server_state=state, app_state={}, _loop=loop)

    if isinstance(at, Path):
        mode = at.parent.stat()
        if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
            raise ValueError(f"{at.parent}: only you may have access to the folder of a Unix socket. Run chmod 700 on it.")
        server = await loop.create_unix_server(connect, str(at))
        return Listener(server, state, f"unix:{at}", at)
    family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
    server = await loop.create_server(connect, at[0], at[1], family=family)
    port = server.sockets[0].getsockname()[1]
    return Listener(server, state, f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{port}", None)
