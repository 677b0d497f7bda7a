"""The policy model of one rank, built and parallelized by torchtitan."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torchtitan.config as titan_config
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.utils import get_local_device, set_default_dtype

from titanrl.config.device import Device
from titanrl.config.sections import LoraConfig, TrainerConfig
from titanrl.models.directory import ModelDirectory
from titanrl.models.family import Projections
from titanrl.models.initial_values import WithoutDraws
from titanrl.trainer.lora import init_adapters, is_adapter, merged
from titanrl.trainer.snapshots import reshard
from titanrl.trainer.storage import mark

if TYPE_CHECKING:
    from titanrl.trainer.float8 import WeightScales


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """Parallelized model of this rank, with its meshes, state-dict adapter and device."""

    module: Decoder
    """torchtitan's model. Sharded parameters are DTensors."""
    parallel_dims: ParallelDims
    """Device meshes by name."""
    adapter: BaseStateDictAdapter
    """Converter between the state dicts of torchtitan and Hugging Face."""
    device: torch.device
    """Device of the parameters."""
    lora: LoraConfig | None
    """LoRA settings; None trains all parameters."""
    scales: "WeightScales | None"
    """Weight scales of tensor-wise float8; None without it."""

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: index of this rank's share of the batch."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def dp_size(self) -> int:
        """Data-parallel size: number of shares of the batch."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 1 if mesh is None else mesh.size()

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank: index of this rank among the ranks with the same share of the batch."""
        mesh = self.parallel_dims.get_optional_mesh("tp")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def groups(self) -> list[ProcessGroup]:
        """Process groups of the collectives in forward and backward passes."""
        return [mesh.get_group() for mesh in self.parallel_dims.get_all_one_dimensional_meshes().values()]

    def reshard(self) -> None:
        """Reshard all parameters. Call this before any access to parameters outside of forward and backward."""
        reshard(self.module)

    def refresh_scales(self) -> None:
        """Recompute the float8 weight scales. Call this after any change of the weights. This is a collective."""
        if self.scales is not None:
            self.reshard()
            self.scales.refresh()

    def weights(self) -> dict[str, Tensor]:
        """Return the sharded parameters by name, with adapters merged. With LoRA this is a collective."""
        self.reshard()
        # state_dict() takes a fraction of the time of torch's get_model_state_dict() and returns the same tensors.
        state = {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}
        return state if self.lora is None else merged(state, self.lora.alpha, self.lora.rank)


def build_model(
    source: ModelDirectory, config: TrainerConfig, device: Device, *, seed: int = 0, random_weights: bool = True
) -> PolicyModel:
    """Build the model on the meta device, parallelize it, and initialize this rank's shards.

    Args:
        source: Hugging Face directory; only its config is read.
        config: Parallelism, dtypes and model converters.
        device: Device of the model.
        seed: Seed of the LoRA adapters, the same on all ranks. With `deterministic` or `detect_anomaly`, it also seeds torch.
        random_weights: Initialize the weights randomly. False marks them as unwritten instead, for a call of `load_hf` that
            follows. Adapters and non-persistent buffers are initialized in both cases.
    """
    spec, parallelism = source.spec(device, config.row_tokens), titan_parallelism(config)
    dist_utils.set_spmd_backend(SPMD_BACKEND)
    parallel_dims = ParallelDims.from_config(parallelism, config.parallelism.world_size)
    where = torch.device("cpu") if device.kind == "cpu" else get_local_device()
    debug = titan_debug(config, seed)
    if debug is not None:
        dist_utils.set_determinism(parallel_dims, where, debug, distinct_seed_mesh_dims=[])
    model_config = converted(spec.model, config, device, source.family.lora_targets)
    model_config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"), set_default_dtype(torch_dtype(config.dtype)):
        module = model_config.build()
    module = spec.parallelize_fn(
        module,
        parallel_dims=parallel_dims,
        training=titan_training(config),
        parallelism=parallelism,
        compile_config=titan_config.CompileConfig(enable=config.compile, components=["model"]),
        ac_config=activation_checkpointing(config),
        dump_folder="",
        # On one data-parallel rank FSDP only adds copies, so it is used for mixed precision only.
        skip_dp=config.parallelism.dp_size == 1 and config.dtype == config.compute_dtype,
    )
    sum_gradients(module)
    module.to_empty(device=where)
    with torch.no_grad(), nullcontext() if random_weights else WithoutDraws():
        module.init_weights(buffer_device=None)
    if not random_weights:
        mark(checkpoint_state(module))
    init_adapters(module, seed)
    assert spec.state_dict_adapter is not None
    # With a path, torchtitan would parse the numbers of weight files in the index, and fail for names without one.
    adapter = spec.state_dict_adapter(model_config, None)
    return PolicyModel(
        module=module,
        parallel_dims=parallel_dims,
        adapter=adapter,
        device=where,
        lora=config.lora,
        scales=weight_scales(module, config),
    )


def checkpoint_state(module: Decoder) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by name, without adapters: the tensors that a checkpoint contains."""
    state = module.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and not is_adapter(name)}


def weight_scales(module: Decoder, config: TrainerConfig) -> "WeightScales | None":
    """Return the weight scales for tensor-wise float8; None for other recipes."""
    if config.float8 != "tensorwise":
        return None
    from titanrl.trainer.float8 import WeightScales

    return WeightScales(module, torch_dtype(config.compute_dtype))


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
