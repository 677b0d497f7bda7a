"""Measure the cost of background evaluations: `python -m benchmarks.evaluations --json FILE`.

The quick start with `max_staleness: 1` runs alternately without evaluations and with one of 200 prompts every 10 steps. An
evaluation samples additional tokens, so it slows training if both need the same cores. The benchmark compares the increase of
the step time with the increase of sampled tokens, and the publication times of both runs.
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

NUM_PROMPTS = 200
"""Prompts per evaluation, with one completion each."""
SETTINGS = ("max_staleness=1", "checkpoint.every_steps=0", "logging.console=off", f"evaluation.num_prompts={NUM_PROMPTS}")
EVERY_STEPS = 10
"""Steps between two evaluations."""
SKIPPED_STEPS = 20
"""Steps at the start that are not measured: caches are cold, and responses still become longer."""


def main() -> None:
    """Run both variants several times, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluations", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--turns", type=int, default=3, help="runs per variant")
    parser.add_argument("--steps", type=int, default=120, help="steps per run")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    kinds: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        for turn in range(arguments.turns):
            for kind, runs in kinds.items():
                every = EVERY_STEPS if kind == "with" else 0
                settings = (*SETTINGS, f"evaluation.every_steps={every}", f"num_steps={arguments.steps}", *arguments.overrides)
                runs.append(measure(Path(folder), f"{kind}{turn}", settings))
    write_result(arguments.json, "evaluations", {**compare(kinds), "runs": kinds})


def measure(folder: Path, name: str, settings: Sequence[str]) -> dict[str, float]:
    """Run the quick start and return its measurements from the first measured step on."""
    run_command([f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", *settings])
    rows = [row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["step"] >= SKIPPED_STEPS]
    steps = [row for row in rows if "time/step_s" in row]
    evaluations = [row for row in rows if "eval/chain_sum/mean" in row and row["step"] < steps[-1]["step"]]
    counted = steps[-1]["step"] - steps[0]["step"]
    return {
        "step_s": (steps[-1]["time"] - steps[0]["time"]) / counted,
        "tokens_per_step": (steps[-1]["count/generated_tokens"] - steps[0]["count/generated_tokens"]) / counted,
        "evaluation_tokens_per_step": sum(map(evaluation_tokens, evaluations)) / counted,
        "evaluations": len(evaluations),
        "pull_s": statistics.median(row["sync/pull_s"] for row in steps if "sync/pull_s" in row),
        "pull_max_s": max(row["sync/pull_s"] for row in steps if "sync/pull_s" in row),
        "wait_for_publication_s": statistics.fmean(row["time/sync_s"] for row in steps),
        "staleness_max": max(row["staleness/max"] for row in steps),
        "heldout_last": rows[-1]["eval/chain_sum/mean"],
    }


def evaluation_tokens(row: Mapping[str, Any]) -> float:
    """Return the number of tokens that an evaluation sampled."""
    return float(row["eval/chain_sum/response_len_mean"]) * NUM_PROMPTS


def compare(kinds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return medians of both variants, and the ratios of step time and of sampled tokens."""
    names = kinds["with"][0].keys()
    medians = {kind: {name: statistics.median(run[name] for run in runs) for name in names} for kind, runs in kinds.items()}
    with_evaluations, without = medians["with"], medians["without"]
    tokens = with_evaluations["tokens_per_step"] + with_evaluations["evaluation_tokens_per_step"]
    return {
        "step_ratio": with_evaluations["step_s"] / without["step_s"],
        "token_ratio": tokens / with_evaluations["tokens_per_step"],
        "medians": medians,
    }


if __name__ == "__main__":
    main()
