"""Processes that do not respond: each is detected and named with its stacks, and the run closes as fast as usual."""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.patients import running_patient
from titanrl.config.sections import FaultsConfig
from titanrl.launch.supervision import (
    WARM_UP,
    WINDOW,
    DeadlineError,
    Pace,
    Process,
    Stall,
    StallError,
    Supervisor,
    Watchdog,
    suspects,
)
from titanrl.processes.actors import Actor, endpoint

PATIENT = Pace(kind="patient.answer")
LIMIT_S = 1.0


def spin_in_python() -> None:
    while True:
        pass


class Patient(Actor):
    """Replies, until it hangs."""

    @endpoint
    async def answer(self) -> int:
        return os.getpid()

    @endpoint
    async def hang_in_python(self) -> None:
        spin_in_python()

    @endpoint
    async def hang_in_native_code(self) -> None:
        ctypes.PyDLL(None).pause()  # keeps the interpreter's lock


class Ward:
    """A process of one rank with enough replies for a learned deadline, and the reports of its supervisor."""

    def __init__(self, folder: Path, **faults: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        config = FaultsConfig(**{"min_stall_s": LIMIT_S, **faults})
        self.supervisor = Supervisor(self._on_event, Watchdog(config, folder, self.warnings.append))
        self.patient: Any = None
        self.pid = 0

    def _on_event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    async def settle(self, request: Callable[[], Any]) -> Any:
        """Make enough requests for a learned deadline of the kind `PATIENT`; the first reply waits for the start."""
        await self.supervisor.ask("start", request(), 60)
        for _ in range(WARM_UP):
            reply = await self.supervisor.ask("patient.answer", request(), 60, PATIENT)
        return reply


def with_ward(folder: Path, scenario: Callable[[Ward], Coroutine[Any, Any, None]], **faults: Any) -> Ward:
    """Run a scenario with one process, then stop the process like a session, which must not take long."""

    async def run() -> Ward:
        ward = Ward(folder, **faults)
        (folder / "logs").mkdir()
        async with running_patient(Patient, folder / "logs", ward.supervisor, stop_s=4, may_hang=True) as (_, ward.patient):
            ward.pid = await ward.settle(lambda: ward.patient.answer.call_one())
            await scenario(ward)
        return ward

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "frames"),
    [("hang_in_python", ["spin_in_python"]), ("hang_in_native_code", ["pause", "hang_in_native_code"])],
)
def test_hanging_request_ends_the_run_with_its_stacks(tmp_path: Path, name: str, frames: list[str]) -> None:
    async def scenario(ward: Ward) -> None:
        call = getattr(ward.patient, name).call_one()
        with pytest.raises(StallError, match=rf"no reply to 'patient\.{name}' for [\d.]+ s .* from patient rank 0; stacks: "):
            await asyncio.wait_for(ward.supervisor.ask(f"patient.{name}", call, 600, PATIENT), 120)
        assert ward.supervisor.failure

    ward = with_ward(tmp_path, scenario)
    (event,) = ward.events
    file = tmp_path / "logs" / "stall_1.txt"
    assert event.pop("seconds") >= LIMIT_S
    assert event == {
        "kind": "stall",
        "actor": "patient",
        "endpoint": name,
        "ranks": ["patient_0"],
        "file": str(file),
    }
    text = file.read_text()
    assert f"patient_0 (process {ward.pid}), " in text
    assert all(frame in text for frame in frames), text


def test_stopped_process_is_named_and_then_closes_in_order(tmp_path: Path) -> None:
    async def scenario(ward: Ward) -> None:
        async def ask_again_and_again() -> None:
            while True:  # it may answer until all of its threads have seen the signal
                await asyncio.wait_for(ward.supervisor.ask("patient.answer", ward.patient.answer.call_one(), 600), 120)

        os.kill(ward.pid, signal.SIGSTOP)
        with pytest.raises(StallError, match=r"patient rank 0 was stopped by a signal [\d.]+ s ago.* patient\.answer; stacks"):
            await ask_again_and_again()
        assert psutil.Process(ward.pid).status() == psutil.STATUS_STOPPED, "the report must not resume it"

    ward = with_ward(tmp_path, scenario)
    text = (tmp_path / "logs" / "stall_1.txt").read_text()
    assert f"patient_0 (process {ward.pid}), stopped by a signal" in text
    assert "Thread" in text


