"""Deliveries of finished groups, to a buffer and shards that only take notes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tests.records import make_record
from titanrl.rollout.outbox import Outbox
from titanrl.types import GroupRecord, Handle


class Notes:
    """Stands for the buffer's actor and for the mesh of shards: each call takes a while and is written down at its end."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []
        self.commit, self.put = self._Call(self, "commit"), self._Call(self, "put")

    class _Call:
        def __init__(self, notes: "Notes", name: str) -> None:
            self.notes, self.name = notes, name
            self.error: Exception | None = None

        async def call_one(self, groups: Sequence[GroupRecord] | Mapping[Handle, Any]) -> None:
            await asyncio.sleep(0.01)
            if self.error is not None:
                raise self.error
            slots = [group.slot if isinstance(group, Handle) else group.handle.slot for group in groups]
            self.notes.log.append((self.name, slots))

    def slice(self, procs: int) -> "Notes":
        return self


def test_payloads_go_before_records_and_what_finishes_meanwhile_goes_together() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, notes)

        async def deliver(index: int) -> None:
            await outbox.deliver(make_record(index), ())
            assert any(name == "commit" and index in slots for name, slots in notes.log)

        first = asyncio.create_task(deliver(0))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
        assert notes.log == [("put", [0]), ("commit", [0]), ("put", [1, 2, 3]), ("commit", [1, 2, 3])]

    asyncio.run(scenario())


def test_groups_of_one_tick_go_together_and_all_learn_that_they_could_not() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, notes)
        await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (0, 1)))
        assert notes.log == [("put", [0, 1]), ("commit", [0, 1])]
        notes.commit.error = RuntimeError("no buffer")
        errors = await asyncio.gather(*(outbox.deliver(make_record(index), ()) for index in (2, 3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["no buffer", "no buffer"]
        notes.commit.error = None
        await outbox.deliver(make_record(4), ())
        assert notes.log[-1] == ("commit", [4])

    asyncio.run(scenario())


def test_groups_without_payload_send_their_record_alone() -> None:
    async def scenario() -> None:
        notes = Notes()
        await Outbox(notes, notes).deliver(make_record(4, has_payload=False), ())
        assert notes.log == [("commit", [4])]

    asyncio.run(scenario())
