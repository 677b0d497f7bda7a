"""Shared buffer with killed or stopped processes, or with items that are all too old."""

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay.processes import (
    CONTEXT,
    EXAMPLE,
    check_rows,
    end,
    items,
    overwrite,
    own_a_buffer,
    reserve_and_stay,
    start,
    two_hosts,
    work,
)
from titanrl.replay import EmptyReplayError, PrioritizedReplay, ReplayClosedError, SharedReplay


def test_slots_of_a_killed_writer_are_freed() -> None:
    with SharedReplay(3, EXAMPLE, spare=1) as replay:
        ours, theirs = CONTEXT.Pipe()
        writer = start(reserve_and_stay, replay, 3, theirs)
        assert ours.recv() == [0, 1, 2]
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        handles = replay.reserve(3, timeout_s=20)  # needs the rows of the writer
        assert replay.stats().num_expired == 3
        with pytest.raises(EmptyReplayError, match="no item was committed"):
            replay.sample(1, timeout_s=0)
        assert replay.commit(handles, items([1, 2, 3])) == 0
        assert set(replay.sample(100).payload["id"]) == {1, 2, 3}


def test_expired_lease_is_never_sampled_and_its_commit_is_stale() -> None:
    with SharedReplay(4, EXAMPLE, num_work=2) as replay:
        slow: SharedReplay = pickle.loads(pickle.dumps(replay))
        late = slow.take_work(2, lease_s=0.05)
        again = replay.take_work(2, timeout_s=20)  # waits until the lease is over
        assert (late.indices.tolist(), again.indices.tolist()) == ([0, 1], [0, 1])
        assert replay.commit(again.handles, items([10, 11])) == 0
        assert slow.commit(late.handles, items([90, 91])) == 2
        assert set(replay.sample(100).payload["id"]) == {10, 11}
        stats = replay.stats()
        assert (stats.num_items, stats.num_expired, stats.num_stale_commits) == (2, 2, 2)
        assert len(replay.take_work(1).indices) == 0


def test_waiting_for_work_held_by_others_has_a_deadline() -> None:
    with SharedReplay(4, EXAMPLE, num_work=1) as replay:
        replay.take_work(1)
        with pytest.raises(EmptyReplayError, match=r"take_work: .* reserved by others after 0\.05 s \(1 items\)"):
            replay.take_work(1, timeout_s=0.05)


def test_killed_writers_neither_lose_nor_duplicate_groups() -> None:
    rng = random.Random(0)
    with SharedReplay(12_000, EXAMPLE, shards=2, num_work=10_000) as replay:
        writers = [start(work, replay) for _ in range(4)]
        num_kills = 0
        while writers:
            wait([writer.sentinel for writer in writers], rng.uniform(0.01, 0.05))
            ended = [writer for writer in writers if writer.exitcode == 0]
            writers = [writer for writer in writers if writer not in ended]
            if writers and num_kills < 25:
                victim = rng.choice(writers)
                victim.kill()
                victim.join()
                num_kills += victim.exitcode == -signal.SIGKILL
                writers[writers.index(victim)] = start(work, replay)
        assert num_kills >= 3
        stats, state = replay.stats(), replay.state_dict()
    written = state["payload"]["id",][state["owners"] >= 0]
    assert stats.num_committed == 10_000
    assert sorted(written.tolist()) == list(range(10_000))


