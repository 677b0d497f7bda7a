"""Define model families that consist of torchtitan's dense decoder blocks.

A block has grouped-query attention, rotary embedding, RMSNorm before attention and feed-forward, and SwiGLU. Families differ in
QK norm, in biases, and in the defaults of transformers. Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.family import HFConfig, ModelFamily, VllmName
from titanrl.models.hf_config import option_problems, recipe_config, rope_problems

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

OPTIONS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Supported value of each option in config.json. A missing or null option is also supported."""

VLLM_NAMES: Mapping[str, VllmName] = {
    "norm.weight": VllmName("model.norm.weight"),
    "tok_embeddings.weight": VllmName("model.embed_tokens.weight", part="vocab"),
    "lm_head.weight": VllmName("lm_head.weight", part="vocab"),
    "layers.{}.attention.qkv_linear.wq.weight": VllmName("model.layers.{}.self_attn.qkv_proj.weight", part="q", dim=0),
    "layers.{}.attention.qkv_linear.wk.weight": VllmName("model.layers.{}.self_attn.qkv_proj.weight", part="k", dim=0),
    "layers.{}.attention.qkv_linear.wv.weight": VllmName("model.layers.{}.self_attn.qkv_proj.weight", part="v", dim=0),
    "layers.{}.attention.wo.weight": VllmName("model.layers.{}.self_attn.o_proj.weight", dim=1),
    "layers.{}.feed_forward.w1.weight": VllmName("model.layers.{}.mlp.gate_up_proj.weight", part="gate", dim=0),
    "layers.{}.feed_forward.w3.weight": VllmName("model.layers.{}.mlp.gate_up_proj.weight", part="up", dim=0),
    "layers.{}.feed_forward.w2.weight": VllmName("model.layers.{}.mlp.down_proj.weight", dim=1),
    "layers.{}.attention_norm.weight": VllmName("model.layers.{}.input_layernorm.weight"),
    "layers.{}.ffn_norm.weight": VllmName("model.layers.{}.post_attention_layernorm.weight"),
}
QK_NORM_NAMES: Mapping[str, VllmName] = {
    "layers.{}.attention.q_norm.weight": VllmName("model.layers.{}.self_attn.q_norm.weight"),
    "layers.{}.attention.k_norm.weight": VllmName("model.layers.{}.self_attn.k_norm.weight"),
}
QKV_BIAS_NAMES: Mapping[str, VllmName] = {
    "layers.{}.attention.qkv_linear.wq.bias": VllmName("model.layers.{}.self_attn.qkv_proj.bias", part="q", dim=0),
    "layers.{}.attention.qkv_linear.wk.bias": VllmName("model.layers.{}.self_attn.qkv_proj.bias", part="k", dim=0),
    "layers.{}.attention.qkv_linear.wv.bias": VllmName("model.layers.{}.self_attn.qkv_proj.bias", part="v", dim=0),
}


def dense_family(
    model_type: str,
    architecture: str,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    renderer: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    further_problems: Callable[[HFConfig], list[str]] | None = None,
    published: Mapping[str, ModelShape] | None = None,
) -> ModelFamily:
    """Return a family whose models torchtitan's dense decoder block computes exactly.

    Args:
        model_type: `model_type` in config.json.
        architecture: Class name in transformers and vLLM.
        qk_norm: True if RMSNorm is applied to each query and key head.
        qkv_bias: True if the query, key and value projections have biases.
        renderer: Renderer that `data.environment.renderer: auto` selects.
        defaults: Defaults of transformers for keys that config.json may omit.
        options: Supported option values that override those of `OPTIONS`. The config.json of the tiny model contains them.
        further_problems: Function that returns error messages for conditions that `options` cannot express.
        published: Sizes of published models by hub id.
    """
    options, defaults = options or {}, defaults or {}
    recipe_options = {**options, "sliding_window": None} if "sliding_window" in defaults else options
    return ModelFamily(
        model_type=model_type,
        problems=partial(_problems, supported={**OPTIONS, **options}, further=further_problems),
        shape=partial(_shape, qk_norm=qk_norm, qkv_bias=qkv_bias),
        spec=partial(_spec, name=model_type, qk_norm=qk_norm, qkv_bias=qkv_bias),
        vllm_names={**VLLM_NAMES, **(QK_NORM_NAMES if qk_norm else {}), **(QKV_BIAS_NAMES if qkv_bias else {})},
        tensors=partial(_tensors, qk_norm=qk_norm, qkv_bias=qkv_bias),
        lora_targets={"attention": ("wq", "wkv", "wo"), "mlp": ("w1", "w2", "w3")},
        renderer=renderer,
        defaults=defaults,
        recipe=partial(_recipe, model_type=model_type, architecture=architecture, options=recipe_options),
        published=published or {},
    )


def _problems(hf: HFConfig, *, supported: Mapping[str, Any], further: Callable[[HFConfig], list[str]] | None) -> list[str]:
    return [*option_problems(hf, supported), *rope_problems(hf), *(further(hf) if further is not None else [])]


def _shape(hf: HFConfig, *, qk_norm: bool, qkv_bias: bool) -> ModelShape:
    return ModelShape(
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        intermediate_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        tied_embeddings=bool(hf["tie_word_embeddings"]),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a dense decoder's checkpoint, by Hugging Face name."""
    hidden, head_dim, feed_forward = shape.hidden_size, shape.head_dim, shape.intermediate_size
    query, key_value = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if shape.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": (query if name == "q" else key_value,) for name in "qkv"}
    if shape.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    layer |= {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (feed_forward, hidden),
        "mlp.up_proj.weight": (feed_forward, hidden),
        "mlp.down_proj.weight": (hidden, feed_forward),
    }
    return {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        **{f"model.layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()},
        "model.norm.weight": (hidden,),
        **({} if shape.tied_embeddings else {"lm_head.weight": (shape.vocab_size, hidden)}),
    }


def _tensors(hf: HFConfig, *, qk_norm: bool, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    return weight_shapes(_shape(hf, qk_norm=qk_norm, qkv_bias=qkv_bias))


def _spec(
    hf: HFConfig, attention: "Module.Config", max_positions: int, *, name: str, qk_norm: bool, qkv_bias: bool
) -> "ModelSpec":
    from titanrl.models.decoder import decoder_spec

    return decoder_spec(name, hf, attention, max_positions, qk_norm=qk_norm, qkv_bias=qkv_bias)


def _recipe(sizes: RecipeConfig, *, model_type: str, architecture: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **recipe_config(sizes, options)}
