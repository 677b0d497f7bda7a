"""Models of every family: equal to transformers, exact when loaded and exported, with the same gradient on every layout."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from tests.docs.blocks import ROOT, blocks_of
from tests.models.tiny import FAMILIES, write_model
from tests.trainer import checks, variants
from tests.trainer.ranks import World

Worlds = Callable[[int], World]
TP = {"tp": 2}
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp("families") / request.param)


def assert_same_logits(model: Path, world: Worlds, family: str | None = None) -> None:
    token_ids = np.random.default_rng(0).integers(1, checks.VOCAB, 200)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = policy(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    (found,) = world(1).run(variants.logits, model, token_ids, family)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)


def test_logits_match_transformers(model: Path, world: Worlds) -> None:
    assert_same_logits(model, world)


def test_documented_custom_family_matches_transformers(world: Worlds, tmp_path: Path) -> None:
    (block,) = (block for block in blocks_of(ROOT / "docs/howto/model_families.md") if block.title)
    (tmp_path / block.title).write_text(block.text)
    model = write_model("seed_oss", tmp_path / "model", head_dim=64)
    assert_same_logits(model, world, f"{tmp_path / block.title}:family")


def test_tensors_unknown_to_family_are_rejected(world: Worlds, tmp_path: Path) -> None:
    model = write_model("qwen2", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(AssertionError, match=r"6 tensors are not part of the model: .*k_proj\.bias"):
        world(1).run(variants.loaded_bytes, model, {})


def test_exported_tensors_equal_loaded_tensors(model: Path, world: Worlds, tmp_path: Path) -> None:
    world(2).run(variants.export, model, {"parallelism": TP}, tmp_path / "out", 0)
    expected = load_file(model / "model.safetensors")
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_two_ranks_equals_gradient_of_one(family: str, world: Worlds, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / family, std=0.02)  # larger weights amplify the rounding of partial sums
    expected, loss = world(1).run(checks.gradient_of, model, (), 2, True)[0]
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    found, same_loss = world(2).run(checks.gradient_of, model, tuple(TP.items()), 2, True)[0]
    assert found.keys() == expected.keys()
    assert same_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in expected.items():
        assert np.abs(gradient).max() > 0, name
        assert np.abs(found[name] - gradient).max() <= 1e-6 * largest, name


def test_adapters_leave_biases_unchanged(world: Worlds, tmp_path: Path) -> None:
    model = write_model("qwen2", tmp_path / "model")
    found = world(2).run(variants.train_adapters, model, {"lora": LORA, "parallelism": TP})[0]
    biases = [name for name in found["before"] if name.endswith(".bias")]
    assert len(biases) == 6
    assert all(np.array_equal(found["before"][name], found["merged"][name]) for name in biases)
