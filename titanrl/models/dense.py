"""Define model families that consist of torchtitan's dense decoder blocks.

A block has grouped-query attention, rotary embedding, RMSNorm before attention and feed-forward, and SwiGLU. Families differ in
QK norm, in biases, and in the defaults of transformers. Importing this module does not import torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import RECIPE_VOCAB_SIZE, ModelShape
from titanrl.models.family import HFConfig, ModelFamily, VllmName

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

OPTIONS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
    "is_causal": True,
}
"""Supported value of each option in config.json. A missing or null option is also supported."""
ROPE_TYPES = ("default", "llama3")
ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
"""Required parameters of the rope type `llama3`."""

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

    def problems(hf: HFConfig) -> list[str]:
        further = further_problems(hf) if further_problems is not None else []
        return [*_option_problems(hf, {**OPTIONS, **options}), *_rope_problems(hf), *further]

    def shape(hf: HFConfig) -> ModelShape:
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

    def recipe(sizes: RecipeConfig) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": RECIPE_VOCAB_SIZE,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            **recipe_options,
            "attention_dropout": 0.0,
            "max_position_embeddings": sizes.max_positions,
            "initializer_range": sizes.init_std,
            "rms_norm_eps": 1e-6,
            # transformers 5 writes rope_parameters instead, but also reads this key.
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": "float32",
        }

    return ModelFamily(
        model_type=model_type,
        problems=problems,
        shape=shape,
        spec=lambda hf, attention, max_positions: spec_of(model_type, hf, shape(hf), attention, max_positions),
        vllm_names={**VLLM_NAMES, **(QK_NORM_NAMES if qk_norm else {}), **(QKV_BIAS_NAMES if qkv_bias else {})},
        tensors=lambda hf: weight_shapes(shape(hf)),
        lora_targets={"attention": ("wq", "wkv", "wo"), "mlp": ("w1", "w2", "w3")},
        vllm_lora_modules={"attention": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")},
        renderer=renderer,
        defaults=defaults,
        recipe=recipe,
        published=published or {},
    )


def spec_of(name: str, hf: HFConfig, shape: ModelShape, attention: "Module.Config", max_positions: int) -> "ModelSpec":
    """Return torchtitan's spec of a model of these sizes; see `ModelFamily.spec`."""
    from titanrl.models.decoder import decoder_spec

    return decoder_spec(name, hf, shape, rope_parameters(hf), attention, max_positions)


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a decoder's checkpoint, by Hugging Face name."""
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
    layer["post_attention_layernorm.weight"] = (hidden,)
    if shape.num_experts:
        layer["mlp.gate.weight"] = (shape.num_experts, hidden)
    for mlp in [f"mlp.experts.{i}" for i in range(shape.num_experts)] or ["mlp"]:
        layer |= {
            f"{mlp}.gate_proj.weight": (feed_forward, hidden),
            f"{mlp}.up_proj.weight": (feed_forward, hidden),
            f"{mlp}.down_proj.weight": (hidden, feed_forward),
        }
    return {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        **{f"model.layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()},
        "model.norm.weight": (hidden,),
        **({} if shape.tied_embeddings else {"lm_head.weight": (shape.vocab_size, hidden)}),
    }


def _option_problems(hf: HFConfig, supported: Mapping[str, Any]) -> list[str]:
    """Return an error message for each option of a config.json that has an unsupported value."""
    problems = []
    for key, value in supported.items():
        if hf.get(key) not in (value, None):
            fix = f"with {value}" if value else "that is not quantized" if key == "quantization_config" else "without it"
            problems.append(f"{key}: not supported (got {hf[key]!r:.200}). Use a checkpoint {fix}.")
    if not isinstance(tied := hf.get("tie_word_embeddings"), bool | None):
        problems.append(f"tie_word_embeddings: must be true or false (got {tied!r:.200}). Correct config.json.")
    if not _is_positive(eps := hf.get("rms_norm_eps")):
        problems.append(f"rms_norm_eps: must be a number above 0 (got {eps!r:.200}). Correct config.json.")
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        kinds = sorted(set(map(str, kinds))) if isinstance(kinds, list) else kinds
        problems.append(f"layer_types: not supported (got {kinds!r:.200}). Use a checkpoint with full attention only.")
    window, positions = hf.get("sliding_window"), hf["max_position_embeddings"]
    if "use_sliding_window" not in hf and isinstance(window, int) and window < positions:
        problems.append(
            f"sliding_window: must be null, or at least max_position_embeddings, {positions} (got {window}). Use a checkpoint "
            "without a sliding window, or lower max_position_embeddings in config.json to the window."
        )
    return problems


def _rope_problems(hf: HFConfig) -> list[str]:
    """Return error messages for unsupported properties of the rotary embedding, at most one."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    if not isinstance(hf.get(key) or {}, Mapping):
        return [f"{key}: must be an object (got {hf[key]!r:.200}). Correct config.json."]
    rope = rope_parameters(hf)
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        return [
            f"{key}: must be the same for all layers (got separate ones for {', '.join(nested):.200}). Use another checkpoint."
        ]
    if not _is_positive(rope["rope_theta"]):
        return [f"rope_theta: must be a number above 0 (got {rope['rope_theta']!r:.200}). Correct config.json."]
    if rope["rope_type"] not in ROPE_TYPES:
        return [
            f"{key}: not supported (got rope_type {rope['rope_type']!r:.200}). Use a checkpoint with {' or '.join(ROPE_TYPES)}."
        ]
    factor = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if factor not in (1.0, None):
        return [
            f"partial_rotary_factor: not supported (got {factor!r:.200}). Use a checkpoint that rotates all head dimensions."
        ]
    if rope["rope_type"] == "llama3":
        missing = [name for name in (*ROPE_FACTORS, "original_max_position_embeddings") if not _is_positive(rope.get(name))]
        if missing:
            return [f"{key}: must contain the numbers {', '.join(missing)} (got {rope!r:.200}). Add them to config.json."]
    return []


def rope_parameters(hf: HFConfig) -> dict[str, Any]:
    """Return the RoPE parameters like transformers, from `rope_scaling` and `rope_theta` or from `rope_parameters`."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = hf.get("rope_theta") or 10_000.0
    if (original := hf.get("original_max_position_embeddings")) is not None:  # transformers prefers it to the parameter
        rope["original_max_position_embeddings"] = original
    rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return rope


def _is_positive(value: object) -> bool:
    """Return True if a value of config.json is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
