"""Deaths of rollout workers, with the groups they were generating and the groups whose tokens they held."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.records import make_record
from tests.simulated_clock import simulate
from titanrl.carriers.types import GroupHandle, GroupRecord
from titanrl.config import Config, load_config
from titanrl.config.sections import ReplayConfig
from titanrl.replay.buffer import GroupBuffer, ReplayMemory
from titanrl.replay.groups import Reservation, handles_of

NUM_SHARDS = 3


def record(reservation: Reservation, **others: Any) -> GroupRecord:
    return make_record(reservation.index, handle=reservation.handle, **others)


def indices(reservations: list[Reservation]) -> list[int]:
    return [reservation.index for reservation in reservations]


def buffer(num_slots: int, **others: Any) -> GroupBuffer:
    return GroupBuffer(num_slots=num_slots, dynamic_sampling=False, **others)


async def test_groups_of_a_dead_worker_are_reserved_before_later_ones() -> None:
    groups = buffer(6)
    lost, kept = await groups.reserve(3, shard=0), await groups.reserve(3, shard=1)
    await groups.commit([record(lost[1]), record(lost[2], has_payload=False), record(kept[0])])
    assert await groups.lose_shard(0) == [0, 1]
    assert indices(await groups.reserve(6, shard=1)) == [0, 1]
    await groups.commit([record(lost[0])])  # sent before the worker died
    with pytest.raises(RuntimeError, match="group 5 was committed without a reservation"):
        await groups.commit([record(kept[2]), record(kept[2])])


async def test_dead_worker_gets_none_of_the_slots_it_freed() -> None:
    groups = buffer(2)
    await groups.reserve(2, shard=0, life=1)
    waiting = asyncio.create_task(groups.reserve(2, shard=0, life=1))
    await asyncio.sleep(0)
    await groups.lose_shard(0, life=1)
    assert await waiting == []
    assert await groups.reserve(2, shard=0, life=1) == []
    assert indices(await groups.reserve(2, shard=0, life=2)) == [0, 1]


async def test_returned_batch_keeps_groups_whose_tokens_exist() -> None:
    groups = buffer(4)
    first, second = await groups.reserve(2, shard=0), await groups.reserve(2, shard=1)
    await groups.commit([record(reservation) for reservation in (*first, *second)])
    batch = await groups.take_batch(4)
    assert await groups.lose_shard(0) == []
    assert await groups.return_batch(batch.records.handles) == [0, 1]
    again = await groups.reserve(4, shard=1)
    assert indices(again) == [0, 1]
    await groups.commit([record(reservation) for reservation in again])
    assert (await groups.take_batch(4)).records.groups["index"].tolist() == [0, 1, 2, 3]


async def test_rewound_buffer_repeats_the_rounds_since_the_last_batch() -> None:
    groups = GroupBuffer(num_slots=4, dynamic_sampling=True)
    first = await groups.reserve_round(2)
    await groups.commit([record(reservation) for reservation in first])
    batch = await groups.take_batch(4)
    await groups.release(batch.records.handles)
    second = await groups.reserve_round(2)
    await groups.commit([record(second[0]), record(second[1], has_payload=False)])  # the other one is replaced
    third = await groups.reserve_round(2)
    assert indices(third) == [8]
    assert await groups.rewind() == [4, 5, 6, 7, 8]
    again = await groups.reserve_round(2)
    assert indices(again) == indices(second)
    await groups.commit([record(third[0]), record(second[2])])  # sent before the buffer was rewound
    await groups.commit([record(reservation, has_payload=number != 1) for number, reservation in enumerate(again)])
    last = await groups.reserve_round(2)
    assert indices(last) == [8]
    await groups.commit([record(last[0])])
    batch = await groups.take_batch(4)
    assert batch.records.groups["index"].tolist() == [4, 6, 7, 8]
    assert batch.drops == {"no signal": 1}
    await groups.lose_shard(0, life=-1)
    assert await groups.rewind(batch.records.handles) == [4, 5, 6, 7, 8]  # the trainer could not fetch it


async def test_memory_drops_groups_of_a_dead_shard_once_no_batch_uses_them() -> None:
    groups = buffer(4, memory=ReplayMemory(ReplayConfig(capacity=4, alpha=0.0), num_replayed=4, seed=0))
    first, second = await groups.reserve(2, shard=0), await groups.reserve(2, shard=1)
    await groups.commit([record(reservation) for reservation in (*first, *second)])
    batch = await groups.take_batch(4)
    await groups.release(batch.records.handles, np.ones(4))
    drawn = await groups.replay(1, 1.0)
    assert sorted(drawn.records.groups["index"].tolist()) == [0, 1, 2, 3]
    await groups.lose_shard(0)
    assert sorted((await groups.replay(1, 1.0)).records.groups["index"].tolist()) == [2, 3]
    await groups.release(drawn.records.handles, np.ones(4))
    assert (await groups.replay(1, 1.0)).num_stored == 2


@dataclass
class World:
    """A simulated run whose workers die at random, each with the tokens in its shard."""

    config: Config
    rng: random.Random
    published: int = 0
    """Version of the generators' weights."""
    ages: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    """Positions trained on."""
    num_deaths: int = 0
    num_given_back: int = 0
    tokens: dict[int, set[GroupHandle]] = field(default_factory=lambda: {shard: set() for shard in range(NUM_SHARDS)})
    workers: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.groups = GroupBuffer(num_slots=config.num_slots, dynamic_sampling=False, window=config.window_groups)
        self.lives = dict.fromkeys(range(NUM_SHARDS), 0)

    async def work(self, shard: int, life: int) -> None:
        async with asyncio.TaskGroup() as rolling:
            while True:
                for reservation in await self.groups.reserve(self.rng.randint(1, 4), shard, life):
                    rolling.create_task(self.generate(reservation))

    async def generate(self, reservation: Reservation) -> None:
        version = self.published
        await asyncio.sleep(self.rng.expovariate(1.0) * (0.01 if self.rng.random() < 0.1 else 0.001))
        self.tokens[reservation.handle.shard].add(reservation.handle)
        await self.groups.commit([record(reservation, min_version=version)])

    def begin(self, shard: int) -> None:
        self.lives[shard] += 1
        self.workers[shard] = asyncio.create_task(self.work(shard, self.lives[shard]))

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 0.01)
            shard = self.rng.randrange(NUM_SHARDS)
            self.workers[shard].cancel()
            await asyncio.gather(self.workers[shard], return_exceptions=True)
            self.tokens[shard].clear()
            self.num_deaths += 1
            await asyncio.sleep(self.rng.random() * 0.003)
            await self.groups.lose_shard(shard, self.lives[shard])
            self.begin(shard)

    async def train(self, num_steps: int) -> None:
        for shard in range(NUM_SHARDS):
            self.begin(shard)
        killing, publishing = asyncio.create_task(self.kill()), asyncio.create_task(asyncio.sleep(0))
        for version in range(num_steps):
            batch = await self.taken()
            self.ages.append(version - int(batch.records.groups["min_version"].min()))
            self.trained += batch.records.groups["index"].tolist()
            await publishing
            publishing = asyncio.create_task(self.publish(version + 1, batch.records.handles))
        killing.cancel()
        for task in self.workers.values():
            task.cancel()
        await asyncio.gather(killing, publishing, *self.workers.values(), return_exceptions=True)

    async def taken(self) -> Any:
        """Take batches until one has all its tokens."""
        while True:
            batch = await self.groups.take_batch(self.config.rollout.groups_per_step)
            await asyncio.sleep(self.rng.random() * 0.002)
            handles = handles_of(batch.records.handles)
            if all(handle in self.tokens[handle.shard] for handle in handles):
                return batch
            self.num_given_back += 1
            await asyncio.sleep(0.004)  # the controller waits for the replacement
            await self.groups.return_batch(batch.records.handles)

    async def publish(self, version: int, handles: Any) -> None:
        await asyncio.sleep(self.rng.random() * 0.002)
        self.published = version
        await self.groups.release(handles)


