"""The storage shards that a process fetches from. A fetch ends at once if its shard has ended.

torchmonarch reports the end of a process to callers in other processes only after many seconds, and starts no endpoint of an
actor while a plain one of it runs. So a trainer that waits for a shard learns of its end through another actor of its process.
"""

import asyncio
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from titanrl.actors import Actor, ActorError, SupervisionError, cause_of, concurrent_endpoint, resolve
from titanrl.errors import TitanRLError
from titanrl.types import GroupHandle, Segment


class TokensLostError(TitanRLError):
    """Tokens of a batch are gone, because the rollout worker that held them has ended."""


class ShardDirectory:
    """The `StorageShard` actors by number, for all actors of a process. Each of these has an event loop of its own."""

    def __init__(self) -> None:
        """Start without shards."""
        self._lock = threading.Lock()
        self._shards: dict[int, Any] = {}
        self._fetches: dict[asyncio.Future[None], int] = {}

    def use(self, number: int, shard: Any | None) -> None:
        """Fetch from a new shard, or from none until there is one. Fetches from the previous one fail."""
        with self._lock:
            self._shards[number] = shard
            lost = [ended for ended, place in self._fetches.items() if place == number]
        for ended in lost:
            ended.get_loop().call_soon_threadsafe(_finish, ended)

    async def fetch(self, number: int, wanted: Sequence[tuple[GroupHandle, int]]) -> list[Segment]:
        """Fetch segments from a shard, by handle and index among the group's segments.

        Raises:
            TokensLostError: The process that held them has ended.
        """
        lost = TokensLostError(f"the storage shard of groups {wanted[0][0]} and others has ended")
        ended = asyncio.get_running_loop().create_future()
        with self._lock:
            shard = self._shards[number]
            self._fetches[ended] = number
        reply: asyncio.Task[list[bytes]] | None = None
        try:
            if shard is None:
                raise lost
            reply = asyncio.create_task(resolve(shard.get.call_one(wanted)), name="fetch")
            await asyncio.wait({reply, ended}, return_when=asyncio.FIRST_COMPLETED)
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
                del self._fetches[ended]


def _finish(ended: "asyncio.Future[None]") -> None:
    if not ended.done():
        ended.set_result(None)


SHARDS = ShardDirectory()
"""The shards of this process."""


class ShardNews(Actor):
    """Tells the process of a trainer rank which storage shards there are."""

    @concurrent_endpoint
    async def use(self, number: int, shard: Any | None) -> None:
        """Let the process fetch from a new shard, or from none; see `ShardDirectory.use`."""
        SHARDS.use(number, shard)
