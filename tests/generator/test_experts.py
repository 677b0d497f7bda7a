"""A mixture of experts in the real engine: updates reach every expert in both implementations."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines import Engines
from tests.generator.expert_cases import published_names, samples
from tests.generator.lora_cases import requests
from tests.generator.test_lora import worst
from tests.models.tiny import change_weights, write_model

PROMPTS = [request.token_ids for request in requests(6)]
CHANGED = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that differ in one matrix of one expert."""
    folder = tmp_path_factory.mktemp("experts")
    for name in ("before", "after"):
        write_model("qwen3_moe", folder / name, std=0.1)
    change_weights(folder / "after", lambda weights: weights[CHANGED].mul_(-3.0))
    return folder


@pytest.mark.parametrize("impl", ["titan", "native"])
def test_change_of_one_expert_reaches_the_generator(impl: str, models: Path, engines: Engines) -> None:
    found = engines.run(samples, models, impl)
    published, expected = found["counts"]
    assert published == expected  # by name
    assert worst(models / "before", found["1 before"], PROMPTS) < 1e-4
    assert worst(models / "after", found["2 after"], PROMPTS) < 1e-4
    assert worst(models / "before", found["2 after"], PROMPTS) > 0.05
    assert [c.logprobs.tolist() for c in found["3 before"]] == [c.logprobs.tolist() for c in found["1 before"]]


def test_published_experts_are_stacked_in_order(models: Path) -> None:
    state = {
        f"model.layers.0.mlp.experts.{i}.{part}_proj.weight": torch.full((2, 3), i)
        for i in range(12)
        for part in ("up", "down")
    }
    state |= {f"model.layers.0.mlp.experts.{i}.gate_proj.weight": torch.zeros(2, 3) for i in range(12)}
    found = published_names({**state, "model.layers.0.mlp.gate.weight": torch.zeros(12, 3)})
    assert found["layers.0.moe.routed_experts.inner_experts.w2_EDF"][:, 0, 0].tolist() == list(range(12))


def packed_by_vllm(plain: np.ndarray) -> np.ndarray:
    from vllm import _custom_ops as kernels

    found: np.ndarray = kernels.cpu_prepack_moe_weight(torch.from_numpy(plain), "vec").numpy()
    return found


def test_vllm_packs_experts_into_another_layout_of_the_same_shape(engines: Engines) -> None:
    plain = torch.arange(2 * 64 * 32, dtype=torch.float32).view(2, 64, 32)
    packed = torch.from_numpy(engines.run(packed_by_vllm, plain.numpy()))
    assert packed.shape == plain.shape
    assert not torch.equal(packed, plain)
    assert torch.equal(packed.flatten().sort().values, plain.flatten())
