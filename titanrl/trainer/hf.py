"""Load and export Hugging Face checkpoints. Each rank reads and writes only its own shards."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from titanrl.base.choices import FileDtype
from titanrl.config.device import Device
from titanrl.config.sections import TrainerConfig
from titanrl.data.tokenizer import export_stop_ids
from titanrl.models.directory import ModelDirectory
from titanrl.trainer.model import PolicyModel, build_model, checkpoint_state, torch_dtype
from titanrl.trainer.storage import MARKS, on_first_rank, storage_errors, unwritten

logger = logging.getLogger(__name__)

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files of the base that an export contains, as glob patterns: tokenizer, generation defaults, chat templates, code."""


class ChosenFiles(FileSystem):
    """File system that lists only the chosen weight files; torch's reader merges every safetensors file that it lists."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Store the files."""
        self._files = files

    def ls(self, path: object) -> list[str]:
        """Return the chosen files."""
        return [str(file) for file in self._files]


def load_model(source: ModelDirectory, config: TrainerConfig, device: Device, *, seed: int = 0) -> PolicyModel:
    """Build the model and load the weights of its directory, without random initialization. `seed` is that of LoRA adapters.

    Raises:
        ValueError: As in `load_hf`.
    """
    model = build_model(source, config, device, seed=seed, random_weights=False)
    load_hf(model, source)
    return model


def load_hf(model: PolicyModel, source: ModelDirectory) -> None:
    """Load the weights of a directory into the parameters. Each rank reads only its shards; adapters are not changed.

    Raises:
        ValueError: The weight files cannot be read, or do not fit the model.
    """
    model.reshard()
    state = checkpoint_state(model.module)
    hf_state = model.adapter.to_hf(state)
    found = source.weight_files({name: tuple(value.shape) for name, value in hf_state.items()})
    reader = model.adapter.get_hf_storage_reader(str(source.path))
    reader.fs = ChosenFiles(found.files)
    with storage_errors("load the model", source.path):
        dcp.load(hf_state, storage_reader=reader)
    loaded = model.adapter.from_hf(hf_state)
    model.module.load_state_dict(loaded, strict=False)
    unnamed = [name for name, value in state.items() if value.dtype not in MARKS and name not in loaded]
    if left := unwritten(checkpoint_state(model.module)) + unnamed:
        raise ValueError(
            f"model.path: {len(left)} tensors were not loaded completely, such as {left[0]} (got {source.path}). "
            "Give a directory whose config.json and weights belong together."
        )


def export_hf(model: PolicyModel, model_dir: Path, target: Path, dtype: FileDtype) -> None:
    """Export the policy as a Hugging Face directory: safetensors with merged adapters, config.json, and the files of `COPIED`.

    `generation_config.json` names the token that ends a turn, so that other programs stop where the policy does.

    `target` appears only when it is complete. This is a collective.

    Args:
        model: Policy.
        model_dir: Directory of the base, whose config.json and tokenizer the export gets.
        target: Directory to write.
        dtype: Dtype of the weights, also in config.json.
    """
    partial, what = target.with_name(target.name + ".partial"), "export the model"

    def begin() -> None:
        if partial.exists():
            shutil.rmtree(partial)  # torch would merge the shards of an earlier attempt into the model

    def complete() -> None:
        shutil.rmtree(partial / "sharded", ignore_errors=True)
        _copy_files(model_dir, partial)
        _write_config(model_dir, partial, dtype)
        export_stop_ids(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    on_first_rank(what, target, begin)
    with storage_errors(what, target):
        writer = HuggingFaceStorageWriter(path=str(partial), save_distributed=True, enable_consolidation=True)
        weights = {name: value.to(torch_dtype(dtype)) for name, value in model.adapter.to_hf(model.weights()).items()}
        dcp.save(weights, storage_writer=writer)
    on_first_rank(what, target, complete)


def _copy_files(model_dir: Path, target: Path) -> None:
    """Copy the files of `COPIED`, and log the names of the others."""
    copied = {path for pattern in COPIED for path in model_dir.glob(pattern) if path.is_file()}
    for path in copied:
        place = target / path.relative_to(model_dir)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)
    left = sorted(path.name for path in model_dir.iterdir() if path.is_file() and path not in copied)
    logger.info("export: %d files of %s are not part of the exported model: %s", len(left), model_dir, ", ".join(left))


def _write_config(model_dir: Path, target: Path, dtype: FileDtype) -> None:
    """Write the config.json of the base with the dtype of the exported weights."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "transformers_weights")}
    text = json.dumps(kept | {"dtype": dtype}, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
