"""Fetches from storage shards, which fail immediately when the shard's process dies.

torchmonarch reports the death of a process to callers in other processes only after many seconds. It also starts no endpoint of
an actor while a plain endpoint of that actor runs. A trainer that waits for a shard is therefore notified by another actor in
its process, `ShardNews`.
"""

import asyncio
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from titanrl.base.errors import TitanRLError
from titanrl.carriers.types import GroupHandle, Segment
from titanrl.processes.actors import Actor, ActorError, SupervisionError, ask_actor, cause_of, concurrent_endpoint


class TokensLostError(TitanRLError):
    """Tokens of a batch are lost because the rollout worker that held them died."""


class ShardDirectory:
    """The `StorageShard` actors by number, shared by all actors of a process, which run on different event loops."""

    def __init__(self) -> None:
        """Start without shards."""
        self._lock = threading.Lock()
        self._shards: dict[int, Any] = {}
        self._fetches: dict[asyncio.Future[None], int] = {}

    def use(self, number: int, shard: Any | None) -> None:
        """Replace a shard, with None until its successor exists. Running fetches from the previous one fail."""
        with self._lock:
            self._shards[number] = shard
            lost = [died for died, source in self._fetches.items() if source == number]
        for died in lost:
            died.get_loop().call_soon_threadsafe(_finish, died)

    async def fetch(self, number: int, wanted: Sequence[tuple[GroupHandle, int]]) -> list[Segment]:
        """Fetch segments from a shard, by handle and index among the group's segments.

        Raises:
            TokensLostError: The process that held them died.
        """
        lost = TokensLostError(f"the storage shard that held {wanted[0][0]} died")
        died = asyncio.get_running_loop().create_future()
        with self._lock:
            shard = self._shards[number]
            self._fetches[died] = number
        reply: asyncio.Future[list[bytes]] | None = None
        try:
            if shard is None:
                raise lost
            reply = ask_actor(shard.get, wanted)
            await asyncio.wait({reply, died}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise lost
            return [pickle.loads(segment) for segment in reply.result()]
        except (ActorError, SupervisionError) as error:
            if isinstance(cause_of(error), KeyError | SupervisionError):
                raise lost from None
            raise
        finally:
            if reply is not None:
                reply.cancel()
            with self._lock:
                del self._fetches[died]


def _finish(died: "asyncio.Future[None]") -> None:
    if not died.done():
        died.set_result(None)


SHARDS = ShardDirectory()
"""Shards known to this process."""


class ShardNews(Actor):
    """Actor that informs the process of a trainer rank about new and lost storage shards."""

    @concurrent_endpoint
    async def use(self, number: int, shard: Any | None) -> None:
        """Replace a shard in this process; see `ShardDirectory.use`."""
        SHARDS.use(number, shard)
