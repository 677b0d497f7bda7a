"""Measure what another adapter on the same base costs: `python -m benchmarks.adapters --json FILE`.

The benchmark alternates between two models of one trainer rank. It measures a switch, and compares the steps of two models,
which switch before each pass, with as many steps of one model.
"""

# ruff: noqa: E402 - the device must be set before torchtitan is imported

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}

from benchmarks.machine import write_result
from titanrl.config.device import DEVICES, missing_for
from titanrl.models.preparation import prepare_torchtitan

DEVICE = DEVICES["cpu" if missing_for("cuda") else "cuda"]
prepare_torchtitan(DEVICE)  # before any other import of torchtitan

import torch
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import init_distributed

from benchmarks.packed_rollouts import ADAM, Case, model_of, rl_batches
from titanrl.carriers.types import AdapterSpec
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import LoraConfig, TrainerConfig
from titanrl.config.sizes import ModelShape
from titanrl.trainer.adapters import Adapters
from titanrl.trainer.learner import Learner
from titanrl.trainer.model import adapters_of

LORA = TrainerConfig(row_tokens=256, rows_per_microbatch=2, lora=LoraConfig(rank=32))
SMALLEST = "10M parameters"
"""Shape with which steps are measured, too."""
SHAPES = {
    SMALLEST: ModelShape(
        hidden_size=384, num_layers=6, num_heads=6, num_kv_heads=3, head_dim=64, intermediate_size=1024, vocab_size=512,
        tied_embeddings=True, max_positions=512, qk_norm=True,
    ),
    "12 layers of Qwen3-0.6B": ModelShape(
        hidden_size=1024, num_layers=12, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072, vocab_size=512,
        tied_embeddings=True, max_positions=512, qk_norm=True,
    ),
}  # fmt: skip


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=6, help="measured optimizer steps")
    parser.add_argument("--switches", type=int, default=30, help="measured switches")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        init_distributed(CommConfig(), base_folder=folder)
        cases = {
            name: figures(shape, Path(folder), arguments.steps if name == SMALLEST else 0, arguments.switches)
            for name, shape in SHAPES.items()
        }
    torch.distributed.destroy_process_group()
    write_result(arguments.json, "adapters", {"device": DEVICE.kind, "rank": 32, "cases": cases})


def figures(shape: ModelShape, folder: Path, num_steps: int, num_switches: int) -> dict[str, Any]:
    """Measure one shape; seconds are medians, with the smallest and the largest value."""
    case = Case(shape=shape, trainer=LORA, num_microbatches=2, median_tokens=50)
    adapters = Adapters(Learner(model_of(case, folder, DEVICE), AlgorithmConfig(), temperature=1.0), ("w1", "w2", "w3"), seed=0)
    for name in "ab":
        adapters.add(name, AdapterSpec(rank=32, alpha=32.0, seed=1))
    batches, *_ = rl_batches(case)
    batches = batches[:2]

    def steps(*names: str) -> None:
        for batch in batches:
            for name in names:
                adapters.use(name).forward_backward(batch)
        for name in names:
            adapters.use(name).optim_step(ADAM)

    def two_models() -> None:
        steps("a", "b")

    def one_model() -> None:
        steps("a")
        steps("a")

    def switch() -> None:
        adapters.use("b" if adapters.live == "a" else "a")

    tensors = adapters_of(adapters.use("a").model.module.state_dict())
    num_bytes = sum(value.numel() * value.element_size() for value in tensors.values())
    found = {"adapter_bytes": num_bytes, **summary(alternate({"switch": switch}, num_switches, 5))}
    if not num_steps:
        return found
    measured = alternate({"two_models": two_models, "one_model": one_model}, num_steps, 2)
    ratio = statistics.median(two / one for two, one in zip(measured["two_models"], measured["one_model"], strict=True))
    return {**found, **summary(measured), "step_ratio": ratio}


def summary(measured: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median, minimum and maximum of the seconds of each function."""
    return {
        name: {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        for name, seconds in measured.items()
    }


def alternate(functions: dict[str, Callable[[], object]], repetitions: int, warm_ups: int) -> dict[str, list[float]]:
    """Call the functions in turn; return the seconds of each call after the warm-ups.

    On a CPU these are CPU seconds of all threads, because other processes change them less than the wall time.
    """
    clock = time.perf_counter if DEVICE.kind == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warm_ups + repetitions):
        for name, function in functions.items():
            if DEVICE.kind == "cuda":
                torch.cuda.synchronize()
            started = clock()
            function()
            if DEVICE.kind == "cuda":
                torch.cuda.synchronize()
            if number >= warm_ups:
                seconds[name].append(clock() - started)
    return seconds


if __name__ == "__main__":
    main()
