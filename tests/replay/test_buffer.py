"""Slots, batches and errors of the group buffer, without actors."""

import asyncio
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.records import make_record
from tests.simulated_clock import simulate
from titanrl.carriers.rewards import RolloutError, ScorerError
from titanrl.carriers.tables import Table
from titanrl.carriers.types import GroupRecord
from titanrl.config import Config, load_config
from titanrl.replay.buffer import ByPosition, GroupBuffer, Slots
from titanrl.replay.groups import Reservation


def record(reservation: Reservation, rewards: tuple[float, ...] = (0.0, 1.0)) -> GroupRecord:
    signal = len(set(rewards)) > 1
    return make_record(
        reservation.index, rewards, handle=reservation.handle, has_payload=signal, reward_parts={"answer": rewards}
    )


def unscored(reservation: Reservation, error: str = "ZeroDivisionError: division by zero") -> GroupRecord:
    """Return the record of a group of two whose reward failed twice."""
    return replace(record(reservation, ()), num_errors=2, first_error=error, min_version=-1, max_version=-1)


def buffer(num_slots: int = 2, *, dynamic_sampling: bool | None = False, window: int = 1) -> GroupBuffer:
    return GroupBuffer(num_slots=num_slots, dynamic_sampling=dynamic_sampling, window=window)


async def test_batch_is_in_prompt_order() -> None:
    groups = buffer(3)
    first, second, third = await groups.reserve(3)
    for reservation in (third, first, second):
        await groups.commit([record(reservation)])
    batch = await groups.take_batch(3)
    assert batch.records.groups["index"].tolist() == [0, 1, 2]
    assert batch.first_untaken == 3


async def test_round_distributes_all_free_slots_evenly() -> None:
    groups = buffer(6)
    reservations = await groups.reserve_round(3)
    assert [reservation.index for reservation in reservations] == list(range(6))
    assert [reservation.handle.shard for reservation in reservations] == [0, 0, 1, 1, 2, 2]
    waiting = asyncio.create_task(groups.reserve_round(3))
    for reservation in reservations:
        await groups.commit([record(reservation)])
    batch = await groups.take_batch(2)
    assert not waiting.done()
    await groups.release(batch.records.handles)
    assert [(each.index, each.handle.shard) for each in await waiting] == [(6, 0), (7, 1)]


