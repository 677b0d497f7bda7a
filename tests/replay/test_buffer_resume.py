"""Checkpoints of the buffer: after a kill and a resume, every prompt is trained on exactly once and within the bound."""

import asyncio
import pickle
import random
from collections.abc import Coroutine
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.records import make_record
from titanrl.base.pickling import read_saved
from titanrl.carriers.rewards import ScorerError
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.config.sections import ReplayConfig
from titanrl.replay.buffer import GroupBuffer, ReplayMemory
from titanrl.replay.groups import Batch, Freshness, Reservation, TrainedBatch, handles_of, joined, versions_behind
from titanrl.replay.shards import read_groups, shard_file

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Settings that determine the staleness bound."""

    max_staleness: int
    groups_per_step: int
    updates_per_publish: int
    window: float
    dynamic_sampling: bool
    replay: bool

    @property
    def per_publish(self) -> int:
        return self.groups_per_step * self.updates_per_publish

    @property
    def num_slots(self) -> int:
        return (self.max_staleness + 1) * self.per_publish

    @property
    def window_groups(self) -> int:
        return max(1, int(self.window * self.num_slots))

    @property
    def bound(self) -> int:
        return (self.num_slots + self.window_groups - 2) // self.per_publish

    def buffer(self) -> GroupBuffer:
        memory = ReplayMemory(ReplayConfig(capacity=5, alpha=0.5, max_age=100), num_replayed=2, seed=0)
        return GroupBuffer(
            num_slots=self.num_slots,
            dynamic_sampling=self.dynamic_sampling,
            window=self.window_groups,
            memory=memory if self.replay else None,
        )


@dataclass
class History:
    """State of the controller, the generators and the shards."""

    version: int = 0
    published: list[int] = field(default_factory=lambda: [0])
    trained: list[int] = field(default_factory=list)
    without_signal: set[int] = field(default_factory=set)
    num_tried: int = 0
    unpublished: list[TrainedBatch] = field(default_factory=list)
    tokens: dict[GroupHandle, int] = field(default_factory=dict)


def finished(index: int, handle: GroupHandle, version: int, kind: str) -> GroupRecord:
    record = make_record(index, handle=handle, min_version=version, max_version=version)
    match kind:
        case "equal":
            return replace(record, rewards=(1.0, 1.0), has_payload=False)
        case "failed":
            return replace(record, rewards=(), has_payload=False, num_errors=2, min_version=-1, max_version=-1)
        case "filtered":
            return replace(record, has_payload=False, rejection="filtered")
    return record


class Resumes(RuleBasedStateMachine):
    """Random admissions, completions, batches, publications, checkpoints, kills, and deaths of single workers."""

    @initialize(
        sizes=st.builds(
            Sizes,
            max_staleness=st.integers(0, 2),
            groups_per_step=st.integers(1, 3),
            updates_per_publish=st.integers(1, 3),
            window=st.sampled_from([0.0, 0.3, 1.0]),
            dynamic_sampling=st.booleans(),
            replay=st.booleans(),
        )
    )
    def start(self, sizes: Sizes) -> None:
        self.loop = asyncio.new_event_loop()
        self.sizes, self.buffer, self.known = sizes, sizes.buffer(), History()
        self.in_flight: list[tuple[Reservation, int]] = []
        self.batch: Batch | None = None
        self.saved: tuple[bytes, History] | None = None

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    def now(self, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call that completes without waiting; cancel the call otherwise."""

        async def attempt() -> T | None:
            task = asyncio.ensure_future(call)
            for _ in range(3):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            return task.result()

        return self.loop.run_until_complete(attempt())

    @rule(limit=st.integers(1, 6), shard=st.integers(0, 2))
    def admit(self, limit: int, shard: int) -> None:
        for reservation in self.now(self.buffer.reserve(limit, shard)) or []:
            self.in_flight.append((reservation, self.known.published[-1]))
        for each in range(3):
            for handle in self.buffer._slots.take_dropped(each):
                self.known.tokens.pop(handle, None)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), kind=st.sampled_from(["signal", "signal", "signal", "equal", "failed", "filtered"]))
    def finish(self, data: st.DataObject, kind: str) -> None:
        place = data.draw(st.integers(0, len(self.in_flight) - 1))
        reservation, version = self.in_flight.pop(place)
        record = finished(reservation.index, reservation.handle, version, kind)
        if record.has_payload:
            self.known.tokens[reservation.handle] = reservation.index
        else:
            self.known.without_signal.add(reservation.index)
        self.now(self.buffer.commit([record]))

    @precondition(lambda self: self.batch is None)
    @rule()
    def take(self) -> None:
        with suppress(ScorerError):  # the first groups of a run had no rewards
            self.batch = self.now(self.buffer.take_batch(self.sizes.groups_per_step))

    @rule(shard=st.integers(0, 2))
    def lose_shard(self, shard: int) -> None:
        self.now(self.buffer.lose_shard(shard, life=-1))
        self.in_flight = [each for each in self.in_flight if each[0].handle.shard != shard]
        self.known.tokens = {handle: index for handle, index in self.known.tokens.items() if handle.shard != shard}

    @property
    def is_lost(self) -> bool:
        """True if tokens of the batch are lost."""
        groups = self.batch.records.groups
        held = handles_of(groups["handle"][groups["has_payload"].astype(bool)])
        return any(handle not in self.known.tokens for handle in held)

    @precondition(lambda self: self.batch is not None and self.is_lost)
    @rule()
    def return_batch(self) -> None:
        self.now(self.buffer.return_batch(self.batch.records.handles))
        self.batch = None

    @precondition(lambda self: self.batch is not None and not self.is_lost)
    @rule(is_skipped=st.sampled_from([False, False, False, True]))
    def train(self, is_skipped: bool) -> None:
        batch, self.batch, known = self.batch, None, self.known
        indices = batch.records.groups["index"].tolist()
        ages = [versions_behind(known.published, version) for version in batch.records.groups["min_version"].tolist()]
        assert max(ages) <= self.sizes.bound
        assert indices == sorted(indices)
        known.trained += indices
        known.num_tried += batch.num_tried
        records = batch.records
        if self.sizes.replay:
            replayed = self.now(self.buffer.replay(known.version, 0.5)).records
            assert not set(replayed.groups["index"].tolist()) & set(indices)
            records = records + replayed
        for group in records.groups:
            if group["has_payload"]:
                (handle,) = handles_of(np.array([group["handle"]]))
                assert known.tokens[handle] == group["index"], "the shard has the tokens"
        if is_skipped:
            self.now(self.buffer.release(records.handles))
            return
        known.version += 1
        known.unpublished.append((records.handles, np.ones(len(records)) if self.sizes.replay else None))
        if len(known.unpublished) == self.sizes.updates_per_publish:
            self.publish()

    def publish(self) -> None:
        self.known.published.append(self.known.version)
        trained, self.known.unpublished = joined(self.known.unpublished), []
        self.now(self.buffer.release(*trained))

    @rule()
    def save(self) -> None:
        state = self.buffer.state(self.known.unpublished)
        known = deepcopy(self.known)
        known.tokens = {handle: self.known.tokens[handle] for handle in state.payloads}
        self.saved = pickle.dumps(state), known

    @precondition(lambda self: self.saved is not None)
    @rule(num_shards=st.integers(1, 3), max_staleness=st.none() | st.integers(0, 2), replay=st.none() | st.booleans())
    def kill_and_resume(self, num_shards: int, max_staleness: int | None, replay: bool | None) -> None:
        self.known = known = deepcopy(self.saved[1])
        staleness = self.sizes.max_staleness if max_staleness is None else max_staleness
        self.sizes = replace(self.sizes, max_staleness=staleness, replay=self.sizes.replay if replay is None else replay)
        sizes, state = self.sizes, pickle.loads(self.saved[0])
        self.buffer, self.in_flight, self.batch, self.saved = sizes.buffer(), [], None, None
        freshness = Freshness(published=tuple(known.published), groups_per_publish=sizes.per_publish, bound=sizes.bound)
        restored = self.buffer.restore(state, freshness, num_shards)
        known.tokens = {now: known.tokens[before] for before, now in restored.moves}
        assert len({now.location for now in known.tokens}) == len(known.tokens)
        assert all(now.shard < num_shards for now in known.tokens)
        known.unpublished = restored.trained
        if max_staleness is None:
            assert restored.too_old == (), "the same configuration continues with every finished group"

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        state = self.buffer.state(self.known.unpublished)
        waiting = [group.record.index for group in state.ready]
        places = [*self.known.trained, *state.in_flight, *waiting]
        assert len(set(places)) == len(places), "a prompt is trained on twice"
        lost = set(range(state.next_index)) - set(places)
        assert lost <= self.known.without_signal
        counted = self.known.num_tried + len(state.discarded) + len(state.in_flight) + len(waiting)
        assert counted == state.next_index, "each prompt counts once"


