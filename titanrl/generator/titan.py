"""The trainer's model definition inside vLLM: torchtitan's wrapper, set up to receive weights instead of loading them."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import CompileConfig, OverrideConfig
from torchtitan.distributed.spmd_types import plain_tensor_to_dtensor_state_dict
from torchtitan.experiments.rl.models.vllm_registry import (
    TORCHTITAN_CONFIG_FORMAT,
    InferenceParallelismConfig,
    register_to_vllm,
)
from torchtitan.experiments.rl.models.vllm_wrapper import VLLMModelWrapper
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.module import Module
from vllm import _custom_ops as kernels

from titanrl.config.device import Device
from titanrl.models.decoder import EXPERT_BIAS, add_expert_bias, routers_of
from titanrl.models.directory import ModelDirectory

CONFIG_FORMAT = TORCHTITAN_CONFIG_FORMAT


def register_titan_model(
    source: ModelDirectory, device: Device, max_len: int, tp: int = 1, *, has_expert_bias: bool = False
) -> None:
    """Register torchtitan's definition of the model with vLLM, for sequences of up to `max_len` tokens on `tp` ranks.

    With `has_expert_bias`, its experts have a bias, which the trainer publishes.
    """
    spec = source.spec(device, max_len)
    if has_expert_bias:
        add_expert_bias(spec.model, rate=1.0)  # only the trainer changes it
    register_to_vllm(
        spec,
        parallelism=InferenceParallelismConfig(tensor_parallel_degree=tp),
        compile_config=CompileConfig(enable=False),
        checkpoint_config=CheckpointManager.Config(enable=False),
        override=OverrideConfig(),
    )


def speed_up(model: nn.Module, device: Device) -> None:
    """Remove torchtitan's wrappers around `forward` from an unsharded model, and on a CPU use vLLM's kernels.

    The wrappers redistribute tensors over ranks. A single rank has nothing to redistribute, and they take a sixth of a decoding
    step of a tiny model. A kernel of vLLM for a norm or a rotary embedding replaces six or ten calls of torch; calls dominate a
    decoding step of a small model. In float32 the results differ only by rounding. Attention calls its parts directly, which
    changes no result.
    """
    assert "spmd_context" in vars(model), "torchtitan no longer enters a mesh context in its forward pass"
    vars(model)["spmd_context"] = contextlib.nullcontext
    wrapped = [module for module in model.modules() if isinstance(module, Module) and "forward" in vars(module)]
    assert wrapped, "torchtitan no longer replaces the forward of parallelized modules"
    for module in wrapped:
        del vars(module)["forward"]
    if device.kind != "cpu":
        return
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    ropes = [module for module in model.modules() if isinstance(module, CosSinRoPE)]
    assert norms, "the model has no RMSNorm of torchtitan"
    assert ropes, "the model has no CosSinRoPE of torchtitan"
    for norm in norms:
        vars(norm)["forward"] = partial(rms_norm, norm)
    for rope in ropes:
        vars(rope)["forward"] = partial(rotate, half_width(rope.cache))
    for attention in model.modules():
        if isinstance(attention, GQAttention) and isinstance(attention.qkv_linear, QKVLinear):
            assert vars(attention.inner_attention.vllm_attn)["use_direct_call"] is False, "vLLM moved its dispatch of attention"
            attention.inner_attention.vllm_attn.use_direct_call = True
            vars(attention)["forward"] = partial(attend, attention)


def weight_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Map the trainer's state-dict names to the model's tensors: DTensors if it is sharded, tied tensors only once."""
    held = {name.removeprefix("model."): parameter.data for name, parameter in model.named_parameters()}
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS))
    held |= {name.removeprefix("model."): buffer for name, buffer in biases}
    assert isinstance(model, VLLMModelWrapper)
    targets: dict[str, torch.Tensor] = plain_tensor_to_dtensor_state_dict(
        held, state_dict_layouts=model.get_state_dict_layouts(), parallel_dims=model.parallel_dims
    )
    return targets


def expert_choices(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Return a function that reads the choices of each router in the last pass, `[tokens, experts of a token]`."""
    routers = routers_of(model)

    def choices() -> list[Tensor]:
        return [router.chosen_BLK.flatten(0, 1) for router in routers if router.chosen_BLK is not None]

    return choices


def attend(attention: GQAttention, x_1LD: Tensor, attention_masks: None, positions_1L: Tensor) -> Tensor:
    """Compute `GQAttention.forward` on one rank, without the calls of its modules."""
    linear, length, width = attention.qkv_linear, x_1LD.shape[1], attention.head_dim
    query, key, value = (part.forward(x_1LD).view(1, length, -1, width) for part in (linear.wq, linear.wk, linear.wv))
    if attention.q_norm is not None and attention.k_norm is not None:
        query, key = rms_norm(attention.q_norm, query), rms_norm(attention.k_norm, key)
    query, key = attention.rope.forward(query, key, positions_1L)
    values_LD = attention.inner_attention.vllm_attn(query[0], key[0], value[0])
    out_LD: Tensor = attention.wo.forward(values_LD)
    return out_LD[None]


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
    """Rotate queries and keys with a table of `half_width`, in its type, float32, like torchtitan; in place if they have it."""
    dtype, width = query_BLNH.dtype, query_BLNH.shape[-1]
    query_BLNH, key_BLNH = (tensor.to(table.dtype).contiguous() for tensor in (query_BLNH, key_BLNH))
    kernels.rotary_embedding(
        positions.flatten(), query_BLNH.flatten(0, 1).flatten(1), key_BLNH.flatten(0, 1).flatten(1), width, table, True
    )
    return query_BLNH.to(dtype), key_BLNH.to(dtype)
