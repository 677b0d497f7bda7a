"""Hugging Face's description of a model, read without torchtitan: a generator with vLLM's own model needs no more."""

import json
from pathlib import Path
from typing import Any


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """The directory's `config.json`, checked to be a dense Qwen3 that torchtitan's definition computes exactly.

    Raises:
        ValueError: another architecture, or an option (rotary scaling, attention bias, sliding window) it does not have.
    """
    path = model_dir / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    unsupported = {
        "model_type": config.get("model_type") != "qwen3",
        "rope_scaling": (config.get("rope_scaling") or {}).get("rope_type", "default") != "default",
        "rope_parameters": (config.get("rope_parameters") or {}).get("rope_type", "default") != "default",
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    for key, wrong in unsupported.items():
        if wrong:
            raise ValueError(f"{path}: {key}={config.get(key)!r} is not supported; give a dense Qwen3 without it")
    return config
