"""Create tiny checkpoints of every family with transformers, with the tokenizer of the recipe."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from titanrl.config.sizes import RECIPE_VOCAB_SIZE
from titanrl.data.tokenizer import EOS_ID, PAD_ID, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": RECIPE_VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
# With 64 original positions, wavelengths of the head's 16 frequencies lie below 16, above 64 and in between.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {  # first: vLLM makes a group for experts only with the first engine of a process
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
}
FAMILIES = tuple(OPTIONS)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_model(model_type: str, path: Path, std: float = 0.05, **options: Any) -> Path:
    """Write a checkpoint with random weights and biases, and norms around one."""
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **OPTIONS.get(model_type, {}), **options})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def add_changed_weights(model: Path, name: str) -> None:
    """Write a second weight file with the tensor names of `model.safetensors`, and other values."""
    weights = load_file(model / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, model / name, metadata={"format": "pt"})


def shard(
    model: Path, names: tuple[str, ...] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
) -> Path:
    """Replace `model.safetensors` with shards and an index."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {key: names[number % len(names)] for number, key in enumerate(sorted(weights))}
    for name in names:
        part = {key: value for key, value in weights.items() if weight_map[key] == name}
        save_file(part, model / name, metadata={"format": "pt"})
    write_index(model, weight_map)
    return model


def write_index(model: Path, weight_map: Mapping[str, object]) -> None:
    """Write the index of the weight files."""
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (model / "model.safetensors.index.json").write_text(text)


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of `model.safetensors`."""
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def change_config(model: Path, **changes: Any) -> Path:
    """Change keys of config.json; None removes a key."""
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return model