async def test_commit_does_not_wake_workers_that_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker of an asynchronous run waits for a slot, so a commit would otherwise cost time for each of them."""
    groups = buffer(100)
    reservations = await groups.reserve(100)
    num_checks, room = 0, Slots.room

    def counted(slots: Slots) -> int:
        nonlocal num_checks
        num_checks += 1
        return room(slots)

    waiting = [asyncio.create_task(groups.reserve(1, shard)) for shard in range(60)]
    await asyncio.sleep(0)
    monkeypatch.setattr(Slots, "room", counted)
    for reservation in reservations:
        await groups.commit([record(reservation)])
        await asyncio.sleep(0)
    assert num_checks <= 2 * len(reservations)
    batch = await groups.take_batch(50)
    await groups.release(batch.records.handles)
    done, pending = await asyncio.wait(waiting, timeout=0.1)
    assert [len(each.result()) for each in done] == [1] * 50
    await groups.release((await groups.take_batch(50)).records.handles)
    await asyncio.wait(pending)
    assert sorted(task.result()[0].index for task in waiting) == list(range(100, 160))


async def test_slot_passes_a_dead_worker_and_reaches_the_next() -> None:
    groups = buffer(2)
    first, second = await groups.reserve(2, shard=2)
    dead, alive = asyncio.create_task(groups.reserve(1, 0)), asyncio.create_task(groups.reserve(4, 1))
    await asyncio.sleep(0)
    await groups.commit([record(first), record(second)])
    await groups.lose_shard(0)
    assert await dead == []
    await groups.release((await groups.take_batch(2)).records.handles)
    assert [reservation.index for reservation in await alive] == [2, 3]


def test_positions_stay_in_order() -> None:
    random.seed(0)
    ordered, expected = ByPosition[int](), dict[int, int]()
    for _ in range(2000):
        position = random.randrange(60)
        if position in expected and random.random() < 0.6:
            assert ordered.pop(position) == expected.pop(position)
        else:
            ordered[position] = expected[position] = random.randrange(9)
        assert list(ordered.items()) == sorted(expected.items())
        assert ordered.first(99) == min(expected, default=99)
        assert ordered.num_before(position) == sum(each < position for each in expected)
    assert ordered.take(3) == [value for _, value in sorted(expected.items())[:3]]
    assert list(ordered) == sorted(expected)[3:]


async def test_slots_stay_reserved_until_the_batch_is_released() -> None:
    groups = buffer(2)
    reservations = await groups.reserve(2)
    waiting = asyncio.create_task(groups.reserve(2))
    for reservation in reservations:
        await groups.commit([record(reservation)])
    batch = await groups.take_batch(2)
    await asyncio.sleep(0)
    assert not waiting.done()
    await groups.release(batch.records.handles)
    assert [reservation.index for reservation in await waiting] == [2, 3]


async def test_group_without_signal_stays_in_its_batch_and_is_counted() -> None:
    groups = buffer(2)
    first, second = await groups.reserve(2)
    await groups.commit([record(first, (1.0, 1.0))])
    await groups.commit([record(second)])
    batch = await groups.take_batch(2)
    assert batch.records.groups["has_payload"].tolist() == [0, 1]
    assert (batch.num_tried, batch.num_equal_rewards) == (2, 1)


async def test_dynamic_sampling_replaces_a_group_without_signal() -> None:
    groups = buffer(2, dynamic_sampling=True)
    first, second = await groups.reserve(2)
    await groups.commit([record(first, (0.0, 0.0))])
    await groups.commit([record(second)])
    (third,) = await groups.reserve(2)
    await groups.commit([record(third)])
    batch = await groups.take_batch(2)
    assert batch.records.groups["index"].tolist() == [1, 2]
    assert (batch.num_tried, batch.num_equal_rewards, batch.drops) == (3, 1, {"no signal": 1})


async def test_batch_without_any_signal_is_replaced() -> None:
    groups = buffer(2)
    for reservation in await groups.reserve(2):
        await groups.commit([record(reservation, (1.0, 1.0))])
    taking = asyncio.create_task(groups.take_batch(2))
    for reservation in await groups.reserve(2):
        await groups.commit([record(reservation)])
    batch = await taking
    assert batch.records.groups["index"].tolist() == [2, 3]
    assert (batch.num_tried, batch.num_equal_rewards) == (4, 2)


async def test_batches_of_a_dump_keep_groups_without_signal() -> None:
    groups = buffer(4, dynamic_sampling=None)
    for reservation in await groups.reserve(4):
        await groups.commit([record(reservation, (0.0, 1.0) if reservation.index == 0 else (1.0, 1.0))])
    for first, payloads in ((0, [1, 0]), (2, [0, 0])):
        batch = await groups.take_batch(2)
        assert batch.records.groups["index"].tolist() == [first, first + 1]
        assert batch.records.groups["has_payload"].tolist() == payloads


async def test_starvation_message_counts_tried_groups_and_their_rewards() -> None:
    groups = buffer(2)
    for reservation, reward in zip(await groups.reserve(2), (0.0, 1.0), strict=True):
        await groups.commit([record(reservation, (reward, reward))])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(groups.take_batch(2), timeout=0.05)
    why = await groups.why_starved(2, waited_s=3.0)
    assert why.startswith("rollout.starvation_timeout_s: no batch of 2 groups with a signal in 3 s. 2 groups finished, 0 ")
    assert "1 with every reward 0, 1 with every reward 1" in why


async def test_starvation_message_counts_groups_without_trainable_tokens() -> None:
    groups = buffer(1)
    (first,) = await groups.reserve(1)
    masked = make_record(0, rewards=(0.0, 1.0), num_sampled=(0, 0), has_payload=False, handle=first.handle)
    await groups.commit([masked])
    assert (
        "the others: 1 without a token to train on (algorithm.mask_truncated, trainer.overlong);"
        in await groups.why_starved(1, 3.0)
    )


async def test_starvation_message_reports_that_no_group_finished() -> None:
    groups = buffer(2)
    await groups.reserve(1)
    why = await groups.why_starved(2, waited_s=0.05)
    assert "no group finished in 0.05 s; groups in flight: 1, the oldest for prompt 0. See" in why


async def test_group_without_scored_rollout_is_replaced_and_counted() -> None:
    groups = buffer(2)
    first, second = await groups.reserve(2)
    await groups.commit([unscored(first)])
    (third,) = await groups.reserve(1)  # the slot is free before any batch is taken
    await groups.commit([replace(record(second), num_errors=1, first_error="ValueError: later"), record(third)])
    batch = await groups.take_batch(2)
    assert batch.records.groups["index"].tolist() == [1, 2]
    assert batch.records.groups["num_errors"].tolist() == [1, 0]
    assert (batch.num_tried, batch.num_equal_rewards) == (3, 0)
    assert (batch.num_errors, batch.num_tried_rollouts) == (3, 7)
    assert batch.first_error == "ZeroDivisionError: division by zero"


async def test_scorer_failing_on_the_first_batch_ends_the_wait() -> None:
    groups = buffer(4)
    taking = asyncio.create_task(groups.take_batch(2))
    first, second, _, _ = await groups.reserve(4)
    await groups.commit([unscored(first)])
    await asyncio.sleep(0.001)
    assert not taking.done()
    await groups.commit([unscored(second, "ValueError: later")])
    with pytest.raises(ScorerError, match=r"data\.rewards: .* all 4 completions of the first 2 groups .*ZeroDivisionError"):
        await taking


async def test_later_failures_of_the_scorer_do_not_end_the_run() -> None:
    groups = buffer(1)
    (first,) = await groups.reserve(1)
    await groups.commit([record(first)])
    await groups.release((await groups.take_batch(1)).records.handles)
    for _ in range(3):
        (failed,) = await groups.reserve(1)
        await groups.commit([unscored(failed)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(groups.take_batch(1), timeout=0.05)
    reason = "3 whose episodes or rewards always failed (ZeroDivisionError: division by zero)"
    assert reason in await groups.why_starved(1, 1)


async def test_failed_worker_ends_the_waits_for_a_batch_and_for_a_failure() -> None:
    groups = buffer(2)
    waits = [asyncio.create_task(wait) for wait in (groups.take_batch(2), groups.wait_until_failed())]
    await asyncio.sleep(0)
    await groups.fail("ValueError: no prompts")
    for wait in waits:
        with pytest.raises(RolloutError, match="no prompts"):
            await wait


async def test_reused_slot_gets_a_new_serial() -> None:
    groups = buffer(1)
    (first,) = await groups.reserve(1)
    await groups.commit([record(first)])
    batch = await groups.take_batch(1)
    await groups.release(batch.records.handles)
    (second,) = await groups.reserve(1)
    assert (second.handle.location, second.handle.serial) == (first.handle.location, first.handle.serial + 1)


async def test_groups_overtake_a_straggler_only_within_the_window() -> None:
    groups = buffer(8, window=3)
    straggler, *others = await groups.reserve(8)
    await groups.commit([record(reservation) for reservation in others])
    batch = await groups.take_batch(2)
    assert batch.records.groups["index"].tolist() == [1, 2]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(groups.take_batch(2), timeout=0.05)
    await groups.commit([record(straggler)])
    batch = await groups.take_batch(2)
    assert batch.records.groups["index"].tolist() == [0, 3]


async def test_first_untaken_is_the_oldest_prompt_not_yet_in_a_batch() -> None:
    groups = buffer(4, window=4)
    first, second, third, fourth = await groups.reserve(4)
    await groups.commit([record(second), record(third)])
    assert (await groups.take_batch(2)).first_untaken == 0
    await groups.commit([record(first), record(fourth)])
    assert (await groups.take_batch(2)).first_untaken == 4


async def test_batch_sums_the_counts_of_its_groups_except_the_slowest_time() -> None:
    groups = buffer(4)
    times = [{"environment_ms": 30, "slowest_ms": 20}, {"environment_ms": 10}, {"environment_ms": 50, "slowest_ms": 15}]
    reserved = await groups.reserve(4)
    await groups.commit([replace(record(one), counts=counts) for one, counts in zip(reserved, [*times, {}], strict=True)])
    assert (await groups.take_batch(3)).counts == {"environment_ms": 90, "slowest_ms": 20}
    assert (await groups.take_batch(1)).counts == {}


async def test_batch_counts_the_slots_by_state() -> None:
    groups = buffer(8)
    reservations = await groups.reserve(7)
    await groups.commit([record(reservation) for reservation in reservations[:5]])
    await groups.take_batch(2)
    batch = await groups.take_batch(2)
    assert (batch.num_in_flight, batch.num_ready, batch.num_unreleased) == (2, 1, 2)


async def test_buffer_is_full_when_every_slot_holds_a_finished_group() -> None:
    groups = buffer(2)
    waiting = asyncio.create_task(groups.wait_until_full())
    first, second = await groups.reserve(2)
    await groups.commit([record(first)])
    await asyncio.sleep(0.001)
    assert not waiting.done()
    await groups.commit([record(second)])
    await waiting
    await groups.take_batch(1)
    await groups.wait_until_full()


@dataclass(frozen=True)
class Oldest:
    """Result of a simulated run."""

    ages: list[int]
    """Age of the oldest token of each batch, in published versions."""
    bound: int


async def train(config: Config, seed: int, *, num_steps: int) -> Oldest:
    """Simulate generation, training and publication with random latencies; every tenth group is ten times slower."""
    rng, num_groups = random.Random(seed), config.rollout.groups_per_step
    groups = GroupBuffer(
        num_slots=config.num_slots,
        dynamic_sampling=config.rollout.dynamic_sampling,
        window=config.window_groups,
    )
    generators = trained = 0
    ages = []

    async def generate(reservation: Reservation) -> None:
        version = generators
        await asyncio.sleep(rng.expovariate(1.0) * (0.01 if rng.random() < 0.1 else 0.001))
        rewards = (1.0, 1.0) if rng.random() < 0.3 else (0.0, 1.0)
        await groups.commit([replace(record(reservation, rewards), min_version=version)])

    async def admit() -> None:
        async with asyncio.TaskGroup() as rolling:
            while True:
                for reservation in await groups.reserve(rng.randint(1, 4)):
                    rolling.create_task(generate(reservation))

    async def publish(version: int, handles: list[Table]) -> None:
        nonlocal generators
        await asyncio.sleep(rng.random() * 0.002)
        generators = version
        await groups.release(np.concatenate(handles))

    admitting, publishing, held = asyncio.create_task(admit()), asyncio.create_task(asyncio.sleep(0)), []
    for step in range(1, num_steps + 1):
        batch = await groups.take_batch(num_groups)
        ages.append(trained - int(batch.records.groups["min_version"].min()))
        await asyncio.sleep(rng.random() * 0.002)
        held.append(batch.records.handles)
        if step % config.algorithm.updates_per_publish == 0:
            await publishing
            trained += 1
            publishing, held = asyncio.create_task(publish(trained, held)), []
    admitting.cancel()
    await asyncio.gather(admitting, publishing, return_exceptions=True)
    return Oldest(ages, config.staleness_bound)


def simulated(max_staleness: int, *overrides: str, seed: int = 0) -> Oldest:
    settings = ["num_steps=60", "rollout.groups_per_step=4", f"max_staleness={max_staleness}", *overrides]
    return simulate(train(load_config("configs/quickstart.yaml", settings), seed, num_steps=60))


@pytest.mark.parametrize("dynamic_sampling", ["false", "true"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_oldest_token_reaches_the_bound_exactly(max_staleness: int, dynamic_sampling: str) -> None:
    seen = [simulated(max_staleness, f"rollout.dynamic_sampling={dynamic_sampling}", seed=seed) for seed in range(3)]
    assert {oldest.bound for oldest in seen} == {max_staleness}
    assert max(max(oldest.ages) for oldest in seen) == max_staleness
    assert min(min(oldest.ages) for oldest in seen) >= 0


@pytest.mark.parametrize("overrides", [("rollout.window=0.5",), ("rollout.window=1.0",), ("algorithm.updates_per_publish=3",)])
def test_bound_holds_with_a_window_and_several_updates_per_publication(overrides: tuple[str, ...]) -> None:
    for seed in range(3):
        oldest = simulated(3, *overrides, seed=seed)
        assert 0 < max(oldest.ages) <= oldest.bound


async def test_trained_group_with_equal_rewards_is_counted_as_without_signal() -> None:
    groups = buffer(2)
    first, second = await groups.reserve(2)
    await groups.commit([record(first)])
    await groups.commit([replace(record(second, (1.0, 1.0)), has_payload=True)])
    batch = await groups.take_batch(2)
    assert (batch.num_tried, batch.num_equal_rewards) == (2, 1)


def filtered(reservation: Reservation) -> GroupRecord:
    """Return the record of a group that the filter rejects, although its rewards differ."""
    return replace(record(reservation), has_payload=False, rejection="filtered")


async def test_filtered_group_frees_its_slot_and_is_counted_by_reason() -> None:
    groups = buffer(3)
    first, second, third = await groups.reserve(3)
    await groups.commit([filtered(first), unscored(second), record(third)])
    fourth, fifth = await groups.reserve(3)  # the slots of the dropped groups
    await groups.commit([record(fourth), record(fifth, (0.5, 0.5))])
    batch = await groups.take_batch(3)
    assert batch.records.groups["index"].tolist() == [2, 3, 4]
    assert batch.drops == {"filtered": 1, "no reward": 1}
    assert (batch.num_tried, batch.num_equal_rewards) == (5, 1)
    await groups.release(batch.records.handles)
    await groups.commit([record(reservation) for reservation in await groups.reserve(3)])
    assert (await groups.take_batch(3)).drops == {}


async def test_group_that_is_too_small_frees_its_slot() -> None:
    groups = buffer(2)
    first, second = await groups.reserve(2)
    small = replace(record(first, (1.0,)), has_payload=False, rejection="too small", num_errors=1, first_error="timeout")
    await groups.commit([small, record(second)])
    assert "1 with fewer rewards than rollout.min_group_size (first error: timeout)" in await groups.why_starved(2, 1.0)
    (third,) = await groups.reserve(2)
    await groups.commit([record(third)])
    batch = await groups.take_batch(2)
    assert (batch.drops, batch.num_tried, batch.num_errors) == ({"too small": 1}, 3, 1)


async def test_starvation_message_counts_filtered_groups() -> None:
    groups = buffer(2)
    await groups.commit([filtered(reservation) for reservation in await groups.reserve(2)])
    text = await groups.why_starved(2, 30.0)
    assert "2 groups finished, 0 with a signal; the others: 2 rejected by rollout.group_filter; groups in flight: 0" in text
