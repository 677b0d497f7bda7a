"""Errors for models that vLLM cannot serve on a device."""

from pathlib import Path
from typing import Any

import pytest

from titanrl.config.sections import RecipeConfig
from titanrl.models.directory import open_model
from titanrl.models.family import vllm_problems
from titanrl.models.recipe import create_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tp": 1, "kv_cache_bytes": 64 << 20, "max_len": 256}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    create_model(tmp_path / "tiny", RecipeConfig(), seed=3)
    return dict(open_model(tmp_path / "tiny").hf)


def test_recipe_model_has_no_problems(config: dict[str, Any]) -> None:
    assert vllm_problems(config, **CPU) == []


def test_head_dim_without_cpu_kernel_is_rejected_only_on_cpu(config: dict[str, Any]) -> None:
    config["head_dim"] = 16
    (problem,) = vllm_problems(config, **CPU)
    assert "vLLM has no CPU attention kernel for this head size (got 16). Use a model with 32, 48," in problem
    assert vllm_problems(config, **CPU | {"device": "cuda"}) == []


def test_error_for_too_small_kv_cache_states_required_size(config: dict[str, Any]) -> None:
    needed = (256 + 32) * 1024  # 2 layers, 2 key/value heads of 32: 1 KiB a token in float32
    assert vllm_problems(config, **CPU | {"kv_cache_bytes": needed}) == []
    (problem,) = vllm_problems(config, **CPU | {"kv_cache_bytes": needed - 1})
    assert problem == (
        f"kv_cache_bytes: too small for one sequence of 256 tokens (got {needed - 1}). Set it to at least {needed}."
    )
