"""Deliveries of finished groups, to shards that only take notes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tests.records import make_record
from titanrl.rollout.outbox import MAX_HELD, Outbox
from titanrl.types import GroupHandle, GroupRecord


class Notes:
    """Stands for the mesh of shards: each call takes a while and is noted at its end, as slots of payloads and of records."""

    def __init__(self) -> None:
        self.log: list[tuple[list[int], list[int]]] = []
        self.error: Exception | None = None

    def slice(self, procs: int) -> "Notes":
        return self

    @property
    def put(self) -> "Notes":
        return self

    async def call_one(self, payload: Mapping[GroupHandle, Any], records: Sequence[GroupRecord] = ()) -> None:
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.log.append(([handle.slot for handle in payload], [record.handle.slot for record in records]))


def test_what_finishes_while_a_delivery_is_under_way_goes_together() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, in_order=True)

        async def deliver(index: int) -> None:
            await outbox.deliver(make_record(index), ())
            assert any(index in records for _, records in notes.log)

        first = asyncio.create_task(deliver(0))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
        assert notes.log == [([0], [0]), ([1, 2, 3], [1, 2, 3])]

    asyncio.run(scenario())


def test_groups_of_one_tick_go_together_and_all_learn_that_they_could_not() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, in_order=True)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (0, 1)))
        assert notes.log == [([0, 1], [0, 1])]
        notes.error = RuntimeError("no buffer")
        errors = await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (2, 3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["no buffer", "no buffer"]
        notes.error = None
        await outbox.deliver(make_record(4), ())
        assert notes.log[-1] == ([4], [4])

    asyncio.run(scenario())


def test_a_group_that_no_batch_can_have_yet_waits_for_older_ones_unless_many_do() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, in_order=True)
        for index in range(20):
            outbox.begin(index)
        waiting = [asyncio.create_task(outbox.deliver(make_record(index), ())) for index in (3, 1)]
        await asyncio.sleep(0.03)
        assert notes.log == []
        await outbox.deliver(make_record(0), ())
        assert notes.log == [([3, 1, 0], [3, 1, 0])]
        await asyncio.gather(*waiting)
        many = range(4, 4 + MAX_HELD)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in many))
        assert notes.log[1:] == [(list(many), list(many))], "2 is not finished"
        await outbox.deliver(make_record(2), ())
        assert notes.log[2:] == [([2], [2])]

    asyncio.run(scenario())


def test_where_order_does_not_matter_nothing_waits() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, in_order=False)
        for index in range(3):
            outbox.begin(index)
        await outbox.deliver(make_record(2), ())
        assert notes.log == [([2], [2])]

    asyncio.run(scenario())


def test_groups_without_payload_send_their_record_alone() -> None:
    async def scenario() -> None:
        notes = Notes()
        await Outbox(notes, in_order=True).deliver(make_record(4, has_payload=False), ())
        assert notes.log == [([], [4])]

    asyncio.run(scenario())


def test_demonstrations_are_stored_without_a_record() -> None:
    async def scenario() -> None:
        notes = Notes()
        await Outbox(notes, in_order=True).store(make_record(7).handle, ())
        assert notes.log == [([7], [])]

    asyncio.run(scenario())
