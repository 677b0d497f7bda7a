"""Task mixtures in the buffer: ratios of trained groups with drops and unequal latencies, and exact resumption."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import make_record
from titanrl.config.data import CurriculumConfig
from titanrl.data.mixture import Draw, MixedTask, Mixture, Outcome, SuccessRate
from titanrl.replay.buffer import GroupBuffer
from titanrl.replay.groups import Batch, Freshness, Reservation

NAMES = ("sums", "words", "games")


def mixture_of(weights: Sequence[float], curriculum: CurriculumConfig | None = None) -> Mixture:
    """Return a mixture of tasks with these weights. The first task has a curriculum."""
    levels = 1 if curriculum is None else curriculum.num_levels
    samplers = [None if curriculum is None else SuccessRate(curriculum, seed=1), *[None] * len(weights)]
    return Mixture(
        [
            MixedTask(name=NAMES[n], weight=weight, sampler=samplers[n], num_levels=levels if n == 0 else 1)
            for n, weight in enumerate(weights)
        ]
    )


@dataclass
class Simulation:
    """A run without processes: groups finish in random order, some are dropped, and batches are trained on."""

    mixture: Mixture
    latencies: Sequence[float]
    dropped: Sequence[float]
    random: Random
    num_slots: int = 16
    batch_size: int = 8
    window: int = 1
    in_flight: list[Reservation] = field(default_factory=list)
    trained: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.buffer = GroupBuffer(num_slots=self.num_slots, dynamic_sampling=True, window=self.window, mixture=self.mixture)

    async def step(self) -> Batch:
        """Let groups finish until a batch is complete; train on it."""
        taking = asyncio.create_task(self.buffer.take_batch(self.batch_size))
        while not taking.done():
            if room := self.buffer._slots.room():
                self.in_flight += await self.buffer.reserve(room)
            speeds = [1.0 / self.latencies[each.draw.task] for each in self.in_flight]
            (finished,) = self.random.choices(self.in_flight, speeds)
            self.in_flight.remove(finished)
            task = finished.draw.task
            is_dropped = self.random.random() < self.dropped[task]
            rewards = (0.0, 0.0) if is_dropped else (0.0, 1.0)
            await self.buffer.commit(
                [make_record(finished.index, rewards, handle=finished.handle, has_payload=not is_dropped, task=NAMES[task])]
            )
            await asyncio.sleep(0)
        batch = taking.result()
        self.trained += Counter(batch.records.tasks.tolist())
        await self.buffer.release(batch.records.handles)
        return batch


@settings(max_examples=12, deadline=None)
@given(
    weight=st.sampled_from([1.0, 3.0, 7.5]),
    latency=st.sampled_from([0.05, 1.0, 20.0]),
    dropped=st.tuples(st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from([0.0, 0.5])),
    window=st.sampled_from([1, 8]),
    seed=st.integers(0, 1000),
)
def test_trained_groups_keep_the_ratio_under_drops_and_latencies(
    weight: float, latency: float, dropped: tuple[float, float], window: int, seed: int
) -> None:
    simulation = Simulation(mixture_of([weight, 1.0]), (latency, 1.0), dropped, Random(seed), window=window)

    async def run() -> Batch:
        for _ in range(199):
            await simulation.step()
        return await simulation.step()

    last = asyncio.run(run())
    share, wanted = simulation.trained[0] / simulation.trained.total(), weight / (weight + 1.0)
    assert simulation.trained.total() == 1600
    assert abs(share - wanted) <= 0.02 * wanted
    assert last.prompts["task/sums/share"] == pytest.approx(share)
    assert last.prompts["task/sums/groups_total"] == simulation.trained[0]


def test_draws_without_drops_follow_the_weights_closely() -> None:
    mixture = mixture_of([3.0, 1.0])
    tasks = [mixture.draw(index).task for index in range(12)]
    assert tasks == [0, 0, 1, 0] * 3
    assert mixture.draw(12) == Draw(stream_index=9, task=0)


def test_single_task_follows_its_stream_and_has_no_state() -> None:
    mixture = Mixture()
    assert [mixture.draw(index) for index in (7, 8)] == [Draw(7), Draw(8)]
    assert mixture.state_dict() is None
    assert mixture.metrics() == {}
    assert mixture.load_state_dict(None)


async def test_rewound_groups_get_the_same_prompts_and_counts() -> None:
    mixture = mixture_of([1.0, 1.0], CurriculumConfig(levels=3, window=1, raise_at=0.4, lower_at=0.0))
    buffer = GroupBuffer(num_slots=4, dynamic_sampling=True, mixture=mixture)
    first = await buffer.reserve_round(1)
    dropped, *kept = first
    await buffer.commit([make_record(dropped.index, (1.0, 1.0), handle=dropped.handle, has_payload=False, task="sums")])
    second = await buffer.reserve_round(1)
    before = [each.draw for each in (*first, *second)]
    assert second[0].draw.level == 1  # the dropped group was solved, and its task's turn came back
    assert await buffer.rewind() == [each.index for each in (*first, *second)]
    again = await buffer.reserve_round(1)
    records = [make_record(again[0].index, (1.0, 1.0), handle=again[0].handle, has_payload=False, task="sums")]
    await buffer.commit(records)
    again += await buffer.reserve_round(1)
    assert [each.draw for each in again] == before
    assert mixture.metrics()["curriculum/sums/moves"] == 1.0
    assert mixture._num_outstanding == [2, 2]
    assert kept


def resumed(simulation: Simulation) -> tuple[Simulation, list[int]]:
    """Return a simulation that resumes from the state of another one, and the positions that it resamples."""
    state = pickle.loads(pickle.dumps((simulation.buffer.state(), simulation.buffer.prompts_state((), None))))
    other = Simulation(
        mixture_of([3.0, 1.0], CurriculumConfig(levels=5, window=4, raise_at=0.3, lower_at=0.2)),
        simulation.latencies,
        simulation.dropped,
        Random(5),
    )
    assert other.mixture.load_state_dict(state[1])
    restored = other.buffer.restore(state[0], Freshness(published=(0,), groups_per_publish=8, bound=5), 1)
    assert not restored.too_old
    other.trained = Counter(simulation.trained)
    return other, list(state[0].in_flight)


async def test_resumed_run_keeps_ratios_positions_and_level() -> None:
    curriculum = CurriculumConfig(levels=5, window=4, raise_at=0.3, lower_at=0.2)
    simulation = Simulation(mixture_of([3.0, 1.0], curriculum), (1.0, 5.0), (0.5, 0.0), Random(3))
    for _ in range(20):
        await simulation.step()
    unfinished = {each.index: each.draw for each in simulation.in_flight}
    other, again = resumed(simulation)
    assert other.mixture.metrics() == simulation.mixture.metrics()
    assert other.mixture._num_outstanding[0] + other.mixture._num_outstanding[1] == len(other.buffer._ready)
    reserved = await other.buffer.reserve(len(again))
    assert {each.index: each.draw for each in reserved} == unfinished
    other.in_flight += reserved
    assert other.mixture._num_outstanding == simulation.mixture._num_outstanding
    for _ in range(180):
        await other.step()
    assert abs(other.trained[0] / other.trained.total() - 0.75) <= 0.015


async def test_state_of_a_synchronous_run_excludes_resampled_groups() -> None:
    curriculum = CurriculumConfig(levels=2, window=2, raise_at=0.4, lower_at=0.0)
    simulation = Simulation(mixture_of([1.0, 1.0], curriculum), (1.0, 1.0), (0.0, 0.0), Random(3), num_slots=8)
    batch = await simulation.step()
    round_ = await simulation.buffer.reserve_round(1)
    await simulation.buffer.commit([make_record(round_[0].index, (0.0, 1.0), handle=round_[0].handle, task="sums")])
    state = simulation.buffer.prompts_state((), batch.first_untaken)
    assert state["num_trained"] == [4, 4]
    other = mixture_of([1.0, 1.0], curriculum)
    assert other.load_state_dict(pickle.loads(pickle.dumps(state)))
    draws = [other.draw(index) for index in range(batch.first_untaken, batch.first_untaken + 8)]
    assert draws == [each.draw for each in round_]
    assert other._num_outstanding == simulation.mixture._num_outstanding


def test_changed_tasks_keep_counts_by_name_and_drop_past_draws() -> None:
    before = mixture_of([1.0, 1.0])
    draws = [before.draw(index) for index in range(4)]
    before.count_trained([0, 1, 2])
    state = before.state_dict()
    after = Mixture([MixedTask(name="words"), MixedTask(name="games")])
    assert not after.load_state_dict(state)
    assert after._num_trained == [1, 0]
    assert after.draw(3) == Draw(stream_index=2, task=0)
    assert draws[3] == Draw(stream_index=1, task=1)


@pytest.mark.parametrize("weights", [[3.0, 1.0], [1.0, 1.0, 1.0]], ids=["another weight", "a new task"])
def test_ratio_of_changed_tasks_counts_from_the_resume_on(weights: list[float]) -> None:
    before = mixture_of([1.0, 1.0])
    for index in range(40):
        before.draw(index)
    before.count_trained(range(40))
    after = mixture_of(weights)
    after.load_state_dict(before.state_dict())
    counts = Counter(after.draw(index).task for index in range(40, 40 + 4 * len(weights)))
    assert [counts[number] / counts[1] for number in range(len(weights))] == weights


def test_level_is_solved_by_a_reward_that_rounding_made_smaller() -> None:
    sampler = SuccessRate(CurriculumConfig(levels=2, window=1), seed=0)
    sampler.observe(Outcome(index=0, level=0, rewards=(0.7 + 0.2 + 0.1,)))
    assert (0.7 + 0.2 + 0.1 < 1.0, sampler.metrics()["level"]) == (True, 1.0)


async def test_returned_or_discarded_batch_is_not_counted_as_trained() -> None:
    simulation = Simulation(mixture_of([1.0, 1.0]), (1.0, 1.0), (0.0, 0.0), Random(3))
    batch = await simulation.step()
    taken = await simulation.buffer.take_batch(4) if len(simulation.buffer._ready) >= 4 else None
    del batch
    if taken is None:
        room = await simulation.buffer.reserve(16)
        records = [make_record(e.index, (0.0, 1.0), handle=e.handle, task=NAMES[e.draw.task]) for e in room]
        records += [make_record(e.index, (0.0, 1.0), handle=e.handle, task=NAMES[e.draw.task]) for e in simulation.in_flight]
        await simulation.buffer.commit(records)
        taken = await simulation.buffer.take_batch(4)
    trained = list(simulation.mixture._num_trained)
    await simulation.buffer.return_batch(taken.records.handles)
    given_back = list(simulation.mixture._num_trained)
    again = await simulation.buffer.take_batch(4)
    await simulation.buffer.discard(again.records.handles, before_version=0)
    counts = {"trained": trained, "given_back": given_back, "discarded": list(simulation.mixture._num_trained)}
    assert counts == {"trained": [6, 6], "given_back": [4, 4], "discarded": [4, 4]}


@pytest.mark.parametrize("level", [2, -1, "easy", 0.5])
def test_level_that_does_not_exist_is_an_error(level: object) -> None:
    class Wrong(SuccessRate):
        def choose(self) -> int:
            return level  # type: ignore[return-value]

    sampler = Wrong(CurriculumConfig(levels=2), seed=0)
    with pytest.raises(ValueError, match=r"curriculum\.sampler: choose\(\) returned a level that task sums does not have"):
        Mixture([MixedTask(name="sums", sampler=sampler, num_levels=2)]).draw(0)


async def test_starvation_names_the_task_whose_groups_are_dropped() -> None:
    buffer = GroupBuffer(num_slots=4, dynamic_sampling=True, mixture=mixture_of([1.0, 1.0]))
    for each in await buffer.reserve(4):
        has_payload = each.draw.task == 0
        rewards, task = (0.0, float(has_payload)), NAMES[each.draw.task]
        await buffer.commit([make_record(each.index, rewards, handle=each.handle, has_payload=has_payload, task=task)])
    assert "with a signal by task: sums 2 of 2, words 0 of 2" in (await buffer.why_starved(4, 1.0))


async def test_groups_in_a_checkpoint_of_other_tasks_are_resampled() -> None:
    simulation = Simulation(mixture_of([1.0, 1.0]), (1.0, 1.0), (0.0, 0.0), Random(3))
    await simulation.step()
    ready = sorted(simulation.buffer._ready)
    state = simulation.buffer.state()
    again = sorted([*ready, *(each.index for each in simulation.in_flight)])
    other = GroupBuffer(num_slots=16, dynamic_sampling=True, mixture=Mixture([MixedTask(name="games")]))
    assert not other.mixture.load_state_dict(simulation.mixture.state_dict())
    restored = other.restore(state.without_groups(), Freshness(published=(0,), groups_per_publish=8, bound=5), 1)
    assert (restored.num_ready, restored.num_in_flight) == (0, len(again))
    assert [each.index for each in await other.reserve(len(again))] == again
