"""Spans of a process: merged, cut, written in the background."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recorded import coverage
from titanrl.carriers.record import RecordFile, Timeline, close_timeline, open_timeline, process_start, span
from titanrl.metrics.reading import RunRecord, Span


@pytest.fixture(autouse=True)
def no_timeline_stays_open() -> Iterator[None]:
    yield
    close_timeline()


def spans(run_dir: Path, name: str) -> list[Span]:
    return [found for found in RunRecord(run_dir).spans() if found.name == name]


def test_span_has_name_kind_times_step_and_version(tmp_path: Path) -> None:
    open_timeline(tmp_path, "trainer_0", 10**6, is_server=False)
    before = time.time()
    with span("push", version=3):
        time.sleep(0.05)
    after = time.time()
    with span("step", "phase", step=7):
        pass
    close_timeline()
    (push,), (step,) = spans(tmp_path, "push"), spans(tmp_path, "step")
    assert (push.process, push.kind, push.step, push.version, push.count) == ("trainer_0", "work", None, 3, 1)
    assert before - 0.02 < push.start < after - 0.03
    assert 0.05 <= push.seconds == push.busy_s < after - before + 0.02
    assert (step.kind, step.step, step.version) == ("phase", 7, None)


def test_spans_without_a_timeline_are_not_recorded(tmp_path: Path) -> None:
    with span("compute"):
        pass
    open_timeline(tmp_path, "trainer_0", 10**6, is_server=False)
    close_timeline()
    assert RunRecord(tmp_path).spans() == []


def test_short_spans_are_merged_but_their_pauses_are_not_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.carriers.record.MERGE_S", 1.0)  # for a busy machine
    open_timeline(tmp_path, "generator_0_0", 10**6, is_server=False)
    for _ in range(20):
        with span("decode"):
            time.sleep(0.002)
        time.sleep(0.001)
    close_timeline()
    found = spans(tmp_path, "decode")
    assert sum(each.count for each in found) == 20
    assert len(found) < 10
    assert sum(each.busy_s for each in found) < sum(each.seconds for each in found)


def test_overlapping_spans_of_tasks_and_threads_are_one_line(tmp_path: Path) -> None:
    open_timeline(tmp_path, "rollout_0", 10**6, is_server=False)
    all_open, before = threading.Barrier(6), time.monotonic()

    async def wait(seconds: float) -> None:
        with span("wait for the generators", "wait"):
            await asyncio.to_thread(all_open.wait, 60)
            await asyncio.sleep(seconds)

    async def both() -> None:
        await asyncio.gather(wait(0.1), wait(0.2))

    threads = [threading.Thread(target=asyncio.run, args=(both(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close_timeline()
    elapsed = time.monotonic() - before
    (found,) = spans(tmp_path, "wait for the generators")
    assert (found.kind, found.count) == ("wait", 6)
    assert 0.2 <= found.busy_s <= found.seconds < elapsed


def test_open_spans_are_written_when_the_timeline_closes(tmp_path: Path) -> None:
    open_timeline(tmp_path, "rollout_0", 10**6, is_server=False)
    with span("score"):
        time.sleep(0.05)
        close_timeline()
    (found,) = spans(tmp_path, "score")
    assert found.seconds >= 0.05


def test_spans_are_written_while_the_process_runs(tmp_path: Path) -> None:
    open_timeline(tmp_path, "rollout_0", 10**6, is_server=False)
    with span("score"):
        pass
    deadline = time.monotonic() + 20
    while not spans(tmp_path, "score"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_server_is_idle_whenever_no_span_is_open(tmp_path: Path) -> None:
    times = [time.monotonic()]  # a busy machine may pause between any two lines

    def note(sleep_s: float = 0.0) -> None:
        time.sleep(sleep_s)
        times.append(time.monotonic())

    open_timeline(tmp_path, "trainer_0", 10**6, is_server=True, since=process_start())
    note()
    note(0.2)
    with span("compute"), span("wait for rollouts", "wait"):
        note()
        note(0.1)
    note()
    note(0.3)  # a planted sleep outside any span
    close_timeline()
    note()
    first, second = spans(tmp_path, "idle")
    assert (first.kind, second.kind) == ("wait", "wait")
    assert times[2] - times[1] - 0.01 < first.seconds < times[3] - times[0] + 0.01
    assert times[6] - times[5] - 0.01 < second.seconds < times[7] - times[4] + 0.01
    (process,) = RunRecord(tmp_path).processes()
    assert (process.name, process.pid) == ("trainer_0", os.getpid())
    assert process.start == pytest.approx(process_start(), abs=0.05)
    assert coverage(RunRecord(tmp_path), "trainer_0") > 0.99


def test_span_costs_microseconds(tmp_path: Path) -> None:
    open_timeline(tmp_path, "trainer_0", 10**6, is_server=True)
    started = time.process_time()
    for _ in range(10_000):
        with span("compute"):
            pass
    assert time.process_time() - started < 1.0  # 100 microseconds each, ten times more than measured


def test_spans_beyond_the_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.carriers.record.MAX_QUEUED", 10)
    open_timeline(tmp_path, "trainer_0", 10**6, is_server=False)
    for number in range(50):
        with span("step", "phase", step=number):
            pass
    close_timeline()
    run = RunRecord(tmp_path)
    assert len(spans(tmp_path, "step")) + run.dropped()["spans"] == 50
    assert run.dropped()["spans"] >= 30


def test_close_returns_although_the_thread_has_just_stopped_waiting_for_it(tmp_path: Path) -> None:
    is_closed = threading.Event()

    class Closing(threading.Event):
        """An event that is set right after the end of a `wait`."""

        def wait(self, timeout: float | None = None) -> bool:
            is_closed.wait()
            return False

    class Due(threading.Event):
        def set(self) -> None:
            super().set()
            is_closed.set()

    timeline = Timeline(RecordFile(tmp_path, "spans", "trainer_0", 10**6), is_server=True)
    first, timeline._due, timeline._closing = timeline._due, Due(), Closing()
    first.set()
    closing = threading.Thread(target=timeline.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
