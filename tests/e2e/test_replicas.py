"""Generator replicas that are not alike: one slow, one spread over ranks of which one dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SMALL, Finished, Start
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO
from titanrl.launch.meshes import BufferClient, GeneratorMeshes
from titanrl.replay.buffer import Batch
from titanrl.tables import BatchPlan, Table
from titanrl.weights.manifest import Commit

SLOW = (
    "generator.replicas=2",
    "max_staleness=1",
    "generator.on_update=continue",
    "rollout.window=0.5",
    "rollout.group_size=4",
    "warm_start=null",
    "logging.console=off",
)


class Watched(GRPO):
    """A run whose batches are noted, by the prompts in them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batches: list[list[int]] = []

    def _plan(self, batch: Batch) -> BatchPlan:
        self.batches.append(batch.records.groups["index"].tolist())
        return super()._plan(batch)


@asynccontextmanager
async def slowed(process: psutil.Process) -> AsyncIterator[None]:
    """Let a process run for a part of the time only."""

    async def throttle() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.15)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.03)

    throttling = asyncio.create_task(throttle())
    try:
        yield
    finally:
        throttling.cancel()
        process.send_signal(signal.SIGCONT)


class LatePulls:
    """Sends the second replica each version only when the slots trained on before are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_pulled = [0, 0]
        self.num_released = 0
        self.released = asyncio.Condition()
        pull, release = GeneratorMeshes.pull_weights, BufferClient.release

        async def late_pull(client: GeneratorMeshes, replica: int, commit: Commit) -> None:
            if replica == 1:
                await asyncio.wait_for(self.wait_for_slots(commit.version), 60)
            await pull(client, replica, commit)
            self.num_pulled[replica] += 1

        async def noted_release(client: BufferClient, handles: Table) -> None:
            assert self.num_pulled[0] == self.num_released + 2, "slots were freed before any replica had pulled"
            await release(client, handles)
            async with self.released:
                self.num_released += 1
                self.released.notify_all()

        monkeypatch.setattr(GeneratorMeshes, "pull_weights", late_pull)
        monkeypatch.setattr(BufferClient, "release", noted_release)

    async def wait_for_slots(self, version: int) -> None:
        async with self.released:
            await self.released.wait_for(lambda: self.num_released >= version)


def overtakers(batches: list[list[int]]) -> dict[int, int]:
    """How many younger groups went into an earlier batch than each group; those that no batch has yet are counted, too."""
    taken: list[int] = []
    counts = {}
    for batch in batches:
        counts |= {index: sum(other > index for other in taken) for index in batch}
        taken += batch
    left_behind = set(range(max(taken))) - set(taken)
    return counts | {index: sum(other > index for other in taken) for index in left_behind}


def test_with_one_slow_replica_both_work_the_order_stays_in_the_window_and_its_pulls_hold_no_slot(
    plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ("name=slow", f"output_dir={tmp_path}", f"model.path={plain_run.run_dir}/checkpoints/final")
    config = load_config("configs/quickstart.yaml", [*SMALL, *places, *SLOW])

    async def scenario() -> tuple[list[list[int]], list[float], list[float]]:
        pulls = LatePulls(monkeypatch)
        run = await Watched(config).start()
        try:
            pids = [(run.run_dir / "logs" / f"generator_{replica}_0.pid").read_text().split()[0] for replica in (0, 1)]
            fast, slow = (psutil.Process(int(pid)) for pid in pids)
            before = [sum(process.cpu_times()[:2]) for process in (fast, slow)]
            async with slowed(slow):
                ages = [(await run.step()).values["staleness/max"] for _ in range(6)]
                await run.parts.weights.ready()
            work = [sum(process.cpu_times()[:2]) - then for process, then in zip((fast, slow), before, strict=True)]
            assert pulls.num_pulled == [7, 7]
            return run.batches, work, ages
        finally:
            await run.close()

    batches, work, ages = asyncio.run(scenario())
    assert min(work) > 0.1, f"a replica was idle: they worked for {work} s"
    overtaken = overtakers(batches)
    assert 0 < max(overtaken.values()) <= config.window_groups - 1 == 7
    assert all(batch == sorted(batch) for batch in batches)
    assert len({index for batch in batches for index in batch}) == sum(map(len, batches))
    assert max(ages) <= config.worst_staleness


def shared_memory() -> set[str]:
    """Names in shared memory, without those that exist for a moment only."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def test_a_rank_of_a_replica_that_is_killed_ends_the_run_by_name_and_leaves_nothing(
    start_run: Start, plain_run: Finished
) -> None:
    before = shared_memory()
    command = start_run("killed-rank", "num_steps=100000", "generator.tp=2", "max_staleness=1")
    command.wait_for_step(1)
    command.process_of("generator_0", rank=1).kill()
    finished = command.finish(timeout_s=60)
    assert finished.code == 1
    assert "generator_0_1" in finished.output.splitlines()[-1]
    assert command.leftovers() == []
    assert shared_memory() <= before
