"""Environments behind an OpenEnv server: a client of its WebSocket, and the server of a package, which each worker starts.

The client needs no OpenEnv package, so a server can use any interpreter. What a server sends is untrusted.
"""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import string
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from titanrl.base.endpoint import certificates
from titanrl.carriers.rewards import PART_NAME
from titanrl.config.data import OpenEnvOptions, is_url
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
    Tool,
    readable,
    readable_text,
    shown,
)
from titanrl.environments.servers import ServerProcess, running
from titanrl.processes.temporary import TemporaryFolder, private_folder

REWARD = "openenv"
"""Name of the reward of an episode's last step. The rewards of the other steps belong to the policy's turns."""
MAX_REPLY_BYTES = 4 << 20
"""Longest message of a server."""

_KEY = "data.environment.options.openenv"
_MAX_METRICS = 8
_CLOSE_S = 2.0
_OWN_FIELDS = ("metadata", "done", "reward")
_MAX_SEED = 1 << 31
_SERVE = """\
import importlib, importlib.resources, inspect, socket, sys
name, descriptor, sessions = sys.argv[1:]
if sessions != "0":
    from openenv.core.env_server.http_server import HTTPEnvServer
    make = HTTPEnvServer.__init__
    def limited(*given, **named):
        bound = inspect.signature(make).bind(*given, **named)
        bound.arguments.pop("concurrency_config", None)
        bound.arguments["max_concurrent_envs"] = int(sessions)
        make(*bound.args, **bound.kwargs)
    HTTPEnvServer.__init__ = limited
if ":" not in name:
    import yaml
    manifest = importlib.resources.files(name) / "openenv.yaml"
    app = yaml.safe_load(manifest.read_text()).get("app") if manifest.is_file() else None
    name = name + "." + (app or "server.app:app")
module, _, attribute = name.partition(":")
app = getattr(importlib.import_module(module), attribute)
import uvicorn
config = uvicorn.Config(app, log_level="warning", ws_ping_interval=None)
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(descriptor))])
"""
"""Program of a local server. It listens on a socket that it inherits, so a connection waits until it is ready. The application
of a package sets its own limit of sessions, which `sessions` replaces."""


def openenv(**options: Any) -> Environment:
    """Return an environment behind an OpenEnv server; raise `ValueError` if `options` are not those of `OpenEnvOptions`."""
    return OpenEnv(OpenEnvOptions.model_validate(options))


