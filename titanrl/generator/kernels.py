"""vLLM's CPU kernels in the place of torchtitan's norms and rotary embedding: one call each where torch needs six or ten.

A decoding step of a small model is mostly the cost of calls. In float32 the results differ by rounding only.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE
from vllm import _custom_ops as kernels


def use_cpu_kernels(model: nn.Module) -> None:
    """Let every norm and rotary embedding of a model that is not spread over ranks run in vLLM's kernels."""
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    ropes = [module for module in model.modules() if isinstance(module, CosSinRoPE)]
    assert norms, "the model has no norm of torchtitan's"
    assert ropes, "the model has no rotary embedding of torchtitan's"
    for norm in norms:
        vars(norm)["forward"] = partial(rms_norm, norm)
    for rope in ropes:
        vars(rope)["forward"] = partial(rotate, half_width(rope.cache))


def rms_norm(norm: RMSNorm, values: Tensor) -> Tensor:
    """`norm` over the last dimension, any shape before it."""
    values = values.contiguous()
    normalized = torch.empty_like(values)
    assert norm.eps is not None
    kernels.rms_norm(normalized, values, norm.weight, norm.eps)
    return normalized


def half_width(cache: Tensor) -> Tensor:
    """torchtitan's table `[positions, cos cos sin sin]` as vLLM's kernel wants it: `[positions, cos sin]`."""
    cos, _, sin, _ = cache.chunk(4, dim=-1)
    return torch.cat([cos, sin], dim=-1).contiguous()


def rotate(table: Tensor, query_BLNH: Tensor, key_BLNH: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, in place where they are contiguous."""
    query_BLNH, key_BLNH = query_BLNH.contiguous(), key_BLNH.contiguous()
    width = query_BLNH.shape[-1]
    kernels.rotary_embedding(
        positions.flatten(), query_BLNH.flatten(0, 1).flatten(1), key_BLNH.flatten(0, 1).flatten(1), width, table, True
    )
    return query_BLNH, key_BLNH
