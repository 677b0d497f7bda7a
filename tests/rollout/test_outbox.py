"""Delivery of finished groups to fake shards that record the calls."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tests.records import make_record
from titanrl.rollout.outbox import MAX_HELD, Outbox
from titanrl.types import GroupHandle, GroupRecord


class FakeShards:
    """Fake mesh of shards. Each call takes 10 ms, then records the slots of its payloads and of its records."""

    def __init__(self) -> None:
        self.log: list[tuple[list[int], list[int]]] = []
        self.error: Exception | None = None

    def slice(self, procs: int) -> "FakeShards":
        return self

    @property
    def put(self) -> "FakeShards":
        return self

    async def call_one(self, payload: Mapping[GroupHandle, Any], records: Sequence[GroupRecord] = ()) -> None:
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.log.append(([handle.slot for handle in payload], [record.handle.slot for record in records]))


def test_groups_finished_during_a_delivery_share_the_next_message() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        outbox = Outbox(shards, in_order=True)

        async def deliver(index: int) -> None:
            await outbox.deliver(make_record(index), ())
            assert any(index in records for _, records in shards.log)

        first = asyncio.create_task(deliver(0))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
        assert shards.log == [([0], [0]), ([1, 2, 3], [1, 2, 3])]

    asyncio.run(scenario())


def test_groups_of_one_tick_share_a_message_and_its_error() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        outbox = Outbox(shards, in_order=True)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (0, 1)))
        assert shards.log == [([0, 1], [0, 1])]
        shards.error = RuntimeError("no buffer")
        errors = await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (2, 3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["no buffer", "no buffer"]
        shards.error = None
        await outbox.deliver(make_record(4), ())
        assert shards.log[-1] == ([4], [4])

    asyncio.run(scenario())


def test_group_waits_for_older_groups_unless_many_wait() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        outbox = Outbox(shards, in_order=True)
        for index in range(20):
            outbox.begin(index)
        waiting = [asyncio.create_task(outbox.deliver(make_record(index), ())) for index in (3, 1)]
        await asyncio.sleep(0.03)
        assert shards.log == []
        await outbox.deliver(make_record(0), ())
        assert shards.log == [([3, 1, 0], [3, 1, 0])]
        await asyncio.gather(*waiting)
        many = range(4, 4 + MAX_HELD)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in many))
        assert shards.log[1:] == [(list(many), list(many))], "2 is not finished"
        await outbox.deliver(make_record(2), ())
        assert shards.log[2:] == [([2], [2])]

    asyncio.run(scenario())


def test_group_is_sent_at_once_if_order_does_not_matter() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        outbox = Outbox(shards, in_order=False)
        for index in range(3):
            outbox.begin(index)
        await outbox.deliver(make_record(2), ())
        assert shards.log == [([2], [2])]

    asyncio.run(scenario())


def test_group_without_payload_sends_only_its_record() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        await Outbox(shards, in_order=True).deliver(make_record(4, has_payload=False), ())
        assert shards.log == [([], [4])]

    asyncio.run(scenario())


def test_demonstrations_are_stored_without_a_record() -> None:
    async def scenario() -> None:
        shards = FakeShards()
        await Outbox(shards, in_order=True).store(make_record(7).handle, ())
        assert shards.log == [([7], [])]

    asyncio.run(scenario())
