"""torchtitan's Qwen3 from a Hugging Face directory.

torchtitan 0.3.0 only builds the published sizes, by name. These functions build any dense Qwen3 from its `config.json`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titanrl.device import Device
from titanrl.models.attention import PackedAttention
from titanrl.models.hf_config import read_hf_config

_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_ONES = {"weight": nn.init.ones_}


def inner_attention(device: Device) -> Module.Config:
    """Return the attention for training on packed rows on a device."""
    return FlexAttention.Config() if device.attention == "flex" else PackedAttention.Config()


def qwen3_config(hf: dict[str, Any], attention: Module.Config) -> Qwen3Model.Config:
    """Convert a Hugging Face config to torchtitan's model config.

    The query, key and value projections stay separate: with torchtitan's fused projection, `state_dict()` is a collective that
    replicates them, and the parameter names differ from the checkpoint's.
    """
    dim, head_dim, vocab = hf["hidden_size"], hf["head_dim"], hf["vocab_size"]
    theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
    rope = CosSinRoPE.Config(dim=head_dim, max_seq_len=hf["max_position_embeddings"], theta=float(theta))

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=hf["rms_norm_eps"], param_init=_ONES)

    def block() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=hf["num_attention_heads"],
                n_kv_heads=hf["num_key_value_heads"],
                head_dim=head_dim,
                wqkv_param_init=_NORMAL,
                wo_param_init=_NORMAL,
                inner_attention=attention,
                fuse_qkv=False,
                rope=rope,
                qk_norm=norm(head_dim),
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
            ),
        )

    return Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=hf.get("tie_word_embeddings", False),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_NORMAL),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=_NORMAL),
        layers=[block() for _ in range(hf["num_hidden_layers"])],
    )


def qwen3_spec(model_dir: Path, device: Device) -> ModelSpec:
    """Return the spec by which torchtitan builds, parallelizes, loads and saves the model of a Hugging Face directory."""
    return ModelSpec(
        name="qwen3",
        flavor=model_dir.name,
        model=qwen3_config(read_hf_config(model_dir), inner_attention(device)),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for `float32` or `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