def test_uncommitted_work_is_done_after_a_restore() -> None:
    with SharedReplay(8, EXAMPLE, num_work=5) as replay:
        first, second = replay.take_work(2), replay.take_work(1)
        replay.commit(first.handles[:1], items(first.indices[:1]))
        state = replay.state_dict()
        assert second.indices.tolist() == [2]
    with SharedReplay(8, EXAMPLE, num_work=5) as restored:
        restored.load_state_dict(state)
        work = restored.take_work(8)
        assert work.indices.tolist() == [1, 2, 3, 4]
        assert restored.commit(work.handles, items(work.indices)) == 0
        assert sorted(set(restored.sample(200).payload["id"].tolist())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("hosts", [False, True])
def test_reader_never_sees_a_row_being_overwritten(hosts: bool) -> None:
    example = {"row": np.zeros(16_384, np.int64)}
    options = {"spare": 16, "initial_priority": 1.0}
    context = two_hosts(8, example, **options) if hosts else SharedReplay(8, example, **options)
    with context as replay:
        clients = [replay.on_host("a"), replay.on_host("b")] if hosts else [replay, replay]
        writers = [start(overwrite, client) for client in clients]
        end([start(check_rows, client, 20) for client in clients])
        for writer in writers:
            writer.kill()
            writer.join()


def test_calls_fail_immediately_when_the_owner_is_killed() -> None:
    with SharedReplay(4, EXAMPLE) as replay:
        assert replay._process is not None
        failed: list[str] = []

        def sample() -> None:
            try:
                replay.sample(1, timeout_s=200)
            except ReplayClosedError as error:
                failed.append(str(error))

        reader = threading.Thread(target=sample)
        reader.start()
        replay.reserve(1)
        replay._process.kill()
        reader.join(20)
        assert [error.startswith("replay buffer does not respond: ") for error in failed] == [True]
        with pytest.raises(ReplayClosedError):
            replay.extend(items([1]))
        folders = replay._folders
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(ReplayClosedError, match="this client was closed"):
        replay.stats()


def test_calls_to_a_stopped_owner_fail_at_their_deadline() -> None:
    with SharedReplay(4, EXAMPLE, reply_s=1.0) as replay:
        replay.extend(items([1]))
        late = pickle.loads(pickle.dumps(replay))
        os.kill(replay._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, replay._process.pid, os.WSTOPPED)
        started = time.monotonic()
        try:
            for client in (replay, late):
                with pytest.raises(ReplayClosedError, match=r"no reply after 1 s"):
                    client.sample(1, timeout_s=0.0)
        finally:
            os.kill(replay._process.pid, signal.SIGCONT)
        assert time.monotonic() - started < 20
        assert replay.sample(1).payload["id"].tolist() == [1]


def test_owner_exits_with_its_parent_process() -> None:
    ours, theirs = CONTEXT.Pipe()
    process = start(own_a_buffer, theirs)
    replay, folders = ours.recv()
    assert replay.sample(1).payload["id"].tolist() == [1]
    waiting = threading.Thread(target=replay._link.wait_until_closed)
    waiting.start()
    process.kill()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not any(Path(folder).exists() for folder in folders)


Buffer = PrioritizedReplay | SharedReplay


@pytest.fixture(params=["one process", "shared"])
def buffers(request: pytest.FixtureRequest) -> Iterator[Callable[..., Buffer]]:
    """Yield a function that creates a buffer of 4 slots."""
    opened: list[SharedReplay] = []

    def create(**options: Any) -> Buffer:
        if request.param == "one process":
            return PrioritizedReplay(4, **options)
        opened.append(SharedReplay(4, EXAMPLE, **options))
        return opened[-1]

    yield create
    for buffer in opened:
        buffer.close()


def test_reader_waits_for_fresh_items_and_its_error_names_the_reason(buffers: Callable[..., Buffer]) -> None:
    replay = buffers(max_staleness=1)
    replay.extend(items([0, 1, 2]), versions=[3, 2, 1])
    replay.set_version(5)
    with pytest.raises(
        EmptyReplayError, match=r"after 0\.05 s: all 3 items are too old \(newest: version 3; current version 5"
    ):
        replay.sample(2, timeout_s=0.05)
    writer = threading.Timer(0.1, lambda: (replay.extend(items([7]), versions=3), replay.extend(items([8]), versions=4)))
    writer.start()
    assert set(replay.sample(20, timeout_s=20).payload["id"].tolist()) == {8}
    writer.join()
