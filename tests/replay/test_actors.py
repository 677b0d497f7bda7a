"""Fetches from storage shards whose process dies."""

import asyncio
import pickle
import threading
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.endpoints import FakeEndpoint
from titanrl.carriers.types import GroupHandle
from titanrl.replay.actors import ShardDirectory, TokensLostError

WANTED = [(GroupHandle(shard=1, slot=2, serial=3), 0)]


def shard(reply: Awaitable[list[bytes]]) -> Any:
    """Return a fake shard with this reply."""

    return SimpleNamespace(get=FakeEndpoint(lambda wanted: reply))


async def silence() -> list[bytes]:
    await asyncio.Event().wait()
    raise AssertionError


async def answer() -> list[bytes]:
    return [pickle.dumps("segment")]


async def forgotten() -> list[bytes]:
    raise KeyError("group")


def test_fetch_fails_when_another_thread_reports_that_its_shard_died() -> None:
    async def main() -> None:
        shards = ShardDirectory()
        shards.use(0, shard(answer()))
        shards.use(1, shard(silence()))
        fetching = asyncio.create_task(shards.fetch(1, WANTED))
        assert await shards.fetch(0, WANTED) == ["segment"]
        assert not fetching.done()
        teller = threading.Thread(target=shards.use, args=(1, None))
        teller.start()
        with pytest.raises(TokensLostError, match="died"):
            await asyncio.wait_for(fetching, 10)
        teller.join()
        with pytest.raises(TokensLostError):
            await shards.fetch(1, WANTED)
        shards.use(1, shard(answer()))
        assert await shards.fetch(1, WANTED) == ["segment"]

    asyncio.run(main())


def test_replacing_a_shard_fails_fetches_from_the_previous_one() -> None:
    async def main() -> None:
        shards = ShardDirectory()
        shards.use(1, shard(silence()))
        fetching = asyncio.create_task(shards.fetch(1, WANTED))
        await asyncio.sleep(0)
        shards.use(1, shard(forgotten()))
        with pytest.raises(TokensLostError):
            await asyncio.wait_for(fetching, 10)
        with pytest.raises(TokensLostError):  # the new one does not have the groups of the old one
            await shards.fetch(1, WANTED)

    asyncio.run(main())
