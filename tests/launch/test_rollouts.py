"""Evaluations by rollout workers that fail, with a real replay buffer."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanrl.config.sections import TimeoutsConfig
from titanrl.data.mixture import Mixture
from titanrl.launch.fleet import Fleet
from titanrl.launch.hosts import local_host
from titanrl.launch.rollouts import BufferClient, RolloutMesh
from titanrl.launch.supervision import ActorDiedError, Supervisor
from titanrl.replay.actors import ReplayBuffer
from titanrl.replay.failures import RolloutError

FOREVER = 3600.0


def with_workers(folder: Path, scenario: Callable[[RolloutMesh, BufferClient], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a buffer, and with a worker whose evaluations take an hour, or 0 s for the set `empty`."""

    async def evaluate(name: str, call: Callable[[Any], float], timeout_s: float, pace: object) -> float:
        seconds = call(SimpleNamespace(worker=SimpleNamespace(evaluate=SimpleNamespace(call_one=lambda name: name != "empty"))))
        return await asyncio.sleep(seconds * FOREVER, seconds)

    async def run() -> None:
        supervisor = Supervisor()
        fleet = Fleet(folder, supervisor)
        store = fleet.spawn("store", local_host(), 1, {}, ())
        actor = store.spawn("store_buffer", ReplayBuffer, 4, 1, False, 0, None, Mixture)
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
        await buffer.actor.fail.call_one("ValueError: no prompts")
        with pytest.raises(RolloutError, match="no prompts"):
            await waiting
        with pytest.raises(RolloutError, match="no prompts"):
            await workers.evaluate("hard")

    with_workers(tmp_path, scenario)


def test_death_of_the_buffer_does_not_hide_its_cause(tmp_path: Path) -> None:
    async def scenario(workers: RolloutMesh, buffer: BufferClient) -> None:
        async def work() -> None:
            await buffer.supervisor.ask("rollout.evaluate", asyncio.Event().wait(), FOREVER)

        await buffer.actor.probe.call_one()
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
        await buffer.actor.probe.call_one()
        buffer.close()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        finish.set()
        assert await waiting

    with_workers(tmp_path, scenario)
