"""The HTTP endpoint: routes, keys, limits, streams and metrics, as an ASGI application over a look-up of callers.

A client is not trusted: its key is checked before its body is read, its body has a limit, and it can have only so many calls at
once. If it disconnects, its generation is cancelled.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import prometheus_client as prometheus

from titanrl.serving import anthropic, openai
from titanrl.serving.anthropic import MessagesRequest
from titanrl.serving.calls import Caller, Refused, Reply
from titanrl.serving.openai import ChatCompletion, TextCompletion, TokenCompletion
from titanrl.serving.protocol import Event, Exchange, Feed, Fields, Piece, load_json
from titanrl.serving.responses import Response

T = TypeVar("T")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Find = Callable[[str], Caller | None]
"""Function from a key, empty if the client sent none, to its caller; it may raise `Refused`."""

PROTOCOLS: Mapping[str, Callable[[Fields, str, Caller], Exchange]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/responses": Response,
    "/v1/messages": MessagesRequest,
    "/inference/v1/generate": TokenCompletion,
}
"""Protocol of each path that takes calls."""
HEADERS = {401: (b"www-authenticate", b"Bearer"), 405: (b"allow", b"POST"), 429: (b"retry-after", b"1")}
"""Header of each refusal that has one."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the endpoint."""

    max_body_bytes: int = 8 << 20
    """Longest body of a request."""
    max_calls: int = 512
    """Completions that all clients can wait for at the same time; more get status 429."""
    max_calls_per_key: int = 256
    """Completions that one key can wait for at the same time."""
    body_s: float = 30.0
    """Time limit for the body of a request, in seconds."""
    call_s: float = 600.0
    """Time limit of a call with its response, in seconds."""