TestResumes = Resumes.TestCase
TestResumes.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


async def test_synchronous_state_at_a_publication_resamples_everything() -> None:
    sizes = Sizes(0, 2, 1, 0.0, dynamic_sampling=False, replay=False)
    buffer = sizes.buffer()
    for reservation in await buffer.reserve(2):
        await buffer.commit([finished(reservation.index, reservation.handle, 0, "signal")])
    await buffer.take_batch(2)
    state = buffer.state(from_index=0)
    assert (state.next_index, state.ready, state.in_flight, state.payloads) == (0, (), (), [])
    again = sizes.buffer()
    again.restore(state, Freshness(published=(0,), groups_per_publish=2, bound=0), 1)
    assert [each.index for each in await again.reserve(4)] == [0, 1]


async def test_group_that_could_become_too_old_is_resampled() -> None:
    """With fewer slots, the bound is lower than the age that a finished group can reach."""
    wide, narrow = Sizes(3, 2, 1, 0.0, False, False), Sizes(0, 2, 1, 0.0, False, False)
    buffer = wide.buffer()
    for reservation in random.Random(0).sample(await buffer.reserve(8), 7):
        await buffer.commit([finished(reservation.index, reservation.handle, 5, "signal")])
    state = buffer.state()
    again = narrow.buffer()
    restored = again.restore(state, Freshness(published=(5,), groups_per_publish=2, bound=narrow.bound), 1)
    (missing,) = state.in_flight
    assert restored.num_ready == len({0, 1} - {missing})
    assert sorted(restored.too_old) == [index for index in range(2, 8) if index != missing]
    assert again.state().in_flight == tuple(sorted({*restored.too_old, missing}))


