"""Measure start time, steps, FLOP/s and memory at the size of Qwen3-0.6B: `python -m benchmarks.full_size --json FILE`.

A model with random weights takes three synchronous GRPO steps (4 groups of 4 completions of 128 tokens) with a bfloat16
generator, once with bfloat16 and once with float32 weights in the trainer. Passes compute in the dtype in which this processor
multiplies faster. The benchmark compares the trainer's FLOP/s with the rate of a matrix product alone, the generator with the
memory's bandwidth (for each token of a batch it reads all weights once), and the peak memory of each process with the estimate
of `--dry-run`. It kills a run that leaves less than 1 GB of the machine's memory available. On a CPU without bfloat16
instructions a step takes minutes; `--set rollout.max_new_tokens=16` shortens it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.machine import read_bandwidth, write_result
from benchmarks.resident import Memory, Sampler
from titanrl.config import load_config
from titanrl.config.dry_run import placements
from titanrl.config.schema import Config
from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import ModelShape, Sizes, cpu_bytes, derive
from titanrl.data.tokenizer import write_tokenizer
from titanrl.metrics.reading import read_metrics
from titanrl.models.dense import weight_shapes
from titanrl.models.directory import model_shape, published_shapes
from titanrl.models.families import QWEN3
from titanrl.models.recipe import write_model_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATMUL = (2048, 3072, 1024)
"""Sizes of the matrix product whose rate is the peak: tokens, output and input features of a layer of Qwen3-0.6B."""
STD = 0.02
"""Standard deviation of the random weights."""
LEAST_AVAILABLE_BYTES = 10**9
"""Available memory of the machine below which the run is killed."""
SETTINGS = (
    "warm_start=null",
    "num_steps=3",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=128",
    "data.rewards={place: benchmarks.varied_reward:by_place}",
    "trainer.row_tokens=320",
    "generator.dtype=bfloat16",
    "generator.max_num_seqs=16",
    "generator.kv_cache_bytes=300000000",
    "evaluation.num_prompts=0",
    "logging.console=plain",
    "timeouts.start_s=1800",
)
"""Overrides of the quick start."""


def main() -> None:
    """Measure every trainer dtype and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_size", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--model", default="Qwen3-0.6B", help="published model whose shape the random model copies")
    parser.add_argument("--folder", type=Path, help="folder that keeps the model and the runs")
    parser.add_argument("--layers", type=int, help="number of layers, fewer to try the benchmark on a smaller model")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as temporary:
        folder = arguments.folder or Path(temporary)
        model = folder / "model"
        if not model.exists():
            write_model(model, published_shapes()[arguments.model], arguments.layers)
        peaks = {name: matmul_flops(name) for name in DTYPES}
        fastest = max(peaks, key=peaks.__getitem__)
        overrides = [f"trainer.compute_dtype={fastest}", *arguments.overrides]
        runs = []
        for dtype in arguments.dtypes:  # the file has the runs before one that fails
            runs.append(measure(folder, model, dtype, overrides, peaks))
            write_result(arguments.json, "full_size", {"model": arguments.model, "matmul_flops": peaks, "runs": runs})


def matmul_flops(dtype: str) -> float:
    """Return the FLOP/s of a matrix product on all cores: the best of several."""
    num_tokens, num_out, num_in = MATMUL
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, num_in, generator=generator).to(DTYPES[dtype])
    weight = torch.randn(num_out, num_in, generator=generator).to(DTYPES[dtype])
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - started)
    return 2 * num_tokens * num_out * num_in / best


