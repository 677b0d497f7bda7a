"""Delivery of finished groups to a fake shard that records calls."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tests.records import make_record
from titanrl.rollout.outbox import MAX_HELD, Outbox
from titanrl.types import GroupHandle, GroupRecord


class FakeShard:
    """Fake storage shard. Each call takes 10 ms, then records the slots of its payloads and of its records."""

    def __init__(self) -> None:
        self.log: list[tuple[list[int], list[int]]] = []
        self.error: Exception | None = None

    @property
    def put(self) -> "FakeShard":
        return self

    async def call_one(
        self, payload: Mapping[GroupHandle, Any], records: Sequence[GroupRecord], dropped: Sequence[GroupHandle]
    ) -> None:
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.log.append(([handle.slot for handle in payload], [record.handle.slot for record in records]))


def test_groups_finished_during_a_delivery_share_the_next_message() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        outbox = Outbox(shard, in_order=True)

        async def deliver(index: int) -> None:
            await outbox.deliver(make_record(index), ())
            assert any(index in records for _, records in shard.log)

        first = asyncio.create_task(deliver(0))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
        assert shard.log == [([0], [0]), ([1, 2, 3], [1, 2, 3])]

    asyncio.run(scenario())


def test_groups_are_dumped_before_their_delivery() -> None:
    async def scenario() -> None:
        shard, written = FakeShard(), []

        def write(groups: Sequence[tuple[Any, str]]) -> None:
            written.append((list(groups), len(shard.log)))

        outbox = Outbox(shard, in_order=True, dump=write)
        records = [
            make_record(0),
            make_record(1, has_payload=False, rejection="too small"),
            make_record(2, has_payload=False),
            make_record(3, rewards=()),
        ]
        await asyncio.gather(*(outbox.deliver(record, (), f"group {record.index}") for record in records))  # type: ignore[arg-type]
        statuses = [("group 0", "kept"), ("group 1", "too small"), ("group 2", "no signal"), ("group 3", "no reward")]
        assert written == [(statuses, 0)]
        assert len(shard.log) == 1

    asyncio.run(scenario())


def test_groups_of_one_tick_share_a_message_and_its_error() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        outbox = Outbox(shard, in_order=True)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (0, 1)))
        assert shard.log == [([0, 1], [0, 1])]
        shard.error = RuntimeError("no buffer")
        errors = await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (2, 3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["no buffer", "no buffer"]
        shard.error = None
        await outbox.deliver(make_record(4), ())
        assert shard.log[-1] == ([4], [4])

    asyncio.run(scenario())


def test_group_waits_for_older_groups_unless_many_are_queued() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        outbox = Outbox(shard, in_order=True)
        for index in range(20):
            outbox.begin(index)
        waiting = [asyncio.create_task(outbox.deliver(make_record(index), ())) for index in (3, 1)]
        await asyncio.sleep(0.03)
        assert shard.log == []
        await outbox.deliver(make_record(0), ())
        assert shard.log == [([3, 1, 0], [3, 1, 0])]
        await asyncio.gather(*waiting)
        many = range(4, 4 + MAX_HELD)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in many))
        assert shard.log[1:] == [(list(many), list(many))], "2 is not finished"
        await outbox.deliver(make_record(2), ())
        assert shard.log[2:] == [([2], [2])]

    asyncio.run(scenario())


def test_group_is_sent_immediately_if_order_does_not_matter() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        outbox = Outbox(shard, in_order=False)
        for index in range(3):
            outbox.begin(index)
        await outbox.deliver(make_record(2), ())
        assert shard.log == [([2], [2])]

    asyncio.run(scenario())


def test_group_without_payload_sends_only_its_record() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        await Outbox(shard, in_order=True).deliver(make_record(4, has_payload=False), ())
        assert shard.log == [([], [4])]

    asyncio.run(scenario())


def test_groups_of_an_abandoned_round_are_discarded() -> None:
    async def scenario() -> None:
        shard = FakeShard()
        outbox = Outbox(shard, in_order=True)
        for index in (0, 1):
            outbox.begin(index)
        waiting = asyncio.create_task(outbox.deliver(make_record(1), ()))  # for group 0
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        outbox.reset()
        outbox.begin(0)
        await asyncio.wait_for(outbox.deliver(make_record(0), ()), 5)
        assert shard.log == [([0], [0])]

    asyncio.run(scenario())
