"""Generator replicas: a slow one, one that drains, and one with a rank that dies."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import SMALL, Finished, Start
from tests.shared_memory import abandoned
from titanrl.algorithms.batch_plan import StepPlan
from titanrl.carriers.tables import Table
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO
from titanrl.launch.generators import BufferClient, GeneratorMeshes
from titanrl.launch.supervision import Supervisor
from titanrl.replay.groups import Batch
from titanrl.weights.records import Commit

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
    """A run that records the prompts of its batches."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batches: list[list[int]] = []

    async def _plan(self, batch: Batch) -> tuple[StepPlan, dict[str, float]]:
        self.batches.append(batch.records.groups["index"].tolist())
        return await super()._plan(batch)


@asynccontextmanager
async def slowed(process: psutil.Process) -> AsyncIterator[None]:
    """Let a process run only for a part of the time."""

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
    """Delays each pull of the second replica until the slots of the previous batch are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_pulled = [0, 0]
        self.num_released = 0
        self.released = asyncio.Condition()
        pull, release = GeneratorMeshes.pull_weights, BufferClient.release

        async def late_pull(client: GeneratorMeshes, replica: int, commit: Commit) -> int:
            if replica == 1:
                await asyncio.wait_for(self.wait_for_slots(commit.version), 60)
            received = await pull(client, replica, commit)
            self.num_pulled[replica] += 1
            return received

        async def noted_release(client: BufferClient, handles: Table, priorities: object) -> None:
            # The next version may also have been pulled already.
            assert self.num_pulled[0] >= self.num_released + 2, "slots were freed before any replica had pulled"
            assert priorities is None, "the run does not replay"
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
    """Return, for each group, how many younger groups were in an earlier batch; includes groups that are in no batch yet."""
    taken: list[int] = []
    counts = {}
    for batch in batches:
        counts |= {index: sum(other > index for other in taken) for index in batch}
        taken += batch
    left_behind = set(range(max(taken))) - set(taken)
    return counts | {index: sum(other > index for other in taken) for index in left_behind}


def test_slow_replica_delays_no_slot_and_no_batch_beyond_the_window(
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
                await run.session.weights.ready()
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
    assert max(ages) <= config.staleness_bound


class TracedRequests:
    """Measures how long at least one compute request to the trainer was pending, as seen from the controller."""

    COMPUTE = ("trainer.forward_backward", "trainer.optim_step")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy_s = 0.0
        self._pending, self._since = 0, 0.0
        ask = Supervisor.ask

        async def traced(supervisor: Supervisor, name: str, call: Awaitable[Any], *others: Any, **options: Any) -> Any:
            if name not in self.COMPUTE:
                return await ask(supervisor, name, call, *others, **options)
            self._count(1)
            try:
                return await ask(supervisor, name, call, *others, **options)
            finally:
                self._count(-1)

        monkeypatch.setattr(Supervisor, "ask", traced)

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if self._pending:
            self.busy_s += now - self._since
        self._pending, self._since = self._pending + change, now


@pytest.mark.slow
async def test_thirty_publications_under_drain_succeed_and_idle_fractions_match_a_trace(
    plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("algorithm.updates_per_publish=2", "max_staleness=5", "generator.on_update=drain", "generator.replicas=2")
    decoupled = ("algorithm.proximal=interval_start", "algorithm.correction.weight=token")
    places = ("name=drain", f"output_dir={tmp_path}", f"model.path={plain_run.run_dir}/checkpoints/final")
    config = load_config(
        "configs/quickstart.yaml", [*SMALL, *places, *overrides, *decoupled, "warm_start=null", "logging.console=off"]
    )
    run = await GRPO(config).start()
    trace = TracedRequests(monkeypatch)
    try:
        steps = [dict((await run.step()).values) for _ in range(60)]
        await run.session.weights.ready()
    finally:
        await run.close()
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["version"] for event in events if event["kind"] == "publication"] == list(range(0, 61, 2))
    assert (run.run_dir / "report.html").exists()
    step_s = sum(step["time/step_s"] for step in steps)
    reported_s = sum(step["time/step_s"] * (1.0 - step["perf/trainer_idle_frac"]) for step in steps)
    assert reported_s / step_s == pytest.approx(trace.busy_s / step_s, abs=0.05)
    assert max(step["staleness/max"] for step in steps) <= config.staleness_bound


def test_killed_generator_rank_ends_the_run_and_is_named(start_run: Start, plain_run: Finished) -> None:
    before = abandoned()
    command = start_run("killed-rank", "num_steps=100000", "generator.tp=2", "max_staleness=1", "faults.max_respawns=0")
    command.wait_for_step(1)
    command.process_of("generator_0", rank=1).kill()
    finished = command.finish(timeout_s=60)
    assert finished.code == 1
    assert "generator_0_1" in finished.output.splitlines()[-1]
    assert command.leftovers() == []
    assert abandoned() <= before
