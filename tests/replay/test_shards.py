"""Payloads of groups in memory and in files, and fetches from storage shards whose process dies."""

import asyncio
import inspect
import os
import pickle
import resource
import tempfile
import threading
import tracemalloc
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
from titanrl.base.pickling import MOVED
from titanrl.carriers.types import GroupHandle
from titanrl.replay import shards
from titanrl.replay.shards import Payloads, ShardDirectory, StorageShard, read_groups, shard_file, shared_payloads, write_groups

WANTED = [(GroupHandle(shard=1, location=2, serial=3), 0)]


def handle(location: int, serial: int = 1) -> GroupHandle:
    return GroupHandle(shard=0, location=location, serial=serial)


def contents(payloads: Payloads, of: GroupHandle) -> list[bytes]:
    return [bytes(part) for part in payloads.get(of)]


def test_groups_beyond_the_memory_limit_are_in_unnamed_files(tmp_path: Path) -> None:
    payloads = Payloads(250, tmp_path)
    groups = {handle(location): [bytes([location]) * 60, bytes([location + 100]) * 40] for location in range(6)}
    for key, parts in groups.items():
        payloads.put(key, parts)
    assert (payloads.usage.num_bytes, payloads.usage.num_spilled_bytes) == (600, 400)
    assert {key: contents(payloads, key) for key in groups} == groups
    assert os.listdir(tmp_path) == []


def test_a_group_has_room_as_long_as_storing_it_moves_none_to_a_file(tmp_path: Path) -> None:
    payloads = Payloads(250, tmp_path)
    for location, has_room in enumerate([True, True, False]):
        assert payloads.has_room([bytes(60), bytes(40)]) is has_room
        payloads.put(handle(location), [bytes(60), bytes(40)])
        assert bool(payloads.usage.num_spilled_bytes) is not has_room


def test_more_groups_than_open_files_are_usually_allowed_are_moved_to_files(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, usual[1]))
    try:
        payloads = Payloads(0, tmp_path)
        for location in range(300):
            payloads.put(handle(location), [b"group"])
        assert payloads.usage.num_spilled_bytes == 1500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


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
    for serial, (location, size, is_write) in enumerate(operations):
        current = next((key for key in expected if key.location == location), None)
        expected.pop(current, None)
        if is_write:
            parts = [pickle.dumps(serial), os.urandom(size)]
            payloads.put(handle(location, serial), parts)
            expected[handle(location, serial)] = parts
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

    def write(location: int) -> None:
        for serial in range(200):
            payloads.put(handle(location, serial), [bytes([location]) * 100, bytes([serial]) * 100])
            assert contents(payloads, handle(location, serial))[1] == bytes([serial]) * 100
            if serial % 3 == 0:
                payloads.drop([handle(location, serial)])

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, range(16)))
    assert payloads.usage.num_bytes == 16 * 200


@pytest.mark.parametrize("is_replaced", [False, True])
def test_group_that_does_not_fit_on_the_disk_is_not_stored(is_replaced: bool, tmp_path: Path) -> None:
    payloads = Payloads(100, tmp_path / "missing")  # no file can be created in it
    payloads.put(handle(0), [b"x" * 60])
    with pytest.raises(FileNotFoundError):
        payloads.put(handle(0 if is_replaced else 1, 2), [b"y" * 150])
    assert (payloads.usage.num_bytes, payloads.usage.num_spilled_bytes) == ((0, 0) if is_replaced else (60, 0))
    if not is_replaced:
        assert contents(payloads, handle(0)) == [b"x" * 60]
    (tmp_path / "missing").mkdir()
    payloads.put(handle(1, 3), [b"z" * 90])
    payloads.put(handle(2, 3), [b"z" * 90])
    assert contents(payloads, handle(1, 3)) == contents(payloads, handle(2, 3)) == [b"z" * 90]


