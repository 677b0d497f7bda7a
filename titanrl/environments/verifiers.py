"""Tasksets of the package verifiers 0.4, unmodified: each call of the policy in a rollout is a turn of an episode.

This module runs in environment processes whose interpreter has verifiers. A rollout runs there as verifiers runs it, with a
loopback endpoint as the model. A call of the rollout becomes an observation, and the policy's message its reply, so tokens,
versions, limits and outcomes are those of any environment. Everything that is private to verifiers stays out of use, except the
registration of a harness under a module name.
"""

import asyncio
import importlib
import itertools
import json
import os
import re
import secrets
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

from titanrl.environments.interface import (
    Done,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    InvalidReward,
    Limit,
    Message,
    Observation,
    Tool,
    checked,
    readable_text,
)
from titanrl.environments.servers import shared

KEY = "data.environment.options"
"""Configuration section of the options, for error messages."""
HARNESS = "titanrl_chat"
"""Name under which verifiers finds the harness."""

_MODEL = "policy"
_KEY_VARIABLE = "TITANRL_VERIFIERS_KEY"
_TAKEN = ("messages", "model", "tools")


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process: it calls the model, runs the calls of tools, and ends at a message without calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Play until the policy calls no tool, or verifiers refuses a call."""
        from openai import APIError, AsyncOpenAI
        from verifiers.v1.dialects.chat import message_to_wire
        from verifiers.v1.runtimes import ProgramResult

        from titanrl.config.data import McpOptions
        from titanrl.environments.mcp import McpTools
        from titanrl.environments.tools import ToolEnvironment

        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if not system else [{"role": "system", "content": system}]
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(one) for one in prompt or ()]
        )
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            runner: ToolEnvironment | None = None
            declared: list[Any] = []
            if mcp_urls:
                sources = [
                    McpTools(McpOptions(mcp=url, timeout_s=self.config.tool_timeout), prefix=f"{name}_" if name else "")
                    for name, url in mcp_urls.items()
                ]
                runner = ToolEnvironment(sources, max_calls=1 << 20, call_timeout_s=self.config.tool_timeout)
                stack.push_async_callback(runner.close)
                await runner.prepare()
                declared = [
                    {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
                    for source in sources
                    for t in source.tools
                ]
            while True:  # verifiers refuses the call after a limit
                try:
                    asked: dict[str, Any] = {"model": ctx.model, "messages": messages}
                    asked |= {"tools": declared} if declared else {}
                    reply: Any = await client.chat.completions.create(**asked)
                except APIError as error:  # a limit or a stop of the task; verifiers has recorded which
                    return ProgramResult(1, "", str(error))
                answer = reply.choices[0].message.model_dump(exclude_none=True)
                messages.append(answer)
                if runner is None or not answer.get("tool_calls"):
                    break
                said = checked(Observation(messages=[answer]))  # parses the arguments of calls
                assert isinstance(said, Observation)
                observation = await runner.step(said.messages[0])
                assert isinstance(observation, Observation)
                messages += observation.messages
        return ProgramResult(0, "", "")


class Verifiers:
    """One rollout of a taskset."""

    def __init__(
        self, *, verifiers: str, taskset: Mapping[str, Any] | None = None, env: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the module of the taskset, such as `marble_v1`, its options, and those of verifiers' environment."""
        self._given: dict[str, Any] = {"verifiers": verifiers, "taskset": dict(taskset or {}), "env": dict(env or {})}
        self._host: _Host | None = None
        self._rollout: _Rollout | None = None

    async def prepare(self) -> None:
        """Load the taskset, or raise `EnvironmentFailure`."""
        self._host = await shared(("verifiers", json.dumps(self._given, sort_keys=True, default=str)), self._opened)

    async def reset(self, episode: Episode) -> Observation:
        """Start the rollout of a task, and return its first call of the policy.

        The task is the one whose index is the metadata field `index` of the prompt.
        """
        await self.prepare()
        assert self._host is not None
        metadata = episode.entry.get("metadata")
        index = metadata.get("index") if isinstance(metadata, Mapping) else None
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise EnvironmentFailure(f"the metadata of a prompt must have the index of its task (got {index!r}). Add `index`.")
        self._rollout = self._host.play(self._host.task(index))
        result = await self._rollout.next_call()
        if isinstance(result, Done):
            raise EnvironmentFailure("the rollout ended without a call of the policy")
        return result

    async def step(self, message: Message) -> Observation | Done:
        """Reply to the call with the policy's message, and return the next call, or the rewards."""
        assert self._rollout is not None
        self._rollout.reply(message, "stop")
        return await self._rollout.next_call()

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
        """Let verifiers score the rollout up to the limit; further calls are refused."""
        assert self._rollout is not None
        return await self._rollout.finish(message)

    async def close(self) -> None:
        """End the rollout."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            await rollout.close()
            assert self._host is not None
            self._host.current = None

    async def _opened(self) -> "_Host":
        host = _Host()
        try:
            await host.open(**self._given)
        except BaseException as error:  # the taskset may raise anything
            await host.close()
            if not isinstance(error, Exception):
                raise
            raise EnvironmentFailure(f"{KEY}.verifiers: {type(error).__name__}: {error} (got {self._given})") from error
        return host


class _Host:
    """The taskset, its resources, and the endpoint of this process."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._tasks: list[Any] = []
        self.current: _Rollout | None = None

    async def open(self, verifiers: str, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        module = types.ModuleType(HARNESS)
        module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]  # type: ignore[attr-defined]
        sys.modules[HARNESS] = module
        importlib.import_module(verifiers.replace("-", "_"))
        kind = loaders.env_config_type(verifiers, str(env.get("id", "")))
        given: dict[str, Any] = {**env, "taskset": {"id": verifiers, **taskset}}
        for role, default in agent_config_fields(
            kind.model_construct(**{n: f.default for n, f in kind.model_fields.items()})
        ).items():
            seat = dict(given.get(role) or {})
            if default.harness is None or default.harness.id == "null":
                seat.setdefault("harness", {"id": HARNESS})
            seat.setdefault("runtime", {"type": "subprocess"})
            if isinstance(seat.get("client"), Mapping):
                seat["client"] = {"type": "eval", **seat["client"]}  # another seat is not trained
            given[role] = seat
        self._env = loaders.load_environment(loaders.resolve_env_config(given))
        self._source: Iterator[Any] = iter(self._env.taskset)
        self.task(0)
        os.environ[_KEY_VARIABLE] = secret = secrets.token_urlsafe(32)
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/chat/completions", lambda request: self._answer(request, secret))
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self._client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var=_KEY_VARIABLE)
        await self._stack.enter_async_context(self._env.serving())

    def task(self, index: int) -> Any:
        """Return a task by its place in the taskset."""
        missing = index + 1 - len(self._tasks)
        self._tasks += itertools.islice(self._source, max(missing, 0))
        if index >= len(self._tasks):
            raise EnvironmentFailure(f"the taskset has only {len(self._tasks)} tasks (got index {index})")
        return self._tasks[index]

    def play(self, task: Any) -> "_Rollout":
        assert self.current is None, "a process plays one rollout at a time"
        self.current = rollout = _Rollout()
        rollout.start(self._env, task, vf.ModelContext(_MODEL, self._client))
        return rollout

    async def close(self) -> None:
        await self._stack.aclose()

    async def _answer(self, request: Any, secret: str) -> Any:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), secret.encode()):
            return _refused(401, "wrong key")
        body, rollout = await request.json(), self.current
        if rollout is None:
            return _refused(410, "the episode has ended")
        return await rollout.answer(body, request.headers.get("X-Session-ID", ""))


