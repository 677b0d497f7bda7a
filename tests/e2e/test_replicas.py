"""Generator replicas that are not alike: one slow, one spread over ranks of which one dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import SMALL, Finished, Start
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO
from titanrl.launch.clients import BufferClient, GeneratorsClient
from titanrl.replay.buffer import Batch
from titanrl.types import BatchPlan

SLOW = (
    "generator.replicas=2",
    "generator.on_update=drain",  # a pull then takes as long as the requests under way
    "max_staleness=1",
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
        self.batches.append([record.index for record in batch.records])
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


def noting(events: list[tuple[Any, ...]], what: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method itself, with a note of its arguments when it has ended."""

    async def noted(self: Any, *args: Any) -> Any:
        answer = await method(self, *args)
        events.append((what, *args))
        return answer

    return noted


def overtakers(batches: list[list[int]], window_end: int) -> dict[int, int]:
    """How many younger groups went into an earlier batch than each group that all older batches have passed by."""
    taken: list[int] = []
    counts = {}
    for batch in batches:
        for index in batch:
            counts[index] = sum(other > index for other in taken)
        taken += batch
    left_behind = set(range(window_end)) - set(taken)
    return counts | {index: sum(other > index for other in taken) for index in left_behind}


def test_with_one_slow_replica_both_work_the_order_stays_in_the_window_and_slots_are_freed_by_the_fast_one(
    plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ("name=slow", f"output_dir={tmp_path}", f"model.path={plain_run.run_dir}/checkpoints/final")
    config = load_config("configs/quickstart.yaml", [*SMALL, *places, *SLOW])
    events: list[tuple[Any, ...]] = []
    monkeypatch.setattr(GeneratorsClient, "pull_weights", noting(events, "pulled", GeneratorsClient.pull_weights))
    monkeypatch.setattr(BufferClient, "release", noting(events, "released", BufferClient.release))

    async def scenario() -> tuple[list[list[int]], list[float], list[dict[str, float]]]:
        run = await Watched(config).start()
        try:
            pids = [(run.run_dir / "logs" / f"generator_{replica}_0.pid").read_text().split()[0] for replica in (0, 1)]
            fast, slow = (psutil.Process(int(pid)) for pid in pids)
            before = [sum(process.cpu_times()[:2]) for process in (fast, slow)]
            async with slowed(slow):
                steps = [dict((await run.step()).values) for _ in range(6)]
            work = [sum(process.cpu_times()[:2]) - then for process, then in zip((fast, slow), before, strict=True)]
            return run.batches, work, steps
        finally:
            await run.close()

    batches, work, steps = asyncio.run(scenario())
    assert min(work) > 0.1, f"a replica was idle: they worked for {work} s"
    overtaken = overtakers(batches, max(map(max, batches)))
    assert max(overtaken.values()) <= config.window_groups - 1 == 7
    assert max(overtaken.values()) > 0, "the slow replica held nobody up, so nothing was seen"
    assert all(batch == sorted(batch) for batch in batches)
    assert len({index for batch in batches for index in batch}) == sum(map(len, batches))
    assert max(step["staleness/max"] for step in steps) <= config.worst_staleness
    assert slots_freed_before_the_slow_pull(events) > 0


def slots_freed_before_the_slow_pull(events: list[tuple[Any, ...]]) -> int:
    """Publications whose slots were free while the slow replica was still at its pull; none may be free before any pull."""
    num_early = 0
    num_published, num_pulled = 1, [0, 0]  # the first publication starts the run, and frees nothing
    for what, which, *_ in events:
        if what == "pulled":
            num_pulled[which] += 1
        else:
            num_published += 1
            assert max(num_pulled) >= num_published
            num_early += num_pulled[1] < num_published
    return num_early


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