def test_readers_do_not_wait_while_a_group_is_moved_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads, is_writing, may_end = Payloads(100, tmp_path), threading.Event(), threading.Event()
    create = tempfile.TemporaryFile

    def slow(*args: Any, **kwargs: Any) -> Any:
        is_writing.set()
        assert may_end.wait(10)
        return create(*args, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", slow)
    payloads.put(handle(0), [b"x" * 60])
    with ThreadPoolExecutor(1) as thread:
        putting = thread.submit(payloads.put, handle(1), [b"y" * 60])
        try:
            assert is_writing.wait(10)
            assert contents(payloads, handle(0)) == [b"x" * 60]
            payloads.drop([handle(0)])
        finally:
            may_end.set()
        putting.result(10)
    assert (payloads.usage.num_bytes, payloads.usage.num_spilled_bytes) == (60, 0)


async def call(shard: StorageShard, endpoint: str, *args: Any) -> None:
    """Call an endpoint without Monarch."""
    await inspect.unwrap(vars(StorageShard)[endpoint]._method)(shard, *args)


async def test_groups_are_saved_and_loaded_one_at_a_time(tmp_path: Path) -> None:
    saving, loading = (StorageShard(number, 1 << 20, tmp_path / f"shard{number}") for number in (92, 93))
    groups = {
        GroupHandle(shard=92, location=location, serial=1): [bytes([location]) * 1_000_000, b"short"] for location in range(12)
    }
    for folder in ("shard92", "shard93"):
        (tmp_path / folder).mkdir()
    for key, parts in groups.items():  # 11 of them are moved to files
        shared_payloads(92, 1 << 20, tmp_path).put(key, parts)
    handles = [*groups][:-1]
    moves = [(old, GroupHandle(shard=93, location=old.location + 1, serial=7)) for old in handles[2:]]
    tracemalloc.start()
    await call(saving, "save", tmp_path, [*handles, GroupHandle(shard=5, location=0, serial=1)])
    await call(saving, "finish_save")
    await call(loading, "load", tmp_path, moves)
    assert tracemalloc.get_traced_memory()[1] < 6_000_000, "more than a few groups were in memory at once"
    tracemalloc.stop()
    assert dict(read_groups(shard_file(tmp_path, 92))) == {key: tuple(groups[key]) for key in handles}
    for saved, current in moves:
        assert contents(shared_payloads(93, 1 << 20, tmp_path), current) == groups[saved]
    with pytest.raises(AssertionError, match="does not have the tokens"):
        await call(loading, "load", tmp_path, [([*groups][-1], GroupHandle(shard=93, location=0, serial=8))])


async def test_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed checkpoint is written again to the same file while the first attempt may still be in its thread."""
    shard, may_write = StorageShard(94, 1000, tmp_path), threading.Event()
    first, second = (GroupHandle(shard=94, location=location, serial=1) for location in range(2))
    for key in (first, second):
        shared_payloads(94, 1000, tmp_path).put(key, [b"tokens"])

    def delayed(path: Path, groups: Any) -> None:
        assert first not in groups or may_write.wait(10)
        write_groups(path, groups)

    monkeypatch.setattr(shards, "write_groups", delayed)
    await call(shard, "save", tmp_path, [first])
    await call(shard, "save", tmp_path, [second])
    finishing = asyncio.create_task(call(shard, "finish_save"))
    await asyncio.wait({finishing}, timeout=0.2)
    may_write.set()
    await asyncio.wait_for(finishing, 10)
    await asyncio.sleep(0.2)
    assert dict(read_groups(shard_file(tmp_path, 94))) == {second: (b"tokens",)}


async def test_segments_of_renamed_modules_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "titanrl.before", "titanrl.carriers.types")
    content = pickle.dumps(WANTED[0][0], 0).replace(b"titanrl.carriers.types", b"titanrl.before")

    async def reply() -> list[bytes]:
        return [content]

    directory = ShardDirectory()
    directory.use(1, shard(reply()))
    assert await directory.fetch(1, WANTED) == [WANTED[0][0]]


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
    directory = ShardDirectory()
    directory.use(0, shard(answer()))
    directory.use(1, shard(silence()))
    fetching = asyncio.create_task(directory.fetch(1, WANTED))
    assert await directory.fetch(0, WANTED) == ["segment"]
    assert not fetching.done()
    teller = threading.Thread(target=directory.use, args=(1, None))
    teller.start()
    with pytest.raises(TokensLostError, match="died"):
        await asyncio.wait_for(fetching, 10)
    teller.join()
    with pytest.raises(TokensLostError):
        await directory.fetch(1, WANTED)
    directory.use(1, shard(answer()))
    assert await directory.fetch(1, WANTED) == ["segment"]


async def test_replacing_a_shard_fails_fetches_from_the_previous_one() -> None:
    directory = ShardDirectory()
    directory.use(1, shard(silence()))
    fetching = asyncio.create_task(directory.fetch(1, WANTED))
    await asyncio.sleep(0)
    directory.use(1, shard(forgotten()))
    with pytest.raises(TokensLostError):
        await asyncio.wait_for(fetching, 10)
    with pytest.raises(TokensLostError):  # the new one does not have the groups of the old one
        await directory.fetch(1, WANTED)
