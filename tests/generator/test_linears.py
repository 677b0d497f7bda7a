"""Linear layers that a CPU computes from packed copies of their weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titanrl.config import load_config
from titanrl.config.sections import GeneratorConfig
from titanrl.config.sizes import derive, packed_weights
from titanrl.generator.compat import PackedLinears
from titanrl.models.directory import published_shapes
from titanrl.processes.machine import THREADS

needs_bfloat16 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="only CPUs with bfloat16 instructions pack weights"
)


@needs_bfloat16
def test_packed_layers_follow_their_weights() -> None:
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    model, values = torch.nn.Sequential(layer), torch.randn(2, 3, 64, dtype=torch.bfloat16)
    linears = PackedLinears(model)
    with torch.no_grad():
        for _ in range(2):
            linears.pack()
            expected = torch.nn.functional.linear(values, layer.weight, layer.bias)
            assert torch.equal(model(values), expected)
            layer.weight.normal_()
            assert torch.equal(model(values), expected)  # until they are packed again


@needs_bfloat16
@pytest.mark.parametrize("impl", ["titan", "native"])
def test_completions_do_not_depend_on_packing(impl: str, tmp_path: Path) -> None:
    environment = {**os.environ, THREADS: "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.generator.packed_cases", impl, tmp_path / "model"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "2 threads" in ran.stdout


def test_only_large_bfloat16_models_are_packed_and_the_estimate_counts_the_copies() -> None:
    shape = published_shapes()["Qwen3-0.6B"]
    assert shape.tied_embeddings
    weights = 2 * shape.num_parameters
    assert packed_weights(GeneratorConfig(dtype="bfloat16"), shape) == weights
    assert packed_weights(GeneratorConfig(dtype="float32"), shape) == 0
    assert packed_weights(GeneratorConfig(dtype="bfloat16", tp=2), shape) == 0
    assert packed_weights(GeneratorConfig(dtype="bfloat16", tp=2, model_impl="native"), shape) == pytest.approx(
        weights / 2, 0.01
    )
    config = load_config("configs/quickstart.yaml", ["generator.dtype=bfloat16"])
    sizes = derive(config, published_shapes()["Qwen3-0.6B"])
    assert sizes.memory is not None
    assert sizes.memory.packed_weights == weights
