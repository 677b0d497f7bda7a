"""Measure the weight sync: `python -m benchmarks.weight_sync --json FILE`.

Writers and readers are separate Monarch processes with real FSDP2 and TP shards. Each repetition copies the same number of
bytes with memcpy (one thread, warm pages, in a separate process) and publishes one version as in a run. Machines are noisy, so
only ratios within a repetition are meaningful. Writers and readers copy with as many threads as in a synchronous run: writers
share the cores, then readers. Push and pull times are those of the slowest process. The end-to-end time is
measured in the controller, from `publish` until slots are freed, and includes calls. For comparison, torchstore's
`put_state_dict` and `get_state_dict` move the same weights once.
"""

import argparse
import asyncio
import ctypes
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

from benchmarks.machine import describe_machine
from benchmarks.payloads import PAYLOADS, build_module, constant, tp_placement
from titanrl.config.device import num_threads
from titanrl.config.sections import Verify
from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.generators import WeightSync
from titanrl.launch.supervision import Supervisor
from titanrl.processes.actors import Actor, endpoint
from titanrl.processes.machine import THREADS
from titanrl.processes.variables import worker_environment
from titanrl.weights.layout import LiveState, local_part
from titanrl.weights.records import Commit, WeightManifest
from titanrl.weights.store import IMPORTS, WeightStore, spawn_store
from titanrl.weights.transport import TEAM, Copies, WeightPublisher, WeightReader

DTYPES = {"bf16->bf16": torch.bfloat16, "fp32->bf16": torch.float32}
PUBLISHED = torch.bfloat16
NUM_WARM_UPS = 3
NUM_REPETITIONS = {"small": 25, "large": 9, "adapters": 25}


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of writer and reader processes."""

    fsdp: int
    """FSDP2 ranks of the writers."""
    tp: int
    """Tensor-parallel ranks of the writers."""
    reader_tp: int
    """Tensor-parallel ranks of the reader."""


LAYOUTS = {"1->1": Layout(1, 1, 1), "FSDP2->1": Layout(2, 1, 1), "FSDP2xTP2->TP2": Layout(2, 2, 2)}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the result. Seconds are medians; ratios are medians over repetitions, each relative to its own memcpy."""

    name: str
    payload: str
    layout: str
    dtype: str
    verify: str
    bytes: int
    memcpy_s: float
    prepare_s: float
    first_push_s: float
    push_s: float
    pull_s: float
    e2e_s: float
    push_ratio: float
    pull_ratio: float
    e2e_ratio: float
    torchstore_s: float | None
    torchstore_ratio: float | None
    copy_ratio: float
    """Time of a push's copies, divided by the time of torch's copies between the same tensors."""
    push_threads: int
    """Threads of a writer's copies."""
    pull_threads: int
    """Threads of a reader's copies."""
    state_dict_ratio: float | None
    """Time to list the model's tensors, divided by the time of `get_model_state_dict`; None without FSDP."""


# Processes


