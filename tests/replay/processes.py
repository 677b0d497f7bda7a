"""Functions that tests of the shared buffer run in separate processes. They import neither torch nor pytest."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import numpy as np

from titanrl.replay import Shard, SharedReplay, serve_shard

EXAMPLE = {"id": 0, "row": np.zeros(16, np.float32)}
CONTEXT = multiprocessing.get_context("spawn")  # a process has one fork server, which the tests of the trainer set up


def start(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    process = CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def end(processes: Sequence[ForkServerProcess], timeout_s: float = 60.0) -> None:
    """Wait until processes have exited successfully."""
    for process in processes:
        process.join(timeout_s)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@contextmanager
def two_hosts(capacity: int, example: Any, **options: Any) -> Iterator[SharedReplay]:
    """Emulate hosts "a" and "b" with one shard each. Clients select their host with `on_host`."""
    shards = [Shard("/dev/shm", "a"), Shard("/dev/shm", "b")]
    with SharedReplay(capacity, example, shards=shards, **options) as replay:
        servers = [start(serve_shard, replay, number) for number in range(2)]
        yield replay
    end(servers)


def items(ids: Any) -> dict[str, Any]:
    ids = np.asarray(ids, np.int64)
    return {"id": ids, "row": np.repeat(ids[:, None].astype(np.float32), 16, axis=1)}


def write(replay: SharedReplay, host: str | None, first: int, count: int) -> None:
    client = replay if host is None else replay.on_host(host)
    for start_id in range(first, first + count, 100):
        client.extend(items(np.arange(start_id, start_id + 100)))


def write_one(replay: SharedReplay, value: int) -> None:
    replay.extend(items([value]))


def reserve_and_stay(replay: SharedReplay, count: int, connection: Connection) -> None:
    connection.send(replay.reserve(count).tolist())
    threading.Event().wait()


def work(replay: SharedReplay) -> None:
    while len((task := replay.take_work(16)).indices):
        replay.commit(task.handles, items(task.indices))


def overwrite(replay: SharedReplay) -> None:
    """Write rows filled with their handle, as fast as possible, until this process is killed."""
    while True:
        handles = replay.reserve(2)
        replay.commit(handles, {"row": np.repeat(handles[:, None], 16_384, axis=1)})


def check_rows(replay: SharedReplay, num_batches: int) -> None:
    """Fail if a row is torn or belongs to another item."""
    for _ in range(num_batches):
        batch = replay.sample(32)
        assert (batch.payload["row"] == batch.handles[:, None]).all(), "torn row"


def own_a_buffer(connection: Connection) -> None:
    with SharedReplay(4, EXAMPLE) as replay:
        replay.extend(items([1]))
        connection.send((replay, [str(folder) for folder in replay._folders]))
        threading.Event().wait()
