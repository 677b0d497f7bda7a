"""Measure how memory, descriptors and threads grow with the steps of a run: `python -m benchmarks.growth --json FILE`.

A tiny model with random weights trains asynchronously for many short steps. The benchmark samples every process of the run
from /proc, and fits a line to each process's resident memory over the prompts that were trained on, without the first steps, in
which caches fill. The standard errors allow for correlated samples (Newey and West, 1987), because memory grows in blocks.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import write_result
from benchmarks.resident import descendants, read_status, roles
from benchmarks.victims import process_of

GROUPS_PER_STEP = 2
SETTINGS = (
    "max_staleness=1",
    "warm_start=null",
    "model.recipe.hidden_size=32",
    "model.recipe.num_layers=1",
    "model.recipe.num_heads=1",
    "model.recipe.num_kv_heads=1",
    "model.recipe.intermediate_size=64",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    "rollout.group_size=2",
    "rollout.max_new_tokens=2",
    "data.rewards={place: {function: benchmarks.varied_reward:by_place, trusted: true}}",
    "evaluation.every_steps=0",
    "evaluation.num_prompts=2",
    "checkpoint.every_steps=0",
    "faults.max_respawns=0",
    "logging.rollouts_per_step=0",
    "logging.console=plain",
)
"""Overrides that make a step as short as possible."""
START_LIMIT_S = 600.0
"""Time limit for the first step."""
LOOK_S = 0.25
"""Polling interval in seconds."""


@dataclass(slots=True)
class Series:
    """Samples of one process."""

    steps: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def figures(self, first_step: int) -> dict[str, Any]:
        """Return slopes and extremes over the samples from a step on."""
        start = int(np.searchsorted(self.steps, first_step))
        prompts = np.array(self.steps[start:], np.float64) * GROUPS_PER_STEP
        slope, error = line(prompts, np.array(self.resident_bytes[start:], np.float64))
        return {
            "bytes_per_prompt": slope,
            "standard_error": error,
            "first_bytes": self.resident_bytes[start],
            "last_bytes": self.resident_bytes[-1],
            "descriptors": spread(self.descriptors[start:]),
            "threads": spread(self.threads[start:]),
            "samples": len(prompts),
        }


def main() -> None:
    """Measure a run and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=10_000, help="number of steps")
    parser.add_argument("--skip", type=int, help="steps at the start that the slopes exclude; by default half of the steps")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-", ignore_cleanup_errors=True) as folder:
        skip = arguments.steps // 2 if arguments.skip is None else arguments.skip
        result = measure(Path(folder), arguments.steps, skip, arguments.overrides)
    write_result(arguments.json, "growth", result)


def measure(folder: Path, num_steps: int, skip: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the command, sample its processes, and return the slopes."""
    run_dir, output = folder / "runs" / "growth", folder / "output.txt"
    places = ["name=growth", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", f"num_steps={num_steps}"]
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *places, *SETTINGS, *overrides]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    started = time.monotonic()
    counter, series = StepCounter(run_dir / "metrics.jsonl"), dict[str, Series]()
    every, due = max(1, num_steps // 400), 1
    while process.poll() is None:
        step = counter.read()
        if step >= due:
            due = step + every
            sample(run_dir, process.pid, step, series)
        elif not step and time.monotonic() - started > START_LIMIT_S:
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"the run failed with exit code {process.returncode}:\n{output.read_text()[-3000:]}")
    return {
        "steps": counter.read(),
        "skipped_steps": skip,
        "prompts_per_step": GROUPS_PER_STEP,
        "processes": figures(series, skip),
    }


def figures(series: Mapping[str, Series], skip: int) -> dict[str, Any]:
    """Return the figures of each process that lived through the measured steps; those without a name are children of others."""
    last = max(taken.steps[-1] for taken in series.values())
    lasting = {name: taken for name, taken in sorted(series.items()) if taken.steps[0] <= skip and taken.steps[-1] == last}
    return {name: taken.figures(skip) for name, taken in lasting.items()}


class StepCounter:
    """Incremental reader of the number of steps in `metrics.jsonl`."""

    def __init__(self, file: Path) -> None:
        """Start before the first step."""
        self._file, self._offset, self._count = file, 0, 0

    def read(self) -> int:
        """Return the number of lines so far."""
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
            self._offset += len(added)
            self._count += added.count(b"\n")
        return self._count


def sample(run_dir: Path, controller: int, step: int, series: dict[str, Series]) -> None:
    """Add a sample of every process that can be read."""
    named = {**roles(run_dir), controller: "controller"}
    for pid in {child for root in named for child in descendants(root)}:
        process, status = process_of(pid), read_status(pid)
        if process is None or "VmRSS" not in status:
            continue
        name = named.get(pid) or f"child {pid} of {named.get(process.parent, process.parent)}"
        try:
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except OSError:
            continue
        taken = series.setdefault(name, Series())
        taken.steps.append(step)
        taken.resident_bytes.append(status["VmRSS"])
        taken.descriptors.append(descriptors)
        taken.threads.append(threads)


def line(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the slope of the least-squares line and its standard error for correlated samples (Newey and West, 1987)."""
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    scores = x * (y - y.mean() - slope * x)
    lags = max(1, len(x) // 10)
    variance = float(scores @ scores)
    variance += sum(2.0 * (1.0 - lag / (lags + 1.0)) * float(scores[lag:] @ scores[:-lag]) for lag in range(1, lags + 1))
    return slope, max(0.0, variance) ** 0.5 / float(x @ x)


def spread(values: Sequence[int]) -> dict[str, int]:
    """Return the first, last, least and greatest value."""
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
