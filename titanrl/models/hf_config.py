"""`config.json` of a Hugging Face model directory, read and checked without importing torch, torchtitan or vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanrl.config.choices import DeviceKind, Dtype

CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that vLLM 0.32.0 has a CPU kernel for."""
CPU_BLOCK_TOKENS = 32
"""Tokens in one block of the KV cache on CPU: the smallest size vLLM accepts, so that short prompts share blocks."""


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """Return the directory's `config.json` after checking that torchtitan's Qwen3 computes this model exactly.

    Raises:
        ValueError: The architecture or one of its options is not supported.
    """
    path = model_dir / "config.json"
    config: dict[str, Any] = {"head_dim": 128, "tie_word_embeddings": False} | json.loads(path.read_text(encoding="utf-8"))
    if problems := torchtitan_problems(config):
        raise ValueError(f"{path}: {problems[0]}")
    return config


def torchtitan_problems(hf_config: Mapping[str, Any]) -> list[str]:
    """Return one message for each option of a `config.json` that torchtitan's dense Qwen3 does not implement."""
    layer_types = set(hf_config.get("layer_types") or [])
    unsupported = {
        "model_type": hf_config.get("model_type") != "qwen3",
        "rope_scaling": (hf_config.get("rope_scaling") or {}).get("rope_type", "default") != "default",
        "rope_parameters": (hf_config.get("rope_parameters") or {}).get("rope_type", "default") != "default",
        "attention_bias": bool(hf_config.get("attention_bias")),
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "layer_types": not layer_types <= {"full_attention"},
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "quantization_config": hf_config.get("quantization_config") is not None,
    }
    return [
        f"{key}: not supported (got {hf_config.get(key)!r}). Use a dense Qwen3 checkpoint without it."
        for key, is_unsupported in unsupported.items()
        if is_unsupported
    ]


def vllm_problems(
    hf_config: Mapping[str, Any],
    *,
    device: DeviceKind,
    dtype: Dtype,
    tp: int,
    kv_cache_bytes: int,
    max_len: int,
) -> list[str]:
    """Return one message for each reason why vLLM cannot serve a model; empty if it can. Only CPU has such limits.

    Args:
        hf_config: Contents of `config.json`; `head_dim` defaults to 128, as in transformers.
        device: Kind of device the generators run on.
        dtype: `generator.dtype`.
        tp: `generator.tp`.
        kv_cache_bytes: `generator.kv_cache_bytes`, shared by the ranks of a replica.
        max_len: Longest prompt plus completion, in tokens.
    """
    if device != "cpu":
        return []
    problems = []
    head_dim = hf_config.get("head_dim", 128)
    if head_dim not in CPU_HEAD_DIMS:
        supported = ", ".join(map(str, CPU_HEAD_DIMS))
        problems.append(
            f"head_dim: vLLM has no CPU attention kernel for this head size (got {head_dim}). Use a model with {supported}."
        )
    bytes_per_number = {"float32": 4, "bfloat16": 2}[dtype]
    numbers_per_token = 2 * hf_config["num_hidden_layers"] * (hf_config["num_key_value_heads"] // tp) * head_dim
    num_blocks = -(-max_len // CPU_BLOCK_TOKENS) + 1  # vLLM reserves one block
    needed_bytes = tp * num_blocks * CPU_BLOCK_TOKENS * numbers_per_token * bytes_per_number
    if kv_cache_bytes < needed_bytes:
        problems.append(
            f"generator.kv_cache_bytes: too small for one sequence of {max_len} tokens (got {kv_cache_bytes}). "
            f"Set it to at least {needed_bytes}."
        )
    return problems
