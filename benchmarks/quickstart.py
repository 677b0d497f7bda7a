"""Measure speed and learning of the quick start: `python -m benchmarks.quickstart --json FILE`.

The benchmark runs the command as a user would, once per seed, and measures time from its launch. A separate run warm-starts the
base model first, so that the base is cached for all measurements of the second run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from titanrl.metrics.reading import by_step, ends_of, read_metrics, series

TARGET_SCORE = 0.8
"""Held-out score; `time_to_score_s` is the time until it is first reached."""
SKIPPED_STEPS = 5
"""Steps at the start that medians exclude, because caches are cold."""


def main() -> None:
    """Measure every seed and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        runs = [measure(Path(folder), seed, arguments.overrides) for seed in arguments.seeds]
    write_result(arguments.json, "quickstart", {"medians": medians(runs), "runs": runs}, shown=medians(runs))


def measure(folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Warm-start the base model of a seed, run the quick start on it, and return the measurements."""
    places = [f"seed={seed}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off", *overrides]
    warm_started = time.time()
    run_command([*places, f"name=warm{seed}", "num_steps=1"])
    # The first line is the evaluation before the first step, directly after startup.
    warm_start_s = read_metrics(folder / "runs" / f"warm{seed}" / "metrics.jsonl")[0]["time"] - warm_started
    # Evaluations every 5 steps determine when the target score is reached; no median includes their time.
    started = time.time()
    run_command([*places, f"name=seed{seed}", "evaluation.every_steps=5"])
    rows = read_metrics(folder / "runs" / f"seed{seed}" / "metrics.jsonl")
    return {"seed": seed, "warm_start_s": warm_start_s, "total_s": time.time() - started, **figures(rows, started)}


def run_command(arguments: Sequence[str]) -> None:
    """Run the training command to completion."""
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *arguments]
    subprocess.run(command, check=True)


def figures(rows: Sequence[Mapping[str, Any]], started: float) -> dict[str, Any]:
    """Return speed and learning of one run."""
    steps = [row for row in rows if "reward/mean" in row]
    steady = steps[SKIPPED_STEPS:]
    heldout = [(row["time"], row["eval/chain_sum/mean"]) for row in rows if "eval/chain_sum/mean" in row]
    reached = [seconds - started for seconds, score in heldout if score >= TARGET_SCORE]
    phases = sorted({name for row in steady for name in row if name.startswith("time/")} - {"time/step_s", "time/evaluate_s"})
    first_reward, last_reward, _ = ends_of(series(by_step(steps), "reward/mean"))
    return {
        "first_step_s": steps[0]["time"] - started,
        "step_s": median(steady, "time/step_s"),
        "step_mean_s": statistics.fmean(row["time/step_s"] for row in steady),
        "phases_s": {name.removeprefix("time/").removesuffix("_s"): median(steady, name) for name in phases},
        "sync_push_s": median(steady, "sync/push_s"),
        "sync_pull_s": median(steady, "sync/pull_s"),
        "gen_tokens_per_s": median(steady, "perf/gen_tokens_per_s"),
        "train_tokens_per_s": median(steady, "perf/train_tokens_per_s"),
        "time_to_score_s": reached[0] if reached else None,
        "heldout_first": heldout[0][1],
        "heldout_last": heldout[-1][1],
        "reward_first_five": first_reward,
        "reward_last_five": last_reward,
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in steps),
    }


def median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a metric over the steps that have it."""
    return float(statistics.median([row[name] for row in rows if name in row]))


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median over seeds of every number that all seeds have."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {
        name: statistics.median([run[name] for run in runs]) for name in names if all(run[name] is not None for run in runs)
    }


if __name__ == "__main__":
    main()
