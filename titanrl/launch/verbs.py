"""Requests of clients to their actors, each declared in one line (`Verb`)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from titanrl.launch.supervision import PACE, Pace
from titanrl.processes.actors import ask_ranks

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M")

Limit = Literal["start_s", "step_s", "sync_s"]
"""Name of the longest wait in the section `timeouts`."""


class Verb(Generic[P, R, M]):
    """A request to the endpoint of the same name, as an attribute of a client's class. The endpoint's docstring describes it.

    The client has `mesh`, the actors, and `ask`, which awaits their replies. If it has a `model`, each request names it.

    Example: `keep_weights = Verb(PolicyTrainer.keep_weights, agreed)`
    """

    def __init__(
        self,
        endpoint: Callable[Concatenate[Any, P], Awaitable[R]],
        merge: Callable[[str, Sequence[R]], M],
        *,
        limit: Limit = "step_s",
        pace: Pace = PACE,
    ) -> None:
        """Declare the request to an endpoint; a private attribute has its name after an underscore.

        `merge` is a function of the name and of the ranks' replies, which returns the reply of the client.
        """
        self._merge, self._limit, self._pace = merge, limit, pace

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removeprefix("_")

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, M]]: ...
    @overload
    def __get__(self, client: object, owner: type) -> Callable[P, Coroutine[Any, Any, M]]: ...
    def __get__(self, client: object, owner: type) -> Callable[..., Coroutine[Any, Any, M]]:
        return self._request if client is None else partial(self._request, client)  # bound to the client like a method

    async def _request(self, client: Any, /, *args: P.args, **kwargs: P.kwargs) -> M:
        model = getattr(client, "model", None)
        named = {} if model is None else {"model": model}
        call = ask_ranks(getattr(client.mesh, self._name), *args, **kwargs, **named)
        return self._merge(self._name, await client.ask(self._name, call, self._limit, self._pace))


def done(name: str, replies: Sequence[object]) -> None:
    """Return nothing once all ranks have replied."""


def only(name: str, replies: Sequence[R]) -> R:
    """Return the reply of the only actor."""
    (reply,) = replies
    return reply


def per_rank(name: str, replies: Sequence[R]) -> Sequence[R]:
    """Return the replies in rank order."""
    return replies


def agreed(name: str, replies: Sequence[R]) -> R:
    """Return the reply on which all ranks agree; different replies mean that the ranks have diverged."""
    assert all(reply == replies[0] for reply in replies), f"ranks disagree after {name}: {replies}"
    return replies[0]


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, for example because the caller was interrupted."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an exception as retrieved
    return task
