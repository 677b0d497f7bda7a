"""Create tiny checkpoints of every family with transformers, with the tokenizer of the recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from titanrl.data.recipe import EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
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
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
}
FAMILIES = tuple(OPTIONS)


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
