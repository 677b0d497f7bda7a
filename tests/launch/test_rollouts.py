"""The client of the rollout workers with a real replay buffer: failing evaluations, and a saved buffer."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.records import make_record
from titanrl.carriers.rewards import RolloutError
from titanrl.config.sections import TimeoutsConfig
from titanrl.data.mixture import Mixture
from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.generators import BufferClient, RolloutMesh
from titanrl.launch.supervision import ActorDiedError, Supervisor
from titanrl.processes.actors import ask_actor
from titanrl.replay.buffer import RECORDS_FILE, BufferActor
from titanrl.replay.groups import Freshness, ShardUsage

FOREVER = 3600.0
USAGE = ShardUsage(num_bytes=0, num_spilled_bytes=0)


def with_workers(folder: Path, scenario: Callable[[RolloutMesh, BufferClient], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a buffer, and with a worker whose evaluations take an hour, or 0 s for the set `empty`."""

    async def evaluate(name: str, call: Callable[[Any], float], timeout_s: float, pace: object) -> float:
        seconds = call(SimpleNamespace(worker=SimpleNamespace(evaluate=SimpleNamespace(call_one=lambda name: name != "empty"))))
        return await asyncio.sleep(seconds * FOREVER, seconds)

    async def run() -> None:
        supervisor = Supervisor()
        fleet = Fleet(folder, supervisor)
        store = fleet.spawn("store", local_host(), 1, {}, ())
        actor = store.spawn("store_buffer", BufferActor, Mixture, num_slots=4, dynamic_sampling=False)
        buffer = BufferClient(actor, supervisor, TimeoutsConfig(), FOREVER, groups_per_step=2)
        workers = object.__new__(RolloutMesh)
        workers.parts = [SimpleNamespace(until_done=evaluate)]  # type: ignore[list-item]
        workers.timeouts, workers.num_rewound, workers._buffer = TimeoutsConfig(), 0, buffer
        try:
            await asyncio.wait_for(scenario(workers, buffer), 60)
        finally:
            buffer.close()
            supervisor.expect_deaths()
            await fleet.stop(20)

    asyncio.run(run())


def test_failed_worker_ends_evaluations(tmp_path: Path) -> None:
    async def scenario(workers: RolloutMesh, buffer: BufferClient) -> None:
        assert await workers.evaluate("empty") == 0
        waiting = asyncio.create_task(workers.evaluate("hard"))
        await asyncio.sleep(0.1)
        await buffer.mesh.fail.call_one("ValueError: no prompts")
        with pytest.raises(RolloutError, match="no prompts"):
            await waiting
        with pytest.raises(RolloutError, match="no prompts"):
            await workers.evaluate("hard")

    with_workers(tmp_path, scenario)


def test_death_of_the_buffer_does_not_hide_its_cause(tmp_path: Path) -> None:
    async def scenario(workers: RolloutMesh, buffer: BufferClient) -> None:
        async def work() -> None:
            await buffer.supervisor.ask("rollout.evaluate", asyncio.Event().wait(), FOREVER)

        await buffer.mesh.probe.call_one()
        waiting = asyncio.create_task(buffer.unless_failed(work()))
        await asyncio.sleep(0.1)
        await buffer.supervisor.kill("store")
        with pytest.raises(ActorDiedError, match=r"store_0 \(process \d+\) exited"):
            await waiting

    with_workers(tmp_path, scenario)


def test_evaluation_that_outlives_the_buffer_client_is_not_cancelled(tmp_path: Path) -> None:
    """Closing the client cancels its requests, which must not look like a cancellation of the evaluation."""

    async def scenario(workers: RolloutMesh, buffer: BufferClient) -> None:
        finish = asyncio.Event()
        waiting = asyncio.create_task(buffer.unless_failed(finish.wait()))
        await buffer.mesh.probe.call_one()
        buffer.close()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        finish.set()
        assert await waiting

    with_workers(tmp_path, scenario)


def test_state_of_the_buffer_survives_a_save_and_a_load(tmp_path: Path) -> None:
    """Also calls the buffer's other endpoints once, in the order of a run with a dead worker."""

    async def scenario(workers: RolloutMesh, buffer: BufferClient) -> None:
        for _ in range(2):
            reservations, dropped = await ask_actor(buffer.mesh.reserve, 2, 0, 1)
            await ask_actor(buffer.mesh.commit, [make_record(each.index, handle=each.handle) for each in reservations], USAGE)
        await buffer.wait_until_full()
        batch = await buffer.take_batch()
        assert dropped == []
        assert batch.records.groups["index"].tolist() == [0, 1]
        assert "groups in flight: 0" in await buffer._why_starved(1.0)
        saved = await buffer.save(tmp_path, [(batch.records.handles, None)], None)
        assert (saved.next_index, saved.in_flight, saved.num_held, len(saved.payloads)) == (4, (), 2, 2)
        await buffer.release(batch.records.handles)
        batch = await buffer.take_batch()
        await buffer.lose_shard(0, 1)
        await buffer.return_batch(batch.records.handles)
        assert [each.index for each in (await ask_actor(buffer.mesh.reserve, 4, 1, 1))[0]] == [2, 3, 4, 5]
        await buffer.hold_rounds()
        await buffer.rewind(None)
        reservations, dropped = await ask_actor(buffer.mesh.reserve_round, 1, 1, 1)
        assert ([each.index for each in reservations], len(dropped)) == ([2, 3, 4, 5], 4)
        await ask_actor(buffer.mesh.commit, [make_record(each.index, handle=each.handle) for each in reservations], USAGE)
        await buffer.discard((await buffer.take_batch()).records.handles, 1)
        await ask_actor(buffer.mesh.probe)

    async def resumed(workers: RolloutMesh, buffer: BufferClient) -> None:
        freshness = Freshness(published=(0,), groups_per_publish=2, bound=1)
        restored = await ask_actor(buffer.mesh.load, tmp_path / RECORDS_FILE, freshness, 1)
        assert (restored.num_ready, len(restored.trained)) == (2, 1)
        with pytest.raises(AssertionError, match="there is no memory"):
            await buffer.replay(0, 1.0)

    with_workers(tmp_path, scenario)
    with_workers(tmp_path, resumed)
