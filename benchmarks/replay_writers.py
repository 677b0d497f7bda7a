"""Measure the throughput of processes that write items of 64 kB to one shared buffer, on one and on two emulated hosts."""

import multiprocessing
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from titanrl.replay import Shard, SharedReplay, serve_shard

ITEM_BYTES = 65_536
CAPACITY, CHUNK = 2048, 16
SECONDS = 4.0
CASES = ((1, 1), (4, 1), (1, 2), (4, 2))
"""Numbers of writers and hosts."""


def measure_writers() -> list[dict[str, Any]]:
    """Return one case per number of writers and hosts, each with its speed relative to one writer on one host."""
    speeds = {case: items_per_s(*case) for case in CASES}
    return [
        {
            "writers": writers,
            "hosts": hosts,
            "items_per_s": round(speed),
            "mb_per_s": round(speed * ITEM_BYTES / 1e6),
            "ratio_vs_one_writer": round(speed / speeds[1, 1], 2),
        }
        for (writers, hosts), speed in speeds.items()
    ]


def items_per_s(num_writers: int, num_hosts: int) -> float:
    """Return the items that all writers together commit per second; with two hosts, half of the items are on the other host."""
    context = multiprocessing.get_context("spawn")
    example = {"item": np.zeros(ITEM_BYTES, np.uint8)}
    with ExitStack() as stack:
        if num_hosts == 1:
            replay = stack.enter_context(SharedReplay(CAPACITY, example))
            clients = [replay] * num_writers
        else:
            shards = [Shard("/dev/shm", f"host-{number}") for number in range(num_hosts)]
            replay = stack.enter_context(SharedReplay(CAPACITY, example, shards=shards))
            for number in range(num_hosts):
                context.Process(target=serve_shard, args=(replay, number), daemon=True).start()
            clients = [replay.on_host(f"host-{writer % num_hosts}") for writer in range(num_writers)]
        start = context.Barrier(num_writers + 1)
        writers = [context.Process(target=write, args=(client, start), daemon=True) for client in clients]
        for writer in writers:
            writer.start()
        start.wait()
        before, started = replay.stats().num_committed, time.perf_counter()
        ended = wait([writer.sentinel for writer in writers], timeout=SECONDS)
        assert not ended, "a writer exited early; its output has the error"
        speed = (replay.stats().num_committed - before) / (time.perf_counter() - started)
        for writer in writers:
            writer.terminate()
            writer.join()
        return speed


def write(replay: SharedReplay, start: Barrier) -> None:
    """Write until this process is terminated. The first pass over the buffer touches its memory, so it is not measured."""
    payload = {"item": np.ones((CHUNK, ITEM_BYTES), np.uint8)}
    for _ in range(CAPACITY // CHUNK):
        replay.extend(payload)
    start.wait()
    while True:
        replay.extend(payload)
