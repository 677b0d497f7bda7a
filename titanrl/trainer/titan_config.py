"""Translation of the trainer section to torchtitan's configuration: parallel plan, checkpointing, compilation, converters."""

import torchtitan.config as titan_config
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC
from torchtitan.protocols.module import Module

from titanrl.config.sections import TrainerConfig
from titanrl.device import Device

# torchtitan's default, `spmd_types`, needs a newer torch than 2.13 if FSDP has more than one rank.
SPMD_BACKEND = "partial_dtensor"

LORA_TARGETS = {"attention": ["wq", "wkv", "wo"], "mlp": ["w1", "w2", "w3"]}
"""torchtitan's names of the projections with adapters."""


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
    """Translate row length and dtypes. torchtitan reduces gradients in float32 by default."""
    return titan_config.TrainingConfig(
        seq_len=config.row_tokens, dtype=config.dtype, mixed_precision_param=config.compute_dtype
    )


def activation_checkpointing(config: TrainerConfig) -> ActivationCheckpointingConfig | None:
    """Translate `activation_checkpointing`."""
    choices = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    chosen = choices[config.activation_checkpointing]
    return None if chosen is None else chosen()


def converted(model: Module.Config, config: TrainerConfig, device: Device) -> Module.Config:
    """Convert the model's projections to float8 and add LoRA adapters, if the config says so.

    The output layer is never converted: the loss is most sensitive to its logits, and it may share the embedding's weight.
    torchtitan's float8 recipes compute row-wise scales at each use, so they need no hook in the optimizer.
    """
    if config.float8 is not None:
        from torchtitan.components.quantization import Float8LinearConverter

        model = (
            Float8LinearConverter.Config(
                recipe_name=config.float8,
                filter_fqns=["lm_head"],
                emulate=device.kind == "cpu",
                model_compile_enabled=config.compile,
            )
            .build()
            .convert(model)
        )
    if config.lora is not None:
        from torchtitan.components.lora import LoRAConverter

        names = [name for target in config.lora.targets for name in LORA_TARGETS[target]]
        adapters = LoRAConverter.Config(rank=config.lora.rank, alpha=config.lora.alpha, target_modules=names)
        model = adapters.build().convert(model)
    return model


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP sum gradients over ranks, because the loss weights already contain the global counts.

    torchtitan sets the divide factor to 1. FSDP2 implements that by PREMUL_SUM, which gloo does not support.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