class Writer(Actor):
    """Trainer rank that publishes weights."""

    def __init__(self, store: WeightStore) -> None:
        """Keep the store."""
        self._store = store
        self._seconds = 0.0

    @endpoint
    async def build(self, payload: str, dtype: str, layout: Layout) -> None:
        """Build the weights."""
        mesh = None
        if layout.fsdp * layout.tp > 1:
            torch.distributed.init_process_group("gloo")
            mesh = torch.distributed.init_device_mesh("cpu", (layout.fsdp, layout.tp), mesh_dim_names=("fsdp", "tp"))
        self._rank = torch.distributed.get_rank() if mesh is not None else 0
        self._module = build_module(PAYLOADS[payload](), DTYPES[dtype], mesh)
        self._state = LiveState(self._module)

    @endpoint
    async def prepare(self, run: str, verify: Verify) -> float:
        """Allocate the arenas and return the seconds it took."""
        self._publisher = WeightPublisher(run, self._rank, self._store, PUBLISHED, ["arena"], verify)
        started = time.perf_counter()
        await self._publisher.prepare(self._state.tensors())
        return time.perf_counter() - started

    @endpoint
    async def push(self, version: int) -> WeightManifest:
        """Publish a version."""
        started = time.perf_counter()
        manifest = await self._publisher.publish(version, self._state.tensors())
        self._seconds = time.perf_counter() - started
        return manifest

    @endpoint
    async def seconds(self) -> float:
        """Return the seconds of the last push."""
        return self._seconds

    @endpoint
    async def threads(self) -> int:
        """Return the number of threads of the copies."""
        return TEAM.num_threads

    @endpoint
    async def torchstore_put(self, key: str) -> None:
        """Publish with torchstore's `put_state_dict`; cast first, because torchstore does not."""
        from torchstore.state_dict_utils import put_state_dict

        state = {name: value.to(PUBLISHED) for name, value in self._module.state_dict().items()}
        await put_state_dict(await self._store.client(), state, key)

    @endpoint
    async def state_dict_ratio(self) -> float | None:
        """Measure `Case.state_dict_ratio`."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if not isinstance(self._module, FSDPModule):
            return None
        return ratio_of_seconds(self._state.tensors, lambda: get_model_state_dict(self._module))

    @endpoint
    async def copy_ratio(self) -> float:
        """Measure `Case.copy_ratio`."""
        sources = [local_part(value).detach() for value in self._state.tensors().values()]
        targets = [torch.ones_like(source, dtype=PUBLISHED) for source in sources]
        return ratio_of_seconds(Copies(targets, sources).run, Copies(targets, sources, streamed_from_bytes=sys.maxsize).run)


def ratio_of_seconds(one: Callable[[], object], other: Callable[[], object], num_pairs: int = 5) -> float:
    """Run both callables alternately and return the median ratio of their seconds."""

    def seconds(make: Callable[[], object]) -> float:
        started = time.perf_counter()
        make()
        return time.perf_counter() - started

    return statistics.median(seconds(one) / seconds(other) for _ in range(num_pairs))


class Copier(Actor):
    """Process that measures memcpy, the reference of all ratios."""

    def __init__(self) -> None:
        """Start without buffers."""
        self._buffers: list[torch.Tensor] = []

    @endpoint
    async def memcpy(self, num_bytes: int) -> float:
        """Return the seconds to copy `num_bytes` between warm pages with one thread."""
        if not self._buffers:
            self._buffers = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)]
        source, target = self._buffers
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        return time.perf_counter() - started


class Reader(Actor):
    """Generator rank that pulls weights."""

    def __init__(self, store: WeightStore) -> None:
        """Keep the store."""
        self._store = store
        self._seconds = 0.0

    @endpoint
    async def build(self, payload: str, layout: Layout) -> None:
        """Build the target tensors."""
        mesh = None
        if layout.reader_tp > 1:
            torch.distributed.init_process_group("gloo")
            mesh = torch.distributed.init_device_mesh("cpu", (layout.reader_tp,))
        self._targets: dict[str, torch.Tensor] = {}
        for name, shape in PAYLOADS[payload]().items():
            value = torch.zeros(shape, dtype=PUBLISHED)
            if mesh is not None:
                value = distribute_tensor(value, mesh, [tp_placement(name)], src_data_rank=None)
            self._targets[name] = value

    @endpoint
    async def prepare(self, run: str, verify: Verify) -> None:
        """Create the weight reader of a run."""
        self._reader = WeightReader(run, self._store, verify)

    @endpoint
    async def pull(self, commit: Commit) -> None:
        """Pull a version."""
        started = time.perf_counter()
        (await self._reader.fetch(commit)).copy_into(self._targets)
        self._seconds = time.perf_counter() - started

    @endpoint
    async def seconds(self) -> float:
        """Return the seconds of the last pull."""
        return self._seconds

    @endpoint
    async def threads(self) -> int:
        """Return the number of threads of the copies."""
        return TEAM.num_threads

    @endpoint
    async def check(self) -> None:
        """Verify that the weights have arrived, and reset the tensors to zero."""
        with torch.no_grad():
            for name, target in self._targets.items():
                local = target.to_local() if isinstance(target, torch.distributed.tensor.DTensor) else target
                assert bool((local == constant(name)).all()), f"{name} is wrong"
                local.zero_()

    @endpoint
    async def torchstore_get(self, key: str) -> None:
        """Pull with torchstore's `get_state_dict`."""
        from torchstore.state_dict_utils import get_state_dict

        await get_state_dict(await self._store.client(), key, self._targets)


