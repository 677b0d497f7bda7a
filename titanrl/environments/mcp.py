"""Tools of Model Context Protocol (MCP) servers: a client over standard input and output or over streamable HTTP.

The client is written for untrusted servers. Every wait has a deadline, every reply a largest size, and a server that breaks the
protocol fails the episode. It needs no MCP package, so it cannot conflict with the one that a server uses.
"""

import asyncio
import itertools
import json
import os
import shlex
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanrl.config.data import McpOptions, is_url
from titanrl.environments.interface import (
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    Tool,
    ToolError,
    readable,
    readable_text,
    shown,
)
from titanrl.environments.servers import ServerProcess, opened, running, shared
from titanrl.environments.tools import ListedTools
from titanrl.processes.temporary import TemporaryFolder

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol versions that begin with a handshake. The client asks for the second one and accepts all."""
MAX_REPLY_BYTES = 4 << 20
"""Longest message of a server."""
MAX_TOOLS = 512
"""Largest number of tools of a server."""

_KEY = "data.environment.options.tools.mcp"
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Environment variables that a server inherits. Others may hold secrets, which a tool could show to the policy."""
_MAX_STRAY = 1000
_MAX_UNREAD_BYTES = 1 << 20
_MAX_PAGES = 64
_MAX_ERROR_CHARS = 2000
_POLICY_ERRORS = (-32602, -32601)
"""JSON-RPC codes of a call that the policy got wrong: invalid parameters, such as an unknown tool, and unknown method."""


class McpTools(ListedTools):
    """The tools of an MCP server.

    A server with state is started for each episode that calls a tool, at its first call, and stopped with the episode. The
    tools are listed once per rollout worker.
    """

    def __init__(self, options: McpOptions, prefix: str = "") -> None:
        """Keep the options, if the program exists. The policy sees the names of the tools after the prefix."""
        program = "" if is_url(options.mcp) else shlex.split(options.mcp)[0]
        if program and shutil.which(program) is None:
            fix = "Install it, or write the path of the program, such as /opt/tools/bin/mcp-server-git."
            raise ValueError(f"{_KEY}: no such program on this machine (got {program!r}). {fix}")
        if options.key_variable is not None and options.key_variable not in os.environ:
            rule = "the environment variable must hold the key, but it is not set"
            raise ValueError(f"{_KEY}: {rule} (got {options.key_variable!r}). Set it, or remove key_variable.")
        self._options, self._prefix = options, prefix
        self._name = options.model_dump_json()
        self._server: _Server | None = None
        self._listed_tools: Sequence[Tool] = ()
        self.tools: Sequence[Tool] = ()

    async def start(self, episode: Episode) -> None:
        """List the tools, as `prepare` does."""
        await self.prepare()

    async def prepare(self) -> None:
        """List the tools. Raise `EnvironmentFailure` if the server cannot be started, or breaks the protocol."""
        if self._options.shared:
            self._server = await running(("server", self._name), self._new_server)
            self._listed_tools = self._server.tools
        else:
            self._listed_tools = await shared(("tools", self._name), self._listed)
        self.tools = [replace(tool, name=f"{self._prefix}{tool.name}") for tool in self._listed_tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text. Raise `ToolError` if the server rejects the call."""
        if self._server is None:
            async with await shared("starts of MCP servers", _starts):
                server = await opened(self._new_server())
            if server.tools != self._listed_tools:
                await server.close()
                raise EnvironmentFailure(
                    f"{_KEY}: the tools of the server have changed since they were listed. Start the run again."
                )
            self._server = server
        return await self._server.call(name.removeprefix(self._prefix), arguments)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of lines that are no reply, and of announcements that the tools have changed, if there were any."""
        if self._server is None or self._options.shared:
            return {}
        counts = {"mcp_stray_lines": self._server.num_stray, "mcp_changes": self._server.num_changes}
        return {name: float(count) for name, count in counts.items() if count}

    async def close(self) -> None:
        """Stop the server of this episode."""
        server, self._server = self._server, None
        if server is not None and not self._options.shared:
            await server.close()

    def _new_server(self) -> "_Server":
        return _Http(self._options) if is_url(self._options.mcp) else _Stdio(self._options)

    async def _listed(self) -> Sequence[Tool]:
        server = await opened(self._new_server())
        await server.close()
        return server.tools


async def _starts() -> asyncio.Semaphore:
    """Return the limit of servers that start at the same time. More would start no sooner, but exceed their time limit."""
    return asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))


