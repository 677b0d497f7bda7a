"""The policy on one rank: built, parallelized, loaded and exported with torchtitan's own parts."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchtitan.config as titan_config
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.utils import set_default_dtype

from titanrl.config.sections import TrainerConfig
from titanrl.device import Device
from titanrl.models.qwen3 import torch_dtype

# torchtitan's default, `spmd_types`, needs a newer torch than 2.13 as soon as FSDP has more than one rank.
SPMD_BACKEND = "partial_dtensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The parallelized model of this rank and what belongs to it."""

    module: Qwen3Model
    """torchtitan's Qwen3, its parameters DTensors where they are sharded."""
    parallel_dims: ParallelDims
    """The device meshes by name."""
    adapter: BaseStateDictAdapter
    """Renames between torchtitan's and Hugging Face's state dicts."""
    device: torch.device
    """Where the parameters are."""

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank runs."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def tp_rank(self) -> int:
        """Position among the ranks that run the same share."""
        mesh = self.parallel_dims.get_optional_mesh("tp")
        return 0 if mesh is None else mesh.get_local_rank()

    def reshard(self) -> None:
        """Put every parameter back to its sharded form; FSDP2 leaves some gathered after a forward pass.

        A write into a gathered parameter is silently lost at the next reshard, so this comes before any access to
        parameters outside forward and backward.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_model(spec: ModelSpec, model_dir: Path, config: TrainerConfig, device: Device) -> PolicyModel:
    """Build the model on the meta device, parallelize it, and load this rank's share of the checkpoint."""
    parallelism = titan_parallelism(config)
    dist_utils.set_spmd_backend(SPMD_BACKEND)
    parallel_dims = ParallelDims.from_config(parallelism, config.parallelism.world_size)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"), set_default_dtype(torch_dtype(config.dtype)):
        module = spec.model.build()
    module = spec.parallelize_fn(
        module,
        parallel_dims=parallel_dims,
        training=titan_config.TrainingConfig(
            seq_len=config.row_tokens, dtype=config.dtype, mixed_precision_param=config.compute_dtype
        ),
        parallelism=parallelism,
        compile_config=titan_config.CompileConfig(enable=False),
        ac_config=activation_checkpointing(config),
        dump_folder="",
        # On one rank FSDP would only copy parameters around; it is needed there for its mixed precision alone.
        skip_dp=config.parallelism.dp_size == 1 and config.dtype == config.compute_dtype,
    )
    sum_gradients(module)
    where = torch.device(device.kind, 0) if device.kind != "cpu" else torch.device("cpu")
    module.to_empty(device=where)
    with torch.no_grad():
        module.init_weights(buffer_device=None)
    assert spec.state_dict_adapter is not None
    adapter = spec.state_dict_adapter(spec.model, str(model_dir))
    model = PolicyModel(module=module, parallel_dims=parallel_dims, adapter=adapter, device=where)
    load_hf(model, model_dir)
    return model


def titan_parallelism(config: TrainerConfig) -> titan_config.ParallelismConfig:
    """Our degrees as torchtitan's config."""
    plan = config.parallelism
    return titan_config.ParallelismConfig(
        data_parallel_replicate_degree=plan.dp_replicate,
        data_parallel_shard_degree=plan.dp_shard,
        tensor_parallel_degree=plan.tp,
        fsdp_reshard_after_forward=plan.fsdp_reshard_after_forward,
        spmd_backend=SPMD_BACKEND,
    )


def activation_checkpointing(config: TrainerConfig) -> ActivationCheckpointingConfig | None:
    """torchtitan's activation checkpointing for our setting."""
    choices = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    chosen = choices[config.activation_checkpointing]
    return None if chosen is None else chosen()


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP sum gradients over ranks, by plain sums: the loss weights already carry the global counts.

    torchtitan sets the divide factor to 1, which FSDP2 turns into PREMUL_SUM, an operation gloo does not have.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def load_hf(model: PolicyModel, model_dir: Path) -> None:
    """Read the safetensors of a directory into the parameters; each rank reads only its shards.

    Raises:
        ValueError: the checkpoint and the model do not have the same tensors.
    """
    model.reshard()
    state = model.module.state_dict()
    hf_state = model.adapter.to_hf(state)
    reader = model.adapter.get_hf_storage_reader(str(model_dir))
    stored = set(reader.read_metadata().state_dict_metadata)
    missing = sorted(set(hf_state) - stored)
    if missing:
        raise ValueError(f"model.path={model_dir}: the checkpoint has no tensor {missing[0]!r} ({len(missing)} missing)")
    dcp.load(hf_state, storage_reader=reader)
    loaded = model.adapter.from_hf(hf_state)
    untied = {name for name in state if name not in loaded}
    assert untied <= {"lm_head.weight", "tok_embeddings.weight"}, f"not loaded: {untied}"
    model.module.load_state_dict(loaded, strict=False)


def export_hf(model: PolicyModel, model_dir: Path, target: Path) -> None:
    """Write the policy as a Hugging Face directory: float32 safetensors, config and tokenizer of `model_dir`.

    A collective: every rank calls it. The directory appears under its name only when it is whole.
    """
    model.reshard()
    state = {name: value for name, value in model.module.state_dict().items() if isinstance(value, torch.Tensor)}
    partial = target.with_name(target.name + ".partial")
    writer = HuggingFaceStorageWriter(path=str(partial), save_distributed=True, enable_consolidation=True)
    dcp.save(model.adapter.to_hf(state), storage_writer=writer)
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(partial / "sharded", ignore_errors=True)
        for path in model_dir.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy2(path, partial / path.name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    torch.distributed.barrier()


def local_logits(logits_BLV: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, int, Any]:
    """This rank's columns of the logits, the first vocabulary id they stand for, and the group that holds the rest."""
    if not isinstance(logits_BLV, DTensor):
        return logits_BLV, 0, None
    mesh = logits_BLV.device_mesh
    width = -(-vocab_size // mesh.size())
    return logits_BLV.to_local(), min(vocab_size, width * mesh.get_local_rank()), mesh.get_group()
