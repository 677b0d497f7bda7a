"""Shared buffer of several processes: writes, draws, rows, hosts and saved states."""

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.replay.processes import EXAMPLE, end, items, start, two_hosts, write, write_one
from titanrl.replay import EmptyReplayError, PrioritizedReplay, ReplayClosedError, ReplayFullError, Shard, SharedReplay


@pytest.fixture
def replay() -> Iterator[SharedReplay]:
    with SharedReplay(4, EXAMPLE, spare=4, eps=0.0, alpha=1.0) as buffer:
        yield buffer


def other(replay: SharedReplay) -> SharedReplay:
    """Return a second client, as in another process."""
    client: SharedReplay = pickle.loads(pickle.dumps(replay))
    return client


@pytest.mark.parametrize("shards", [1, 2, "two hosts"])
def test_four_processes_write_every_item_once(shards: Any) -> None:
    with ExitStack() as stack:
        if shards == "two hosts":
            replay = stack.enter_context(two_hosts(10_000, EXAMPLE))
            hosts: list[str | None] = ["a", "b", "a", "b"]
        else:
            replay, hosts = stack.enter_context(SharedReplay(10_000, EXAMPLE, shards=shards)), [None] * 4
        end([start(write, replay, host, 2500 * writer, 2500) for writer, host in enumerate(hosts)])
        for host in set(hosts):
            state = (replay if host is None else replay.on_host(host)).state_dict()
            assert len(replay) == 10_000
            assert sorted(state["payload"]["id",]) == list(range(10_000))
            assert (state["payload"]["row",] == state["payload"]["id",][:, None]).all()
            assert state["owners"].tolist() == list(range(10_000))


def test_spawned_process_gets_its_own_client(replay: SharedReplay) -> None:
    process = multiprocessing.get_context("spawn").Process(target=write_one, args=(replay, 7))
    process.start()
    assert replay.sample(1, timeout_s=60).payload["id"].tolist() == [7]
    process.join(60)
    assert process.exitcode == 0


def fill(buffer: Any) -> list[list[int]]:
    """Write and draw; return the drawn handles."""
    rng = np.random.default_rng(0)
    drawn = []
    for step in range(12):
        ids = rng.integers(0, 1000, 30)
        buffer.extend(items(ids), rng.lognormal(size=30), versions=step)
        buffer.set_step(step)
        batch = buffer.sample(50)
        buffer.update_priorities(batch.handles, rng.lognormal(size=50))
        drawn.append(batch.handles.tolist())
    return drawn


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_draws_equal_those_of_a_buffer_in_one_process(shards: int) -> None:
    alone = PrioritizedReplay(100, seed=3, beta_steps=10)
    expected = fill(alone)
    with SharedReplay(100, EXAMPLE, shards=shards, seed=3, beta_steps=10) as replay:
        assert fill(replay) == expected
        one, shared = alone.sample(200), replay.sample(200)
        for name in ("handles", "weights", "probabilities", "versions"):
            assert (getattr(one, name) == getattr(shared, name)).all()
        assert (one.payload["row"] == shared.payload["row"]).all()
        assert (replay.beta, len(replay)) == (alone.beta, len(alone))


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_state_loads_with_other_shards_and_into_one_process(shards: int) -> None:
    with SharedReplay(100, EXAMPLE, shards=2, seed=3) as replay:
        fill(replay)
        replay.reserve(10)
        state = pickle.loads(pickle.dumps(replay.state_dict()))
        expected = [replay.sample(100) for _ in range(10)]
    alone = PrioritizedReplay(100)
    with SharedReplay(100, EXAMPLE, shards=shards) as restored:
        restored.extend(items(range(50)))
        restored.load_state_dict(state)
        alone.load_state_dict(state)
        for batch in expected:
            for again in (restored.sample(100), alone.sample(100)):
                assert (again.handles == batch.handles).all()
                assert (again.weights == batch.weights).all()
                assert (again.payload["row"] == batch.payload["row"]).all()
        assert restored.extend(items([1])).tolist() == [370]


def test_reservation_from_before_a_restore_is_stale(replay: SharedReplay) -> None:
    replay.extend(items(range(4)))
    state, writer = replay.state_dict(), other(replay)
    late = writer.reserve(1)
    replay.load_state_dict(state)
    assert replay.reserve(1).tolist() == [late[0] + 1]  # the writer may still write the row of the number before
    assert writer.commit(late, items([77])) == 1
    writer.close()
    assert 77 not in replay.sample(100).payload["id"]


