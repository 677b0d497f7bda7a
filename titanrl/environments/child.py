"""Main program of an environment process, which `titanrl.environments.worker` starts.

It requires only Python 3.10 or newer and the packages that the environment imports. Requests are pickled. Replies are JSON, so
that an environment that executes model-written code cannot make the parent unpickle anything. Each message is preceded by its
length. Messages use a dedicated socket, so the environment can print, and its output goes to the log.
"""

import asyncio
import json
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from titanrl.base.errors import describe_user_error
from titanrl.base.plugins import Plugin
from titanrl.environments.factories import load_factory
from titanrl.environments.interface import (
    Done,
    Environment,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    InvalidReward,
    JudgesTruncated,
    Limit,
    Message,
    Observation,
    Prepares,
    Tool,
    checked,
    shown,
)
from titanrl.processes.confine import end_with_parent

LENGTH = struct.Struct("!I")
"""Length prefix of a request or reply, in bytes."""

_MAX_ERROR_CHARS = 2000


def main(channel_fd: int, parent_pid: int) -> None:
    """Serve requests until the socket is closed, or the thread of the process `parent_pid` that started this one exits."""
    end_with_parent(parent_pid)
    os.set_inheritable(channel_fd, False)
    asyncio.run(_serve(socket.socket(fileno=channel_fd)))


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    host = _Host()
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            request = await reader.readexactly(length)
            reply = await _attempt(host, request)
            writer.write(LENGTH.pack(len(reply)) + reply)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # threads of the environment must not delay the exit


async def _attempt(host: "_Host", request: bytes) -> bytes:
    """Execute a request and return the reply. If it raises, reply with the exception's type and message."""
    try:
        name, arguments = pickle.loads(request)
        # Without escapes, a reply of the maximum size is at most 6 bytes per character long.
        return json.dumps(await host.calls[name](*arguments), ensure_ascii=False).encode()
    except BaseException as error:  # a user-defined environment may raise anything, even SystemExit
        traceback.print_exc()
        text = describe_user_error(error)[:_MAX_ERROR_CHARS]
        kinds = {"is_reward": isinstance(error, InvalidReward), "is_timeout": isinstance(error, EnvironmentTimeout)}
        return json.dumps({"error": text, **kinds}).encode()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _Host:
    """Runs one episode at a time, each in a new environment object."""

    def __init__(self) -> None:
        self._make: Callable[[], Environment] | None = None
        self._environment: Environment | None = None
        self.calls: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "start": self.start,
            "reset": self.reset,
            "step": self.step,
            "judge_truncated": self.judge_truncated,
            "close": self.close,
        }

    async def start(self, function: str | Plugin, options: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
        """Import the environment. `path` is `sys.path` of the parent, empty if the parent runs another interpreter."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]  # keep the parent's order
        plugins = {function.key: function} if isinstance(function, Plugin) else {}
        self._make = load_factory(function.name if isinstance(function, Plugin) else function, options, plugins)
        if isinstance(environment := self._make(), Prepares):
            await environment.prepare()
        return {}

    async def reset(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Create an environment and start the episode."""
        assert self._make is not None
        self._environment = self._make()
        return encoded(await self._environment.reset(Episode(**episode)))

    async def step(self, message: Message) -> dict[str, Any]:
        assert self._environment is not None
        return encoded(await self._environment.step(message))

    async def judge_truncated(self, message: Message | None, limit: Limit) -> dict[str, Any]:
        """Return the reply of the environment; `{"done": null}` if it does not judge the episode."""
        environment: Any = self._environment
        if not isinstance(environment, JudgesTruncated):
            return {"done": None}
        done = await environment.judge_truncated(message, limit)
        return {"done": None} if done is None else encoded(done)

    async def close(self) -> dict[str, Any]:
        environment, self._environment = self._environment, None
        if environment is not None:
            await environment.close()
        return {}


def encoded(result: object) -> dict[str, Any]:
    """Convert the return value of a method to JSON values; raise `EnvironmentFailure` if it is invalid."""
    valid = checked(result)
    if isinstance(valid, Done):  # `asdict` would copy the messages, which takes longer than everything else here
        return {"done": {"rewards": valid.rewards, "reward": valid.reward, "metrics": valid.metrics}}
    tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in valid.tools]
    observation: dict[str, Any] = {"messages": valid.messages, "tools": tools}
    observation |= {"reward": valid.reward, "replaces": valid.replaces, "metrics": valid.metrics, "state": valid.state}
    return {"observation": observation}


def decoded(reply: Mapping[str, Any]) -> Observation | Done:
    """Convert a reply back to the argument of `encoded`. It is checked again, because the process is not trusted."""
    match reply:
        case {"done": {"rewards": dict(rewards), "reward": float(reward), "metrics": dict(metrics)}}:
            return checked(Done(rewards=rewards, reward=reward, metrics=metrics))
        case {
            "observation": {
                "messages": list(messages),
                "tools": list(tools),
                "reward": float(reward),
                "replaces": bool(replaces),
                "metrics": dict(metrics),
                "state": str(state),
            }
        }:
            try:
                made = [Tool(**tool) for tool in tools]
            except TypeError as error:
                raise EnvironmentFailure(f"tools: {error} (got {shown(tools)}). Correct them.") from error
            fields: dict[str, Any] = {"reward": reward, "replaces": replaces, "metrics": metrics, "state": state}
            return checked(Observation(messages=messages, tools=made, **fields))
    raise EnvironmentFailure(f"the reply must be an Observation or Done (got {shown(reply)})")