@pytest.mark.parametrize("overrides", [(), ("rollout.window=0.5",), ("rollout.groups_per_step=1",)], ids=" ".join)
def test_every_prompt_is_trained_once_within_the_bound_despite_deaths(overrides: tuple[str, ...]) -> None:
    num_deaths = num_given_back = 0
    settings = ["rollout.groups_per_step=4", "max_staleness=2", *overrides]
    config = load_config("configs/quickstart.yaml", settings)
    for seed in range(10):
        world = World(config, random.Random(seed))
        simulate(world.train(60))
        assert len(world.trained) == 60 * config.rollout.groups_per_step
        state = world.groups.state()
        untrained = [*state.in_flight, *(group.record.index for group in state.ready)]
        assert sorted([*world.trained, *untrained]) == list(range(state.next_index)), "a prompt was lost or repeated"
        assert 0 <= min(world.ages) <= max(world.ages) <= config.staleness_bound
        num_deaths, num_given_back = num_deaths + world.num_deaths, num_given_back + world.num_given_back
    assert num_deaths > 100
    assert num_given_back > 5


async def test_commit_of_an_abandoned_group_deletes_its_tokens() -> None:
    groups = buffer(1)
    (reservation,) = await groups.reserve(1)
    await groups.rewind()
    await groups.commit([replace(record(reservation))])
    assert reservation.handle in groups._slots.take_dropped(0)
