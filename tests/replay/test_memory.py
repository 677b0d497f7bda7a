"""Replay memory: eviction, draws and their frequencies, importance weights, and interaction with the buffer's slots."""

import math
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import make_record
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.carriers.types import GroupHandle
from titanrl.config.sections import ReplayConfig
from titanrl.replay.buffer import EPS, GroupBuffer, ReplayMemory, Stored
from titanrl.replay.groups import handles_of


def memory(num_replayed: int = 2, seed: int = 0, **others: Any) -> ReplayMemory:
    return ReplayMemory(ReplayConfig(**({"capacity": 8, "alpha": 1.0, "max_age": 100} | others)), num_replayed, seed)


def group(index: int, priority: float = 1.0, min_version: int = 0, shard: int = 0) -> Stored:
    handle = GroupHandle(shard=shard, location=index, serial=1)
    record = make_record(index, handle=handle, min_version=min_version)
    return Stored(handle=handle, record=pack_record(record), min_version=min_version, priority=priority)


def drawn_from(replay: ReplayMemory, version: int = 0, beta: float = 0.5) -> tuple[list[int], list[float]]:
    """Draw once and release immediately; return prompt indices and weights."""
    table = RecordTable.join(replay.draw(version, beta))
    for shard, location, serial in table.handles.tolist():
        replay.release(GroupHandle(shard=shard, location=location, serial=serial), None)
    return table.groups["index"].tolist(), table.groups["weight"].tolist()


def test_first_draw_is_proportional_to_the_leaves() -> None:
    replay = memory(num_replayed=1, alpha=0.6)
    priorities = [0.1, 1.0, 2.0, 5.0, 0.0]
    assert replay.add(group(i, priority) for i, priority in enumerate(priorities)) == []
    num_draws = 4000
    counts = Counter(drawn_from(replay)[0][0] for _ in range(num_draws))
    leaves = (np.array(priorities) + EPS) ** 0.6
    expected = leaves / leaves.sum()
    chi_square = sum((counts[i] - num_draws * share) ** 2 / (num_draws * share) for i, share in enumerate(expected))
    assert chi_square < 18.5, "p < 0.001 at four degrees of freedom"


def test_weights_are_powers_of_probabilities_and_at_most_one() -> None:
    replay = memory(num_replayed=4, alpha=0.5)
    replay.add(group(i, priority) for i, priority in enumerate([4.0, 1.0, 9.0, 16.0]))
    indices, weights = drawn_from(replay, beta=0.7)
    assert sorted(indices) == [0, 1, 2, 3], "no group twice"
    probabilities = np.sqrt(np.array([4.0, 1.0, 9.0, 16.0]) + EPS)
    probabilities /= probabilities.sum()
    by_hand = (4 * probabilities) ** -0.7
    assert weights == pytest.approx((by_hand / by_hand.max())[indices], rel=1e-12)
    assert max(weights) == 1.0


def test_group_without_advantage_does_not_reduce_the_weights_of_the_others() -> None:
    replay, other = memory(num_replayed=2), memory(num_replayed=2)
    for each, priorities in ((replay, [1.0, 4.0, 0.0]), (other, [1.0, 4.0])):
        each.add(group(i, priority) for i, priority in enumerate(priorities))
    indices, weights = drawn_from(replay, beta=1.0)  # the third has a probability of 2e-7
    assert sorted(indices) == [0, 1]
    assert dict(zip(indices, weights, strict=True)) == pytest.approx({0: 1.0, 1: 0.25}, rel=1e-5)
    assert dict(zip(indices, weights, strict=True)) == dict(zip(*drawn_from(other, beta=1.0), strict=True))


def test_draws_depend_on_contents_and_seed_but_not_on_shards() -> None:
    def sequence(num_shards: int, seed: int) -> list[list[int]]:
        replay = memory(seed=seed)
        replay.add(group(i, 1.0 + i, shard=i % num_shards) for i in range(6))
        return [drawn_from(replay)[0] for _ in range(50)]

    assert sequence(1, 3) == sequence(2, 3) == sequence(4, 3)
    assert sequence(1, 3) != sequence(1, 4)


def test_undone_draw_is_repeated_and_uses_up_nothing() -> None:
    replay, other = memory(max_uses=2), memory(max_uses=2)
    for each in (replay, other):
        each.add(group(i, priority=i + 1.0) for i in range(6))
    for _ in range(3):
        replay.undo_draw(handles_of(RecordTable.join(replay.draw(0, 0.5)).handles))
    assert [drawn_from(replay) for _ in range(5)] == [drawn_from(other) for _ in range(5)]


def test_old_and_often_used_groups_are_not_drawn() -> None:
    replay = memory(max_age=2, max_uses=3, num_replayed=8)
    replay.add(group(version, min_version=version) for version in range(6))
    assert sorted(drawn_from(replay, version=5)[0]) == [3, 4, 5]
    assert sorted(drawn_from(replay, version=5)[0]) == [3, 4, 5]
    assert drawn_from(replay, version=5)[0] == [], "each was in three batches"
    replay.add([group(6, min_version=6)])
    assert drawn_from(replay, version=6)[0] == [6]


def test_recency_prefers_young_groups_by_their_age_at_the_draw() -> None:
    replay = memory(priority="recency", num_replayed=1)
    replay.add(group(version, min_version=version) for version in (0, 8))
    counts = Counter(drawn_from(replay, version=8)[0][0] for _ in range(2000))
    assert counts[0] / 2000 == pytest.approx(1 / 10, abs=0.03)  # 1/9 against 1


