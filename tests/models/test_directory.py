"""Read model directories, and raise errors for unsupported model types and options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import change_weights
from titanrl.config import load_config
from titanrl.config.errors import BrokenRule
from titanrl.config.sections import RecipeConfig
from titanrl.models.directory import export_dtype, open_model, read_model
from titanrl.models.recipe import create_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model_of(family: str, folder: Path, **changes: Any) -> Path:
    """Write the recipe's model of a family with changes to its config.json; None removes a key."""
    path = folder / family
    create_model(path, RecipeConfig(family=family), seed=3)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 128), ("qwen2", 32), ("llama", 32), ("mistral", 32)])
def test_missing_keys_have_defaults_of_transformers(family: str, head_dim: int, tmp_path: Path) -> None:
    model = open_model(model_of(family, tmp_path, head_dim=None, rms_norm_eps=None, tie_word_embeddings=None))
    assert (model.hf["head_dim"], model.hf["rms_norm_eps"], model.shape.tied_embeddings) == (head_dim, 1e-6, False)


@pytest.mark.parametrize(("family", "heads"), [("qwen3", 32), ("qwen2", 32), ("llama", 4), ("mistral", 8)])
def test_missing_key_value_heads_default_as_in_transformers(family: str, heads: int, tmp_path: Path) -> None:
    from transformers import AutoConfig

    path = model_of(family, tmp_path, num_key_value_heads=None)
    assert open_model(path).shape.num_kv_heads == heads == AutoConfig.from_pretrained(path).num_key_value_heads


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True}),
        ("qwen3", {"is_causal": False}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("qwen3", {"quantization_config": {"quant_method": "awq"}}),
        ("qwen3", {"partial_rotary_factor": 0.5}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"mlp_bias": True}),
        ("mistral", {"rope_scaling": {"rope_type": "longrope"}}),
    ],
    ids=str,
)
def test_error_names_unsupported_option(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))}: not supported"):
        open_model(model_of(family, tmp_path, **change))


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope_scaling: not supported \(got rope_type 'yarn'\). Use .* default or llama3",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: must contain the numbers low_freq_factor, high_freq_factor",
        ),
        ("llama", {"rope_scaling": "llama3"}, "rope_scaling: must be an object"),
        *(
            (
                "llama",
                {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": value}},
                "rope_scaling: must contain the numbers original_max_position_embeddings",
            )
            for value in ("64", 0, float("inf"))
        ),
        ("mistral", {"sliding_window": 511}, "sliding_window: must be null, or at least max_position_embeddings, 512"),
        ("mistral", {"max_position_embeddings": 8192}, r"sliding_window: .* max_position_embeddings, 8192 \(got 4096\)"),
        ("qwen2", {"head_dim": 64}, "head_dim: must be hidden_size / num_attention_heads = 32"),
        (
            "llama",
            {"quantization_config": {"quant_method": "awq"}},
            r"got {'quant_method': 'awq'}\). Use a checkpoint that is not quantized",
        ),
    ],
    ids=str,
)
def test_error_says_what_to_use_instead(family: str, change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        open_model(model_of(family, tmp_path, **change))


def test_sliding_window_may_cover_all_positions(tmp_path: Path) -> None:
    assert open_model(model_of("mistral", tmp_path, sliding_window=512)).problems == []


def test_error_for_unknown_model_type_lists_supported_types(tmp_path: Path) -> None:
    found = read_model(model_of("llama", tmp_path, model_type="gemma3"))
    assert isinstance(found, BrokenRule)
    assert "supported model types qwen3, qwen3_moe, qwen2, llama, mistral, not gemma3" in found.rule
    assert "set model.family to a custom family" in found.fix


OWN = """
from titanrl.models.dense import dense_family
family = dense_family("mine", "LlamaForCausalLM", qkv_bias=True)
number = 5
"""


def test_custom_family_is_imported_from_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    path = model_of("llama", tmp_path, model_type="mine")
    model = open_model(path, f"{tmp_path}/own.py:family")
    assert (model.family.model_type, model.shape.qkv_bias) == ("mine", True)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("number", "must name a titanrl.models.family.ModelFamily, but this is of type int"),
        ("nothing", "has no attribute 'nothing'"),
        ("family", "the family is for model type mine, but config.json has llama"),
    ],
)
def test_unusable_custom_family_is_rejected(name: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = read_model(model_of("llama", tmp_path), f"{tmp_path}/own.py:{name}")
    assert isinstance(found, BrokenRule)
    assert rule in found.rule
    assert "model.family" in found.values


@pytest.mark.parametrize(
    ("dtype", "chosen", "expected"),
    [("float32", "base", "float32"), ("bfloat16", "base", "bfloat16"), ("bfloat16", "float32", "float32")],
)
def test_exports_have_the_dtype_of_the_base_unless_chosen(dtype: str, chosen: str, expected: str, tmp_path: Path) -> None:
    model = model_of("qwen3", tmp_path, dtype="bfloat16")  # the tensors count, not config.json
    change_weights(model, lambda weights: weights.update({key: value.to(DTYPES[dtype]) for key, value in weights.items()}))
    assert export_dtype(load_config("quickstart", [f"checkpoint.export_dtype={chosen}"]), model) == expected
