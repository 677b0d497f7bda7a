"""Measure how long a short run takes with and without `titanrl warm`: `python -m benchmarks.startup --json FILE`.

Runs of one step of the quick start alternate between both. Apart from the step, they start, evaluate and shut down, which is
what every run pays.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import write_result
from titanrl.processes.templates import SHARED


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder, templates() as shared:
        run_s(Path(folder), {SHARED: ""})  # creates the model
        pairs = [(run_s(Path(folder), {SHARED: ""}), run_s(Path(folder), {SHARED: shared})) for _ in range(arguments.pairs)]
    cold, warm = (statistics.median(values) for values in zip(*pairs, strict=True))
    result = {"without_s": cold, "with_s": warm, "ratio": cold / warm, "pairs": pairs}
    write_result(arguments.json, "startup", result)


@contextmanager
def templates() -> Iterator[str]:
    """Run `titanrl warm` during the body, and yield the value of SHARED."""
    command = [sys.executable, "-m", "titanrl.commands.warm", "--config", "quickstart"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as warm:
        assert warm.stdout is not None
        yield next(line for line in iter(warm.stdout.readline, "") if "export" in line).split("=")[1].strip()
        warm.send_signal(signal.SIGINT)


def run_s(folder: Path, environment: Mapping[str, str]) -> float:
    """Return the seconds from start to exit of a run of one step."""
    small = ("warm_start=null", "num_steps=1", "evaluation.num_prompts=8", "checkpoint.every_steps=0", "logging.console=off")
    places = (f"output_dir={folder}/runs", f"cache_dir={folder}/cache")
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "quickstart", *small, *places]
    started = time.perf_counter()
    subprocess.run(command, env=os.environ | environment, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
