"""Verbs: requests of a client to its actors. Each is one line with the endpoint, the merge of the replies and the deadline."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from titanrl.launch.stalls import DISK_S, Pace
from titanrl.processes.actors import ask_ranks

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")

Limit = Literal["start_s", "step_s", "sync_s"]
"""Name of the longest wait in the section `timeouts`."""
PACE, DISK = Pace(), Pace(min_s=DISK_S)
"""Paces of requests, and of those that read or write files."""


class Verb(Generic[P, R, M]):
    """A request to the endpoint of the same name, as an attribute of a client's class. The endpoint's docstring describes it.

    The client has `mesh`, the actors, and `ask`, which awaits their replies.

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
        """Declare the request.

        Args:
            endpoint: endpoint of the actor's class; a private attribute has its name after an underscore.
            merge: function of the name and of the ranks' replies, which returns the reply of the client.
            limit: longest wait.
            pace: parameters of the learned deadline.
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
        call = ask_ranks(getattr(client.mesh, self._name), *args, **kwargs)
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
