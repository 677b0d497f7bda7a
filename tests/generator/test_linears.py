"""Linear layers that a CPU computes from packed copies of their weights."""

from pathlib import Path

import pytest
import torch

from tests.engines import Engines
from tests.generator.packed_cases import compare_all
from titanrl.config import load_config
from titanrl.config.sections import GeneratorConfig
from titanrl.config.sizes import derive, packed_weights
from titanrl.generator.compat import PackedLinears
from titanrl.models.directory import model_shape, published_shapes
from titanrl.processes.machine import THREADS

MEDIUM = ["model.recipe.hidden_size=384", "model.recipe.num_layers=6", "model.recipe.intermediate_size=1088"]
needs_bfloat16 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="only CPUs with bfloat16 instructions pack weights of this type"
)
dtypes = pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=needs_bfloat16), "float32"])


@dtypes
def test_packed_layers_follow_their_weights(dtype: str) -> None:
    torch_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    layer = torch.nn.Linear(64, 48, dtype=torch_dtype)
    model, values = torch.nn.Sequential(layer), torch.randn(2, 3, 64, dtype=torch_dtype)
    linears = PackedLinears(model)
    tolerance = 0.0 if dtype == "bfloat16" else 1e-5  # torch does not use oneDNN in float32
    with torch.no_grad():
        for _ in range(2):
            linears.pack()
            expected = torch.nn.functional.linear(values, layer.weight, layer.bias)
            torch.testing.assert_close(packed := model(values), expected, rtol=tolerance, atol=tolerance)
            layer.weight.normal_()
            assert torch.equal(model(values), packed)  # until they are packed again


def test_packed_layers_do_not_depend_on_the_batch() -> None:
    layer = torch.nn.Linear(384, 256)
    model, values = torch.nn.Sequential(layer), torch.randn(64, 384)
    PackedLinears(model).pack()
    with torch.no_grad():
        expected = model(values)
        for size in (2, 3, 7, 16, 33):
            assert torch.equal(model(values[:size].clone()), expected[:size])


@dtypes
def test_completions_do_not_depend_on_packing(dtype: str, tmp_path: Path, engines: Engines) -> None:
    differences, num_threads = engines.run(compare_all, dtype, tmp_path / "model", **{THREADS: "2"})
    assert len(differences) == 4  # of two versions, for both implementations of the model
    assert max(differences) < (1e-3 if dtype == "bfloat16" else 2e-5)
    assert num_threads == 2


def test_only_large_models_are_packed_and_the_estimate_counts_the_copies() -> None:
    shape = published_shapes()["Qwen3-0.6B"]
    assert shape.tied_embeddings
    weights = 2 * shape.num_parameters
    assert packed_weights(GeneratorConfig(dtype="bfloat16"), shape) == weights
    assert packed_weights(GeneratorConfig(dtype="float32"), shape) == 2 * weights
    tiny, medium = (model_shape(load_config("configs/quickstart.yaml", changes)) for changes in ([], MEDIUM))
    assert tiny is not None
    assert packed_weights(GeneratorConfig(dtype="float32"), tiny) == 0
    assert packed_weights(GeneratorConfig(dtype="float32"), medium) == 4 * medium.num_parameters
    assert packed_weights(GeneratorConfig(dtype="bfloat16"), medium) == 0
    assert packed_weights(GeneratorConfig(dtype="bfloat16", tp=2), shape) == 0
    assert packed_weights(GeneratorConfig(dtype="bfloat16", tp=2, model_impl="native"), shape) == pytest.approx(
        weights / 2, 0.01
    )
    config = load_config("configs/quickstart.yaml", ["generator.dtype=bfloat16"])
    sizes = derive(config, published_shapes()["Qwen3-0.6B"])
    assert sizes.memory.packed_weights == weights