# Measuring


class Bench:
    """Processes of one layout and payload, and a controller that publishes as in a run."""

    def __init__(self, payload: str, layout: str, dtype: str, fleet: Fleet) -> None:
        """Keep the options; `start` spawns the processes."""
        self.payload, self.layout, self.dtype = payload, layout, dtype
        self._fleet = fleet

    async def start(self) -> None:
        """Start the processes and build the weights."""
        layout, imports = LAYOUTS[self.layout], (*IMPORTS, "benchmarks.weight_sync")
        sizes = {"store": 1, "copier": 1, "writers": layout.fsdp * layout.tp, "readers": layout.reader_tp}
        procs = {
            role: self._fleet.spawn(role, local_host(), size, worker_environment() | {THREADS: str(num_threads(size))}, imports)
            for role, size in sizes.items()
        }
        for role in ("writers", "readers"):
            await self._fleet.join_process_group(procs[role], one_machine=True)
        self.store = await spawn_store(procs["store"])
        self.copier: Any = procs["copier"].spawn("copier", Copier)
        self.writers = procs["writers"].spawn("writers", Writer, self.store)
        self.readers = procs["readers"].spawn("readers", Reader, self.store)
        await asyncio.gather(
            replies(self.writers.build.call(self.payload, self.dtype, layout)),
            replies(self.readers.build.call(self.payload, layout)),
        )

    async def measure(self, verify: Verify, num_repetitions: int, *, torchstore: bool) -> Case:
        """Publish versions, each after a memcpy of the same size."""
        run = f"run-{verify}"
        prepare_s = max(await replies(self.writers.prepare.call(run, verify)))
        await self.readers.prepare.call(run, verify)
        self._sync = WeightSync(self.store.delete, push=self._push, expect=self._expect, pulls=[self._pull])
        rows = [await self._repetition(version) for version in range(NUM_WARM_UPS + num_repetitions)]
        await self.readers.check.call()
        warm, num_bytes = rows[NUM_WARM_UPS:], rows[0]["bytes"]
        torchstore_s = await self._torchstore() if torchstore else None
        memcpy_s = statistics.median(row["memcpy"] for row in warm)
        (state_dict_ratio, *_) = await replies(self.writers.state_dict_ratio.call())
        copy_ratio = statistics.median(await replies(self.writers.copy_ratio.call()))
        return Case(
            name=f"{self.payload} {self.layout} {self.dtype} {verify}",
            payload=self.payload,
            layout=self.layout,
            dtype=self.dtype,
            verify=verify,
            bytes=int(num_bytes),
            memcpy_s=memcpy_s,
            prepare_s=prepare_s,
            first_push_s=rows[0]["push"],
            push_s=statistics.median(row["push"] for row in warm),
            pull_s=statistics.median(row["pull"] for row in warm),
            e2e_s=statistics.median(row["e2e"] for row in warm),
            push_ratio=statistics.median(row["push"] / row["memcpy"] for row in warm),
            pull_ratio=statistics.median(row["pull"] / row["memcpy"] for row in warm),
            e2e_ratio=statistics.median(row["e2e"] / row["memcpy"] for row in warm),
            torchstore_s=torchstore_s,
            torchstore_ratio=None if torchstore_s is None else torchstore_s / memcpy_s,
            copy_ratio=copy_ratio,
            push_threads=max(await replies(self.writers.threads.call())),
            pull_threads=max(await replies(self.readers.threads.call())),
            state_dict_ratio=state_dict_ratio,
        )

    async def _repetition(self, version: int) -> dict[str, float]:
        num_bytes = 2 * sum(torch.Size(shape).numel() for shape in PAYLOADS[self.payload]().values())
        memcpy_s: float = await self.copier.memcpy.call_one(num_bytes)
        ended: list[float] = []

        async def then() -> None:
            ended.append(time.perf_counter())

        started = time.perf_counter()
        self._sync.publish(version, then)
        await self._sync.ready()
        return {
            "bytes": num_bytes,
            "memcpy": memcpy_s,
            "push": max(await replies(self.writers.seconds.call())),
            "pull": max(await replies(self.readers.seconds.call())),
            "e2e": ended[0] - started,
        }

    async def _torchstore(self) -> float:
        """Measure one put and get of torchstore, which needs no warm-up."""
        started = time.perf_counter()
        await self.writers.torchstore_put.call("own")
        await self.readers.torchstore_get.call("own")
        seconds = time.perf_counter() - started
        await self.readers.check.call()
        return seconds

    async def _push(self, version: int) -> list[WeightManifest]:
        return await replies(self.writers.push.call(version))

    async def _expect(self, version: int) -> None:
        """Do nothing; the reader serves no requests."""

    async def _pull(self, commit: Commit) -> int:
        await self.readers.pull.call(commit)
        return 0


