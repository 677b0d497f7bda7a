"""The trainer's model definition inside vLLM: torchtitan's wrapper, set up to receive weights instead of loading them."""

import contextlib

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import CompileConfig, OverrideConfig
from torchtitan.distributed.spmd_types import plain_tensor_to_dtensor_state_dict
from torchtitan.experiments.rl.models.vllm_registry import (
    TORCHTITAN_CONFIG_FORMAT,
    InferenceParallelismConfig,
    register_to_vllm,
)
from torchtitan.experiments.rl.models.vllm_wrapper import VLLMModelWrapper
from torchtitan.protocols.module import Module

from titanrl.config.device import Device
from titanrl.models.directory import ModelDirectory

CONFIG_FORMAT = TORCHTITAN_CONFIG_FORMAT


def register_titan_model(source: ModelDirectory, device: Device, max_len: int, tp: int = 1) -> None:
    """Register torchtitan's definition of the model with vLLM, for sequences of up to `max_len` tokens on `tp` ranks."""
    register_to_vllm(
        source.spec(device, max_len),
        parallelism=InferenceParallelismConfig(tensor_parallel_degree=tp),
        compile_config=CompileConfig(enable=False),
        checkpoint_config=CheckpointManager.Config(enable=False),
        override=OverrideConfig(),
    )


def unwrap_forward(model: torch.nn.Module) -> None:
    """Remove torchtitan's wrappers around `forward`, which redistribute tensors over ranks, from the model and its modules.

    A single rank has nothing to redistribute, and the wrappers take a sixth of a decoding step of a tiny model.
    """
    assert "spmd_context" in vars(model), "torchtitan no longer enters a mesh context in its forward pass"
    vars(model)["spmd_context"] = contextlib.nullcontext
    wrapped = [module for module in model.modules() if isinstance(module, Module) and "forward" in vars(module)]
    assert wrapped, "torchtitan no longer replaces the forward of parallelized modules"
    for module in wrapped:
        del vars(module)["forward"]


def weight_targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Map the trainer's state-dict names to the model's tensors: DTensors if it is sharded, tied tensors only once."""
    held = {name.removeprefix("model."): parameter.data for name, parameter in model.named_parameters()}
    assert isinstance(model, VLLMModelWrapper)
    targets: dict[str, torch.Tensor] = plain_tensor_to_dtensor_state_dict(
        held, state_dict_layouts=model.get_state_dict_layouts(), parallel_dims=model.parallel_dims
    )
    return targets
