"""Endpoints of fake actors, which reply through torchmonarch like real ones."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from titanrl.launch.assembly import local_host
from titanrl.processes.actors import Answer, Asked, portable


class FakeEndpoint:
    """Endpoint of functions, one per rank, whose results it sends as real endpoints do."""

    def __init__(self, *ranks: Callable[..., Any]) -> None:
        local_host()  # makes the sockets of this process private, before its first port opens
        self._ranks = ranks
        self._tasks: set[asyncio.Task[None]] = set()

    def broadcast(self, asked: Asked, *args: Any, **kwargs: Any) -> None:
        for rank in range(len(self._ranks)):
            task = asyncio.create_task(self._reply(asked, rank, args, kwargs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, asked: Asked, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            result = self._ranks[rank](*args, **kwargs)
            value = await result if inspect.isawaitable(result) else result
            answer = Answer(rank, len(self._ranks), value, None)
        except Exception as error:
            answer = Answer(rank, len(self._ranks), None, portable(error))
        asked.replies.send(answer)
