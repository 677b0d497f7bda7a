"""Translate the `trainer` section to torchtitan's configuration: parallelism, activation checkpointing, dtypes, converters."""

from collections.abc import Mapping, Sequence

import torch
import torchtitan.config as titan_config
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC
from torchtitan.protocols.module import Module

from titanrl.config.device import Device
from titanrl.config.sections import TrainerConfig
from titanrl.models.family import Projections

# torchtitan's default, `spmd_types`, requires a torch version newer than 2.13 if FSDP has more than one rank.
SPMD_BACKEND = "partial_dtensor"


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def titan_parallelism(config: TrainerConfig) -> titan_config.ParallelismConfig:
    """Translate the parallel degrees."""
    plan = config.parallelism
    return titan_config.ParallelismConfig(
        data_parallel_replicate_degree=plan.dp_replicate,
        data_parallel_shard_degree=plan.dp_shard,
        tensor_parallel_degree=plan.tp,
        fsdp_reshard_after_forward=plan.fsdp_reshard_after_forward,
        spmd_backend=SPMD_BACKEND,
    )


def titan_training(config: TrainerConfig) -> titan_config.TrainingConfig:
    """Translate row length and dtypes. By default, torchtitan reduces gradients in float32."""
    return titan_config.TrainingConfig(
        seq_len=config.row_tokens, dtype=config.dtype, mixed_precision_param=config.compute_dtype
    )


def titan_debug(config: TrainerConfig, seed: int) -> titan_config.DebugConfig | None:
    """Translate `deterministic` and `detect_anomaly`; None if both are off."""
    if config.deterministic == "off" and not config.detect_anomaly:
        return None
    return titan_config.DebugConfig(
        seed=seed,
        deterministic=config.deterministic != "off",
        deterministic_warn_only=config.deterministic == "warn",
        detect_anomaly=config.detect_anomaly,
    )


def activation_checkpointing(config: TrainerConfig) -> ActivationCheckpointingConfig | None:
    """Translate `activation_checkpointing`."""
    choices = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    chosen = choices[config.activation_checkpointing]
    return None if chosen is None else chosen()


def converted(
    model: Module.Config, config: TrainerConfig, device: Device, lora_targets: Mapping[Projections, Sequence[str]]
) -> Module.Config:
    """Convert the linear layers to float8 and add LoRA adapters, as configured.

    The output layer is never converted, because the loss is most sensitive to the logits, and because its weight may be tied
    to the embedding.
    """
    if config.float8 is not None:
        from titanrl.trainer.float8 import float8_projections

        model = float8_projections(model, config.float8, emulate=device.kind == "cpu", compiled=config.compile)
    if config.lora is not None:
        from torchtitan.components.lora import LoRAConverter

        names = [name for target in config.lora.targets for name in lora_targets[target]]
        adapters = LoRAConverter.Config(rank=config.lora.rank, alpha=config.lora.alpha, target_modules=names)
        model = adapters.build().convert(model)
    return model


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP sum gradients over ranks instead of averaging them, because the loss weights contain the global counts.

    torchtitan sets the divide factor to 1, which FSDP2 implements with PREMUL_SUM. gloo does not support PREMUL_SUM, so this
    forces a plain sum. Ranks that do not use a parameter also contribute zeros to its reduction, because gloo kills the process
    if ranks reduce tensors of different sizes.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_force_sum_reduction_for_comms(True)
            child.set_reduce_scatter_unused_params(True, recurse=False)
