"""Common parts of the HTTP endpoints: checks of callers, bodies with limits, errors without tracebacks, metrics; the listener.

A client is not trusted: its key is checked before its body is read, and its body has a limit.

The listener serves an ASGI application with uvicorn's HTTP protocol, but without `uvicorn.Server`, which takes over the signals
of the process and polls ten times per second. `tests/serving/test_http.py` fails if these internal interfaces change.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httptools
import prometheus_client as prometheus
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from titanrl.base.ownership import bind
from titanrl.serving.calls import Refused

T = TypeVar("T")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = Mapping[bytes, bytes]

HEADERS = {401: (b"www-authenticate", b"Bearer"), 405: (b"allow", b"POST"), 429: (b"retry-after", b"1")}
"""Header of each refusal that has one."""
JSON = b"application/json"
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine."""
dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Function that returns a value as compact JSON."""
logger = logging.getLogger(__name__)


class Disconnected(Exception):
    """The client has gone."""


class Response:
    """The response to one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.status = 499  # as in other servers: the client has gone

    async def send(self, body: bytes, headers: Iterable[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send a whole response."""
        self.has_started, self.status = True, status
        listed = [*headers, (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Start a response whose length is not known yet."""
        self.has_started, self.status = True, 200
        await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})

    async def send_part(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a part of a response that `start_stream` has started."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def send_json(self, value: object, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
        """Send a value as JSON."""
        await self.send(dump(value).encode(), [(b"content-type", JSON), *headers], status)

    async def refuse(self, refused: Refused) -> None:
        """Send a refusal, in the error format of the protocol. A stream that has started ends instead."""
        if self.has_started:
            await self.send_part(b"", is_last=True)
            return
        headers = [HEADERS[refused.status]] if refused.status in HEADERS else []
        await self.send_json(self.error(refused), refused.status, *headers)

    def error(self, refused: Refused) -> object:
        """Return the JSON of a refusal."""
        return {"error": str(refused)}


class Endpoint:
    """An ASGI application: checks who calls, answers `/health` and `/metrics`, and turns errors into responses."""

    def __init__(self, *, check: Callable[[], str] = str, hosts: Collection[str] | None = None) -> None:
        """Create the endpoint.

        Args:
            check: Function that returns why the policy cannot be served now; empty if it can.
            hosts: Names by which the endpoint may be addressed; None allows any. An endpoint without keys needs them, because a
                web page can make a browser send requests to this machine.
        """
        self._check, self._hosts = check, hosts
        self.registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter("titanrl_requests", "Requests.", ("path", "status"), registry=self.registry)
        self._cancelled = prometheus.Counter(
            "titanrl_requests_cancelled", "Requests whose client disconnected.", registry=self.registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        started, response = time.perf_counter(), self.response(scope["path"], send)
        try:
            await self._respond(scope, receive, response)
        except Disconnected:
            self._cancelled.inc()
        except Refused as refused:
            await response.refuse(refused)
        except asyncio.CancelledError:  # of this task, which ends here: the listener closes
            await response.refuse(Refused("the server shuts down.", status=503))
        except Exception as error:  # edge of the program: the log has the traceback, which the client must not see
            logger.exception("a request failed")
            await response.refuse(internal(error))
        finally:
            if (label := self.label(scope["path"])) is not None:
                self._requests.labels(label, response.status).inc()
                self.observe(label, time.perf_counter() - started)

    def response(self, path: str, send: Send) -> Response:
        """Return an unsent response to a request, which will be sent with `send`."""
        return Response(send)

    def label(self, path: str) -> str | None:
        """Return the label of a path in the metrics; None leaves it out."""
        return None

    def observe(self, label: str, seconds: float) -> None:
        """Record the time of a request."""

    def authorize(self, key: str) -> bool:
        """Return whether a key may use the endpoint; it may raise `Refused`."""
        raise NotImplementedError

    async def answer(self, scope: Scope, key: str, headers: Headers, receive: Receive, response: Any) -> None:
        """Answer a request of a client that may use the endpoint."""
        raise NotImplementedError

    async def _respond(self, scope: Scope, receive: Receive, response: Response) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        host = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]  # without the port
        if self._hosts is not None and host not in self._hosts:
            raise Refused(f"host: must be one of {', '.join(sorted(self._hosts))} (got {host[:80]!r})", status=403)
        if path == "/health":
            problem = self._check()
            await response.send_json({"status": problem or "ok"}, status=503 if problem else 200)
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = (bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")).decode("latin-1")
        if not self.authorize(key):
            rule = "the key is wrong or missing. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
            raise Refused(rule, status=401, code="invalid_api_key")
        if path == "/metrics":
            text = prometheus.generate_latest(self.registry)
            await response.send(text, [(b"content-type", prometheus.CONTENT_TYPE_LATEST.encode())])
        else:
            await self.answer(scope, key, headers, receive, response)


async def read_body(
    headers: Headers, receive: Receive, *, limit: int, limit_s: float, kinds: Collection[bytes] = (JSON,)
) -> bytes:
    """Return the body of a request.

    Args:
        headers: Headers of the request.
        receive: Source of its parts.
        limit: Longest body, in bytes.
        limit_s: Time limit, in seconds.
        kinds: Content types that are accepted; none of them is one that a web page can send unasked.

    Raises:
        Disconnected: The client has gone.
        Refused: The body is too long or late, or has another content type.
    """
    kind, length = headers.get(b"content-type", b""), headers.get(b"content-length", b"0")
    if kind.partition(b";")[0].strip().lower() not in kinds:
        names = b" or ".join(kinds).decode()
        raise Refused(f"content-type: must be {names} (got {kind[:80].decode('latin-1')!r})", status=415)
    too_long = Refused(f"body: must have at most {limit} bytes. Send less.", status=413)
    if not length.isdigit() or len(length) > 18 or int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(f"body: must arrive within {limit_s:g} s", status=408) from None


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await work; cancel it if the client disconnects.

    Raises:
        Disconnected: The client has gone.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        await cancel([working, watching])


async def cancel(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel tasks, and wait for their end."""
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # raised elsewhere, if at all


def internal(error: BaseException) -> Refused:
    """Return what a client sees of an unexpected error."""
    return Refused(f"an internal error ({type(error).__name__}). The log of the server has the details.", status=500)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Application = Callable[[Any, Any, Any], Awaitable[None]]

MAX_CONNECTIONS = 1024
"""Connections that are open at the same time; others are closed at once."""
MAX_BACKLOG = 4096
"""Largest number of connections that wait until they are accepted. The kernel resets others."""
HEAD_S = 60.0
"""Time limit for the head of a request, in seconds, from the connection or from its first byte."""
MAX_HEAD_BYTES = 1 << 16
"""Longest head of a request, in bytes."""
IDLE_S = 75.0
"""Time without a request after which a connection is closed, in seconds."""


class _Connection(HttpToolsProtocol):
    """A connection with a deadline and a size limit for the head of each request."""

    max_connections = MAX_CONNECTIONS
    _head: asyncio.TimerHandle | None = None
    _is_in_head = True
    _is_repeated = False  # the head that is parsed
    _num_bytes = 0  # of the head, without the part that arrived with what is before it

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.max_connections:
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


async def listen(app: Application, at: tuple[str, int] | Path, *, max_connections: int = MAX_CONNECTIONS) -> Listener:
    """Serve an application on an address and port (0 selects a free one), or on a Unix socket, on the running event loop.

    Raise `OSError` if the address cannot be used, and `ValueError` if other users can enter the folder of the Unix socket.
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
    backlog = min(max_connections, MAX_BACKLOG)

    def connect() -> asyncio.Protocol:
        connection = _Connection(config=config, server_state=state, app_state={}, _loop=loop)
        connection.max_connections = max_connections
        return connection

    if isinstance(at, Path):
        server = await loop.create_unix_server(connect, sock=bind(at), backlog=backlog)
        return Listener(server, state, f"unix:{at}", at)
    server = await loop.create_server(connect, sock=bind(at), backlog=backlog)
    port = server.sockets[0].getsockname()[1]
    return Listener(server, state, f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{port}", None)
