"""vLLM's own Qwen3: where the trainer's tensors lie in its fused parameters."""

import re
from collections.abc import Mapping
from typing import Any

import torch

# Trainer's name -> vLLM's parameter, and which part of a fused one.
_LAYER = {
    "attention.qkv_linear.wq.weight": ("self_attn.qkv_proj.weight", "q"),
    "attention.qkv_linear.wk.weight": ("self_attn.qkv_proj.weight", "k"),
    "attention.qkv_linear.wv.weight": ("self_attn.qkv_proj.weight", "v"),
    "attention.wo.weight": ("self_attn.o_proj.weight", None),
    "attention.q_norm.weight": ("self_attn.q_norm.weight", None),
    "attention.k_norm.weight": ("self_attn.k_norm.weight", None),
    "feed_forward.w1.weight": ("mlp.gate_up_proj.weight", "gate"),
    "feed_forward.w3.weight": ("mlp.gate_up_proj.weight", "up"),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", None),
    "attention_norm.weight": ("input_layernorm.weight", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None),
}
_TOP = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}


def weight_targets(model: torch.nn.Module, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Where each tensor of the trainer's state dict goes, by its name there; fused parameters as views of their parts."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    vocab_size = hf_config["vocab_size"]
    targets = {name: parameters[theirs] for name, theirs in _TOP.items()}
    # vLLM pads the vocabulary; only the real rows are ever filled or read.
    targets["tok_embeddings.weight"] = targets["tok_embeddings.weight"][:vocab_size]
    if not hf_config.get("tie_word_embeddings", False):
        targets["lm_head.weight"] = parameters["lm_head.weight"][:vocab_size]
    rows = part_rows(hf_config)
    for layer in sorted({int(match[1]) for name in parameters if (match := re.match(r"model\.layers\.(\d+)\.", name))}):
        for ours, (theirs, part) in _LAYER.items():
            fused = parameters[f"model.layers.{layer}.{theirs}"]
            targets[f"layers.{layer}.{ours}"] = fused if part is None else fused[rows[part]]
    return targets


def part_rows(hf_config: Mapping[str, Any]) -> dict[str, slice]:
    """Rows of each part of `qkv_proj` and `gate_up_proj`."""
    head_dim, hidden = hf_config["head_dim"], hf_config["intermediate_size"]
    q, kv = hf_config["num_attention_heads"] * head_dim, hf_config["num_key_value_heads"] * head_dim
    return {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
        "gate": slice(0, hidden),
        "up": slice(hidden, 2 * hidden),
    }
