"""A model directory is read, or refused if torchtitan or vLLM cannot run its model."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import create_model
from titanrl.models.hf_config import read_hf_config, torchtitan_problems, vllm_problems

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tp": 1, "kv_cache_bytes": 64 << 20, "max_len": 256}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    create_model(tmp_path / "tiny", RecipeConfig(), seed=3)
    return tmp_path / "tiny"


def edit(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_dense_qwen3_config_is_read(model_dir: Path) -> None:
    assert read_hf_config(model_dir)["hidden_size"] == 128


def test_missing_head_dim_defaults_to_128_as_in_transformers(model_dir: Path) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "head_dim"}))
    assert read_hf_config(model_dir)["head_dim"] == 128


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "awq"}},
    ],
)
def test_unsupported_model_option_is_refused_by_name(model_dir: Path, change: dict[str, Any]) -> None:
    edit(model_dir, **change)
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))}: not supported"):
        read_hf_config(model_dir)


def test_recipe_model_has_no_problems(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert torchtitan_problems(config) == vllm_problems(config, **CPU) == []


def test_head_size_without_cpu_kernel_is_refused_on_cpu_only(model_dir: Path) -> None:
    config = read_hf_config(model_dir) | {"head_dim": 16}
    (problem,) = vllm_problems(config, **CPU)
    assert "vLLM has no CPU attention kernel for this head size (got 16). Use a model with 32, 48," in problem
    assert vllm_problems(config, **CPU | {"device": "cuda"}) == []


def test_cache_too_small_for_one_sequence_is_refused_with_the_size_needed(model_dir: Path) -> None:
    config = read_hf_config(model_dir)  # 2 layers, 2 key/value heads of 32: 1 KiB a token in float32
    needed = (256 + 32) * 1024
    assert vllm_problems(config, **CPU | {"kv_cache_bytes": needed}) == []
    (problem,) = vllm_problems(config, **CPU | {"kv_cache_bytes": needed - 1})
    assert problem == (
        f"generator.kv_cache_bytes: too small for one sequence of 256 tokens (got {needed - 1}). Set it to at least {needed}."
    )