def test_oldest_group_is_evicted_first_unless_a_batch_contains_it() -> None:
    replay = memory(capacity=3, num_replayed=1)
    replay.add([group(0, 1e9), group(1, 0.0), group(2, 0.0)])
    (record,) = replay.draw(0, 0.5)
    assert RecordTable.join([record]).groups["index"].tolist() == [0]
    assert [handle.location for handle in replay.add([group(3), group(4)])] == [1, 2]
    replay.release(group(0).handle, 0.25)
    assert [handle.location for handle in replay.add([group(5)])] == [0]
    assert (len(replay), replay.num_evicted) == (3, 3)


@settings(max_examples=30)
@given(num_before=st.integers(0, 8), num_draws=st.integers(0, 5))
def test_restored_memory_continues_with_the_same_draws(num_before: int, num_draws: int) -> None:
    original = memory()
    original.add(group(i, 1.0 + i, min_version=i) for i in range(num_before))
    for _ in range(num_draws):
        drawn_from(original)
    state, places = original.state_dict(), [GroupHandle(shard=1, location=20 + i, serial=4) for i in range(num_before)]
    moved = [replace(group, handle=at, record=group.record.at(at)) for group, at in zip(state["groups"], places, strict=True)]
    restored = memory()
    restored.load_state_dict({**state, "groups": moved})
    assert all(place in restored for place in places)
    assert [drawn_from(restored) for _ in range(20)] == [drawn_from(original) for _ in range(20)]


def replaying_buffer(num_slots: int = 2, first_index: int = 0, **others: Any) -> GroupBuffer:
    replay = memory(**({"capacity": 3} | others))
    return GroupBuffer(num_slots=num_slots, dynamic_sampling=False, first_index=first_index, memory=replay)


async def step(groups: GroupBuffer, version: int, *, shard: int = 0) -> tuple[list[int], list[int], list[GroupHandle]]:
    """Fill the free slots, then take and train a batch of two with replayed groups; also return the deletable payloads."""
    reservations = await groups.reserve(2, shard)
    dropped = groups._slots.take_dropped(shard)
    for reservation in reservations:
        await groups.commit([make_record(reservation.index, handle=reservation.handle, min_version=version)])
    batch = await groups.take_batch(2)
    replayed = await groups.replay(version, 0.5)
    batch = replace(batch, replayed=replayed)
    records = batch.all_records.by_index()
    assert len(records) == 2 + len(replayed.records)
    await groups.release(records.handles, np.ones(len(records)))
    return batch.records.groups["index"].tolist(), replayed.records.groups["index"].tolist(), dropped


async def test_trained_groups_move_to_the_memory_and_free_a_slot() -> None:
    groups = replaying_buffer()
    seen: list[int] = []
    for version in range(10):
        new, replayed, dropped = await step(groups, version)
        assert new == [2 * version, 2 * version + 1]
        assert len(replayed) == min(2, len(seen), 3)
        assert set(replayed) <= set(seen[-3:]), "the memory has the three newest groups"
        assert len(dropped) <= 2
        seen += new


async def test_every_deleted_payload_is_reported_once_to_its_shard() -> None:
    groups = replaying_buffer()
    dropped: dict[int, list[GroupHandle]] = {0: [], 1: []}
    for version in range(12):
        dropped[version % 2] += (await step(groups, version, shard=version % 2))[2]
    both = dropped[0] + dropped[1]
    assert len(set(both)) == len(both)
    assert all(handle.shard == shard for shard, handles in dropped.items() for handle in handles)
    named = len(both) + len(groups._slots.take_dropped(0)) + len(groups._slots.take_dropped(1))
    assert named == 24 - 3, "all groups but those in the memory"


@pytest.mark.parametrize("num_tokens", [10, 100_000])
async def test_messages_about_a_group_are_smaller_than_2_kb(num_tokens: int) -> None:
    """Pickle every message to and from the owner, for eight completions with three rewards each."""
    groups = replaying_buffer(num_slots=8, num_replayed=8, capacity=8)
    num_bytes = 0
    for version in range(2):
        reservations = await groups.reserve(8)
        dropped = groups._slots.take_dropped(0)
        records = [
            make_record(
                each.index,
                [0.125 * i for i in range(8)],
                [num_tokens] * 8,
                handle=each.handle,
                reward_parts={part: tuple(0.1 * i for i in range(8)) for part in ("answer", "format", "length")},
            )
            for each in reservations
        ]
        await groups.commit(records)
        batch = replace(await groups.take_batch(8), replayed=await groups.replay(version, 0.5))
        handles, priorities = batch.all_records.handles, np.ones(len(batch.all_records))
        await groups.release(handles, priorities)
        num_bytes = sum(len(pickle.dumps(each)) for each in (reservations, dropped, records, batch, handles, priorities))
    assert len(batch.replayed.records) == 8
    assert num_bytes // 8 <= 2048


async def test_skipped_step_frees_new_groups_and_keeps_replayed_ones() -> None:
    groups = replaying_buffer()
    await step(groups, 0)
    reservations = await groups.reserve(2)
    await groups.commit([make_record(each.index, handle=each.handle) for each in reservations])
    batch = await groups.take_batch(2)
    replayed = await groups.replay(1, 0.5)
    assert sorted(replayed.records.groups["index"].tolist()) == [0, 1]
    await groups.release((batch.records + replayed.records).handles)
    assert (await groups.replay(1, 0.5)).num_stored == 2
    assert len(await groups.reserve(4)) == 2


def test_weight_of_a_new_group_is_one() -> None:
    table = RecordTable.of([make_record(0)])
    assert table.groups["weight"].tolist() == [1.0]
    assert RecordTable.join([pack_record(make_record(0)).with_weight(0.25)]).groups["weight"].tolist() == [0.25]
    assert math.isclose(RecordTable.join([group(3).record]).groups["weight"][0], 1.0)