def write_model(directory: Path, shape: ModelShape, num_layers: int | None) -> None:
    """Write a Hugging Face directory with random weights in bfloat16 and the tokenizer of the quick start."""
    sizes = {name: value for name, value in asdict(shape).items() if name in RecipeConfig.model_fields}
    recipe = RecipeConfig.model_validate({**sizes, "num_layers": num_layers or shape.num_layers})
    assert QWEN3.recipe is not None
    hf = QWEN3.recipe(recipe) | {"vocab_size": shape.vocab_size}
    directory.mkdir(parents=True)
    write_tokenizer(directory)
    write_model_config(directory, hf)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(size, dtype=torch.bfloat16).normal_(std=STD, generator=generator)
        for name, size in weight_shapes(QWEN3.shape(QWEN3.completed(hf))).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def measure(folder: Path, model: Path, dtype: str, overrides: Sequence[str], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Run the command with one trainer dtype; return its times, its FLOP/s by `peaks`, and its memory by the estimates."""
    places = [f"name={dtype}", f"model.path={model}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache"]
    settings = [*places, *SETTINGS, f"trainer.dtype={dtype}", *overrides]
    config = load_config("configs/quickstart.yaml", settings)
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *settings]
    bandwidth = read_bandwidth()
    started, run_dir = time.time(), folder / "runs" / dtype
    process = subprocess.Popen(command)
    with Sampler(process.pid, run_dir, least_available_bytes=LEAST_AVAILABLE_BYTES) as sampler:
        process.wait()
    if process.returncode:
        sys.exit(f"the run with a {dtype} trainer exited with code {process.returncode}; memory: {asdict(sampler.memory)}")
    rows = read_metrics(run_dir / "metrics.jsonl")
    sizes = derive(config, model_shape(config))
    assert sizes.memory is not None
    result = {
        "trainer_dtype": dtype,
        "compute_dtype": config.trainer.compute_dtype,
        **seconds(rows, started),
        "trainer": training(rows, sizes.memory.num_parameters, peaks[config.trainer.compute_dtype]),
        "generator": decoding(rows, config, sizes, bandwidth),
        **compared(config, sizes, sampler.memory),
    }
    print(json.dumps(result), flush=True)
    return result


def seconds(rows: Sequence[Mapping[str, Any]], started: float) -> dict[str, Any]:
    """Return the seconds until the first step began, and the times and gradient norms of the steps."""
    steps = [row for row in rows if "reward/mean" in row]
    return {
        "start_s": steps[0]["time"] - steps[0]["time/step_s"] - started,
        "step_s": [row["time/step_s"] for row in steps],
        "phase_s": {name: [row[name] for row in steps] for name in steps[-1] if name.startswith("time/")},
        "grad_norm": [row["grad/norm"] for row in steps],
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in steps),
        "total_s": time.time() - started,
    }


def decoding(rows: Sequence[Mapping[str, Any]], config: Config, sizes: Sizes, bandwidth: float) -> dict[str, float]:
    """Return the tokens per second while the generator decodes, and the weights that it reads per second over the bandwidth.

    All sequences of the batch get a token for each reading of the weights; with random weights, few end early.
    """
    assert sizes.memory is not None
    tokens_per_s = statistics.median(row["perf/gen_tokens_per_s"] for row in rows if "reward/mean" in row)
    sequences = min(config.generator.max_num_seqs, sizes.sequences_per_step)
    bytes_per_s = sizes.memory.replica_weights * tokens_per_s / sequences
    return {
        "tokens_per_s": tokens_per_s,
        "bytes_per_s": bytes_per_s,
        "bandwidth": bandwidth,
        "of_bandwidth": bytes_per_s / bandwidth,
    }


def training(rows: Sequence[Mapping[str, Any]], num_parameters: int, peak: float) -> dict[str, Any]:
    """Return the trainer's tokens and FLOPs per second while busy, by step, and their share of a matrix product's FLOP/s.

    A token takes 6 FLOPs per parameter, without attention and without what is computed again.
    """
    trained = [row["perf/train_tokens_per_s"] for row in rows if "perf/train_tokens_per_s" in row]
    flops = [6 * num_parameters * rate for rate in trained]
    return {
        "tokens_per_s": trained,
        "flops_per_s": flops,
        "matmul_flops_per_s": peak,
        "of_matmul": [rate / peak for rate in flops],
    }


def compared(config: Config, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """Return the memory peaks of a run next to the estimates of the dry run."""
    assert sizes.memory is not None
    estimates = {f"{row.role.removesuffix(' rank')}_": row.num_bytes for row in placements(config, sizes, "cpu")}
    roles: dict[str, dict[str, Any]] = {role: asdict(peak) for role, peak in sorted(memory.roles.items())}
    for role, figures in roles.items():
        estimate = next((value for name, value in estimates.items() if role.startswith(name)), None)
        if estimate is not None:
            figures |= {"estimate_bytes": estimate, "ratio": figures["private_bytes"] / estimate}
    together = cpu_bytes(config, sizes.memory, sizes.memory.trainer.cpu_total)
    return {
        "roles": roles,
        "together_bytes": memory.together_bytes,
        "together_estimate_bytes": together,
        "together_ratio": memory.together_bytes / together,
        "least_available_bytes": memory.least_available_bytes,
    }


if __name__ == "__main__":
    main()
