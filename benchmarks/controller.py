"""Measure the overhead of the controller: `python -m benchmarks.controller --json FILE`.

The real loop, rollout worker, sandbox, buffer, shards and weight store run between two stubs: a trainer that replies
immediately, and a generator with prepared completions. All measured time is therefore overhead. The stubs replace the real
actors before the run spawns its processes.
"""

import argparse
import asyncio
import gc
import pickle
import statistics
import tempfile
import time
from pathlib import Path

import titanrl.launch.assembly as assembly
from benchmarks.controller_stubs import StubGenerator, StubTrainer
from benchmarks.machine import write_result
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO

GROUPS_PER_STEP = (32, 512, 4096)
"""Batch sizes at which the overhead of a step is measured."""
THROUGHPUT_GROUPS = 64
"""Groups per step while throughput is measured."""
NUM_TOKENS = 256
"""Tokens per completion while throughput is measured."""
NUM_STEPS = (9, 400)
"""Smallest and largest number of steps over which the median overhead is computed."""
NUM_GROUPS = 16_384
"""Number of groups to train on while the overhead is measured, within the limits of `NUM_STEPS`."""
NUM_WARMUP_STEPS = 5
"""Steps before the measured ones. A run's first steps allocate memory and are slower."""
SHORT_TOKENS = 16
"""Tokens per completion while the overhead of a step is measured; the overhead does not depend on it."""


def main() -> None:
    """Measure throughput and overhead, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the throughput measurement")
    parser.add_argument("--groups-per-step", type=int, nargs="+", default=list(GROUPS_PER_STEP))
    arguments = parser.parse_args()
    vars(assembly).update(PolicyTrainer=StubTrainer, Generator=StubGenerator)
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        throughput = asyncio.run(measure_throughput(Path(folder), arguments.seconds))
        overheads = [asyncio.run(measure_overhead(Path(folder), groups)) for groups in arguments.groups_per_step]
    write_result(arguments.json, "controller", {**throughput, "steps": overheads})


async def measure_throughput(folder: Path, seconds: float) -> dict[str, float]:
    """Return the groups per second through admission, rollout, scoring, commit, planning and release."""
    run = await started(folder, "throughput", THROUGHPUT_GROUPS, NUM_TOKENS, max_staleness=1)
    try:
        for _ in range(3):
            await run.step()
        began, num_steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            await run.step()
            num_steps += 1
        return {"groups_per_s": num_steps * THROUGHPUT_GROUPS / (time.perf_counter() - began)}
    finally:
        await run.close()


async def measure_overhead(folder: Path, groups_per_step: int) -> dict[str, float]:
    """Measure steps that start with a full buffer and idle actors: their duration, and the bytes moved per group."""
    run = await started(folder, f"step{groups_per_step}", groups_per_step, SHORT_TOKENS, max_staleness=1)
    try:
        for _ in range(NUM_WARMUP_STEPS):
            await run.step()
        seconds = []
        for _ in range(min(max(NUM_GROUPS // groups_per_step, NUM_STEPS[0]), NUM_STEPS[1])):
            await run.session.weights.ready()
            await run.session.rollouts.buffer.wait_until_full()
            gc.collect()
            seconds.append((await run.step()).values["time/step_s"])
        return {
            "groups_per_step": groups_per_step,
            "step_overhead_ms": 1e3 * statistics.median(seconds),
            "step_overhead_min_ms": 1e3 * min(seconds),
            "target_ms": 5.0 + 0.02 * groups_per_step,
            "bytes_per_group": await bytes_per_group(run),
        }
    finally:
        await run.close()


async def bytes_per_group(run: GRPO) -> float:
    """Return the pickled size of a batch's records, plan and handles, per group."""
    groups_per_step = run.config.rollout.groups_per_step
    batch = await run.session.rollouts.buffer.take_batch()
    num_bytes = len(pickle.dumps(batch, -1))  # as it was sent, because planning caches columns in its table
    plan, _ = await run._plan(batch)
    messages = [*plan.microbatches, batch.records.handles.copy()]
    return (num_bytes + sum(len(pickle.dumps(message, -1)) for message in messages)) / groups_per_step


async def started(folder: Path, name: str, groups_per_step: int, num_tokens: int, *, max_staleness: int) -> GRPO:
    """Start a run with the stubs."""
    return await GRPO(stub_config(folder, name, groups_per_step, num_tokens, max_staleness)).start()


def stub_config(folder: Path, name: str, groups_per_step: int, num_tokens: int, max_staleness: int) -> Config:
    """Return the quick start's configuration with the given sizes and without a warm start."""
    overrides = [
        f"name={name}",
        f"output_dir={folder}/runs",
        f"cache_dir={folder}/cache",
        "warm_start=null",
        "num_steps=1000000",
        f"max_staleness={max_staleness}",
        f"rollout.groups_per_step={groups_per_step}",
        f"rollout.max_new_tokens={num_tokens}",
        "data.rewards={answer: benchmarks.controller_stubs:reward}",
        "trainer.row_tokens=512",
        "trainer.rows_per_microbatch=512",
        "generator.max_num_seqs=65536",
        "logging.console=off",
        "logging.rollouts_per_step=0",
    ]
    return load_config("configs/quickstart.yaml", overrides)


if __name__ == "__main__":
    main()
