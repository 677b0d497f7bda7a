"""Delivery of finished groups to a fake buffer that records calls."""

import asyncio
import gc
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.endpoints import FakeEndpoint
from tests.records import make_record
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.processes.actors import cause_of
from titanrl.replay.groups import ShardUsage
from titanrl.rollout.workers import MAX_HELD, Dump, Outbox, RolloutWorker


class FakeBuffer:
    """Fake buffer and storage. Each commit takes 10 ms, then records the locations stored since the last, and its records."""

    def __init__(self) -> None:
        self.log: list[tuple[list[int], list[int]]] = []
        self.error: Exception | None = None
        self.usage = ShardUsage(num_bytes=0, num_spilled_bytes=0)
        self.room = True
        self.threads = set[int]()
        """Threads that stored groups."""
        self._stored: list[int] = []

    def has_room(self, parts: Sequence[bytes]) -> bool:
        return self.room

    def put(self, handle: GroupHandle, parts: Sequence[bytes]) -> None:
        self.threads.add(threading.get_ident())
        self._stored.append(handle.location)

    @property
    def commit(self) -> FakeEndpoint:
        return FakeEndpoint(self.add)

    async def add(self, records: Sequence[GroupRecord], usage: ShardUsage) -> None:
        stored, self._stored = self._stored, []
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        assert usage is self.usage
        self.log.append((stored, [record.handle.location for record in records]))

    def outbox(self, *, in_order: bool = True, dump: Dump | None = None) -> Outbox:
        return Outbox(self, self, in_order=in_order, dump=dump)  # type: ignore[arg-type]


async def test_groups_finished_during_a_delivery_share_the_next_message() -> None:
    buffer = FakeBuffer()
    outbox = buffer.outbox()

    async def deliver(index: int) -> None:
        await outbox.deliver(make_record(index), ())
        assert any(index in records for _, records in buffer.log)

    first = asyncio.create_task(deliver(0))
    await asyncio.sleep(0.001)
    await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
    assert buffer.log == [([0], [0]), ([1, 2, 3], [1, 2, 3])]


async def test_groups_are_dumped_before_their_delivery() -> None:
    buffer, written = FakeBuffer(), []

    def write(groups: Sequence[tuple[Any, str]]) -> None:
        written.append((list(groups), len(buffer.log)))

    outbox = buffer.outbox(dump=write)
    records = [
        make_record(0),
        make_record(1, has_payload=False, rejection="too small"),
        make_record(2, has_payload=False),
        make_record(3, rewards=()),
    ]
    await asyncio.gather(*(outbox.deliver(record, (), f"group {record.index}") for record in records))  # type: ignore[arg-type]
    statuses = [("group 0", "kept"), ("group 1", "too small"), ("group 2", "no signal"), ("group 3", "no reward")]
    assert written == [(statuses, 0)]
    assert len(buffer.log) == 1


async def test_groups_of_one_tick_share_a_message_and_its_error() -> None:
    buffer = FakeBuffer()
    outbox = buffer.outbox()
    await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (0, 1)))
    assert buffer.log == [([0, 1], [0, 1])]
    buffer.error = RuntimeError("no buffer")
    errors = await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (2, 3)), return_exceptions=True)
    assert [str(cause_of(error)) for error in errors if isinstance(error, Exception)] == ["no buffer", "no buffer"]
    buffer.error = None
    await outbox.deliver(make_record(4), ())
    assert buffer.log[-1] == ([4], [4])


async def test_failure_of_the_rollouts_is_logged_and_sent_to_the_buffer(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        async with asyncio.TaskGroup() as groups:
            for error in (ValueError("no prompts"), ValueError("no reward")):
                groups.create_task(raising(error))

    async def raising(error: Exception) -> None:
        raise error

    reported = list[str]()

    async def report(text: str) -> None:
        reported.append(text)

    worker = object.__new__(RolloutWorker)
    worker._run = fail  # type: ignore[method-assign]
    buffer = SimpleNamespace(fail=SimpleNamespace(call_one=report))
    worker._setup = cast("Any", SimpleNamespace(config=SimpleNamespace(max_staleness=1), buffer=buffer))
    task = asyncio.create_task(worker._run_and_report_failure())
    await asyncio.wait({task})
    del task
    gc.collect()
    assert [text.partition("\n")[0] for text in reported] == ["ValueError: no prompts"]
    assert "the rollouts failed" in caplog.text
    assert "ValueError: no reward" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_group_waits_for_older_groups_unless_many_are_queued() -> None:
    buffer = FakeBuffer()
    outbox = buffer.outbox()
    for index in range(20):
        outbox.begin(index)
    waiting = [asyncio.create_task(outbox.deliver(make_record(index), ())) for index in (3, 1)]
    await asyncio.sleep(0.03)
    assert buffer.log == []
    await outbox.deliver(make_record(0), ())
    assert buffer.log == [([3, 1, 0], [3, 1, 0])]
    await asyncio.gather(*waiting)
    many = range(4, 4 + MAX_HELD)
    await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in many))
    assert buffer.log[1:] == [(list(many), list(many))], "2 is not finished"
    await outbox.deliver(make_record(2), ())
    assert buffer.log[2:] == [([2], [2])]


async def test_group_is_sent_immediately_if_order_does_not_matter() -> None:
    buffer = FakeBuffer()
    outbox = buffer.outbox(in_order=False)
    for index in range(3):
        outbox.begin(index)
    await outbox.deliver(make_record(2), ())
    assert buffer.log == [([2], [2])]


async def test_group_without_payload_sends_only_its_record() -> None:
    buffer = FakeBuffer()
    await buffer.outbox().deliver(make_record(4, has_payload=False), ())
    assert buffer.log == [([], [4])]


async def test_only_groups_that_may_wait_for_the_disk_are_stored_in_a_thread() -> None:
    buffer = FakeBuffer()
    outbox, own = buffer.outbox(), threading.get_ident()
    await outbox.deliver(make_record(0), ())
    assert buffer.threads == {own}
    buffer.threads.clear()
    buffer.room = False
    await outbox.deliver(make_record(1), ())
    assert own not in buffer.threads
    assert buffer.threads
    assert buffer.log == [([0], [0]), ([1], [1])]


async def test_groups_of_an_abandoned_round_are_discarded() -> None:
    buffer = FakeBuffer()
    outbox = buffer.outbox()
    for index in (0, 1):
        outbox.begin(index)
    waiting = asyncio.create_task(outbox.deliver(make_record(1), ()))  # for group 0
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    outbox.reset()
    outbox.begin(0)
    await asyncio.wait_for(outbox.deliver(make_record(0), ()), 5)
    assert buffer.log == [([0], [0])]