def test_without_py_spy_the_process_writes_its_own_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")

    async def scenario(ward: Ward) -> None:
        call = ward.patient.hang_in_python.call_one()
        with pytest.raises(StallError):
            await ward.supervisor.ask("patient.hang_in_python", call, 600, PATIENT)

    with_ward(tmp_path, scenario)
    text = (tmp_path / "logs" / "stall_1.txt").read_text()
    assert "py-spy dump --native: not installed" in text
    assert "Python stacks of its threads to logs/patient_0.log now" in text
    assert "spin_in_python" in (tmp_path / "logs" / "patient_0.log").read_text()


async def test_run_that_waits_reports_again_after_twice_the_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ward = Ward(tmp_path, on_stall="wait", min_stall_s=0.1)
    await ward.settle(lambda: asyncio.sleep(0))

    async def answer_after_two_reports() -> str:
        while len(ward.warnings) < 2:
            await asyncio.sleep(0.01)
        return "late"

    assert await ward.supervisor.ask("patient.answer", answer_after_two_reports(), 60, PATIENT) == "late"
    with pytest.raises(DeadlineError, match=r"no reply to 'patient\.hang' for 0\.2 s \(the limit"):
        await ward.supervisor.ask("patient.hang", asyncio.sleep(60), 0.2)
    *reported, last = (event["seconds"] for event in ward.events)
    assert reported == pytest.approx([reported[0] * (2**number - 1) for number in range(1, len(reported) + 1)])
    assert last == 0.2
    assert len(ward.warnings) == len(reported)
    assert all("still waiting (faults.on_stall)" in text for text in ward.warnings)


