"""Measure step, memory and CPU time over the sizes of a run: `python -m benchmarks.growth_by_size --json FILE [--over NAME]`.

A tiny model with random weights trains asynchronously. One size varies at a time: groups per step, trainer ranks, generator
replicas, or tokens per completion. Each figure gets the slope of a line through its logarithms: 1 is proportional growth.
Processes share the cores of this machine, so ranks and replicas beyond the cores add cost, but no speed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.growth import SETTINGS, StepCounter
from benchmarks.machine import write_result
from benchmarks.resident import descendants, read_status, roles
from benchmarks.scale_tables import ROLES, growth_table
from titanrl.metrics.reading import read_metrics

SMALL = ("rollout.max_new_tokens=8", "rollout.groups_per_step=16", "rollout.group_size=4", "generator.on_update=continue")
"""Overrides of every case, after those of `benchmarks.growth`."""
LONG_ROWS = ("trainer.row_tokens=2112", "model.recipe.max_positions=2112")
OVER: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
    "groups": ((8, 64, 512, 4096), ("rollout.groups_per_step={}", "rollout.max_new_tokens=2", "rollout.group_size=2")),
    "ranks": ((1, 2, 4), ("trainer.parallelism.dp_shard={}",)),
    "replicas": ((1, 2, 4), ("generator.replicas={}",)),
    "lengths": (
        (32, 128, 512, 2048),
        (
            "rollout.max_new_tokens={}",
            "rollout.groups_per_step=4",
            "trainer.row_tokens=2112",
            "model.recipe.max_positions=2112",
        ),
    ),
}
"""Values of each size, and the overrides that set them."""
START_LIMIT_S = 300.0
LOOK_S = 0.1
"""Polling interval in seconds."""
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure the sizes and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth_by_size", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write; sizes that are in it and not in --over stay")
    parser.add_argument("--over", nargs="+", choices=list(OVER), default=list(OVER), help="sizes to vary")
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of the steps of each case")
    arguments = parser.parse_args()
    known = json.loads(arguments.json.read_text())["over"] if arguments.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-", ignore_cleanup_errors=True) as folder:
        for name in arguments.over:
            known[name] = over(Path(folder), name, arguments.seconds)
            print(growth_table(name, known[name]), flush=True)
    write_result(arguments.json, "growth_by_size", {"over": known}, shown={})


def over(folder: Path, name: str, seconds: float) -> dict[str, Any]:
    """Measure the cases of a size; return their figures and slopes."""
    values, overrides = OVER[name]
    cases = []
    for value in values:
        settings = [*SETTINGS, *SMALL, *(override.format(value) for override in overrides)]
        cases.append({"value": value, **measure(folder, f"{name}{value}", settings, seconds)})
    figures = [key for key in cases[0] if key not in ("value", "steps")]
    return {"cases": cases, "slopes": {key: slope(values, [case[key] for case in cases]) for key in figures}}


def slope(values: Sequence[float], figures: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(values), np.log(np.maximum(figures, 1e-9)), 1)[0])


def measure(folder: Path, name: str, settings: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run the command until its steps have taken some seconds; return figures per step, and memory at the end.

    The first two steps are not measured.
    """
    run_dir, output = folder / "runs" / name, folder / f"{name}.txt"
    places = [f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "num_steps=1000000"]
    command = [sys.executable, "-m", "benchmarks.endless", "--config", "configs/quickstart.yaml", *places, *settings]
    counter, started, before = StepCounter(run_dir / "metrics.jsonl"), time.monotonic(), dict[str, float]()
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        first, began = 0, 0.0
        while process.poll() is None:
            step = counter.read()
            if not began and step >= 2:
                first, began, before = step, time.monotonic(), cpu_seconds(run_dir, process.pid)
            if began and step > first and time.monotonic() - began >= seconds:
                used, memory = cpu_seconds(run_dir, process.pid), resident_bytes(run_dir, process.pid)
                break
            if not began and time.monotonic() - started > START_LIMIT_S:
                raise RuntimeError(f"no step in {START_LIMIT_S:g} s:\n{output.read_text()[-3000:]}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        else:
            raise RuntimeError(f"the run ended with exit code {process.returncode}:\n{output.read_text()[-3000:]}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    rows = read_metrics(run_dir / "metrics.jsonl")[first:step]
    num_steps = step - first
    return {
        "steps": num_steps,
        "step_s": statistics.median(row["time/step_s"] for row in rows),
        **{f"{role}_cpu_s": (used[role] - before[role]) / num_steps for role in ROLES},
        **{f"{role}_bytes": memory[role] for role in ROLES},
    }


def _by_role(run_dir: Path, controller: int) -> list[tuple[str, int]]:
    """Return the role of each process of a run. Children have the role of their parent, except those of the controller."""
    found = {controller: "controller"}
    for root, name in roles(run_dir).items():
        role = next(role for role in ROLES if name.startswith(role))
        found |= dict.fromkeys(descendants(root), role)
    return [(role, pid) for pid, role in found.items()]


def cpu_seconds(run_dir: Path, controller: int) -> dict[str, float]:
    """Return the CPU seconds of each role so far."""
    used = dict.fromkeys(ROLES, 0.0)
    for role, pid in _by_role(run_dir, controller):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[role] += (int(fields[11]) + int(fields[12])) / _TICKS
    return used


def resident_bytes(run_dir: Path, controller: int) -> dict[str, int]:
    """Return the resident memory of each role."""
    sizes = dict.fromkeys(ROLES, 0)
    for role, pid in _by_role(run_dir, controller):
        with contextlib.suppress(OSError):
            sizes[role] += read_status(pid).get("VmRSS", 0)
    return sizes


if __name__ == "__main__":
    main()
