"""Put the figures of `benchmarks/baselines/` into the README: `python -m benchmarks.table [--check]`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: python -m benchmarks.table -->", "<!-- end of figures -->"


def main() -> None:
    """Rewrite the README's table, or check that it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README is outdated")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    updated = with_table(text, quickstart_table(json.loads((ROOT / "benchmarks/baselines/quickstart.json").read_text())))
    if arguments.check:
        sys.exit(0 if updated == text else "README.md: the figures are outdated; run python -m benchmarks.table")
    readme.write_text(updated)


def with_table(text: str, table: str) -> str:
    """The text with the part between the two marks replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


Cell = Callable[[Mapping[str, Any]], str]
"""The text of a figure, from a run."""


def sync_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step in which a new version is on its way."""
    return float(run["sync_push_s"] + run["sync_pull_s"])


QUICKSTART_ROWS: dict[str, Cell] = {
    "held-out accuracy, before -> after": lambda run: f"{run['heldout_first']:.3f} -> {run['heldout_last']:.3f}",
    "reward, first -> last five steps": lambda run: f"{run['reward_first_five']:.2f} -> {run['reward_last_five']:.2f}",
    "warm start, with loading (once, then cached)": lambda run: f"{run['warm_start_s']:.0f} s",
    "first GRPO step after launch, base cached": lambda run: f"{run['first_step_s']:.1f} s",
    "held-out accuracy 0.8 after": lambda run: f"{run['time_to_accuracy_s']:.0f} s" if run["time_to_accuracy_s"] else "-",
    "step, median": lambda run: f"{run['step_s']:.3f} s",
    "of it: generate, score, sync": lambda run: f"{run['phases_s']['rollout']:.3f} s",
    "of it: forward, backward, optimizer": lambda run: f"{run['phases_s']['train'] + run['phases_s']['optim']:.3f} s",
    "weight sync, push + pull": lambda run: f"{sync_s(run):.3f} s, {sync_s(run) / run['step_s']:.0%} of a step",
    "largest log-prob difference trainer/generator": lambda run: f"{run['mismatch_max']:.1e}",
}


def quickstart_table(result: Mapping[str, Any]) -> str:
    """The quick start's figures, a column per seed."""
    runs, machine = result["runs"], result["machine"]
    head = "| | " + " | ".join(f"seed {run['seed']}" for run in runs) + " |"
    lines = [head, "|---|" + "---|" * len(runs)]
    lines += [f"| {label} | " + " | ".join(map(cell, runs)) + " |" for label, cell in QUICKSTART_ROWS.items()]
    where = f"{machine['cores']} cores of an {machine['processor']}, commit {machine['commit']}"
    return "\n".join(lines) + f"\n\n`python -m benchmarks.quickstart --json FILE`, {where}."


if __name__ == "__main__":
    main()
