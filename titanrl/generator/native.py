"""The trainer's tensors as views into the fused parameters of vLLM's own Qwen3, of which a rank may hold only a shard."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from titanrl.weights.layout import PartOf

# Trainer's name -> vLLM's parameter, the slice of a fused parameter, and the dimension that tensor parallelism shards.
_LAYER = {
    "attention.qkv_linear.wq.weight": ("self_attn.qkv_proj.weight", "q", 0),
    "attention.qkv_linear.wk.weight": ("self_attn.qkv_proj.weight", "k", 0),
    "attention.qkv_linear.wv.weight": ("self_attn.qkv_proj.weight", "v", 0),
    "attention.wo.weight": ("self_attn.o_proj.weight", None, 1),
    "attention.q_norm.weight": ("self_attn.q_norm.weight", None, None),
    "attention.k_norm.weight": ("self_attn.k_norm.weight", None, None),
    "feed_forward.w1.weight": ("mlp.gate_up_proj.weight", "gate", 0),
    "feed_forward.w3.weight": ("mlp.gate_up_proj.weight", "up", 0),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", None, 1),
    "attention_norm.weight": ("input_layernorm.weight", None, None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None, None),
}


def weight_targets(
    model: torch.nn.Module, hf_config: Mapping[str, Any], rank: int = 0, tp: int = 1
) -> dict[str, torch.Tensor | PartOf]:
    """Return vLLM's tensor for each name of the trainer's state dict; slices of fused parameters are views."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    vocab_size = hf_config["vocab_size"]
    targets: dict[str, torch.Tensor | PartOf] = {"norm.weight": parameters["model.norm.weight"]}
    targets["tok_embeddings.weight"] = vocab_rows(parameters["model.embed_tokens.weight"], vocab_size, rank)
    if not hf_config.get("tie_word_embeddings", False):
        targets["lm_head.weight"] = vocab_rows(parameters["lm_head.weight"], vocab_size, rank)
    rows = part_rows(hf_config, tp)
    for layer in sorted({int(match[1]) for name in parameters if (match := re.match(r"model\.layers\.(\d+)\.", name))}):
        for ours, (theirs, part, dim) in _LAYER.items():
            fused = parameters[f"model.layers.{layer}.{theirs}"]
            held = fused if part is None else fused[rows[part]]
            targets[f"layers.{layer}.{ours}"] = held if dim is None else share_of(held, dim, rank, tp)
    return targets


def vocab_rows(held: torch.Tensor, vocab_size: int, rank: int) -> PartOf:
    """Return a rank's rows of an embedding without padding: vLLM pads the vocabulary before sharding it."""
    start = min(rank * len(held), vocab_size)
    return PartOf(held[: vocab_size - start], (vocab_size, held.shape[1]), (start, 0))


def share_of(held: torch.Tensor, dim: int, rank: int, tp: int) -> PartOf:
    """Return a rank's even shard of a tensor along one dimension."""
    size = held.shape[dim]
    shape, offset = list(held.shape), [0] * held.ndim
    shape[dim], offset[dim] = tp * size, rank * size
    return PartOf(held, tuple(shape), tuple(offset))


def part_rows(hf_config: Mapping[str, Any], tp: int = 1) -> dict[str, slice]:
    """Return the rows of each projection in `qkv_proj` and `gate_up_proj` on one of `tp` ranks."""
    head_dim, hidden = hf_config["head_dim"], hf_config["intermediate_size"] // tp
    q, kv = (hf_config[heads] * head_dim // tp for heads in ("num_attention_heads", "num_key_value_heads"))
    return {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
        "gate": slice(0, hidden),
        "up": slice(hidden, 2 * hidden),
    }
