"""Build torchtitan's decoder from any config.json that `titanrl.models.dense` accepts.

torchtitan 0.3.0 builds only models of published sizes, by name. Its Qwen3 block implements all families, with or without
QK norm and biases, and with a feed-forward layer or experts. Module names, parallelization and state-dict adapter are therefore
those of torchtitan's Qwen3.

Shape suffixes: L positions, H head dimension.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titanrl.config.sizes import ModelShape
from titanrl.models.experts import EXPERTS, expert_tensors, moe_config
from titanrl.models.family import HFConfig

TRAINER = "torchtitan.trainer"
"""Module of torchtitan's own trainer, which imports `datasets`, pandas and pyarrow."""
_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_ONES = {"weight": nn.init.ones_}
_EXPERTS = {name: partial(nn.init.normal_, std=0.02) for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


class Llama3RoPE(CosSinRoPE):
    """Rotary embedding with the frequency scaling of Llama 3.1. It rotates halves, like transformers.

    torchtitan 0.3.0 implements this scaling only for the variant that rotates pairs, which needs permuted weights.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Configuration with the fields of torchtitan's `scaling: llama`."""

    def _precompute_cache(self) -> Tensor:
        """Return cosine and sine of each position, `[L, 2 H]`. Source: `_compute_llama3_parameters` of transformers."""
        config = self.config
        original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
        frequencies = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        wavelengths = 2 * math.pi / frequencies
        scaled = torch.where(wavelengths > original / low, frequencies / config.scaling_factor, frequencies)
        smooth = (original / wavelengths - low) / (high - low)
        smoothed = (1 - smooth) * scaled / config.scaling_factor + smooth * scaled
        is_medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
        positions_L = torch.arange(config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions_L, torch.where(is_medium, smoothed, scaled))
        angles_LH = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles_LH.cos(), angles_LH.sin()], dim=-1)


class TitanDecoder(Qwen3Model):
    """torchtitan's Qwen3 model, whose configuration is applied without importing torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Configuration with the fields of torchtitan's Qwen3."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Check and apply a parallelism plan."""
            with without_trainer():
                Qwen3Model.Config.update_from_config(self, config=config, **kwargs)


@contextmanager
def without_trainer() -> Iterator[None]:
    """Replace torchtitan's trainer during the body by a module whose configuration class has no instances.

    `update_from_config` of torchtitan 0.3.0 imports the trainer to check whether it got the trainer's own configuration, which
    is never the case here. The import would take a second of CPU time in every process that builds a model.
    """
    if TRAINER in sys.modules:
        yield
        return
    placeholder: Any = ModuleType(TRAINER)
    placeholder.Trainer = SimpleNamespace(Config=type("Config", (), {}))
    sys.modules[TRAINER] = placeholder
    try:
        yield
    finally:
        del sys.modules[TRAINER]


class DecoderStateDictAdapter(Qwen3StateDictAdapter):
    """torchtitan's Qwen3 adapter, extended by the biases of the query, key and value projections, and for sharded experts.

    torchtitan's own conversion of experts fails for replicated ones and for numbers that the ranks do not divide. Here, each
    rank has the tensors of its experts. They share the memory of the model, so that loading them fills it.
    """

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{name}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{name}.bias" for name in "qkv"
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of this rank by Hugging Face name."""
        rest = {name: value for name, value in state_dict.items() if EXPERTS not in name}
        found: dict[str, Any] = super().to_hf(rest)
        for name, value in state_dict.items():
            if match := re.fullmatch(rf"layers\.(\d+){re.escape(EXPERTS)}(\w+)", name):
                found |= expert_tensors(match[1], match[2], value)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors by torchtitan's name, without experts, whose tensors from `to_hf` are views of the model."""
        found: dict[str, Any] = super().from_hf(
            {name: value for name, value in hf_state_dict.items() if ".experts." not in name}
        )
        return found


def decoder_spec(
    name: str,
    hf: HFConfig,
    shape: ModelShape,
    rope: Mapping[str, Any],
    attention: Module.Config,
    max_positions: int,
) -> ModelSpec:
    """Return the spec with which torchtitan builds, parallelizes, loads and saves the model of `hf`, a config.json.

    The query, key and value projections are not fused. With torchtitan's fused projection, `state_dict()` is a collective that
    replicates the weights, and the parameter names differ from those of the checkpoint.

    `attention` configures the inner attention of each layer, and `rope` (`rope_parameters`) its RoPE table, which has at most
    `max_positions` positions. `name` is the model family's.
    """
    dim, vocab = shape.hidden_size, shape.vocab_size
    sizes: dict[str, Any] = {
        "dim": shape.head_dim,
        "max_seq_len": min(max_positions, shape.max_positions),
        "theta": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "default":
        rotary = CosSinRoPE.Config(**sizes)
    else:
        rotary = Llama3RoPE.Config(
            **sizes,
            scaling="llama",
            scaling_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=hf["rms_norm_eps"], param_init=_ONES)

    def block() -> Qwen3TransformerBlock.Config:
        gqa = make_gqa_config(
            dim=dim,
            n_heads=shape.num_heads,
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=_NORMAL,
            wo_param_init=_NORMAL,
            inner_attention=attention,
            fuse_qkv=False,
            rope=rotary,
            qk_norm=norm(shape.head_dim) if shape.qk_norm else None,
        )
        assert isinstance(gqa.qkv_linear, QKVLinear.Config)
        gqa.qkv_linear.wq.bias = gqa.qkv_linear.wkv.bias = shape.qkv_bias
        shared: dict[str, Any] = {"attention_norm": norm(dim), "ffn_norm": norm(dim), "attention": gqa}
        if shape.num_experts:
            moe = moe_config(shape, normalize=hf["norm_topk_prob"], init=_NORMAL, experts_init=_EXPERTS)
            return Qwen3TransformerBlock.Config(**shared, moe=moe)
        feed_forward = make_ffn_config(
            dim=dim, hidden_dim=shape.intermediate_size, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
        )
        return Qwen3TransformerBlock.Config(**shared, feed_forward=feed_forward)

    model = TitanDecoder.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=hf["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_NORMAL),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=_NORMAL),
        layers=[block() for _ in range(shape.num_layers)],
    )
    return ModelSpec(
        name=name,
        flavor="",
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=DecoderStateDictAdapter,
    )