def test_tensors_and_nested_payloads_keep_their_types() -> None:
    example = {"obs": {"image": torch.zeros(2, 3, dtype=torch.bfloat16), "is_end": torch.tensor(False)}, "n": np.int16(0)}
    payload = {
        "obs": {"image": torch.arange(24, dtype=torch.bfloat16).reshape(4, 2, 3), "is_end": torch.tensor([True, False] * 2)},
        "n": np.arange(4, dtype=np.int16),
    }
    with SharedReplay(4, example, shards=2) as replay:
        replay.extend(payload)
        replay.put({"obs": {"image": torch.ones(2, 3, dtype=torch.bfloat16), "is_end": torch.tensor(True)}, "n": np.int16(9)})
        batch = other(replay).sample(50)
    for row, handle in enumerate(batch.handles.tolist()):
        expected = torch.ones(2, 3, dtype=torch.bfloat16) if handle == 4 else payload["obs"]["image"][handle]  # type: ignore[index]
        assert torch.equal(batch.payload["obs"]["image"][row], expected)
        assert batch.payload["n"][row] == (9 if handle == 4 else handle)
    assert (batch.payload["n"].dtype, batch.payload["obs"]["is_end"].dtype) == (np.int16, torch.bool)


def test_row_being_copied_is_not_overwritten(replay: SharedReplay) -> None:
    replay.extend(items(range(4)))
    drawn, ticket = replay._link.call("draw", 20, 0.0)
    writer = other(replay)
    writer.extend(items(range(10, 14)))
    handles = writer.reserve(4)  # the other rows
    with pytest.raises(ReplayFullError, match=r"spare: no rows for 1 items .*got 4; writers hold 4 rows, readers 4"):
        writer.reserve(1, timeout_s=0.05)
    assert (replay._shards().read(drawn.handles)["id"] == drawn.handles).all()
    waiting = threading.Thread(target=writer.extend, args=(items(range(20, 24)),))
    waiting.start()
    replay._link.send("done", ticket)
    waiting.join(20)
    assert writer.commit(handles, items(range(14, 18))) == 4
    assert set(replay.sample(200).payload["id"]) == {20, 21, 22, 23}


def test_overtaken_writer_does_not_write_into_another_item(replay: SharedReplay) -> None:
    slow = other(replay)
    late = slow.reserve(4)
    replay.extend(items(range(4)))
    assert slow.commit(late, items([90, 91, 92, 93])) == 4
    assert set(replay.sample(200).payload["id"]) == {0, 1, 2, 3}
    replay.extend(items(range(10, 14)))  # its rows are free again
    assert set(replay.sample(200).payload["id"]) == {10, 11, 12, 13}


def test_reserved_item_is_sampled_only_after_its_commit(replay: SharedReplay) -> None:
    handles = replay.reserve(2)
    with pytest.raises(EmptyReplayError, match=r"no item was committed \(2 are reserved\)"):
        replay.sample(1, timeout_s=0.0)
    assert replay.commit(handles[:1], items([5]), [2.0]) == 0
    assert set(replay.sample(50).payload["id"]) == {5}
    assert replay.release(handles) == 0
    assert len(replay) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda replay: replay.extend({"id": np.zeros(2, np.int64)}), "keys changed"),
        (lambda replay: replay.extend({"id": np.zeros(2), "row": np.zeros((2, 16), np.float32)}), r"payload\.id: the type"),
        (lambda replay: replay.reserve(5), r"num_items: .*got 5.*1 to 4"),
        (lambda replay: replay.reserve(1, lease_s=0), "lease_s"),
        (lambda replay: replay.commit([0], items([1])), r"handles: not reserved by this process.*got 0"),
        (lambda replay: replay.update_priorities([7], [1.0]), "handles: not handles of this buffer"),
        (lambda replay: replay.set_step(-1), "step"),
        (lambda replay: replay.sample(0), "batch_size"),
    ],
)
def test_invalid_call_names_the_argument_and_changes_nothing(replay: SharedReplay, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(replay)
    assert replay.stats().num_reserved == 0
    replay.put({"id": 1, "row": np.ones(16, np.float32)})
    assert replay.sample(1).payload["id"].tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"spare": 0}, "spare"),
        ({"shards": []}, "shards"),
        ({"example": {"text": "a"}}, r"payload\.text: a shared buffer stores arrays.*got str"),
        ({"example": {"x": np.zeros(0)}}, r"payload\.x: an item has no elements"),
        ({"capacity": 10**6, "example": {"x": np.zeros(10**6)}}, r"folder: no room for a shard of [\d,]+ bytes \(got /"),
        ({"address": ("192.0.2.1", 0)}, "address: cannot listen"),
    ],
)
def test_error_names_the_invalid_option(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedReplay(**{"capacity": 4, "example": EXAMPLE, "folder": str(tmp_path), **options})
    assert not any(tmp_path.iterdir())


def test_error_names_a_shard_without_a_server() -> None:
    message = r"shard 0: no process serves it .*serve_shard\(replay, 0\) on elsewhere"
    shards = [Shard("/dev/shm", "elsewhere")]
    with SharedReplay(4, EXAMPLE, shards=shards, reply_s=1.0) as replay, pytest.raises(ReplayClosedError, match=message):
        replay.extend(items([1]))


def test_forked_client_has_its_own_session(replay: SharedReplay) -> None:
    replay.reserve(2)
    process = multiprocessing.get_context("fork").Process(target=replay.extend, args=(items([8]),))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert replay.sample(1).payload["id"].tolist() == [8]
    assert replay.stats().num_expired == 0  # the end of the fork is not the end of this process
