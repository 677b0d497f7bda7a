"""Measure the overhead of the generator pool and actor over bare vLLM: `python -m benchmarks.generator --json FILE`.

The same requests run alternately through the bare engine in a separate process, and through pool, actor and engine, so that
both see the same machine load. The weights are random, and every completion has maximum length.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.random_generator import RandomGenerator
from titanrl.carriers.types import GenerationRequest, SamplingParams
from titanrl.config import Config, load_config
from titanrl.config.device import DEVICES
from titanrl.generator.actor import GeneratorSetup
from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.supervision import Supervisor
from titanrl.models.recipe import create_model
from titanrl.processes.variables import generator_environment
from titanrl.rollout.pool import GeneratorPool

GROUP_SIZE = 8
PROMPT_TOKENS = 14
NEW_TOKENS = 64
NUM_ROUNDS = 12
"""Measured rounds per variant, after as many warm-up rounds."""


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generator", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    config = load_config("configs/quickstart.yaml", arguments.overrides)
    if arguments.bare is not None:
        serve_bare(config, arguments.bare)
        return
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        model_dir = Path(folder) / "model"
        create_model(model_dir, config.model.recipe, seed=0)
        batches = asyncio.run(measure(config, model_dir, Path(folder), arguments.batch, arguments.overrides))
    result = {"benchmark": "generator", "machine": describe_machine(), "batches": batches}
    print(json.dumps(batches, indent=2))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


async def measure(
    config: Config, model_dir: Path, folder: Path, batches: Sequence[int], overrides: Sequence[str]
) -> list[dict[str, float]]:
    """Measure both variants alternately, for each batch size."""
    supervisor = Supervisor()
    fleet = Fleet(folder, supervisor)
    environment = generator_environment(config, DEVICES["cpu"], 0)
    procs = fleet.spawn("generator", local_host(), 1, environment, ("benchmarks.random_generator",))
    setup = GeneratorSetup(
        model_dir=model_dir,
        config=config.generator,
        device=DEVICES["cpu"],
        max_len=PROMPT_TOKENS + NEW_TOKENS,
        stop_ids=(),
        source=None,  # nothing is pulled here
    )
    actor: Any = procs.spawn("generator", RandomGenerator, setup)
    bare = Bare(model_dir, environment, overrides)
    try:
        await actor.start.call_one()
        await actor.trust_weights.call_one()
        pool = GeneratorPool([actor], config.generator.max_num_seqs)
        bare.wait_until_ready()
        return [await measure_batch(pool, bare, num_requests) for num_requests in batches]
    finally:
        bare.stop()
        supervisor.expect_deaths()
        await fleet.stop(20)


async def measure_batch(pool: GeneratorPool, bare: "Bare", num_requests: int) -> dict[str, float]:
    """Return the tokens per second of both variants and their ratio."""
    pool_s, bare_s = [], []
    for _ in range(2 * NUM_ROUNDS):
        began = time.perf_counter()
        groups = [requests_of(start, GROUP_SIZE) for start in range(0, num_requests, GROUP_SIZE)]
        await asyncio.gather(*map(pool.generate, groups))
        pool_s.append(time.perf_counter() - began)
        bare_s.append(bare.round(num_requests))
    pool_median, bare_median = (statistics.median(seconds[NUM_ROUNDS:]) for seconds in (pool_s, bare_s))
    ratios = [theirs / ours for ours, theirs in zip(pool_s[NUM_ROUNDS:], bare_s[NUM_ROUNDS:], strict=True)]
    return {
        "batch": num_requests,
        "tokens_per_s": num_requests * NEW_TOKENS / pool_median,
        "bare_tokens_per_s": num_requests * NEW_TOKENS / bare_median,
        "relative_throughput": statistics.median(ratios),
    }


def requests_of(start: int, count: int) -> list[GenerationRequest]:
    """Return a group of requests with one prompt and different seeds."""
    prompt = tuple(2 + (7 * start + i) % 90 for i in range(PROMPT_TOKENS))
    return [
        GenerationRequest(
            token_ids=prompt, sampling=SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=start + place)
        )
        for place in range(count)
    ]


class Bare:
    """Process of the bare engine. It reads a number of requests per line and prints the seconds of each batch."""

    def __init__(self, model_dir: Path, environment: dict[str, str], overrides: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.generator", "--bare", str(model_dir)]
        if overrides:
            command += ["--set", *overrides]
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        """Wait until the engine is built."""
        self._read_line()

    def round(self, num_requests: int) -> float:
        """Run a batch; return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_requests}\n")
        self._process.stdin.flush()
        return float(self._read_line())

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _read_line(self) -> str:
        """Return the next line from `serve_bare`, skipping the output of libraries."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("bare "):
                return line.removeprefix("bare ")
        raise RuntimeError("the bare engine's process has exited")


def serve_bare(config: Config, model_dir: Path) -> None:
    """Build vLLM's engine as the generator does, and time batches on it."""
    from titanrl.models.preparation import prepare_torchtitan

    prepare_torchtitan(DEVICES["cpu"])
    from vllm.sampling_params import RequestOutputKind

    from titanrl.generator.engine import build_engine, sampling_params
    from titanrl.models.directory import open_model

    engine = build_engine(open_model(model_dir), config.generator, DEVICES["cpu"], PROMPT_TOKENS + NEW_TOKENS)
    print("bare ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for start in range(0, int(line), GROUP_SIZE):
            for index, request in enumerate(requests_of(start, GROUP_SIZE)):
                prompt: Any = {"prompt_token_ids": list(request.token_ids)}
                params = sampling_params(request.sampling, ())
                params.flat_logprobs, params.output_kind = True, RequestOutputKind.FINAL_ONLY  # vLLM's cheapest options
                engine.add_request(f"{start + index}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        print(f"bare {time.perf_counter() - began}", flush=True)


if __name__ == "__main__":
    main()
