"""Load and export Hugging Face checkpoints. Each rank reads and writes only its own shards."""

import re
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from titanrl.config.sections import TrainerConfig
from titanrl.device import Device
from titanrl.models.directory import ModelDirectory
from titanrl.trainer.model import PolicyModel, build_model, checkpoint_state
from titanrl.trainer.storage import storage_errors
from titanrl.trainer.unwritten import MARKS, unwritten

BLOCK = r"model\.layers\.\d+\."
"""Prefix pattern of the tensor names of a transformer block in a checkpoint."""


def load_model(source: ModelDirectory, config: TrainerConfig, device: Device, *, seed: int = 0) -> PolicyModel:
    """Build the model and load the weights of its directory, without random initialization. `seed` is that of LoRA adapters.

    Raises:
        ValueError: As in `load_hf`.
    """
    model = build_model(source, config, device, seed=seed, random_weights=False)
    load_hf(model, source.path)
    return model


def load_hf(model: PolicyModel, model_dir: Path) -> None:
    """Load the safetensors of a directory into the parameters. Each rank reads only its shards; adapters are not changed.

    Raises:
        ValueError: The checkpoint lacks a tensor of the model or elements of one, or its blocks have tensors that the model
            lacks.
    """
    model.reshard()
    state = checkpoint_state(model.module)
    hf_state = model.adapter.to_hf(state)
    reader = model.adapter.get_hf_storage_reader(str(model_dir))
    stored = set(reader.read_metadata().state_dict_metadata)
    fix = f"(got {model_dir}). Give a directory whose config.json and safetensors belong together."
    if missing := sorted(set(hf_state) - stored):
        raise ValueError(f"model.path: {len(missing)} tensors are missing, such as {missing[0]} {fix}")
    # The directory may hold tensors of other formats, and old checkpoints store rotary frequencies, which config.json defines.
    if unknown := sorted(name for name in stored - set(hf_state) if re.match(BLOCK, name) and not name.endswith(".inv_freq")):
        raise ValueError(f"model.path: {len(unknown)} tensors are not part of the model, such as {unknown[0]} {fix}")
    with storage_errors("load the model", model_dir):
        dcp.load(hf_state, storage_reader=reader)
    loaded = model.adapter.from_hf(hf_state)
    model.module.load_state_dict(loaded, strict=False)
    unnamed = [name for name, value in state.items() if value.dtype not in MARKS and name not in loaded]
    if left := unwritten(checkpoint_state(model.module)) + unnamed:
        raise ValueError(f"model.path: {len(left)} tensors were not loaded completely, such as {left[0]} {fix}")


def export_hf(model: PolicyModel, model_dir: Path, target: Path) -> None:
    """Export the policy as a Hugging Face directory: safetensors with merged adapters, and config and tokenizer of `model_dir`.

    `target` appears only when it is complete. This is a collective.
    """
    partial = target.with_name(target.name + ".partial")
    with storage_errors("export the model", target):
        writer = HuggingFaceStorageWriter(path=str(partial), save_distributed=True, enable_consolidation=True)
        dcp.save(model.adapter.to_hf(model.weights()), storage_writer=writer)
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(partial / "sharded", ignore_errors=True)
            for path in model_dir.iterdir():
                if path.is_file() and ".safetensors" not in path.name:
                    shutil.copy2(path, partial / path.name)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    torch.distributed.barrier()
