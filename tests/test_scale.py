"""The simulation of a run at any size: repeatable, consistent with its costs, and able to name the bottleneck."""

from dataclasses import replace

import pytest

from benchmarks.scale import Size, bottleneck, ends, simulate
from benchmarks.scale_costs import least_squares
from benchmarks.timed_roles import Costs
from benchmarks.virtual_actors import Cores, Job, MessageCosts, World

MESSAGES = MessageCosts(send_s=5e-5, receive_s=5e-5, others_s=1e-4, latency_s=2e-4, bytes_per_s=1e9)
COSTS = Costs(
    source="test",
    decode_s=0.01,
    decode_sequence_s=1e-4,
    prefill_token_s=0.0,
    pass_s=0.01,
    train_token_s=1e-6,
    optim_s=0.01,
    weight_bytes=1e6,
    push_bytes_per_s=1e9,
    pull_bytes_per_s=1e9,
    serve_bytes_per_s=1e9,
    stop_probability=0.0,
    messages=MESSAGES,
)
SIZE = Size(generators=4, trainer_ranks=2, workers=2, groups_per_step=8, group_size=2, max_new_tokens=32)
CALLBACK_S = 2e-5


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return simulate(SIZE, COSTS, num_steps=3, callback_s=CALLBACK_S)


def test_simulation_repeats(figures: dict[str, float]) -> None:
    assert simulate(SIZE, COSTS, num_steps=3, callback_s=CALLBACK_S) == figures


def test_decoding_bounds_the_step(figures: dict[str, float]) -> None:
    """Each generator has 2 of the 8 groups of a step, so 4 completions of 32 tokens, and at most 8 from two batches."""
    free = simulate(SIZE, COSTS, num_steps=3, is_free=True)
    assert free["controller_s"] == free["buffer_s"] == 0.0
    assert 32 * (0.01 + 4e-4) / 2 < free["step_s"] < 32 * (0.01 + 8e-4) * 1.2
    assert free["step_s"] < figures["step_s"] < free["step_s"] * 1.2
    assert free["tokens_per_s"] == pytest.approx(8 * 2 * 32 / free["step_s"], rel=0.35)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "generators"), ({"pass_s": 1.0}, "trainer"), ({"push_s": 1.0}, "push and pull")],
)
def test_slowest_part_is_the_bottleneck(changes: dict[str, float], expected: str) -> None:
    assert bottleneck(simulate(SIZE, replace(COSTS, **changes), num_steps=3, callback_s=CALLBACK_S)) == expected


def test_slow_controller_is_the_bottleneck() -> None:
    costs = replace(COSTS, messages=replace(MESSAGES, send_s=0.02, receive_s=0.02))
    figures = simulate(SIZE, costs, num_steps=3, callback_s=CALLBACK_S)
    assert bottleneck(figures) in ("controller", "rollout workers")
    assert figures["controller_messages"] >= 3 * SIZE.generators


def test_shared_cores_slow_a_run_down(figures: dict[str, float]) -> None:
    shared = simulate(SIZE, replace(COSTS, cores=2.0), num_steps=3, callback_s=CALLBACK_S)
    assert 1.8 < shared["step_s"] / figures["step_s"] < 3.5  # four generators and two trainer ranks on two cores


def test_jobs_share_cores_in_proportion_to_their_demand() -> None:
    world = World(MESSAGES, callback_s=0.0)
    cores, ended = Cores(world, 2.0), dict[str, float]()

    async def run() -> None:
        for name, seconds, demand in (("long", 3.0, 2.0), ("short", 1.0, 2.0)):
            cores.start(Job(seconds, demand, lambda name=name: ended.setdefault(name, world.time)))  # type: ignore[misc]
        await world.free.loop.run_in_executor(None, lambda: None)
        while len(ended) < 2:
            done = world.free.loop.create_future()
            world.free.post(world.time + 0.5, done.set_result, None)
            await done

    world.run(world.free, run(), limit_s=10.0)
    assert ended == pytest.approx({"short": 2.0, "long": 4.0})


def test_first_size_above_each_limit_is_the_end_of_the_design() -> None:
    rows = [{"generators": 16, "overhead": 0.04}, {"generators": 64, "overhead": 0.2}, {"generators": 256, "overhead": 0.4}]
    assert ends(rows) == {"overhead above 10%": 64, "overhead above 50%": None}


def test_costs_are_not_negative() -> None:
    assert least_squares([(1.0, 2.0, 5.0), (2.0, 1.0, 4.0), (3.0, 1.0, 5.0)]) == pytest.approx([1.0, 2.0])
    first, second = least_squares([(1.0, 1.0, 2.0), (2.0, 1.0, 1.9), (4.0, 1.0, 1.8)])
    assert first == 0.0
    assert second > 1.8
