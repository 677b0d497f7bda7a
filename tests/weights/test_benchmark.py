"""A short run of the weight-sync benchmark with two FSDP2 writers and one reader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.table import weight_sync_tables


@pytest.mark.slow
def test_benchmark_measures_two_writers_and_a_reader(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    which = ["--payloads", "small", "--layouts", "FSDP2->1", "--dtypes", "fp32->bf16", "--repetitions", "1"]
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--json", out, *which, "--no-torchstore"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "[1/1] small FSDP2->1 fp32->bf16" in shown
    result = json.loads(out.read_text())
    (case,) = result["cases"]
    assert case["name"] == "small FSDP2->1 fp32->bf16 sampled"
    assert case["bytes"] == 2 * 150 * (512 * 320 + 512)
    assert min(case[name] for name in ("memcpy_s", "push_s", "pull_s", "e2e_s", "push_ratio", "pull_ratio", "e2e_ratio")) > 0
    assert "\n| small FSDP2->1 | fp32->bf16 | " in weight_sync_tables(result)
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
