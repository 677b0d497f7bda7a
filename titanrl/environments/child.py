"""The process of an environment: what `titanrl.environments.worker` starts.

It needs Python 3.10 or newer and the environment's own packages, nothing else. Requests are pickled; replies are JSON, so that
an environment that executes code of a model cannot make the other side unpickle anything. Both are preceded by their length.
Requests and replies have a socket of their own: what the environment prints goes to its log.
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

from titanrl.environments.interface import Done, Environment, Episode, Message, Observation, Tool
from titanrl.environments.registry import load_factory
from titanrl.plugins import Plugin
from titanrl.sandbox.confine import end_with_parent

LENGTH = struct.Struct("!I")
"""Length of a request or reply, before it."""

Request = tuple[str, tuple[Any, ...]]
"""Name of a method of `_Host`, and its arguments."""

_MAX_ERROR_CHARS = 2000


def main(channel_fd: int, parent_pid: int) -> None:
    """Serve requests until the socket closes or the process `parent_pid` ends."""
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
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # threads of the environment must not delay the end
        reply = await _attempt(host, request)
        writer.write(LENGTH.pack(len(reply)) + reply)
        await writer.drain()


async def _attempt(host: "_Host", request: bytes) -> bytes:
    """Answer a request; the answer to one that raises is its exception."""
    try:
        name, arguments = pickle.loads(request)
        return json.dumps(await host.calls[name](*arguments)).encode()
    except BaseException as error:  # the environment is the user's and may raise anything, also SystemExit
        traceback.print_exc()
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}).encode()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _Host:
    """Holds the environment of one episode after the other."""

    def __init__(self) -> None:
        self._make: Callable[[], Environment] | None = None
        self._environment: Environment | None = None
        self.calls: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "load": self.load,
            "reset": self.reset,
            "step": self.step,
            "close": self.close,
        }

    async def load(self, function: str | Plugin, options: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
        """Import the environment; `path` is the import path of the parent, empty if that is another interpreter."""
        sys.path[:] = [*path, *(place for place in sys.path if place not in path)]  # in the order of the parent
        plugins = {function.key: function} if isinstance(function, Plugin) else {}
        self._make = load_factory(function.name if isinstance(function, Plugin) else function, options, plugins)
        return {}

    async def reset(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Make an environment and start it."""
        assert self._make is not None
        self._environment = self._make()
        return encoded(await self._environment.reset(Episode(**episode)))

    async def step(self, message: Message) -> dict[str, Any]:
        assert self._environment is not None
        return encoded(await self._environment.step(message))

    async def close(self) -> dict[str, Any]:
        environment, self._environment = self._environment, None
        if environment is not None:
            await environment.close()
        return {}


def encoded(result: object) -> dict[str, Any]:
    """Return what an environment returned as JSON values.

    Raises:
        TypeError: It is neither an observation nor the end.
    """
    if isinstance(result, Done):
        rewards = _numbers(result.rewards)
        return {"done": {"rewards": rewards, "reward": float(result.reward), "metrics": _numbers(result.metrics)}}
    if isinstance(result, Observation):
        tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in result.tools]
        observation = {"messages": [dict(message) for message in result.messages], "tools": tools}
        numbers = {"reward": float(result.reward), "replaces": bool(result.replaces), "metrics": _numbers(result.metrics)}
        return {"observation": {**observation, **numbers}}
    raise TypeError(f"an environment returns Observation or Done (got {result!r:.80})")


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def decoded(reply: Mapping[str, Any]) -> Observation | Done:
    """Return what `encoded` was called with.

    Raises:
        ValueError: It is something else.
    """
    match reply:
        case {"done": {"rewards": dict(rewards), "reward": float(reward), "metrics": dict(metrics)}}:
            return Done(rewards=rewards, reward=reward, metrics=metrics)
        case {
            "observation": {
                "messages": list(messages),
                "tools": list(tools),
                "reward": float(reward),
                "replaces": bool(replaces),
                "metrics": dict(metrics),
            }
        }:
            made = [Tool(**tool) for tool in tools]
            return Observation(messages=messages, tools=made, reward=reward, replaces=replaces, metrics=metrics)
    raise ValueError(f"neither Observation nor Done (got {reply!r:.80})")