class OpenEnv:
    """One session of an OpenEnv server.

    The policy's text is the action, or a field of it; observations become messages. If the actions of the server are calls of
    tools, the policy calls them, and the episode ends at a message without calls.
    """

    def __init__(self, options: OpenEnvOptions) -> None:
        """Keep the options; raise `ValueError` if the interpreter or the package does not exist."""
        package = re.split(r"[.:]", options.openenv)[0]
        if not is_url(options.openenv) and options.python is None and importlib.util.find_spec(package) is None:
            rule, fix = "no such package", "Install it, or set options.python to an interpreter that has it."
            raise ValueError(f"{_KEY}: {rule} (got {options.openenv!r}). {fix}")
        if options.python is not None and shutil.which(options.python) is None:
            rule = "must be an executable file on this machine"
            raise ValueError(f"data.environment.options.python: {rule} (got {options.python!r}). Correct the path.")
        self._options = options
        self._name = options.model_dump_json()
        self._server: _Server | None = None
        self._session: ClientConnection | None = None
        self._tools: list[Tool] = []
        self._counts = {"invalid_actions": 0.0}

    async def prepare(self) -> None:
        """Start or reach the server; raise `EnvironmentFailure` if that fails."""
        await self._started()

    async def reset(self, episode: Episode) -> Observation:
        """Wait for a free session, and reset the environment; raise `EnvironmentFailure` if the server fails."""
        server = await self._started()
        await server.places.acquire()
        self._server = server  # `close` releases the place
        async with _limit("reset", self._options.timeout_s):
            self._session = await server.connect()
            given = episode.entry.get("metadata")
            of_row = given.get("reset") if isinstance(given, Mapping) else None
            arguments = {**self._options.reset, **(of_row if isinstance(of_row, Mapping) else {})}
            arguments |= {"seed": episode.seed % _MAX_SEED, "episode_id": episode.task_id}
            reply = await self._ask("reset", arguments)
            if server.has_tools:
                self._tools = _tools_of(await self._ask("step", {"type": "list_tools"}))
        if reply.get("done") is True:
            raise EnvironmentFailure(f"{_KEY}: reset must not return done (got {shown(reply)})")
        prompt = self._options.system_prompt
        messages: list[Message] = [] if prompt is None else [{"role": "system", "content": prompt}]
        text = self._text(reply)
        question = text if text and (self._options.message is not None or not server.has_tools) else episode.question
        return Observation(messages=[*messages, {"role": "user", "content": question}], tools=self._tools)

    async def step(self, message: Message) -> Observation | Done:
        """Send the policy's message as an action. The policy sees the reason why a message is no action."""
        assert self._server is not None
        if self._server.has_tools:
            return await self._step_tools(message)
        try:
            action = self._server.action_of(self._found(str(message["content"])), self._options.action)
        except ValueError as error:
            return self._refused(str(error))
        async with _limit("step", self._options.timeout_s):
            reply = await self._ask("step", action)
            if "refusal" in reply:
                return self._refused(str(reply["refusal"]))
            reward = _reward_of(reply)
            if reply.get("done") is True:
                return Done(rewards={REWARD: reward}, metrics=await self._metrics())
        messages = [{"role": "user", "content": self._text(reply)}]
        return Observation(messages=messages, reward=reward, metrics=self._counts)

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Let the rewards of the steps so far count."""
        return Done(rewards={REWARD: 0.0}, metrics=self._counts)

    async def close(self) -> None:
        """End the session, and wait until the server has ended it, because another episode may take its place."""
        session, self._session = self._session, None
        server, self._server = self._server, None
        try:
            if session is not None:
                with suppress(WebSocketException, OSError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await session.send(json.dumps({"type": "close"}))
                        await session.wait_closed()
                session.transport.abort()
        finally:
            if server is not None:
                server.places.release()

    async def _step_tools(self, message: Message) -> Observation | Done:
        replies: list[Message] = []
        reward = 0.0
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            arguments = function.get("arguments") or {}
            reply: Mapping[str, Any] = {"refusal": "the arguments must be one JSON object"}
            if isinstance(arguments, Mapping):
                action = {"type": "call_tool", "tool_name": function.get("name") or "", "arguments": dict(arguments)}
                async with _limit("step", self._options.timeout_s):
                    reply = await self._ask("step", action)
                reply = _tool_result(reply)
            text = str(reply["refusal"]) if "refusal" in reply else self._text(reply)
            self._counts["invalid_actions"] += "refusal" in reply
            reward += 0.0 if "refusal" in reply else _reward_of(reply)
            if reply.get("done") is True:
                return Done(rewards={REWARD: reward}, metrics=await self._metrics())
            replies.append({"role": "tool", "tool_call_id": call.get("id") or f"call_{index}", "content": text})
        if not replies:
            return Done(rewards={REWARD: 0.0}, metrics=await self._metrics())
        return Observation(messages=replies, reward=reward, metrics=self._counts)

    def _found(self, text: str) -> str:
        """Return the part of the policy's text that is the action; raise ValueError if there is none."""
        if self._options.pattern is None:
            return text
        matches = list(re.finditer(self._options.pattern, text, re.DOTALL))
        if not matches:
            raise ValueError(f"there is no match of {self._options.pattern}")
        return str(matches[-1][1 if matches[-1].re.groups else 0] or "")

    def _refused(self, reason: str) -> Observation:
        self._counts["invalid_actions"] += 1
        text = readable_text(f"Invalid action: {reason[:500]}.")
        return Observation(messages=[{"role": "user", "content": text}], metrics=self._counts)

    def _text(self, reply: Mapping[str, Any]) -> str:
        """Return the text of an observation for the policy."""
        observation = reply["observation"]
        if self._options.message is not None:
            fields = {name: "" if value is None else value for name, value in observation.items()}
            try:
                return str(string.Formatter().vformat(self._options.message, (), fields))
            except (LookupError, ValueError, AttributeError, TypeError) as error:
                rule = f"message does not fit the observation: {type(error).__name__}: {error}"
                raise EnvironmentFailure(f"{_KEY}: {rule} (got {shown(observation)})") from error
        fields = {name: value for name, value in observation.items() if name not in _OWN_FIELDS and value is not None}
        only = next(iter(fields.values())) if len(fields) == 1 else fields
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False) if fields else ""

    async def _metrics(self) -> dict[str, float]:
        """Return the numbers in the state of the environment, such as its number of steps, and the own counts."""
        state = await self._ask("state", None)
        numbers = {
            name: float(value)
            for name, value in state.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and PART_NAME.fullmatch(name)
        }
        return dict(list(numbers.items())[:_MAX_METRICS]) | self._counts

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Send a message and return the data of the reply; `{"refusal": reason}` for an action that is invalid."""
        assert self._session is not None
        assert self._server is not None
        asked: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # what the server wrote before is still to be read
                await self._session.send(json.dumps(asked))
            received = await self._session.recv()
        except (WebSocketException, OSError) as error:
            raise EnvironmentDied(f"{_KEY}: {kind} failed: {error}{await self._server.account()}") from error
        try:
            reply = readable(json.loads(received))
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailure(f"{_KEY}: the reply to {kind} is no JSON (got {shown(received)})") from error
        shows = self._options.show_errors
        match reply:
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": list(errors)}} if kind == "step":
                return {"refusal": "; ".join(map(_explained, errors)) or "it does not fit the schema"}
            case {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": text}}:
                fix = "Set sessions to the number of sessions that the server allows, or raise its limit."
                raise EnvironmentFailure(f"{_KEY}: the server has no free session: {str(text)[:500]} {fix}")
            case {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": text}} if kind == "step" and shows:
                return {"refusal": text}
            case {"type": "error", "data": data}:
                raise EnvironmentFailure(f"{_KEY}: {kind} failed on the server: {json.dumps(data)[:1000]}")
            case {"type": "state", "data": dict(found)} if kind == "state":
                return found
            case {"type": "observation", "data": {"observation": dict()} as found} if kind in ("reset", "step"):
                return dict(found)
        raise EnvironmentFailure(f"{_KEY}: the reply to {kind} is not one of OpenEnv (got {shown(reply)})")

    async def _started(self) -> "_Server":
        return await running(("openenv", self._name), lambda: _Server(self._options))


@asynccontextmanager
async def _limit(name: str, limit_s: float) -> AsyncIterator[None]:
    """Raise `EnvironmentTimeout` if the block takes longer."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise EnvironmentTimeout(f"{_KEY}: {name} took longer than {limit_s:g} s") from None


