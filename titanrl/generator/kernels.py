"""vLLM's CPU kernels in place of torchtitan's norms and rotary embedding: one call each where torch needs six or ten.

The cost of calls dominates a decoding step of a small model. In float32 the results differ only by rounding.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE
from vllm import _custom_ops as kernels


def use_cpu_kernels(model: nn.Module) -> None:
    """Run every norm and rotary embedding of an unsharded model in vLLM's kernels."""
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    ropes = [module for module in model.modules() if isinstance(module, CosSinRoPE)]
    assert norms, "the model has no RMSNorm of torchtitan"
    assert ropes, "the model has no CosSinRoPE of torchtitan"
    for norm in norms:
        vars(norm)["forward"] = partial(rms_norm, norm)
    for rope in ropes:
        vars(rope)["forward"] = partial(rotate, half_width(rope.cache))


def rms_norm(norm: RMSNorm, values: Tensor) -> Tensor:
    """Apply `norm` over the last dimension of a tensor of any shape."""
    values = values.contiguous()
    normalized = torch.empty_like(values)
    assert norm.eps is not None
    kernels.rms_norm(normalized, values, norm.weight, norm.eps)
    return normalized


def half_width(cache: Tensor) -> Tensor:
    """Convert torchtitan's table `[positions, cos cos sin sin]` to that of vLLM's kernel, `[positions, cos sin]`."""
    cos, _, sin, _ = cache.chunk(4, dim=-1)
    return torch.cat([cos, sin], dim=-1).contiguous()


def rotate(table: Tensor, query_BLNH: Tensor, key_BLNH: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in the type of the table, float32, as torchtitan does; in place if they have that type."""
    dtype, width = query_BLNH.dtype, query_BLNH.shape[-1]
    query_BLNH, key_BLNH = (tensor.to(table.dtype).contiguous() for tensor in (query_BLNH, key_BLNH))
    kernels.rotary_embedding(
        positions.flatten(), query_BLNH.flatten(0, 1).flatten(1), key_BLNH.flatten(0, 1).flatten(1), width, table, True
    )
    return query_BLNH.to(dtype), key_BLNH.to(dtype)
