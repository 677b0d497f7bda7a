"""Sampling of the memory of a command's processes, for benchmarks."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import full_size, resident
from benchmarks.resident import Memory, Peak, Sampler, read_fields
from titanrl.config import load_config
from titanrl.config.sizes import LIBRARY_BYTES, derive
from titanrl.models.directory import model_shape, published_shapes

PROGRAM = """
import os, mmap, subprocess, sys
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    private, shared = b"x" * 30_000_000, mmap.mmap(-1, 10_000_000)
    shared.write(b"x" * 10_000_000)
    print(child.pid, child.stdout.readline(), end="", flush=True)
    sys.stdin.readline()
    child.communicate("")
else:
    private = b"x" * 60_000_000
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "logs").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "program.py")]


def test_peaks_are_reported_by_role(command: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        sampler = Sampler(process.pid, tmp_path)
        child, _ = process.stdout.readline().split()
        (tmp_path / "logs/trainer_0.pid").write_text(f"{child} 17\n")
        sampler.sample()
        process.stdin.write("\n")
    memory = sampler.memory
    assert memory.roles.keys() == {"trainer_0", "others"}
    assert 60e6 < memory.roles["trainer_0"].private_bytes < 90e6
    assert 30e6 < memory.roles["others"].private_bytes < 60e6
    assert 10e6 <= memory.roles["others"].shared_bytes < 12e6
    private = sum(peak.private_bytes for peak in memory.roles.values())
    assert memory.together_bytes == pytest.approx(private + memory.roles["others"].shared_bytes, rel=0.03)
    assert 0 < memory.least_available_bytes < read_fields(Path("/proc/meminfo"))["MemTotal"]


def test_command_is_killed_when_memory_runs_out(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "INTERVAL_S", 0.01)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with process, Sampler(process.pid, tmp_path, least_available_bytes=1 << 60) as sampler:
        process.wait(20)
    assert process.returncode == -9
    assert sampler.memory.together_bytes > 0


def test_figures_compare_the_peaks_with_the_dry_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 96, "vocab_size": 200}
    shape = replace(published_shapes()["Qwen3-0.6B"], **sizes)
    full_size.write_model(tmp_path / "model", shape, 2)
    config = load_config("configs/quickstart.yaml", [f"model.path={tmp_path}/model", *full_size.SETTINGS])
    assert model_shape(config) == replace(shape, num_layers=2)
    derived = derive(config, model_shape(config))
    trainer = derived.memory.trainer.cpu_total + LIBRARY_BYTES["trainer"]
    generator = derived.memory.generator_rank_weights + config.generator.kv_cache_bytes + LIBRARY_BYTES["generator"]
    peaks = {"trainer_0": Peak(private_bytes=trainer), "generator_0_0": Peak(private_bytes=generator // 2), "others": Peak()}
    found = full_size.compared(config, derived, Memory(roles=peaks, together_bytes=10**9))
    assert found["roles"]["trainer_0"]["ratio"] == 1.0
    assert found["roles"]["generator_0_0"]["ratio"] == pytest.approx(0.5)
    assert "ratio" not in found["roles"]["others"]
    others = {"controller": 1, "rollout": 1, "store": 1, "sandbox": config.sandbox.num_processes}
    libraries = sum(LIBRARY_BYTES[role] * number for role, number in others.items())
    assert found["together_estimate_bytes"] == trainer + generator + 2 * derived.memory.replica_weights + libraries
