"""Compare learning of the quick start with and without replayed groups: `python -m benchmarks.replay_learning --json FILE`.

Every variant generates the same number of groups per step from the same base model, with the same off-policy correction, so the
rewards of a step compare at equal numbers of generated tokens. Replay adds work for the trainer, which shows in the step time.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.quickstart import run_command
from titanrl.metrics.reading import read_metrics

CORRECTION = ("algorithm.proximal=step_start", "algorithm.correction={preset: token_tis}")
REPLAY = ("replay.fraction=0.5", "replay.capacity=64", "replay.max_age=8")
GROUP_SIZE = 8
"""Completions per group in the quick start."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "no replay": (),
    "uniform": (*REPLAY, "replay.alpha=0.0"),
    "advantage": (*REPLAY, "replay.priority=advantage"),
}


def main() -> None:
    """Measure every variant with every seed and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_learning", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        runs = [
            measure(Path(folder), name, seed, arguments.steps) for seed in arguments.seeds for name in VARIANTS
        ]  # seeds outermost, so that a drift in machine speed affects all variants
    variants = {name: summary([run for run in runs if run["variant"] == name]) for name in VARIANTS}
    write_result(arguments.json, "replay_learning", {"variants": variants, "runs": runs}, shown=variants)


def measure(folder: Path, name: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Run one variant and return its measurements."""
    run = f"{name.replace(' ', '_')}_{seed}"
    places = [f"seed={seed}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off", f"name={run}"]
    run_command([*places, f"num_steps={num_steps}", "evaluation.every_steps=10", *CORRECTION, *VARIANTS[name]])
    rows = read_metrics(folder / "runs" / run / "metrics.jsonl")
    steps = [row for row in rows if "reward/mean" in row]
    heldout = [row["eval/chain_sum/mean"] for row in rows if "eval/chain_sum/mean" in row]
    num_groups = sum(row["buffer/tried"] for row in steps)
    tokens = sum(row["tokens/response_len_mean"] * row["buffer/tried"] * GROUP_SIZE for row in steps)
    return {
        "variant": name,
        "seed": seed,
        "heldout": heldout,
        "heldout_mean": statistics.fmean(heldout),
        "heldout_last": heldout[-1],
        "reward_mean": statistics.fmean(row["reward/mean"] for row in steps),
        "generated_groups": num_groups,
        "generated_tokens": tokens,
        "reward_per_1000_tokens": 1000 * sum(row["reward/mean"] * row["buffer/tried"] * GROUP_SIZE for row in steps) / tokens,
        "step_s": statistics.median(row["time/step_s"] for row in steps[5:]),
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over seeds."""
    names = (
        "heldout_mean",
        "heldout_last",
        "reward_mean",
        "generated_tokens",
        "reward_per_1000_tokens",
        "step_s",
    )
    return {name: statistics.fmean(run[name] for run in runs) for name in names}


if __name__ == "__main__":
    main()
