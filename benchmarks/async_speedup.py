"""Measure the speedup of overlapping and the cost of staleness: `python -m benchmarks.async_speedup --json FILE [--reward]`.

A synchronous and an asynchronous run alternate every few steps, so that both are measured under the same conditions. Each has
its trainer on one core and its generator on another, with a batch that takes both about equally long. With `--reward`, the
benchmark runs the quick start at several values of `max_staleness` instead, with the same number of sampled completions each.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.quickstart import run_command
from titanrl.config import load_config
from titanrl.grpo import GRPO
from titanrl.metrics.reading import by_step, ends_of, read_metrics, series

BALANCED = (
    "rollout.groups_per_step=16",
    "rollout.group_size=16",
    "generator.max_num_seqs=1024",
    "sandbox.num_processes=4",
    "trainer.share_prompts=false",
)
"""Overrides for a batch whose generation and training take about equally long on one core each."""
CORES = {"trainer_0": 0, "generator_0_0": 1}
"""Core of each compute process, by the name of its log; other processes are not pinned."""
SKIPPED_STEPS = 3
"""Steps at the start of each turn that are not measured, because a run buffers groups while the other one is measured."""
STALENESS = (0, 1, 3, 8)
"""Default values of `max_staleness` with `--reward`."""
CORRECTIONS: Mapping[str, Sequence[str]] = {
    "on": (),
    # A loss that ignores staleness is refused, so this one has a correction whose bounds are never exceeded.
    "off": ("algorithm.proximal=step_start", "algorithm.correction.veto_prox_over_behavior=[1e-30,1e30]"),
}
"""Overrides with `--reward`: the default, whose ratio is relative to the sampler, and one that ignores the sampler."""


def main() -> None:
    """Measure speed or learning, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_speedup", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--turns", type=int, default=6, help="number of turns of each run")
    parser.add_argument("--steps", type=int, default=8, help="measured steps per turn")
    parser.add_argument("--reward", action="store_true", help="compare scores at different staleness instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=list(STALENESS))
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        if arguments.reward:
            result = measure_reward(Path(folder), arguments.seeds, arguments.staleness, arguments.overrides)
        else:
            result = asyncio.run(measure_speed(Path(folder), arguments.turns, arguments.steps, arguments.overrides))
    write_result(arguments.json, "async_speedup", result)


async def measure_speed(folder: Path, num_turns: int, num_steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Alternate between a synchronous and an asynchronous run, and return their measurements."""
    runs = {}
    try:
        for name, max_staleness in (("sync", 0), ("async", 1)):
            runs[name] = await started(folder, name, max_staleness, overrides)
        rows: dict[str, list[Mapping[str, float]]] = {name: [] for name in runs}
        for _ in range(num_turns):
            for name, run in runs.items():
                steps = [(await run.step()).values for _ in range(SKIPPED_STEPS + num_steps)]
                rows[name] += steps[SKIPPED_STEPS:]
    finally:
        for run in runs.values():
            await run.close()
    return speed_figures(rows["sync"], rows["async"])


def speed_figures(sync: Sequence[Mapping[str, float]], overlapped: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return means over the steps of both runs; medians would mislead, because overlapped steps alternate in length."""
    generate_s = mean(sync, "time/rollout_s")
    train_s = mean(sync, "time/train_s") + mean(sync, "time/optim_s")
    sync_step_s, async_step_s = mean(sync, "time/step_s"), mean(overlapped, "time/step_s")
    lags = sorted({name for row in overlapped for name in row if name.startswith("staleness/lag_")})
    return {
        "generate_s": generate_s,
        "train_s": train_s,
        "sync_step_s": sync_step_s,
        "async_step_s": async_step_s,
        "async_step_median_s": statistics.median(row["time/step_s"] for row in overlapped),
        "speedup": sync_step_s / async_step_s,
        "overlap_efficiency": max(generate_s, train_s) / async_step_s,
        "trainer_idle_frac": {
            "sync": mean(sync, "perf/trainer_idle_frac"),
            "async": mean(overlapped, "perf/trainer_idle_frac"),
        },
        "generator_idle_frac": {
            "sync": mean(sync, "perf/generator_idle_frac"),
            "async": mean(overlapped, "perf/generator_idle_frac"),
        },
        "staleness_max": max(row["staleness/max"] for row in overlapped),
        "staleness_histogram": {
            name.removeprefix("staleness/lag_").removesuffix("_frac"): statistics.mean(row[name] for row in overlapped)
            for name in lags
        },
    }


def mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean of a metric."""
    return statistics.fmean(row[name] for row in rows)


async def started(folder: Path, name: str, max_staleness: int, overrides: Sequence[str]) -> GRPO:
    """Start a run, and pin its trainer and its generator to one core each."""
    places = [f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off"]
    # A short warm start suffices for groups whose rewards differ; the speed does not depend on the score.
    short = ["num_steps=100000", "warm_start.num_steps=150", "warm_start.num_long_only_steps=100"]
    config = load_config("configs/quickstart.yaml", [*places, *short, *BALANCED, f"max_staleness={max_staleness}", *overrides])
    run = await GRPO(config).start()
    for role, core in CORES.items():
        pin(int((run.run_dir / "logs" / f"{role}.pid").read_text().split()[0]), core)
    return run


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def measure_reward(folder: Path, seeds: Sequence[int], staleness: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    """Run the quick start at each staleness, with and without correction, for each seed."""
    settings = [(age, correction) for age in staleness for correction in CORRECTIONS if age or correction == "on"]
    runs = []
    for seed, (max_staleness, correction) in itertools.product(seeds, settings):
        name = f"seed{seed}-staleness{max_staleness}-{correction}"
        places = [f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off"]
        run_command([*places, f"seed={seed}", f"max_staleness={max_staleness}", *CORRECTIONS[correction], *overrides])
        figures = reward_figures(read_metrics(folder / "runs" / name / "metrics.jsonl"))
        runs.append({"seed": seed, "max_staleness": max_staleness, "correction": correction, **figures})
        print(json.dumps(runs[-1]), flush=True)
    return {"settings": [summary(*setting, runs) for setting in settings], "runs": runs}


def reward_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return scores, response length, staleness and clip fraction of a run."""
    steps = [row for row in rows if "reward/mean" in row]
    heldout = series(by_step(rows), "eval/chain_sum/mean")
    _, last_reward, _ = ends_of(series(by_step(steps), "reward/mean"))
    return {
        "heldout_first": heldout[0][1],
        "heldout_last": heldout[-1][1],
        "heldout_mean": statistics.mean(value for _, value in heldout[1:]),
        "reward_mean": statistics.mean(row["reward/mean"] for row in steps),
        "reward_last_five": last_reward,
        "response_len_mean": statistics.mean(row["tokens/response_len_mean"] for row in steps),
        "staleness_mean": statistics.mean(row["staleness/mean"] for row in steps),
        "clip_frac_mean": statistics.mean(row["policy/clip_frac"] for row in steps),
    }


def summary(max_staleness: int, correction: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over the seeds of a setting, and the lowest final score."""
    mine = [run for run in runs if (run["max_staleness"], run["correction"]) == (max_staleness, correction)]
    means = {name: statistics.mean(run[name] for run in mine) for name in mine[0] if isinstance(mine[0][name], float)}
    worst = min(run["heldout_last"] for run in mine)
    return {"max_staleness": max_staleness, "correction": correction, **means, "heldout_last_worst": worst}


if __name__ == "__main__":
    main()
