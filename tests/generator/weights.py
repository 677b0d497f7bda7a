"""Weights for generator tests: a Hugging Face state dict under the trainer's names."""

import torch

RENAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.": "attention.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def titan_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors of a Hugging Face state dict as the trainer publishes them."""
    renamed = {}
    for name, value in state.items():
        for theirs, ours in RENAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = value
    return renamed