class Metrics:
    """Metrics of an endpoint, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter("titanrl_requests", "Requests.", ("path", "status"), registry=self.registry)
        self.running = prometheus.Gauge("titanrl_calls_running", "Completions that clients wait for.", registry=self.registry)
        self.seconds = prometheus.Histogram("titanrl_call_seconds", "Time of a call with its response.", registry=self.registry)
        self.prompt_tokens = prometheus.Counter("titanrl_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.tokens = prometheus.Counter("titanrl_completion_tokens", "Sampled tokens.", registry=self.registry)
        self.cancelled = prometheus.Counter(
            "titanrl_requests_cancelled", "Requests whose client disconnected.", registry=self.registry
        )
        self.uncalled = prometheus.Counter(
            "titanrl_required_calls_missing", "Replies without the tool call that the client required.", registry=self.registry
        )


class App:
    """The endpoint as an ASGI application."""

    def __init__(
        self,
        find: Find,
        models: Sequence[str],
        limits: Limits | None = None,
        *,
        check: Callable[[], str] = str,
        hosts: Collection[str] | None = None,
    ) -> None:
        """Serve the callers that a look-up finds.

        Args:
            find: Function from a key to its caller.
            models: Names of the policy, of which the first is the default.
            limits: Limits.
            check: Function that returns why the policy cannot be served now; empty if it can.
            hosts: Names by which the endpoint may be addressed; None allows any. An endpoint without keys needs them, because a
                web page can make a browser send requests to this machine.
        """
        self._find, self._models, self._limits, self._check = find, tuple(models), limits or Limits(), check
        self._hosts, self._since, self.metrics = hosts, int(time.time()), Metrics()
        self._num_running: Counter[int] = Counter()  # calls by caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path, started = scope["path"], time.perf_counter()
        response = _Response(send, is_anthropic=path == "/v1/messages")
        try:
            await self._respond(scope, receive, response)
        except _Disconnected:
            self.metrics.cancelled.inc()
        except Refused as refused:
            await response.refuse(refused)
        except asyncio.CancelledError:  # of this task, which ends here: the listener closes
            await response.refuse(Refused("the server shuts down.", status=503))
        except Exception as error:  # edge of the program: the log has the traceback, which the client must not see
            logger.exception("a request failed")
            text = f"an internal error ({type(error).__name__}). The log of the server has the details."
            await response.refuse(Refused(text, status=500))
        finally:
            if path in PROTOCOLS:
                self.metrics.requests.labels(path, response.status).inc()
                self.metrics.seconds.observe(time.perf_counter() - started)

    async def _respond(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        if self._hosts is not None and (host := _host_of(headers)) not in self._hosts:
            raise Refused(f"host: must be one of {', '.join(sorted(self._hosts))} (got {host[:80]!r})", status=403)
        if path == "/health":
            problem = self._check()
            await response.send_json({"status": problem or "ok"}, status=503 if problem else 200)
            return
        caller = self._find(_key_of(headers))
        if caller is None:
            rule = "the key is wrong or missing. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
            raise Refused(rule, status=401, code="invalid_api_key")
        if path == "/metrics":
            text = prometheus.generate_latest(self.metrics.registry)
            await response.send(text, [(b"content-type", prometheus.CONTENT_TYPE_LATEST.encode())])
        elif path == "/v1/models":
            await response.send_json({"object": "list", "data": list(map(self._model, self._models))})
        elif path.startswith("/v1/models/"):
            await response.send_json(self._model(self._served(path.removeprefix("/v1/models/"))))
        elif path not in PROTOCOLS:
            known = ", ".join((*PROTOCOLS, "/v1/models", "/health", "/metrics"))
            raise Refused(f"path: must be one of {known} (got {path[:200]!r})", status=404)
        elif method != "POST":
            raise Refused(f"method: must be POST (got {method[:20]!r})", status=405)
        else:
            await self._answer(path, caller, headers, receive, response)

    async def _answer(
        self, path: str, caller: Caller, headers: Mapping[bytes, bytes], receive: Receive, response: "_Response"
    ) -> None:
        """Answer a request for completions."""
        with self._admitted(caller, 1):  # before the body takes memory
            fields = load_json(await self._read_body(headers, receive))
            exchange = PROTOCOLS[path](fields, self._served(fields.text("model")), caller)
        if problem := self._check():
            raise Refused(problem, status=503)
        with self._admitted(caller, len(exchange.calls)):
            work = self._stream(exchange, caller, response) if exchange.streams else _reply(exchange, caller, response)
            try:
                async with asyncio.timeout(self._limits.call_s):
                    replies = await _unless_disconnected(work, receive)
            except TimeoutError:
                raise Refused(
                    f"the call took longer than {self._limits.call_s:g} s. Ask for fewer tokens.", status=504
                ) from None
        self.metrics.prompt_tokens.inc(sum(len(reply.prompt_ids) for reply in replies))
        self.metrics.tokens.inc(sum(len(reply.completion.token_ids) for reply in replies))
        self.metrics.uncalled.inc(sum(reply.misses_tool(call) for call, reply in zip(exchange.calls, replies, strict=True)))

    async def _stream(self, exchange: Exchange, caller: Caller, response: "_Response") -> list[Reply]:
        """Send events while the completions are sampled. A refusal before the first event has its own HTTP status."""
        feeds = [Feed(caller, call, by_token=exchange.by_token) for call in exchange.calls]
        news: asyncio.Queue[tuple[int, Piece | Reply | Exception]] = asyncio.Queue()
        replies = dict[int, Reply]()

        async def sample(index: int) -> None:
            def on_tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
                try:
                    piece = feeds[index].take(token_ids, logprobs)
                except Exception as error:  # must not reach the caller, which calls this for other clients, too
                    news.put_nowait((index, error))
                    return
                if piece is not None:
                    news.put_nowait((index, piece))

            try:
                news.put_nowait((index, await caller.call(exchange.calls[index], on_tokens)))
            except Exception as error:  # raised below
                news.put_nowait((index, error))

        tasks = [asyncio.create_task(sample(index)) for index in range(len(exchange.calls))]
        try:
            while len(replies) < len(tasks):
                events = list[Event]()
                for index, new in [await news.get(), *(news.get_nowait() for _ in range(news.qsize()))]:
                    if isinstance(new, Exception):
                        raise new
                    if not response.has_started:
                        await response.start_events(exchange.start())
                    if isinstance(new, Piece):
                        events += exchange.extend(index, new)
                    else:
                        replies[index] = new
                        events += exchange.finish(index, feeds[index].finish(new), new)
                await response.send_events(events)
            ordered = [replies[index] for index in range(len(tasks))]
            await response.send_events(exchange.end(ordered), is_last=True)
            return ordered
        finally:
            await _cancel(tasks)

    @contextmanager
    def _admitted(self, caller: Caller, num: int) -> Iterator[None]:
        """Count calls while the body runs.

        Raises:
            Refused: They are too many.
        """
        limits, key = self._limits, id(caller)
        if self._num_running.total() + num > limits.max_calls or self._num_running[key] + num > limits.max_calls_per_key:
            text = f"too many calls at once: {limits.max_calls_per_key} per key, {limits.max_calls} in all. Retry later."
            raise Refused(text, status=429)
        self._num_running[key] += num
        self.metrics.running.inc(num)
        try:
            yield
        finally:
            self._num_running[key] -= num
            self.metrics.running.dec(num)
            if not self._num_running[key]:
                del self._num_running[key]

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        kind, length = headers.get(b"content-type", b""), headers.get(b"content-length", b"0")
        if kind.partition(b";")[0].strip().lower() != b"application/json":  # a web page cannot send it unasked
            raise Refused(f"content-type: must be application/json (got {kind[:80].decode('latin-1')!r})", status=415)
        too_long = Refused(f"body: must have at most {limit} bytes. Send less.", status=413)
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_long
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Refused(f"body: must arrive within {self._limits.body_s:g} s", status=408) from None

    def _served(self, model: str | None) -> str:
        if model is not None and model not in self._models:
            text = f"model: must be {' or '.join(self._models)} (got {model[:80]!r})"
            raise Refused(text, status=404, param="model", code="model_not_found")
        return model or self._models[0]

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "titanrl"}


class _Disconnected(Exception):
    """The client has gone."""


class _Response:
    """The response to one request."""

    def __init__(self, send: Send, *, is_anthropic: bool) -> None:
        self._send, self._is_anthropic = send, is_anthropic
        self.has_started = False
        self.status = 499  # as in other servers: the client has gone

    async def send(self, body: bytes, headers: Iterable[tuple[bytes, bytes]], status: int = 200) -> None:
        self.has_started, self.status = True, status
        listed = [*headers, (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})
        await self._send({"type": "http.response.body", "body": body})

    async def send_json(self, value: object, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
        await self.send(_dump(value).encode(), [(b"content-type", b"application/json"), *headers], status)

    async def start_events(self, events: Iterable[Event]) -> None:
        self.has_started, self.status = True, 200
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send_events(events)

    async def send_events(self, events: Iterable[Event], *, is_last: bool = False) -> None:
        lines = []
        for name, data in events:
            text = data if isinstance(data, str) else _dump(data)
            lines.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
        if lines or is_last:
            await self._send({"type": "http.response.body", "body": "".join(lines).encode(), "more_body": not is_last})

    async def refuse(self, refused: Refused) -> None:
        error = anthropic.error(refused) if self._is_anthropic else openai.error(refused)
        if self.has_started:
            self.status = refused.status
            await self.send_events([("error" if self._is_anthropic else None, error)], is_last=True)
        else:
            headers = [HEADERS[refused.status]] if refused.status in HEADERS else []
            await self.send_json(error, refused.status, *headers)


async def _reply(exchange: Exchange, caller: Caller, response: _Response) -> list[Reply]:
    """Send the JSON response when all completions have been sampled."""
    tasks = [asyncio.ensure_future(caller.call(call)) for call in exchange.calls]
    try:
        replies = list(await asyncio.gather(*tasks))
        await response.send_json(exchange.body(replies))
        return replies
    finally:
        await _cancel(tasks)


async def _unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await work; cancel it if the client disconnects.

    Raises:
        _Disconnected: The client has gone.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Disconnected
        return working.result()
    finally:
        await _cancel([working, watching])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # raised elsewhere, if at all


_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _key_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the key of a request; empty if it has none."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return key.decode("latin-1")


def _host_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the name by which a client addresses the endpoint, without the port."""
    host = headers.get(b"host", b"").decode("latin-1")
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
