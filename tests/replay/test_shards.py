"""Payloads of groups in memory and in files, and fetches from storage shards whose process dies."""

import asyncio
import os
import pickle
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.endpoints import FakeEndpoint
from titanrl.base.errors import TokensLostError
from titanrl.carriers.types import GroupHandle
from titanrl.replay.shards import Payloads, ShardDirectory, shared_payloads

WANTED = [(GroupHandle(shard=1, slot=2, serial=3), 0)]


def handle(slot: int, serial: int = 1) -> GroupHandle:
    return GroupHandle(shard=0, slot=slot, serial=serial)


def contents(payloads: Payloads, of: GroupHandle) -> list[bytes]:
    return [bytes(part) for part in payloads.get(of)]


def test_groups_beyond_the_memory_limit_are_in_unnamed_files(tmp_path: Path) -> None:
    payloads = Payloads(250, tmp_path)
    groups = {handle(slot): [bytes([slot]) * 60, bytes([slot + 100]) * 40] for slot in range(6)}
    for key, parts in groups.items():
        payloads.put(key, parts)
    assert (payloads.usage.num_bytes, payloads.usage.num_spilled_bytes) == (600, 400)
    assert {key: contents(payloads, key) for key in groups} == groups
    assert os.listdir(tmp_path) == []


def test_group_larger_than_the_limit_is_stored(tmp_path: Path) -> None:
    payloads = Payloads(1, tmp_path)
    payloads.put(handle(0), [b"long", b"er"])
    assert contents(payloads, handle(0)) == [b"long", b"er"]
    assert payloads.usage.num_spilled_bytes == 6


def test_overwritten_and_dropped_groups_cannot_be_read(tmp_path: Path) -> None:
    payloads = Payloads(100, tmp_path)
    payloads.put(handle(0, 1), [b"old"])
    payloads.put(handle(0, 2), [b"new"])
    with pytest.raises(KeyError):
        payloads.get(handle(0, 1))
    payloads.drop([handle(0, 1), handle(7)])
    assert contents(payloads, handle(0, 2)) == [b"new"]
    payloads.drop([handle(0, 2)])
    assert payloads.usage.num_bytes == 0
    with pytest.raises(KeyError):
        payloads.get(handle(0, 2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=30))
def test_any_order_of_writes_and_deletions_behaves_like_a_dictionary(tmp_path_factory, operations) -> None:
    payloads, expected = Payloads(64, tmp_path_factory.mktemp("spill")), {}
    for serial, (slot, size, is_write) in enumerate(operations):
        current = next((key for key in expected if key.slot == slot), None)
        expected.pop(current, None)
        if is_write:
            parts = [pickle.dumps(serial), os.urandom(size)]
            payloads.put(handle(slot, serial), parts)
            expected[handle(slot, serial)] = parts
        elif current is not None:
            payloads.drop([current])
    assert {key: contents(payloads, key) for key in expected} == expected
    assert payloads.usage.num_bytes == sum(len(part) for parts in expected.values() for part in parts)


def test_worker_and_shard_of_a_process_share_their_storage(tmp_path: Path) -> None:
    mine, yours = (shared_payloads(number, 100, tmp_path) for number in (90, 91))
    mine.put(handle(0), [b"tokens"])
    assert contents(shared_payloads(90, 100, tmp_path), handle(0)) == [b"tokens"]
    assert yours.usage.num_bytes == 0


def test_storage_stays_consistent_while_threads_write_and_read(tmp_path: Path) -> None:
    payloads = Payloads(2000, tmp_path)  # most groups are moved to files

    def write(slot: int) -> None:
        for serial in range(200):
            payloads.put(handle(slot, serial), [bytes([slot]) * 100, bytes([serial]) * 100])
            assert contents(payloads, handle(slot, serial))[1] == bytes([serial]) * 100
            if serial % 3 == 0:
                payloads.drop([handle(slot, serial)])

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, range(16)))
    assert payloads.usage.num_bytes == 16 * 200


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


async def test_fetch_fails_when_another_thread_reports_that_its_shard_died() -> None:
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


async def test_replacing_a_shard_fails_fetches_from_the_previous_one() -> None:
    shards = ShardDirectory()
    shards.use(1, shard(silence()))
    fetching = asyncio.create_task(shards.fetch(1, WANTED))
    await asyncio.sleep(0)
    shards.use(1, shard(forgotten()))
    with pytest.raises(TokensLostError):
        await asyncio.wait_for(fetching, 10)
    with pytest.raises(TokensLostError):  # the new one does not have the groups of the old one
        await shards.fetch(1, WANTED)