async def replies(call: Any) -> list[Any]:
    """Await a call and return the replies of all ranks of a mesh."""
    return [reply for _, reply in (await call).items()]


async def run_all(arguments: argparse.Namespace) -> None:
    """Measure every case, with new processes for each set of weights; rewrite the file after each case."""
    machine = describe_machine()
    print(f"{machine['cores']} cores of {machine['processor']}", flush=True)
    result: dict[str, Any] = {"benchmark": "weight_sync", "machine": machine, "cases": []}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    chosen = list(itertools.product(arguments.payloads, arguments.layouts, arguments.dtypes))
    for number, (payload, layout, dtype) in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {payload} {layout} {dtype}", flush=True)
        async for case in run_one(payload, layout, dtype, arguments):
            print(summary(case), flush=True)
            result["cases"].append(asdict(case))
            write_whole(arguments.json, json.dumps(result, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text atomically; an interruption leaves the previous text."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


async def run_one(payload: str, layout: str, dtype: str, arguments: argparse.Namespace) -> AsyncIterator[Case]:
    """Measure one set of weights with the default digest, and with the others if there is one writer and one reader."""
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        supervisor = Supervisor()
        fleet = Fleet(Path(folder), supervisor)
        bench = Bench(payload, layout, dtype, fleet)
        num_repetitions = arguments.repetitions or NUM_REPETITIONS[payload]
        try:
            await bench.start()
            yield await bench.measure("sampled", num_repetitions, torchstore=arguments.torchstore)
            others: Sequence[Verify] = ("off", "full") if layout == "1->1" else ()
            for verify in others:
                yield await bench.measure(verify, num_repetitions, torchstore=False)
        finally:
            supervisor.expect_deaths()
            await fleet.stop(30)


def summary(case: Case) -> str:
    """Format a case as one line."""
    other = "" if case.torchstore_ratio is None else f"   torchstore x{case.torchstore_ratio:.0f}"
    return (
        f"{case.name:40} memcpy {case.memcpy_s * 1e3:6.1f} ms   push x{case.push_ratio:.2f}   pull x{case.pull_ratio:.2f}   "
        f"threads {case.push_threads} and {case.pull_threads}   copies x{case.copy_ratio:.2f} of torch's   "
        f"end to end {case.e2e_s * 1e3:6.1f} ms x{case.e2e_ratio:.2f}   first push {case.first_push_s:.2f} s{other}"
    )


def main() -> None:
    """Measure the cases that the arguments select."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write, rewritten after each case")
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, help=f"repetitions after {NUM_WARM_UPS} warm-ups; default {NUM_REPETITIONS}")
    parser.add_argument("--no-torchstore", dest="torchstore", action="store_false", help="skip torchstore's own calls")
    arguments = parser.parse_args()
    asyncio.run(run_all(arguments))


if __name__ == "__main__":
    # Import by name, so that the spawned processes find the same classes.
    from benchmarks import weight_sync

    weight_sync.main()
