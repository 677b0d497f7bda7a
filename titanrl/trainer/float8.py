"""Float8 linear layers. With the tensor-wise recipe, weight scales are computed once per change of the weights.

The scale of a tensor depends on its largest absolute value (amax). torchao computes the amax of each gathered weight twice per
pass. This module instead computes all of them after each optimizer step, with one reduction over the shards. torchao's
`precompute_float8_dynamic_scale_for_fsdp` has the same purpose, but needs weights in a wrapper tensor subclass without storage,
which can be neither published nor copied into snapshots.

Shape suffixes: I input features, O output features, N tokens.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchao.float8.config import Float8LinearConfig, e4m3_dtype
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale
from torchtitan.components.quantization.float8 import Float8Linear, Float8LinearConverter
from torchtitan.protocols.module import Module

from titanrl.weights.layout import local_part

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class TensorwiseLinear(Float8Linear):
    """Float8 linear layer whose weight scale is computed by `WeightScales`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Float8Linear.Config):
        """Configuration with the fields of torchtitan's float8 linear layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.weight_scale: Tensor | None = None
        """Scale that `WeightScales.refresh` must set before the first pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer, with input and weight rounded to float8."""
        assert self.weight_scale is not None, "WeightScales.refresh was not called after the weights were loaded"
        scale, grad_dtype = self.weight_scale, self.config.cast_config_grad_output.target_dtype
        if isinstance(self.weight, DTensor):  # torchao then expects a replicated DTensor
            mesh = self.weight.device_mesh
            scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        output: Tensor = Float8Matmul.apply(  # type: ignore[no-untyped-call]
            input, self.weight.t(), scale, self.linear_mm_config, grad_dtype
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch._dynamo.allow_in_graph
class Float8Matmul(torch.autograd.Function):
    """torchao's tensor-wise matmul (`matmul_with_hp_or_float8_args`) with a precomputed weight scale."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight_IO: Tensor, scale: Tensor, mm_config: LinearMMConfig, grad_dtype: torch.dtype
    ) -> Tensor:
        """Return the product, which has the shape of the input except for the last dimension."""
        ctx.save_for_backward(input, weight_IO, scale)
        ctx.mm_config, ctx.grad_dtype = mm_config, grad_dtype
        input_NI = rounded(input, e4m3_dtype, mm_config, GemmInputRole.INPUT)
        output_NO = input_NI @ hp_tensor_and_scale_to_float8(weight_IO, scale, e4m3_dtype, mm_config, GemmInputRole.WEIGHT)
        output: Tensor = output_NO.reshape(*input.shape[:-1], output_NO.shape[-1])
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the gradients of input and weight."""
        input, weight_IO, scale = ctx.saved_tensors
        weight8_IO = hp_tensor_and_scale_to_float8(weight_IO, scale, e4m3_dtype, ctx.mm_config, GemmInputRole.WEIGHT)
        grad_NO = rounded(grad_output, ctx.grad_dtype, ctx.mm_config, GemmInputRole.GRAD_OUTPUT)
        input_NI = rounded(input, e4m3_dtype, ctx.mm_config, GemmInputRole.INPUT)
        grad_input = (grad_NO @ weight8_IO.t()).reshape(input.shape)
        return grad_input, (grad_NO.t() @ input_NI).t(), None, None, None


def rounded(values: Tensor, dtype: torch.dtype, mm_config: LinearMMConfig, role: GemmInputRole) -> Tensor:
    """Round a tensor to float8 with a dynamic scale, and flatten all dimensions but the last."""
    float8: Tensor = hp_tensor_to_float8_dynamic(values, dtype, mm_config, gemm_input_role=role)
    return float8.reshape(-1, values.shape[-1])


def float8_projections(model: Module.Config, recipe: Recipe, *, emulate: bool, compiled: bool) -> Module.Config:
    """Convert all linear layers of a model config to float8, except the output layer. The config is modified.

    `emulate` rounds operands to float8 and multiplies them in higher precision, for a device without float8 support. `compiled`
    is True if the transformer blocks are compiled.

    Raises:
        ValueError: The device does not support float8.
    """
    converter = Float8LinearConverter.Config(
        recipe_name=recipe, filter_fqns=["lm_head"], emulate=emulate, model_compile_enabled=compiled
    ).build()
    # With emulation, torchtitan would ignore the recipe.
    converter.torchao_config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    model = converter.convert(model)
    for _, linear, parent, attribute in model.traverse(Float8Linear.Config) if recipe == "tensorwise" else ():
        cached = TensorwiseLinear.Config(**{field.name: getattr(linear, field.name) for field in fields(linear) if field.init})
        if isinstance(parent, list):
            parent[attribute] = cached
        else:
            setattr(parent, attribute, cached)
    return model


class WeightScales:
    """Weight scales of all `TensorwiseLinear` layers of a model."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        """Collect the layers of a parallelized model, whose gathered weights have the compute dtype."""
        self._linears = [child for child in module.modules() if isinstance(child, TensorwiseLinear)]
        self._compute_dtype = compute_dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of the current weights, whose parameters must be resharded. This is a collective."""
        shards = [local_part(linear.weight) for linear in self._linears]
        largest = torch.zeros(len(shards), device=shards[0].device)
        nonempty = [index for index, shard in enumerate(shards) if shard.numel()]  # FSDP may leave a rank without rows
        norms = torch._foreach_norm([shards[index] for index in nonempty], ord=math.inf)
        if nonempty:
            largest[nonempty] = torch.stack(norms).float()
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        scales = amax_to_scale(largest.to(self._compute_dtype), e4m3_dtype)
        for linear, scale in zip(self._linears, scales.unbind(), strict=True):
            if linear.weight_scale is None:
                linear.weight_scale = torch.empty_like(scale)
            linear.weight_scale.copy_(scale)  # in place, because compiled code holds a reference to the tensor
