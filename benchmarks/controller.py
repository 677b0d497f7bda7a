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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import titanrl.launch.assembly as assembly
from benchmarks.machine import write_result
from titanrl.actors import Actor, concurrent_endpoint, endpoint
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO
from titanrl.tables import MicroBatch
from titanrl.types import (
    AdamParams,
    Admission,
    Completion,
    EngineLoad,
    GenerationRequest,
    GenerationStats,
    LossSums,
    OptimUpdate,
)
from titanrl.weights.manifest import Commit, WeightManifest

if TYPE_CHECKING:
    from monarch.actor import Port

GROUPS_PER_STEP = (32, 512, 4096)
"""Batch sizes at which the overhead of a step is measured."""
THROUGHPUT_GROUPS = 64
"""Groups per step while throughput is measured."""
NUM_TOKENS = 256
"""Tokens per completion while throughput is measured."""
GROUPS_PER_MESSAGE = 16
"""Groups per message of the generator, as if they had finished at the same decoding step."""
NUM_STEPS = 9
"""Number of steps over which the median overhead is computed."""
SHORT_TOKENS = 16
"""Tokens per completion while the overhead of a step is measured; the overhead does not depend on it."""


class StubTrainer(Actor):
    """Trainer rank that computes nothing and replies immediately."""

    def __init__(self, setup: Any) -> None:
        self._version = 0

    @endpoint
    async def start(self) -> None:
        """Do nothing; there is no model."""

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Do nothing; there is no model."""

    @endpoint
    async def forward_backward(
        self, microbatch: MicroBatch, proximal_version: int | None, reference_version: int | None
    ) -> LossSums:
        """Count the sequences of a micro-batch."""
        num_sequences = sum(len(rank.sequences) for rank in microbatch.rows)
        return LossSums(
            sums={"num_tokens": float(num_sequences), "loss/policy": 0.0, "lag/0": 0.0, "lag/0/logprob_abs": 0.0}, maxima={}
        )

    @endpoint
    async def optim_step(self, params: AdamParams, completes: bool) -> OptimUpdate:
        """Increase the version."""
        self._version += 1
        return OptimUpdate(version=self._version, grad_norm=1.0, skipped=False)

    @endpoint
    async def push_weights(self, version: int) -> WeightManifest:
        """Return an empty manifest."""
        return WeightManifest(version, 0, "", 0, None, 0, ())

    @endpoint
    async def close(self) -> None:
        """Do nothing; there is nothing to close."""


class StubGenerator(Actor):
    """Generator that replies immediately with slices of prepared random text."""

    def __init__(self, setup: Any) -> None:
        self._num_tokens, self._since = 0, time.perf_counter()
        self._text = np.random.default_rng(0).integers(2, 95, 1 << 16)
        self._logprobs = np.full(1 << 16, -0.5, np.float32)
        self._versions = np.zeros(1 << 16, np.int64)

    @endpoint
    async def start(self) -> None:
        """Do nothing; there is no engine."""

    @concurrent_endpoint
    async def generate(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        answers: "Port[Any]",
        admission: Admission,
    ) -> None:
        """Send completions for every group, `GROUPS_PER_MESSAGE` groups at a time."""
        load = EngineLoad(num_requests=0, num_queued=0)
        for start in range(0, len(groups), GROUPS_PER_MESSAGE):
            places = range(start, min(start + GROUPS_PER_MESSAGE, len(groups)))
            answers.send(([(place, [self._completion(request) for request in groups[place]]) for place in places], load))

    @endpoint
    async def pull_weights(self, commit: Commit) -> int:
        """Set the version of later completions."""
        self._versions = np.full(1 << 16, commit.version)
        return 0

    @concurrent_endpoint
    async def expect_weights(self, version: int) -> None:
        """Do nothing; there are no weights."""

    @concurrent_endpoint
    async def stats(self) -> GenerationStats:
        """Return the tokens generated since the last call."""
        now = time.perf_counter()
        stats = GenerationStats(num_tokens=self._num_tokens, busy_s=0.0, wall_s=now - self._since, num_replicas=1)
        self._num_tokens, self._since = 0, now
        return stats

    @endpoint
    async def close(self) -> None:
        """Do nothing; there is nothing to close."""

    def _completion(self, request: GenerationRequest) -> Completion:
        num_tokens = request.sampling.max_new_tokens
        self._num_tokens += num_tokens
        start = self._num_tokens % (len(self._text) - num_tokens)
        tokens = slice(start, start + num_tokens)
        return Completion(
            token_ids=self._text[tokens],
            logprobs=self._logprobs[tokens],
            versions=self._versions[tokens],
            finish_reason="length",
        )


def reward(text: str, entry: Mapping[str, Any]) -> float:
    """Return 1 for about half of all completions, and 0 for the others."""
    return float(ord(text[0]) % 2)


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
        await run.step()
        seconds = []
        for _ in range(NUM_STEPS):
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
    plan = run._plan(batch)
    messages = [batch, *plan.microbatches, batch.records.handles.copy()]
    return sum(len(pickle.dumps(message, -1)) for message in messages) / groups_per_step


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
        "data.rewards={answer: benchmarks.controller:reward}",
        "trainer.row_tokens=512",
        "trainer.rows_per_microbatch=512",
        "generator.max_num_seqs=65536",
        "logging.console=off",
        "logging.rollouts_per_step=0",
    ]
    return load_config("configs/quickstart.yaml", overrides)


if __name__ == "__main__":
    main()