async def test_checkpoint_of_an_earlier_version_resumes() -> None:
    """The modules of all classes in these files have been renamed since."""
    folder = Path(__file__).parent / "checkpoint_before_rooms"
    state = read_saved((folder / "records.pkl").read_bytes())
    memory = ReplayMemory(ReplayConfig(capacity=4), num_replayed=2, seed=9)
    buffer = GroupBuffer(num_slots=4, dynamic_sampling=False, memory=memory)
    restored = buffer.restore(state, Freshness(published=(0, 1), groups_per_publish=2, bound=4), 1)
    assert (restored.num_ready, restored.num_in_flight, restored.too_old) == (1, 1, ())
    drawn = [(await buffer.replay(3, 0.5)).records for _ in range(3)]
    assert [records.groups["index"].tolist() for records in drawn] == [[0, 1], [3, 2], [2, 3]]
    assert drawn[0].turns.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert drawn[0].tokens.positions.tolist() == [1, 1, 1, 1]
    groups = dict(read_groups(shard_file(folder, 0)))
    assert groups.keys() == {handle for handle, _ in restored.moves}
    for handle, parts in groups.items():
        (segment,) = map(read_saved, parts)
        assert segment.versions.tolist() == [0, 0, handle.location]
        assert segment.supports.words_K.tolist() == [4, 4, 9]
