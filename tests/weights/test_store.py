"""torchstore through our adapter, in a real process; and what a reader does with damaged or uncommitted weights."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import this_host

from titanrl.actors import set_up_process
from titanrl.weights.manifest import Commit, WeightMismatchError, commit_key, rank_key
from titanrl.weights.publish import WeightPublisher, WeightReader
from titanrl.weights.store import WeightStore, spawn_store

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}


Scenario = Callable[[WeightStore], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def with_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], None]:
    log_dir = tmp_path_factory.mktemp("logs")

    def run(scenario: Scenario) -> None:
        async def body() -> None:
            bootstrap = partial(set_up_process, "store", Path(log_dir), ("titanrl.weights.store",))
            procs = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=bootstrap, name="store")
            try:
                await scenario(await spawn_store(procs))
            finally:
                await procs.stop()

        asyncio.run(body())

    return run


async def publish(store: WeightStore, version: int) -> None:
    manifest = await WeightPublisher("run", 0, store, torch.float32, "store").publish(version, STATE)
    await store.put(commit_key("run", version), Commit(version, (manifest,)))


def test_objects_tensors_and_versions_go_through_the_store(with_store: Callable[[Scenario], None]) -> None:
    async def scenario(store: WeightStore) -> None:
        await store.put("run/x", {"a": (1, 2)})
        assert await store.get("run/x") == {"a": (1, 2)}
        await store.put("run/t", torch.arange(3, dtype=torch.uint8))
        assert (await store.get("run/t")).tolist() == [0, 1, 2]
        await store.delete("run/x")
        with pytest.raises(KeyError, match="run/x"):
            await store.get("run/x")

        reader = WeightReader("run", store)
        with pytest.raises(WeightMismatchError, match="version 5 of the weights was not committed"):
            await reader.fetch(5)
        await publish(store, 5)
        targets = {name: torch.zeros_like(value) for name, value in STATE.items()}
        (await reader.fetch(5)).copy_into(targets)
        assert all(torch.equal(targets[name], STATE[name]) for name in STATE)

        damaged = (await store.get(rank_key("run", 5, 0))).clone()
        damaged[3] += 1
        await store.delete(rank_key("run", 5, 0))
        await store.put(rank_key("run", 5, 0), damaged)
        with pytest.raises(WeightMismatchError, match="the bytes of rank 0, version 5, are not what it published"):
            await reader.fetch(5)

    with_store(scenario)