class _Call:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self.messages: list[Any] = body["messages"]
        self.tools = [_tool(tool) for tool in body.get("tools") or ()]
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()


class _Rollout:
    """A rollout: calls of the policy wait for their reply, one at a time."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._call: _Call | None = None
        self._known: list[Any] = []
        self._tools: list[Tool] | None = None
        self._traces: list[Any] = []
        self._seat: tuple[str | None] | None = None
        self._is_closing = False
        self._num_ignored = 0

    def start(self, env: Any, task: Any, context: Any) -> None:
        running = env.run_episode(task, context, on_trace=self._traces.append)
        self._running: asyncio.Task[Any] = asyncio.create_task(running, name="rollout of verifiers")

    async def answer(self, body: Mapping[str, Any], session: str) -> Any:
        """Return the response to a call in the session of one of the rollout's traces, once the policy has replied."""
        trace = next((trace for trace in self._traces if trace.id == session), None)
        if trace is None:
            return _refused(410, "the episode has ended")
        seat = trace.agent.name
        if not trace.agent.trainable or (self._seat is not None and seat != self._seat[0]):
            return _refused(400, f"only one seat is trained. Set env.{seat}.client to the endpoint of another model.")
        self._seat = (seat,)
        for name, allowed in (("stream", (False, None)), ("n", (1, None)), ("response_format", (None,))):
            if body.get(name) not in allowed:
                return _refused(400, f"{name} is not supported (got {body[name]!r})")
        if body.get("tool_choice") not in (None, "auto"):
            return _refused(400, f"tool_choice is not supported (got {body['tool_choice']!r})")
        if self._is_closing:
            return _refused(400, "a limit has ended the episode")
        self._num_ignored += any(name not in _TAKEN and value is not None for name, value in body.items())
        call = _Call(body)
        self._calls.put_nowait(call)
        return web.json_response(await call.reply)

    def reply(self, message: Message, reason: str) -> None:
        call, self._call = self._call, None
        assert call is not None
        answer = _wire(message)
        self._known = [*call.messages, answer]
        reason = "tool_calls" if answer.get("tool_calls") and reason == "stop" else reason
        choice = {"index": 0, "message": answer, "finish_reason": reason, "logprobs": None}
        if not call.reply.done():  # the rollout may have given up
            common = {"id": f"call-{secrets.token_hex(8)}", "object": "chat.completion", "model": _MODEL}
            call.reply.set_result({**common, "created": int(time.time()), "choices": [choice]})

    async def next_call(self) -> Observation | Done:
        """Wait for the next call of the policy, or the end of the rollout."""
        waiting = asyncio.create_task(self._calls.get())
        try:
            await asyncio.wait([waiting, self._running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()  # has no effect if there is a call
        if not waiting.done():
            return self._end()
        self._call = call = waiting.result()
        if self._tools is None:
            self._tools = call.tools
        elif self._tools != call.tools:
            raise EnvironmentFailure("the tools of the policy must not change within an episode")
        size = len(self._known)
        if size and len(call.messages) > size and list(map(_plain, call.messages[:size])) == list(map(_plain, self._known)):
            return Observation(messages=call.messages[size:])
        return Observation(messages=call.messages, tools=call.tools, replaces=size > 0)

    async def finish(self, message: Message | None) -> Done | None:
        """Reply to the current call with a message that was cut off, refuse later ones, and return the rewards."""
        self._is_closing = True
        if self._call is not None:
            self.reply(message or {"role": "assistant", "content": ""}, "length")
        await asyncio.wait([self._running])
        try:
            return self._end()
        except InvalidReward:
            raise
        except EnvironmentFailure:  # the limit ended it, so that it has no rewards
            return None

    async def close(self) -> None:
        self._is_closing = True
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _end(self) -> Done:
        episode = self._running.result()
        traces = [trace for trace in episode.traces if self._seat is not None and trace.agent.name == self._seat[0]]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)[:1000]
        if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
            raise EnvironmentTimeout(f"the rollout ran out of time: {said}")
        if any(error.type == "TaskError" for error in errors):
            raise InvalidReward(f"the task failed: {said}")
        if errors or not traces:
            raise EnvironmentFailure(f"the rollout failed: {said or 'it has no trace of the policy'}")
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {"ignored_options": float(self._num_ignored)}
        for trace in traces:
            for name, reward in trace.rewards.items():
                if reward is None:
                    raise InvalidReward(f"the reward {name} was not computed")
                part = _part(name)
                if reward.weight:
                    rewards[part] = rewards.get(part, 0.0) + reward.value / len(traces)
                else:
                    metrics[part] = metrics.get(part, 0.0) + reward.score / len(traces)
            metrics |= {_part(name): value for name, value in trace.metrics.items() if value is not None}
        return Done(rewards=rewards, metrics=metrics)


def _refused(status: int, text: str) -> Any:
    error = {"message": text, "type": "invalid_request_error", "code": None, "param": None}
    return web.json_response({"error": error}, status=status)


def _part(name: str) -> str:
    """Return the name of a reward or metric as a name of a part."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)[:60] or "reward"


def _tool(declared: Mapping[str, Any]) -> Tool:
    function = declared.get("function") or {}
    if declared.get("type", "function") != "function" or not function.get("name"):
        raise EnvironmentFailure(f"only functions are supported as tools (got {declared!r:.200})")
    return Tool(
        name=function["name"], description=function.get("description") or "", parameters=function.get("parameters") or {}
    )


def _wire(message: Message) -> dict[str, Any]:
    """Return the policy's message as OpenAI's clients read it, where the arguments of calls are text."""
    answer: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        answer["reasoning_content"] = message["reasoning_content"]
    calls = [
        {
            "id": call.get("id") or f"call_{index}",
            "type": "function",
            "function": {
                "name": call["function"].get("name") or "",
                "arguments": given if isinstance(given := call["function"].get("arguments"), str) else json.dumps(given or {}),
            },
        }
        for index, call in enumerate(message.get("tool_calls") or ())
    ]
    return answer | ({"tool_calls": calls} if calls else {})


def _plain(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return what a message says, without differences in form."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message.get("role"), readable_text(content), calls, message.get("tool_call_id")
