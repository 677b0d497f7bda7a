"""How fast is the quick start, and how well does it learn? `python -m benchmarks.quickstart --json FILE`.

Runs the main job as a user would, once per seed. Seconds are counted from the start of the command; the warm-started base
is made first and timed apart, so that every figure of the run itself is with the base cached.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from titanrl.metrics.run_directory import read_metrics
from titanrl.metrics.series import by_step, first_and_last_five, series

ACCURACY = 0.8
"""Held-out accuracy that `time_to_accuracy_s` waits for."""
SKIPPED_STEPS = 5
"""First steps left out of medians: caches are cold."""


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        runs = [measure(Path(folder), seed, arguments.overrides) for seed in arguments.seeds]
    result = {"benchmark": "quickstart", "machine": describe_machine(), "medians": medians(runs), "runs": runs}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["medians"], indent=2))


def measure(folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Warm-start the base of a seed, then run the quick start on it."""
    places = [f"seed={seed}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off", *overrides]
    warm_started = time.time()
    run_command([*places, f"name=warm{seed}", "num_steps=1"])
    warm_start_s = first_row(folder / "runs" / f"warm{seed}")["time"] - warm_started
    # Evaluating every 5 steps shows when the accuracy was reached; those seconds count in none of the medians.
    started = time.time()
    run_command([*places, f"name=seed{seed}", "evaluation.every_steps=5"])
    rows = read_metrics(folder / "runs" / f"seed{seed}" / "metrics.jsonl")
    return {"seed": seed, "warm_start_s": warm_start_s, "total_s": time.time() - started, **figures(rows, started)}


def run_command(arguments: Sequence[str]) -> None:
    """Run the main job to its end."""
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *arguments]
    subprocess.run(command, check=True)


def first_row(run_dir: Path) -> Mapping[str, Any]:
    """The first line of a run's metrics: the evaluation before the first step, right after the start."""
    return read_metrics(run_dir / "metrics.jsonl")[0]


def figures(rows: Sequence[Mapping[str, Any]], started: float) -> dict[str, Any]:
    """Speed and learning of one run."""
    steps = [row for row in rows if "reward/mean" in row]
    steady = steps[SKIPPED_STEPS:]
    heldout = [(row["time"], row["eval/chain_sum/mean"]) for row in rows if "eval/chain_sum/mean" in row]
    reached = [seconds - started for seconds, accuracy in heldout if accuracy >= ACCURACY]
    phases = sorted({name for row in steady for name in row if name.startswith("time/")} - {"time/step_s", "time/evaluate_s"})
    first_reward, last_reward = first_and_last_five(series(by_step(steps), "reward/mean"))
    return {
        "first_step_s": steps[0]["time"] - started,
        "step_s": median(steady, "time/step_s"),
        "step_mean_s": statistics.fmean(row["time/step_s"] for row in steady),
        "phases_s": {name.removeprefix("time/").removesuffix("_s"): median(steady, name) for name in phases},
        "sync_push_s": median(steady, "sync/push_s"),
        "sync_pull_s": median(steady, "sync/pull_s"),
        "gen_tokens_per_s": median(steady, "perf/gen_tokens_per_s"),
        "train_tokens_per_s": median(steady, "perf/train_tokens_per_s"),
        "time_to_accuracy_s": reached[0] if reached else None,
        "heldout_first": heldout[0][1],
        "heldout_last": heldout[-1][1],
        "reward_first_five": first_reward,
        "reward_last_five": last_reward,
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in steps),
    }


def median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Median of a metric over the steps that have it."""
    return float(statistics.median([row[name] for row in rows if name in row]))


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median over seeds of every figure that all of them have."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {
        name: statistics.median([run[name] for run in runs]) for name in names if all(run[name] is not None for run in runs)
    }


if __name__ == "__main__":
    main()
