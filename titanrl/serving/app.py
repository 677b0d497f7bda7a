"""The HTTP endpoint of completions: calls, limits and streams, as an ASGI application over a look-up of callers.

A client can have only so many calls at once. If it disconnects, its generation is cancelled.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import prometheus_client as prometheus

from titanrl.serving.calls import Caller, Event, Exchange, Feed, Piece, Refused, Reply, load_json
from titanrl.serving.http import Endpoint, Headers, Receive, Response, Scope, Send, cancel, dump, read_body, unless_disconnected
from titanrl.serving.protocols import PROTOCOLS, anthropic_error, openai_error

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
"""Headers of a stream of events."""
Find = Callable[[str], Caller | None]
"""Function from a key, empty if the client sent none, to its caller; it may raise `Refused`."""


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


class App(Endpoint):
    """The endpoint for completions."""

    def __init__(
        self,
        find: Find,
        models: Sequence[str],
        limits: Limits | None = None,
        *,
        check: Callable[[], str] = str,
        hosts: Collection[str] | None = None,
    ) -> None:
        """Serve the callers that a look-up finds; see `Endpoint` for the last two arguments.

        `models` are the names of the policy, of which the first is the default.
        """
        super().__init__(check=check, hosts=hosts)
        self._find, self._models, self._limits = find, tuple(models), limits or Limits()
        self._since, to = int(time.time()), self.registry
        self._running = prometheus.Gauge("titanrl_calls_running", "Completions that clients wait for.", registry=to)
        self._seconds = prometheus.Histogram("titanrl_call_seconds", "Time of a call with its response.", registry=to)
        self._prompt_tokens = prometheus.Counter("titanrl_prompt_tokens", "Tokens of prompts.", registry=to)
        self._tokens = prometheus.Counter("titanrl_completion_tokens", "Sampled tokens.", registry=to)
        text = "Replies in another form than the client required."
        self._nonconforming = prometheus.Counter("titanrl_nonconforming_replies", text, registry=to)
        self._num_running: Counter[int] = Counter()  # calls by caller

    def response(self, path: str, send: Send) -> "_Response":
        """Return an unsent response to a request for `path`, whose errors are in the format of that path."""
        return _Response(send, is_anthropic=path.startswith("/v1/messages"))

    def label(self, path: str) -> str | None:
        """Return the path if it takes calls."""
        return path if path in PROTOCOLS else None

    def observe(self, label: str, seconds: float) -> None:
        """Record the time of a call."""
        self._seconds.observe(seconds)

    def authorize(self, key: str) -> bool:
        """Return whether the key has a caller; raise `Refused` if the caller has ended."""
        return self._find(key) is not None

    async def answer(self, scope: Scope, key: str, headers: Headers, receive: Receive, response: "_Response") -> None:
        """Answer a request for completions or models."""
        method, path = scope["method"], scope["path"]
        response.caller = caller = self._find(key)
        assert caller is not None, "the key was checked"
        if path == "/v1/models":
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

    async def _answer(self, path: str, caller: Caller, headers: Headers, receive: Receive, response: "_Response") -> None:
        with self._admitted(caller, 1):  # before the body takes memory
            body = await read_body(headers, receive, limit=self._limits.max_body_bytes, limit_s=self._limits.body_s)
            fields = load_json(body)
            exchange = PROTOCOLS[path](fields, self._served(fields.text("model")), caller)
        if problem := self._check():
            raise Refused(problem, status=503)
        with self._admitted(caller, len(exchange.calls)):
            work = self._stream(exchange, caller, response) if exchange.streams else _reply(exchange, caller, response)
            try:
                async with asyncio.timeout(self._limits.call_s):
                    replies = await unless_disconnected(work, receive)
            except TimeoutError:
                raise Refused(
                    f"the call took longer than {self._limits.call_s:g} s. Ask for fewer tokens.", status=504
                ) from None
        self._prompt_tokens.inc(sum(len(reply.prompt_ids) for reply in replies))
        self._tokens.inc(sum(len(reply.completion.token_ids) for reply in replies))
        self._nonconforming.inc(sum(map(Reply.differs_in_form, replies, exchange.calls)))

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
                        await response.start_stream(EVENT_STREAM)
                        await response.send_events(exchange.start())
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
            await cancel(tasks)

    @contextmanager
    def _admitted(self, caller: Caller, num: int) -> Iterator[None]:
        """Count calls while the body runs; raise `Refused` if they are too many."""
        limits, key = self._limits, id(caller)
        if self._num_running.total() + num > limits.max_calls or self._num_running[key] + num > limits.max_calls_per_key:
            text = f"too many calls at once: {limits.max_calls_per_key} per key, {limits.max_calls} in all. Retry later."
            raise Refused(text, status=429)
        self._num_running[key] += num
        self._running.inc(num)
        try:
            yield
        finally:
            self._num_running[key] -= num
            self._running.dec(num)
            if not self._num_running[key]:
                del self._num_running[key]

    def _served(self, model: str | None) -> str:
        if model is not None and model not in self._models:
            text = f"model: must be {' or '.join(self._models)} (got {model[:80]!r})"
            raise Refused(text, status=404, param="model", code="model_not_found")
        return model or self._models[0]

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "titanrl"}


class _Response(Response):
    """The response to one request, which may be a stream of events."""

    def __init__(self, send: Send, *, is_anthropic: bool) -> None:
        super().__init__(send)
        self._is_anthropic = is_anthropic
        self.caller: Caller | None = None

    async def send_events(self, events: Iterable[Event], *, is_last: bool = False) -> None:
        lines = []
        for name, data in events:
            text = data if isinstance(data, str) else dump(data)
            lines.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
        if lines or is_last:
            await self.send_part("".join(lines).encode(), is_last=is_last)

    async def refuse(self, refused: Refused) -> None:
        """Send a refusal, in a stream that has started as its last event."""
        if self.caller is not None:
            self.caller.refused(refused)
        if not self.has_started:
            await super().refuse(refused)
            return
        self.status = refused.status
        await self.send_events([("error" if self._is_anthropic else None, self.error(refused))], is_last=True)

    def error(self, refused: Refused) -> object:
        """Return an error as the protocol has it."""
        return anthropic_error(refused) if self._is_anthropic else openai_error(refused)


async def _reply(exchange: Exchange, caller: Caller, response: _Response) -> list[Reply]:
    """Send the JSON response when all completions have been sampled."""
    tasks = [asyncio.ensure_future(caller.call(call)) for call in exchange.calls]
    try:
        replies = list(await asyncio.gather(*tasks))
        await response.send_json(exchange.body(replies))
        return replies
    finally:
        await cancel(tasks)
