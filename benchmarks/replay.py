"""Compare prioritized replay with TorchRL's: sample, update and extend by 256. `python -m benchmarks.replay --json FILE`.

TorchRL's wheels load only with the torch version that they were built for, so the benchmark installs both into a separate
environment, once. Both buffers hold the same small tensors on one thread, and alternate, so that other load on the machine hits
both. Afterwards, one and four processes write items of 64 kB to one shared buffer, on one host and on two emulated ones.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.machine import write_result

ROOT = Path(__file__).parents[1]
PEER = ("torchrl==0.14.1", "tensordict>=0.14.3,<0.15", "torch==2.14.1")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SIZES = (10_000, 100_000, 1_000_000)
OPERATIONS = ("sample", "update", "extend")
BATCH = 256
ALPHA, BETA = 0.6, 0.4
NUM_ROUNDS, NUM_CALLS = 20, 25
MAX_WAIT_S = 300


class Buffer(Protocol):
    """Buffer with the three calls that are timed."""

    def sample(self, count: int) -> object:
        """Draw `count` items."""

    def update(self, index: Any, priorities: Any) -> object:
        """Set priorities of items."""

    def extend(self, items: Mapping[str, Any]) -> object:
        """Write items."""


def main() -> None:
    """Measure both buffers and the writers, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="ITEMS")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        serve_peer()
        return
    from benchmarks.replay_writers import measure_writers  # the peer's environment lacks its packages

    cases = measure(peer_python(ROOT / "cache/replay_peer"), arguments.sizes)
    growth = {}
    for operation in OPERATIONS:
        times = {case["items"]: case["ours_us"] for case in cases if case["operation"] == operation}
        growth[operation] = round(times[max(times)] / times[min(times)], 2)
    result = {"peer": PEER, "batch": BATCH, "growth": growth, "cases": cases, "writers": measure_writers()}
    write_result(arguments.json, "replay", result)


def peer_python(folder: Path) -> str:
    """Return the interpreter of TorchRL's environment; create the environment if it does not work yet."""
    python = str(folder / "bin/python")
    works = [python, "-c", "from torchrl import _torchrl"]
    if Path(python).exists() and subprocess.run(works, capture_output=True, check=False).returncode == 0:
        return python
    print(f"installing {', '.join(PEER)} into {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    build = PEER[2] + "+cpu"
    has_cpu_build = subprocess.run(
        [*install, "--index-url", TORCH_CPU_INDEX, "--retries", "0", "--timeout", "10", build], check=False
    )
    if has_cpu_build.returncode:
        print(f"{build} is not available; installing the default build, which also runs on CPU", file=sys.stderr)
    subprocess.run([*install, *PEER], check=True)
    subprocess.run(works, check=True)
    return python


def measure(python: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one case per operation and size."""
    peer = subprocess.Popen(
        [python, "-m", "benchmarks.replay", "--peer", "--json", "-"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdin
    cases = []
    try:
        for size in sizes:
            ours = Timer(our_buffer(size), size)
            ask(peer, "build", size)
            for operation in OPERATIONS:
                pairs = [(ours.time(operation), ask(peer, "time", operation)) for _ in range(NUM_ROUNDS)]
                our_us, peer_us = (statistics.median(times) for times in zip(*pairs, strict=True))
                case = {"operation": operation, "items": size, "ours_us": round(our_us, 1), "torchrl_us": round(peer_us, 1)}
                cases.append({**case, "ratio_vs_torchrl": round(our_us / peer_us, 3)})
    finally:
        peer.stdin.close()
        peer.wait(MAX_WAIT_S)
    return cases


def ask(peer: "subprocess.Popen[str]", *request: object) -> float:
    """Send a request to the peer's process and return its reply."""
    assert peer.stdin
    assert peer.stdout
    peer.stdin.write(json.dumps(request) + "\n")
    peer.stdin.flush()
    return float(json.loads(peer.stdout.readline()))


def serve_peer() -> None:
    """Serve requests from standard input: build a buffer, or time an operation."""
    replies, sys.stdout = sys.stdout, sys.stderr  # TorchRL logs to stdout
    timer = None
    for line in sys.stdin:
        verb, value = json.loads(line)
        if verb == "build":
            timer = None  # frees the previous one
            timer = Timer(peer_buffer(value), value)
        assert timer is not None
        print(json.dumps(0.0 if verb == "build" else timer.time(value)), file=replies, flush=True)


class Timer:
    """Timer of calls on a full buffer; each call uses different items."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        """Fill the buffer and give its items random priorities."""
        import torch

        torch.set_num_threads(1)
        self._buffer = buffer
        self._rng = np.random.default_rng(0)
        self._size = size
        self._items = items(BATCH)
        for start in range(0, size, 10_000):
            buffer.extend(items(min(10_000, size - start)))
        buffer.update(torch.arange(size), torch.from_numpy(self._rng.random(size, np.float32)))

    def time(self, operation: str) -> float:
        """Return the mean time of a call, in microseconds."""
        import torch

        indices = [torch.from_numpy(self._rng.integers(0, self._size, BATCH)) for _ in range(NUM_CALLS)]
        priorities = [torch.from_numpy(self._rng.random(BATCH, np.float32)) for _ in range(NUM_CALLS)]
        total_s = 0.0
        for index, values in zip(indices, priorities, strict=True):
            started = time.perf_counter()
            if operation == "sample":
                self._buffer.sample(BATCH)
            elif operation == "update":
                self._buffer.update(index, values)
            else:
                self._buffer.extend(self._items)
            total_s += time.perf_counter() - started
            if operation == "sample":  # priorities change between draws, as they do in training
                self._buffer.update(index, values)
        return 1e6 * total_s / NUM_CALLS


def items(count: int) -> dict[str, Any]:
    """Return random transitions of a small task."""
    import torch

    return {
        "obs": torch.randn(count, 8),
        "next_obs": torch.randn(count, 8),
        "action": torch.randint(4, (count,)),
        "reward": torch.randn(count),
    }


def our_buffer(size: int) -> Buffer:
    """Build TitanRL's buffer. The handle of an item is its slot plus a multiple of the buffer size."""
    from titanrl.replay import PrioritizedReplay

    class Ours:
        def __init__(self) -> None:
            self.replay = PrioritizedReplay(size, alpha=ALPHA, beta=BETA)
            self.oldest = -size

        def sample(self, count: int) -> object:
            return self.replay.sample(count)

        def update(self, index: Any, priorities: Any) -> object:
            return self.replay.update_priorities(index.numpy() + self.oldest, priorities)

        def extend(self, items: Mapping[str, Any]) -> object:
            self.oldest += len(items["reward"])
            return self.replay.extend(items)

    return Ours()


def peer_buffer(size: int) -> Buffer:
    """Build TorchRL's buffer, with its C++ trees."""
    from tensordict import TensorDict  # type: ignore[import-not-found]
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer  # type: ignore[import-not-found]

    class Peer:
        def __init__(self) -> None:
            storage = LazyTensorStorage(size)
            self.replay = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH)

        def sample(self, count: int) -> object:
            return self.replay.sample(count)

        def update(self, index: Any, priorities: Any) -> object:
            return self.replay.update_priority(index, priorities)

        def extend(self, items: Mapping[str, Any]) -> object:
            return self.replay.extend(TensorDict(dict(items), [len(items["reward"])]))

    return Peer()


if __name__ == "__main__":
    main()
