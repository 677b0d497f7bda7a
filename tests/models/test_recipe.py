"""The tiny recipe model of every family."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from titanrl.config.sections import RecipeConfig
from titanrl.models.directory import open_model
from titanrl.models.families import FAMILIES
from titanrl.models.recipe import create_model

FILES = ["config.json", "generation_config.json", "model.safetensors", "recipe.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def recipe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model directory."""
    directory = tmp_path_factory.mktemp("recipe") / "model"
    create_model(directory, RecipeConfig(), seed=0)
    return directory


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_transformers_loads_every_parameter_of_recipe_model(recipe_dir: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    loaded: Any = Qwen3ForCausalLM.from_pretrained(recipe_dir, output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    # 112*128 + 2 * (2*128*128 + 2*64*128 + 3*384*128 + 2*128 + 2*32) + 128, the output projection being the embedding.
    assert sum(parameter.numel() for parameter in model.parameters()) == 408_320
    assert model.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert (model.config.rms_norm_eps, model.config.head_dim, model.config.tie_word_embeddings) == (1e-6, 32, True)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    logits = model(torch.arange(102)[None]).logits
    assert logits.shape == (1, 102, 112)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1


def test_transformers_reads_every_recipe_option(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3ForCausalLM

    recipe = RecipeConfig(
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=80,
        max_positions=99,
        init_std=0.5,
    )
    create_model(tmp_path / "model", recipe, seed=0)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (48, 3, 80)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 64)
    assert (config.max_position_embeddings, config.initializer_range) == (99, 0.5)
    loaded: Any = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loaded[1].values())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_recipe_model_of_every_family(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    create_model(tmp_path / "model", RecipeConfig(family=family, max_positions=8192), seed=0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    assert model.config.model_type == family
    expected = open_model(tmp_path / "model").shape.num_parameters
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_error_for_unknown_recipe_family_lists_supported_families(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of the supported model types qwen3, qwen3_moe, qwen2, llama, mistral"):
        create_model(tmp_path / "model", RecipeConfig(family="llama4"), seed=0)
    assert names(tmp_path) == []


def test_matrices_are_normal_and_norms_are_one(recipe_dir: Path) -> None:
    weights = load_file(recipe_dir / "model.safetensors")
    assert "lm_head.weight" not in weights
    for name, weight in weights.items():
        if "norm" in name:
            assert np.all(weight == 1)
        else:  # 8192 numbers or more: the spread is known to about 1 %, the mean to 0.05 / sqrt(8192) = 0.0006
            assert weight.std() == pytest.approx(0.05, rel=0.05)
            assert abs(weight.mean()) < 0.003


def test_files_depend_only_on_recipe_and_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        create_model(tmp_path / name, RecipeConfig(), seed)
    assert names(tmp_path / "a") == FILES
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in FILES)
    changed = [file for file in FILES if (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()]
    assert changed == ["model.safetensors", "recipe.json"]


def test_existing_model_is_kept_and_never_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "model"
    create_model(directory, RecipeConfig(), seed=3)
    (directory / "config.json").write_text("changed by hand")
    create_model(directory, RecipeConfig(), seed=3)
    assert (directory / "config.json").read_text() == "changed by hand"
    with pytest.raises(ValueError, match="not the model of this recipe"):
        create_model(directory, RecipeConfig(), seed=4)
    with pytest.raises(ValueError, match="not the model of this recipe"):
        create_model(tmp_path / "cache", RecipeConfig(), seed=3)


def test_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("titanrl.models.recipe.save", full_disk)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/model'"):
        create_model(tmp_path / "model", RecipeConfig(), seed=0)
    assert names(tmp_path) == []


def test_concurrent_creation_gives_one_complete_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: create_model(tmp_path / "model", RecipeConfig(), 0), range(8)))
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == FILES