class _RpcError(Exception):
    def __init__(self, error: object) -> None:
        fields = error if isinstance(error, Mapping) else {}
        self.code, text = fields.get("code"), fields.get("message")
        super().__init__(readable_text(text[:_MAX_ERROR_CHARS]) if isinstance(text, str) else shown(error))


class _Server(ABC):
    """A connection to a server, its tools, and what it has done. `request` raises `_RpcError` and `EnvironmentFailure`."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._ids = itertools.count(1)
        self.tools: Sequence[Tool] = ()
        self.version: str | None = None
        self.failure: EnvironmentFailure | None = None
        """Failure that has ended the server."""
        self.num_stray = 0
        """Number of messages that are no reply to a request."""
        self.num_changes = 0
        """Number of announcements that the tools have changed. An episode keeps the tools that it began with."""

    @property
    def has_ended(self) -> bool:
        """True if a failure has ended the server."""
        return self.failure is not None

    @abstractmethod
    async def request(self, method: str, params: Mapping[str, Any]) -> object: ...

    @abstractmethod
    async def notify(self, method: str) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Stop the server, or leave it."""

    async def open(self) -> None:
        """Start or connect to the server, and list its tools."""
        client = {"name": "titanrl", "version": "1"}
        asked = {"protocolVersion": VERSIONS[1], "capabilities": {}, "clientInfo": client}
        try:
            reply = await self.request("initialize", asked)
            version = reply.get("protocolVersion") if isinstance(reply, dict) else None
            if version not in VERSIONS:
                raise EnvironmentFailure(
                    f"{_KEY}: the server speaks none of the versions {', '.join(VERSIONS)} (got {shown(version)})"
                )
            self.version = version
            await self.notify("notifications/initialized")
            self.tools = await self._list()
        except _RpcError as error:
            raise EnvironmentFailure(
                f"{_KEY}: the server replied to the handshake with the error {error.code}: {error}"
            ) from error

    @abstractmethod
    def _answer(self, method: str, number: int | str) -> bool:
        """Answer a request of the server; return False if too many answers wait."""

    def _take(self, text: bytes | bytearray, pending: "Mapping[int, asyncio.Future[object]]") -> None:
        """Process a message; `pending` has the replies to open requests."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        match message:
            case {"method": str(method), "id": asked} if asked is not None:
                self.num_stray += not (isinstance(asked, int | str) and self._answer(method, asked) and method == "ping")
            case {"method": str(method)}:
                self.num_changes += method == "notifications/tools/list_changed"
                self.num_stray += not method.startswith("notifications/")
            case {"id": int(number), **rest} if number in pending and ("result" in rest or "error" in rest):
                if not pending[number].done() and rest.get("error") is not None:
                    pending[number].set_exception(_RpcError(rest["error"]))
                elif not pending[number].done():
                    pending[number].set_result(rest.get("result"))
            case _:
                self.num_stray += 1

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            result = await self.request("tools/call", {"name": name, "arguments": dict(arguments)})
        except _RpcError as error:
            if error.code in _POLICY_ERRORS:
                raise ToolError(str(error)) from None
            raise EnvironmentFailure(f"{_KEY}: {name} failed with the error {error.code}: {error}") from error
        text = _text_of(name, result)
        if isinstance(result, dict) and result.get("isError") is True:
            raise ToolError(text)
        return text

    async def _list(self) -> Sequence[Tool]:
        found: list[Tool] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = await self.request("tools/list", cursor)
            entries = page.get("tools") if isinstance(page, dict) else None
            if not isinstance(entries, list):
                raise EnvironmentFailure(f"{_KEY}: tools/list must return tools (got {shown(page)})")
            found += [_tool_of(entry) for entry in entries]
            assert isinstance(page, dict)
            if page.get("nextCursor") is None or len(found) > MAX_TOOLS:
                break
            cursor = {"cursor": page["nextCursor"]}
        if len(found) > MAX_TOOLS:
            raise EnvironmentFailure(f"{_KEY}: the server has more than {MAX_TOOLS} tools")
        names = {tool.name: tool for tool in found}
        if unknown := [name for name in self._options.only if name not in names]:
            fix = f"Choose among {', '.join(names)[:500]}."
            raise EnvironmentFailure(f"{_KEY}: only: the server has no such tool (got {unknown[0]!r}). {fix}")
        return [names[name] for name in self._options.only] or found


def _tool_of(entry: object) -> Tool:
    match entry:
        case {"name": str(name), "inputSchema": dict(schema)} if name and isinstance(entry, dict):
            description = entry.get("description") or ""
            if isinstance(description, str):
                try:
                    return Tool(name=readable_text(name), description=readable_text(description), parameters=readable(schema))
                except ValueError as error:
                    raise EnvironmentFailure(f"{_KEY}: the parameters of the tool {shown(name)} {error}") from error
    raise EnvironmentFailure(f"{_KEY}: a tool must have a name and an inputSchema (got {shown(entry)})")


def _text_of(name: str, result: object) -> str:
    """Return the text of a result. Content that is not text is named instead."""
    content = result.get("content") if isinstance(result, dict) else None
    if not isinstance(content, list):
        raise EnvironmentFailure(f"{_KEY}: {name} must return content (got {shown(result)})")
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)} | {"type": "resource", "resource": {"text": str(text)}}:
                texts.append(readable_text(text))
            case {"type": str(kind)}:
                texts.append(f"[{readable_text(kind)[:40]} without text]")
            case _:
                raise EnvironmentFailure(f"{_KEY}: {name} returned content without a type (got {shown(part)})")
    assert isinstance(result, dict)
    if not texts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=True)
    return "\n".join(texts)


class _Stdio(_Server):
    """A server process that exchanges lines of JSON over its standard input and output."""

    def __init__(self, options: McpOptions) -> None:
        super().__init__(options)
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._process: ServerProcess | None = None
        self._folder: Path
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._listening: asyncio.Task[None]

    async def open(self) -> None:
        parent = await shared("folder of MCP servers", _parent)
        folder = Path(tempfile.mkdtemp(dir=parent.path))
        words = [word.replace("{folder}", str(folder)) for word in shlex.split(self._options.mcp)]
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        ours, theirs = socket.socketpair()
        with ExitStack() as undone:
            undone.callback(shutil.rmtree, folder, ignore_errors=True)
            undone.enter_context(ours)
            with theirs:
                process = ServerProcess(words, key=_KEY, environment=variables, stream=theirs.fileno())
            undone.callback(process.kill)
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES)
            undone.pop_all()
        self._process, self._folder = process, folder
        self._listening = asyncio.create_task(self._listen(process))
        await super().open()

    async def request(self, method: str, params: Mapping[str, Any]) -> object:
        number, limit_s = next(self._ids), self._options.timeout_s
        self._pending[number] = reply = asyncio.get_running_loop().create_future()
        try:
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            async with asyncio.timeout(limit_s):
                return await reply
        except TimeoutError:
            failure = EnvironmentTimeout(f"{_KEY}: {method} took longer than {limit_s:g} s, so the server was killed")
            self._fail(failure)
            raise failure from None
        except asyncio.CancelledError:
            if self.failure is None:
                cancelled = {"requestId": number, "reason": "the episode ended"}
                self._send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancelled})
            raise
        finally:
            self._pending.pop(number, None)

    async def notify(self, method: str) -> None:
        self._send({"jsonrpc": "2.0", "method": method})

    async def close(self) -> None:
        """Close the connection, which ends a server that keeps to the protocol; kill it if it does not exit."""
        if self._process is None:
            return
        with suppress(OSError):
            self._writer.write_eof()
        try:
            await self._process.close(timeout_s=0.0 if self.failure else 2.0)
        finally:  # also if the wait is cancelled
            self._listening.cancel()
            self._writer.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self._writer.write(json.dumps(message).encode() + b"\n")  # ASCII, so that any text can be sent
        if self._writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self._fail(EnvironmentFailure(f"{_KEY}: the server does not read its input, so it was killed"))

    def _fail(self, failure: EnvironmentFailure) -> None:
        """End the server: requests that wait and later ones raise the failure."""
        self.failure = self.failure or failure
        if self._process is not None:
            self._process.kill()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(self.failure)
                reply.exception()  # marks it as retrieved, in case nothing awaits it any more

    async def _listen(self, process: ServerProcess) -> None:
        while self.failure is None:
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                rule = f"the server wrote a line of more than {MAX_REPLY_BYTES >> 20} MiB"
                return self._fail(EnvironmentFailure(f"{_KEY}: {rule}, so it was killed"))
            except (asyncio.IncompleteReadError, ConnectionError):
                await process.exited()
                return self._fail(EnvironmentDied(f"{_KEY}: the server ended{process.account}"))
            self._take(line, self._pending)
            if self.num_stray > _MAX_STRAY:
                rule = f"the server wrote more than {_MAX_STRAY} lines that are no message (the last is {shown(line)})"
                return self._fail(EnvironmentFailure(f"{_KEY}: {rule}, so it was killed"))

    def _answer(self, method: str, number: int | str) -> bool:
        with suppress(EnvironmentFailure):
            self._send(_answer_to(method, number))
        return True


def _answer_to(method: str, number: int | str) -> dict[str, Any]:
    """Return the answer to a request of a server, of which this client supports only pings."""
    error = {"code": -32601, "message": f"this client does not support {method:.80}"}
    return {"jsonrpc": "2.0", "id": number} | ({"result": {}} if method == "ping" else {"error": error})


async def _parent() -> TemporaryFolder:
    """Return the folder in which servers have theirs. It is deleted with this process."""
    return TemporaryFolder()


class _Http(_Server):
    """A session with a server that speaks streamable HTTP."""

    def __init__(self, options: McpOptions) -> None:
        import httpx  # not needed for other servers

        from titanrl.base.endpoint import certificates

        super().__init__(options)
        key = os.environ.get(options.key_variable or "", "")
        headers = {"Accept": "application/json, text/event-stream"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # Each request sets a limit for itself as a whole. The timeouts of httpx apply to single reads.
        self._client = httpx.AsyncClient(headers=headers, timeout=None, verify=certificates())
        self._errors = httpx.HTTPError
        self._session: str | None = None
        self._answers: set[asyncio.Task[None]] = set()  # to requests of the server

    async def request(self, method: str, params: Mapping[str, Any]) -> object:
        number = next(self._ids)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        await self._post(method, message, {number: reply})
        if not reply.done():
            raise self._failed(EnvironmentFailure(f"{_KEY}: the server did not reply to {method}"))
        return reply.result()

    async def notify(self, method: str) -> None:
        await self._post(method, {"jsonrpc": "2.0", "method": method}, {})

    async def close(self) -> None:
        if self._session is not None and self.failure is None:
            with suppress(TimeoutError, self._errors):
                async with asyncio.timeout(2.0):
                    await self._client.delete(self._options.mcp, headers=self._headers())
        await self._client.aclose()

    def _headers(self) -> dict[str, str]:
        headers = {"Mcp-Session-Id": self._session, "MCP-Protocol-Version": self.version}
        return {name: value for name, value in headers.items() if value is not None}

    def _failed(self, failure: EnvironmentFailure) -> EnvironmentFailure:
        self.failure = failure
        return failure

    async def _post(self, method: str, message: Mapping[str, Any], pending: "Mapping[int, asyncio.Future[object]]") -> None:
        """Send a message. `pending` is `{number: reply}` if it is a request, whose reply is settled as soon as it arrives."""
        limit_s, received = self._options.timeout_s, bytearray()
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream("POST", self._options.mcp, json=message, headers=self._headers()) as response,
            ):
                is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                self._session = response.headers.get("mcp-session-id", self._session)
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_REPLY_BYTES:
                        rule = f"the reply to {method} has more than {MAX_REPLY_BYTES >> 20} MiB"
                        raise self._failed(EnvironmentFailure(f"{_KEY}: {rule}"))
                    if is_stream and pending and b"\n" in chunk:
                        received = self._take_events(received, pending)
                        if all(reply.done() for reply in pending.values()):
                            return
        except TimeoutError:
            raise self._failed(EnvironmentTimeout(f"{_KEY}: {method} took longer than {limit_s:g} s")) from None
        except self._errors as error:
            raise self._failed(EnvironmentDied(f"{_KEY}: {type(error).__name__}: {error} (got {self._options.mcp})")) from error
        if response.status_code >= 400 and "method" in message:  # a server may take no answers to its requests
            text = f"HTTP status {response.status_code} ({bytes(received[:200]).decode(errors='replace')!a})"
            fix = " Set key_variable to the variable with the key." if response.status_code in (401, 403) else ""
            raise self._failed(EnvironmentFailure(f"{_KEY}: the server replied to {method} with {text}.{fix}"))
        if pending and is_stream:
            self._take_events(received + b"\n", pending)
        elif pending:
            self._take(received, pending)

    def _take_events(self, received: bytearray, pending: "Mapping[int, asyncio.Future[object]]") -> bytearray:
        """Process complete lines of an event stream, and return the rest. Servers write a message as one line."""
        *lines, rest = received.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip():
                self._take(line[5:].strip(), pending)
        return bytearray(rest)

    def _answer(self, method: str, number: int | str) -> bool:
        if len(self._answers) < _MAX_STRAY:
            answer = asyncio.create_task(self._post(method, _answer_to(method, number), {}))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # `failure` has it
            return True
        return False
