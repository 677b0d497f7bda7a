"""Deliveries of finished groups, to a buffer and shards that only take notes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.rollout.outbox import Outbox
from titanrl.types import GroupRecord, Handle


def record(index: int, *, has_payload: bool = True) -> GroupRecord:
    return GroupRecord(
        index=index,
        task="sums",
        handle=Handle(shard=0, slot=index, generation=1),
        has_payload=has_payload,
        rewards=(0.0, 1.0),
        reward_parts={},
        prompt_len=2,
        lengths=(4, 4),
        num_sampled=(2, 2),
        num_truncated=0,
        num_overlong=0,
        num_nonfinite=0,
        min_version=0,
        max_version=0,
        generate_s=0.0,
        score_s=0.0,
    )


class Notes:
    """Stands for the buffer's actor and for the mesh of shards: each call takes a while and is written down at its end."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []
        self.commit, self.put = self._Call(self, "commit"), self._Call(self, "put")

    class _Call:
        def __init__(self, notes: "Notes", name: str) -> None:
            self.notes, self.name = notes, name

        async def call_one(self, groups: Sequence[GroupRecord] | Mapping[Handle, Any]) -> None:
            await asyncio.sleep(0.01)
            slots = [group.slot if isinstance(group, Handle) else group.handle.slot for group in groups]
            self.notes.log.append((self.name, slots))

    def slice(self, procs: int) -> "Notes":
        return self


def test_payloads_go_before_records_and_what_finishes_meanwhile_goes_together() -> None:
    async def scenario() -> None:
        notes = Notes()
        outbox = Outbox(notes, notes)

        async def deliver(index: int) -> None:
            await outbox.deliver(record(index), ())
            assert any(name == "commit" and index in slots for name, slots in notes.log)

        first = asyncio.create_task(deliver(0))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, *(deliver(index) for index in (1, 2, 3)))
        assert notes.log == [("put", [0]), ("commit", [0]), ("put", [1, 2, 3]), ("commit", [1, 2, 3])]

    asyncio.run(scenario())


def test_groups_without_payload_send_their_record_alone() -> None:
    async def scenario() -> None:
        notes = Notes()
        await Outbox(notes, notes).deliver(record(4, has_payload=False), ())
        assert notes.log == [("commit", [4])]

    asyncio.run(scenario())
