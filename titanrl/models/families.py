"""Registry of the built-in model families, by `model_type` in config.json.

To add a family, add an entry here and a row in docs/howto/model_families.md.
"""

from collections.abc import Mapping

from titanrl.config.sizes import ModelShape
from titanrl.models.dense import dense_family
from titanrl.models.family import HFConfig, ModelFamily
from titanrl.models.moe import moe_family


def _published(
    hidden_size: int, num_layers: int, heads: tuple[int, int, int], intermediate_size: int, vocab_size: int, positions: int,
    *, tied: bool = False, qk_norm: bool = False, qkv_bias: bool = False, experts: tuple[int, int] = (0, 0),
) -> ModelShape:  # fmt: skip
    """Return the sizes of a published model.

    `heads` are the numbers of query and key-value heads, and the head dimension; `experts` all experts of a layer, and those of
    a token.
    """
    num_heads, num_kv_heads, head_dim = heads
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_positions=positions,
        tied_embeddings=tied,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        num_experts=experts[0],
        experts_per_token=experts[1],
    )


def _head_dim_problems(hf: HFConfig) -> list[str]:
    """Return an error message unless `head_dim` is hidden_size / num_attention_heads: vLLM's model ignores `head_dim`."""
    expected = hf["hidden_size"] // hf["num_attention_heads"]
    if hf["head_dim"] == expected:
        return []
    return [f"head_dim: must be hidden_size / num_attention_heads = {expected} (got {hf['head_dim']}). Correct one of them."]


QWEN3 = dense_family(
    "qwen3",
    "Qwen3ForCausalLM",
    renderer="qwen3",
    qk_norm=True,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32_768, "use_sliding_window": False},
    options={"attention_bias": False},
    published={
        "Qwen/Qwen3-0.6B": _published(1024, 28, (16, 8, 128), 3072, 151_936, 40_960, tied=True, qk_norm=True),
        "Qwen/Qwen3-1.7B": _published(2048, 28, (16, 8, 128), 6144, 151_936, 40_960, tied=True, qk_norm=True),
        "Qwen/Qwen3-4B": _published(2560, 36, (32, 8, 128), 9728, 151_936, 40_960, tied=True, qk_norm=True),
        "Qwen/Qwen3-8B": _published(4096, 36, (32, 8, 128), 12_288, 151_936, 40_960, qk_norm=True),
        "Qwen/Qwen3-14B": _published(5120, 40, (40, 8, 128), 17_408, 151_936, 40_960, qk_norm=True),
        "Qwen/Qwen3-32B": _published(5120, 64, (64, 8, 128), 25_600, 151_936, 40_960, qk_norm=True),
    },
)
QWEN3_MOE = moe_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    renderer="qwen3",
    qk_norm=True,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    options={"attention_bias": False},
    published={
        "Qwen/Qwen3-30B-A3B": _published(2048, 48, (32, 4, 128), 768, 151_936, 40_960, qk_norm=True, experts=(128, 8)),
        "Qwen/Qwen3-235B-A22B": _published(4096, 94, (64, 4, 128), 1536, 151_936, 40_960, qk_norm=True, experts=(128, 8)),
    },
)
QWEN2 = dense_family(
    "qwen2",
    "Qwen2ForCausalLM",
    renderer="template",
    qkv_bias=True,
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "use_sliding_window": False},
    options={"use_sliding_window": False},
    further_problems=_head_dim_problems,
    published={
        "Qwen/Qwen2.5-0.5B": _published(896, 24, (14, 2, 64), 4864, 151_936, 32_768, tied=True, qkv_bias=True),
        "Qwen/Qwen2.5-1.5B": _published(1536, 28, (12, 2, 128), 8960, 151_936, 131_072, tied=True, qkv_bias=True),
        "Qwen/Qwen2.5-3B": _published(2048, 36, (16, 2, 128), 11_008, 151_936, 32_768, tied=True, qkv_bias=True),
        "Qwen/Qwen2.5-7B": _published(3584, 28, (28, 4, 128), 18_944, 152_064, 131_072, qkv_bias=True),
        "Qwen/Qwen2.5-14B": _published(5120, 48, (40, 8, 128), 13_824, 152_064, 131_072, qkv_bias=True),
        "Qwen/Qwen2.5-32B": _published(5120, 64, (40, 8, 128), 27_648, 152_064, 131_072, qkv_bias=True),
    },
)
LLAMA = dense_family(
    "llama",
    "LlamaForCausalLM",
    renderer="llama-3",
    defaults={"max_position_embeddings": 2048},
    options={"attention_bias": False, "mlp_bias": False},
    published={
        "meta-llama/Llama-3.2-1B": _published(2048, 16, (32, 8, 64), 8192, 128_256, 131_072, tied=True),
        "meta-llama/Llama-3.2-3B": _published(3072, 28, (24, 8, 128), 8192, 128_256, 131_072, tied=True),
        "meta-llama/Llama-3.1-8B": _published(4096, 32, (32, 8, 128), 14_336, 128_256, 131_072),
        "meta-llama/Llama-3.1-70B": _published(8192, 80, (64, 8, 128), 28_672, 128_256, 131_072),
    },
)
MISTRAL = dense_family(
    "mistral",
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    published={"mistralai/Mistral-7B-v0.3": _published(4096, 32, (32, 8, 128), 14_336, 32_768, 32_768)},
)

FAMILIES: Mapping[str, ModelFamily] = {family.model_type: family for family in (QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL)}
"""Families by model type. The first one is the default of the tiny recipe."""
