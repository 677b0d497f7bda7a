"""Memory of the structures that live as long as a run: it must not grow with the number of steps."""

import gc
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks import growth
from tests.endpoints import FakeEndpoint
from tests.records import make_record
from titanrl.launch.generators import WeightSync
from titanrl.processes.actors import ask_actor, open_replies
from titanrl.replay.buffer import GroupBuffer
from titanrl.weights.records import Commit

STEPS = 1500


async def growth_of(step: Callable[[int], Awaitable[object]]) -> float:
    """Return the memory blocks that a step allocates and keeps, on average over `STEPS` steps after as many others.

    `tracemalloc` would count bytes, but in Python 3.11 it can crash a process in which Monarch's threads run.
    """
    for number in range(STEPS):
        await step(number)
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(STEPS, 2 * STEPS):
        await step(number)
    gc.collect()
    return (sys.getallocatedblocks() - before) / STEPS


async def test_buffer_does_not_grow_with_steps() -> None:
    buffer = GroupBuffer(num_slots=4, dynamic_sampling=False)

    async def step(number: int) -> None:
        for reservation in await buffer.reserve(2):
            await buffer.commit([make_record(reservation.index, handle=reservation.handle)])
        batch = await buffer.take_batch(2)
        await buffer.release(batch.records.handles)
        buffer._slots.take_dropped(0)

    assert (await growth_of(step)) < 0.5


async def test_publications_do_not_grow_with_versions() -> None:
    async def push(version: int) -> tuple[()]:
        return ()

    async def pull(commit: Commit) -> int:
        return 0

    async def nothing(*_: object) -> None:
        pass

    weights = WeightSync(nothing, push=push, expect=nothing, pulls=[pull, pull], num_listed=3)

    async def step(number: int) -> None:
        weights.publish(number, then=nothing)
        await weights.ready()

    grown = await growth_of(step)
    assert weights.versions == [2 * STEPS - 3, 2 * STEPS - 2, 2 * STEPS - 1]
    assert grown < 0.5


async def test_requests_do_not_grow_with_their_number() -> None:
    endpoint = FakeEndpoint(lambda number: number)

    async def step(number: int) -> None:
        with open_replies() as (replies, messages):
            replies.send("part")
            assert await ask_actor(endpoint, number) == number
            assert await messages.get() == "part"

    assert (await growth_of(step)) < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_process_of_a_run_grows_with_prompts(tmp_path: Path) -> None:
    """Before replies came through one port, the controller grew by 4.3 kB per prompt and every other process by over 1 kB."""
    result = growth.measure(tmp_path, num_steps=2500, skip=1500, overrides=())
    for name, process in result["processes"].items():
        assert process["bytes_per_prompt"] < 300 + 3 * process["standard_error"], name
        assert process["descriptors"]["max"] <= process["descriptors"]["first"] + 2, name
        assert process["threads"]["max"] <= process["threads"]["first"] + 2, name