async def test_progress_is_not_a_stall(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ward, finished = Ward(tmp_path, min_stall_s=0.1), iter([1, 2, 3, 4, 4])
    await ward.settle(lambda: asyncio.sleep(0))

    async def progress() -> int:
        return next(finished)

    with pytest.raises(StallError):
        await ward.supervisor.ask("patient.answer", asyncio.sleep(60), 60, Pace(kind="patient.answer", progress=progress))
    (event,) = ward.events
    assert event["seconds"] >= 0.5  # five intervals


def test_reply_that_waited_for_a_replacement_raises_no_deadline(tmp_path: Path) -> None:
    watchdog, now = Watchdog(FaultsConfig(min_stall_s=LIMIT_S), tmp_path), time.perf_counter()
    for _ in range(WARM_UP):
        watchdog.note_reply("buffer.take_batch", Pace(), now)
    learned = watchdog.limit("buffer.take_batch", Pace(), 1800.0)
    watchdog.note_fault()
    watchdog.note_reply("buffer.take_batch", Pace(), now - 30)
    watchdog.note_reply("buffer.take_batch", Pace(since=now - 30), time.perf_counter())
    assert watchdog.limit("buffer.take_batch", Pace(), 1800.0) == learned < 2 * LIMIT_S


async def test_breakpoint_in_the_controller_is_not_a_stall(tmp_path: Path) -> None:
    ward = Ward(tmp_path, min_stall_s=3)
    await ward.settle(lambda: asyncio.sleep(0))

    async def answer_after_a_breakpoint() -> str:
        await asyncio.sleep(0.1)
        time.sleep(4.5)  # blocks the event loop, as pdb does
        await asyncio.sleep(0.5)
        return "answer"

    assert await ward.supervisor.ask("patient.answer", answer_after_a_breakpoint(), 60, PATIENT) == "answer"
    assert ward.events == []


def processes(*names: str) -> list[Process]:
    return [Process(name=name, pid=1) for name in names]


def test_suspects_are_the_processes_that_work_on_the_request() -> None:
    all_of_a_run = processes("trainer_1", "trainer_0", "generator_0_0", "generator_1_0", "rollout_0_0", "store_0")

    def named(request: str) -> list[str]:
        return [process.name for process in suspects(request, all_of_a_run)]

    assert named("trainer.optim_step") == ["trainer_0", "trainer_1"]
    assert named("generator_1.pull_weights") == ["generator_1_0"]
    assert named("generator.stats") == ["generator_0_0", "generator_1_0"]
    assert named("buffer.take_batch") == ["generator_0_0", "generator_1_0", "rollout_0_0", "store_0"]
    assert named("buffer.release") == ["store_0"]
    assert named("shards.save") == ["rollout_0_0"]
    assert len(named("start of the processes")) == len(all_of_a_run)


def test_stall_names_the_ranks_of_each_role() -> None:
    stall = Stall(
        request="rollout.evaluate", seconds=31.0, suspects=tuple(processes("generator_0_0", "rollout_0_0", "rollout_1_0"))
    )
    assert (stall.actor, stall.endpoint) == ("rollout", "evaluate")
    named = "generator_0 rank 0 and rollout_0 rank 0 and rollout_1 rank 0"
    assert str(stall) == f"no reply to 'rollout.evaluate' for 31 s from {named}"


def test_stopped_process_is_the_actor_of_its_stall() -> None:
    stall = Stall(request="buffer.take_batch", seconds=31.0, suspects=tuple(processes("generator_0_0")), are_stopped=True)
    assert (stall.actor, stall.endpoint) == ("generator_0", "buffer.take_batch")
    assert str(stall) == "generator_0 rank 0 was stopped by a signal 31 s ago, while waiting for: buffer.take_batch"


STEP = "trainer.optim_step"


def learned(*seconds: float) -> Watchdog:
    watchdog = Watchdog(FaultsConfig(stall_factor=10, min_stall_s=30), Path("unused"))
    for value in seconds:
        learn(watchdog, value)
    return watchdog


def learn(watchdog: Watchdog, seconds: float) -> None:
    watchdog.note_reply(STEP, Pace(), time.perf_counter() - seconds)


def test_first_requests_have_the_configured_deadline() -> None:
    watchdog = learned(*[0.1] * (WARM_UP - 1))
    assert watchdog.limit(STEP, Pace(), 1800) == 1800
    learn(watchdog, 0.1)
    assert watchdog.limit(STEP, Pace(), 1800) == 30


@pytest.mark.parametrize(
    ("slowest", "hard_s", "min_s", "expected"),
    [
        (0.4, 1800, 0, 30),
        (7.0, 1800, 0, 70),
        (7.0, 60, 0, 60),
        (0.4, 4, 0, 4),
        (0.4, 1800, 300, 300),
        (0.4, 100, 300, 100),
    ],
)
def test_deadline_is_ten_times_the_slowest_reply_within_bounds(
    slowest: float, hard_s: float, min_s: float, expected: float
) -> None:
    assert learned(0.2, slowest, 0.1).limit(STEP, Pace(min_s=min_s), hard_s) == pytest.approx(expected, rel=0.05)


async def test_failed_requests_teach_no_deadline() -> None:
    async def refuse() -> None:
        raise ValueError("refused")

    watchdog = learned()
    supervisor = Supervisor(watchdog=watchdog)
    for _ in range(WARM_UP):
        with pytest.raises(ValueError, match="refused"):
            await supervisor.ask(STEP, refuse(), 1800)
    assert watchdog.limit(STEP, Pace(), 1800) == 1800
    for _ in range(WARM_UP):
        await supervisor.ask(STEP, asyncio.sleep(0), 1800)
    assert watchdog.limit(STEP, Pace(), 1800) == 30
    supervisor.expect_deaths()


def test_slow_reply_is_forgotten_after_a_hundred_others() -> None:
    watchdog = learned(60.0, *[0.1] * (WINDOW - 1))
    assert watchdog.limit(STEP, Pace(), 1800) == pytest.approx(600, rel=1e-3)
    learn(watchdog, 0.1)
    assert watchdog.limit(STEP, Pace(), 1800) == 30


def test_kinds_of_requests_do_not_share_their_times() -> None:
    watchdog = learned(60.0, 60.0, 60.0)
    assert watchdog.limit("trainer.push_weights", Pace(), 600) == 600
    assert watchdog.known(STEP, Pace()) == "the slowest of the last 3 took 60 s"
    assert watchdog.known("trainer.push_weights", Pace()) == ""
