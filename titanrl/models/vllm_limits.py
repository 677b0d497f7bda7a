"""Limits and names of vLLM, and whether it can serve a model, without importing vLLM."""

from titanrl.base.choices import DeviceKind, Dtype
from titanrl.models.family import HFConfig

CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions for which vLLM 0.32.0 has a CPU attention kernel."""
CPU_BLOCK_TOKENS = 32
"""Block size of the KV cache on CPU, in tokens. It is the smallest size vLLM accepts, so that short prompts share blocks."""
LOAD_FORMAT = "titanrl"
"""Value of vLLM's option `load_format` with which vLLM gets the weights from `titanrl.generator.native`."""


def vllm_problems(
    hf_config: HFConfig,
    *,
    device: DeviceKind,
    dtype: Dtype,
    tp: int,
    kv_cache_bytes: int,
    max_len: int,
) -> list[str]:
    """Return an error message for each reason why vLLM cannot serve a model. Only the CPU backend has such limits.

    Args:
        hf_config: Contents of `config.json`, completed with the family's defaults.
        device: Device kind of the generators.
        dtype: `generator.dtype`.
        tp: `generator.tp`.
        kv_cache_bytes: `generator.kv_cache_bytes`, the total over the ranks of a replica.
        max_len: Maximum length of prompt plus completion, in tokens.
    """
    if device != "cpu":
        return []
    problems = []
    head_dim = hf_config["head_dim"]
    if head_dim not in CPU_HEAD_DIMS:
        supported = ", ".join(map(str, CPU_HEAD_DIMS))
        problems.append(
            f"head_dim: vLLM has no CPU attention kernel for this head size (got {head_dim}). Use a model with {supported}."
        )
    bytes_per_value = {"float32": 4, "bfloat16": 2}[dtype]
    values_per_token = 2 * hf_config["num_hidden_layers"] * (hf_config["num_key_value_heads"] // tp) * head_dim
    num_blocks = -(-max_len // CPU_BLOCK_TOKENS) + 1  # vLLM reserves one block
    needed_bytes = tp * num_blocks * CPU_BLOCK_TOKENS * values_per_token * bytes_per_value
    if kv_cache_bytes < needed_bytes:
        problems.append(
            f"generator.kv_cache_bytes: too small for one sequence of {max_len} tokens (got {kv_cache_bytes}). "
            f"Set it to at least {needed_bytes}."
        )
    return problems