class _Server:
    """A server of another machine, or one that this process has started, and what it says about its actions."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._process: ServerProcess | None = None
        self._folder: TemporaryFolder | None = None
        self._path: str | None = None
        self._properties: Mapping[str, Mapping[str, Any]] = {}
        self._required: list[str] = []
        self.places = asyncio.Semaphore(options.sessions or sys.maxsize)
        """Sessions that may still be opened."""
        self.has_tools = False
        """True if the actions are calls of tools."""

    @property
    def has_ended(self) -> bool:
        """True if this process has started the server, and it has exited."""
        return self._process is not None and self._process.has_exited

    async def account(self) -> str:
        """Return how a local server ended, as the end of a sentence. It closes its connections before it has exited."""
        if self._process is None:
            return ""
        await self._process.exited(_CLOSE_S)
        return self._process.account

    async def open(self) -> None:
        """Start a local server, wait until it serves, and read its schema."""
        if not is_url(self._options.openenv):
            self._start()
        base = "http://localhost" if self._path else self._url("http")
        transport = httpx.AsyncHTTPTransport(uds=self._path, verify=certificates()) if self._path else None
        try:
            async with (
                _limit("its start", self._options.timeout_s),
                httpx.AsyncClient(transport=transport, timeout=None, verify=certificates()) as client,
            ):
                reply = await client.get(f"{base}/schema")
        except httpx.HTTPError as error:
            raise EnvironmentDied(
                f"{_KEY}: cannot be reached: {error}{await self.account()} (got {self._options.openenv})"
            ) from error
        try:
            action = reply.json()["action"]
            properties = {name: schema for name, schema in action.get("properties", {}).items() if name != "metadata"}
            required = [name for name in action.get("required", ()) if name in properties]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"the server has no schema of actions, so it is no OpenEnv server (HTTP status {reply.status_code})"
            raise EnvironmentFailure(f"{_KEY}: {rule} (got {self._options.openenv})") from error
        self.has_tools = "tool_name" in properties or action.get("title") == "CallToolAction"
        self._properties, self._required = properties, required
        field = self._options.action
        if field is not None and field not in properties:
            fix = f"Choose one of {', '.join(properties)[:500]}."
            raise EnvironmentFailure(f"data.environment.options.action: actions have no such field (got {field!r}). {fix}")

    def action_of(self, text: str, field: str | None) -> dict[str, Any]:
        """Return the action that the policy's text describes, or raise `ValueError`."""
        name = field if field is not None else self._required[0] if len(self._required) == 1 else None
        if name is not None and self._properties[name].get("type") == "string":
            return {name: text}
        try:
            value = readable(json.loads(text))
        except (ValueError, RecursionError):
            what = f"{name} ({self._properties[name].get('type', 'a JSON value')})" if name else "one JSON object"
            raise ValueError(f"write {what}, and nothing else") from None
        if name is not None and not (isinstance(value, dict) and name in value):
            return {name: value}
        if not isinstance(value, dict):
            raise ValueError(f"write one JSON object with {', '.join(self._properties)[:200]}")
        return value

    async def connect(self) -> ClientConnection:
        try:
            if self._path is not None:
                return await unix_connect(
                    self._path, uri="ws://localhost/ws", max_size=MAX_REPLY_BYTES, ping_interval=None, open_timeout=None
                )
            url = f"{self._url('ws')}/ws"
            return await connect(url, max_size=MAX_REPLY_BYTES, ping_interval=None, open_timeout=None, proxy=None)
        except (WebSocketException, OSError) as error:
            raise EnvironmentDied(f"{_KEY}: cannot be reached: {error}{await self.account()}") from error

    async def close(self) -> None:
        """Stop a local server."""
        if self._process is not None:
            await self._process.close()
        if self._folder is not None:
            self._folder.delete()

    def _url(self, scheme: str) -> str:
        """Return the URL of the server with the scheme `http` or `ws`, or their encrypted forms."""
        return re.sub(r"^(http|ws)", scheme, self._options.openenv).rstrip("/")

    def _start(self) -> None:
        self._folder = private_folder()
        self._path = str(self._folder.path / "server")
        variables = dict(os.environ)
        if self._options.python is not None:
            variables = {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        command = [self._options.python or sys.executable, "-c", _SERVE, self._options.openenv]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen(1024)
            descriptor = listener.fileno()
            command += [str(descriptor), str(self._options.sessions or 0)]
            self._process = ServerProcess(command, key=_KEY, environment=variables, descriptors=[descriptor])


def _reward_of(reply: Mapping[str, Any]) -> float:
    reward = reply.get("reward")
    if reward is None:
        return 0.0
    if not isinstance(reward, int | float):
        raise InvalidReward(f"{_KEY}: a reward must be a number (got {shown(reward)})")
    return float(reward)


def _tools_of(reply: Mapping[str, Any]) -> list[Tool]:
    entries = reply["observation"].get("tools")
    tools = []
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case {"name": str(name)} if isinstance(entry, dict):
                schema = entry.get("input_schema") or entry.get("inputSchema") or {}
                tools.append(Tool(name=name, description=entry.get("description") or "", parameters=schema))
            case _:
                raise EnvironmentFailure(f"{_KEY}: a tool must have a name (got {shown(reply)})")
    return tools


def _tool_result(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a call of a tool with the text of its result as the only field of the observation."""
    match reply.get("observation"):
        case {"error": {"message": text}} | {"error": str(text)}:
            return {"refusal": text}
        case {"result": {"data": str(text)}} | {"result": str(text)}:
            return {**reply, "observation": {"result": text}}
        case {"result": {"data": dict() | list() | int() | float() as data}} | {"result": {"content": list(data)}}:
            return {**reply, "observation": {"result": data}}
    return reply


def _explained(error: object) -> str:
    match error:
        case {"loc": list(place), "msg": str(text)}:
            return f"{'.'.join(map(str, place))}: {text[:1].lower()}{text[1:]}"
    return shown(error)
