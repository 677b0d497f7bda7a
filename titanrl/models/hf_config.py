"""Validate the options of a `config.json` for torchtitan's dense decoder block, and write the `config.json` of a tiny model."""

from collections.abc import Mapping
from typing import Any

from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import RECIPE_VOCAB_SIZE
from titanrl.models.family import HFConfig

ROPE_TYPES = ("default", "llama3")
ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
"""Required parameters of the rope type `llama3`."""


def option_problems(hf: HFConfig, supported: Mapping[str, Any]) -> list[str]:
    """Return an error message for each option of a config.json that has an unsupported value."""
    problems = []
    for key, value in supported.items():
        if hf.get(key) not in (value, None):
            fix = f"with {value}" if value else "that is not quantized" if key == "quantization_config" else "without it"
            problems.append(f"{key}: not supported (got {hf[key]!r:.200}). Use a checkpoint {fix}.")
    if not isinstance(tied := hf.get("tie_word_embeddings"), bool | None):
        problems.append(f"tie_word_embeddings: must be true or false (got {tied!r:.200}). Correct config.json.")
    if not is_positive(eps := hf.get("rms_norm_eps")):
        problems.append(f"rms_norm_eps: must be a number above 0 (got {eps!r:.200}). Correct config.json.")
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        kinds = sorted(set(map(str, kinds))) if isinstance(kinds, list) else kinds
        problems.append(f"layer_types: not supported (got {kinds!r:.200}). Use a checkpoint with full attention only.")
    window, positions = hf.get("sliding_window"), hf["max_position_embeddings"]
    if "use_sliding_window" not in hf and isinstance(window, int) and window < positions:
        problems.append(
            f"sliding_window: must be null, or at least max_position_embeddings, {positions} (got {window}). Use a checkpoint "
            "without a sliding window, or lower max_position_embeddings in config.json to the window."
        )
    return problems


def rope_problems(hf: HFConfig) -> list[str]:
    """Return error messages for unsupported properties of the rotary embedding, at most one."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    if not isinstance(hf.get(key) or {}, Mapping):
        return [f"{key}: must be an object (got {hf[key]!r:.200}). Correct config.json."]
    rope = rope_parameters(hf)
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        return [
            f"{key}: must be the same for all layers (got separate ones for {', '.join(nested):.200}). Use another checkpoint."
        ]
    if not is_positive(rope["rope_theta"]):
        return [f"rope_theta: must be a number above 0 (got {rope['rope_theta']!r:.200}). Correct config.json."]
    if rope["rope_type"] not in ROPE_TYPES:
        return [
            f"{key}: not supported (got rope_type {rope['rope_type']!r:.200}). Use a checkpoint with {' or '.join(ROPE_TYPES)}."
        ]
    factor = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if factor not in (1.0, None):
        return [
            f"partial_rotary_factor: not supported (got {factor!r:.200}). Use a checkpoint that rotates all head dimensions."
        ]
    if rope["rope_type"] == "llama3":
        missing = [name for name in ROPE_FACTORS if not is_positive(rope.get(name))]
        if missing:
            return [f"{key}: must contain the numbers {', '.join(missing)} (got {rope!r:.200}). Add them to config.json."]
    return []


def rope_parameters(hf: HFConfig) -> dict[str, Any]:
    """Return the RoPE parameters like transformers, from `rope_scaling` and `rope_theta` or from `rope_parameters`."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = hf.get("rope_theta") or 10_000.0
    if (original := hf.get("original_max_position_embeddings")) is not None:  # transformers prefers it to the parameter
        rope["original_max_position_embeddings"] = original
    rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return rope


def is_positive(value: object) -> bool:
    """Return True if a value of config.json is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def recipe_config(recipe: RecipeConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json entries of a tiny model with tied embeddings."""
    return {
        "vocab_size": RECIPE_VOCAB_SIZE,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        **options,
        "attention_dropout": 0.0,
        "max_position_embeddings": recipe.max_positions,
        "initializer_range": recipe.init_std,
        "rms_norm_eps": 1e-6,
        # transformers 5 writes rope_parameters instead, but also reads this key.
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "float32",
    }
