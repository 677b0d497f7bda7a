"""Create the tiny model of the quick start as a Hugging Face directory: by default 408 320 parameters with random weights."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from titanrl.base.files import naming, write_bytes
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.sections import ModelConfig, RecipeConfig
from titanrl.data.tokenizer import EOS_ID, PAD_ID, write_tokenizer
from titanrl.models.dense import weight_shapes
from titanrl.models.directory import ModelDirectory, recipe_model

_SPECIAL_IDS = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_STAMP = "recipe.json"


def create_model(directory: Path, recipe: RecipeConfig, seed: int, family: str | None = None) -> None:
    """Write a model directory with random weights, unless it already exists with the same recipe and seed.

    The directory is created atomically, even if several processes create it concurrently. `family` is the import path of a
    user-defined family. Raise `ValueError` if the family has no recipe, or the directory exists with a different recipe or
    seed.
    """
    settings = {"recipe": recipe.model_dump(exclude_none=True), "seed": seed} | ({"family": family} if family else {})
    stamp = json.dumps(settings, indent=2)
    if not directory.exists():
        model = recipe_model(ModelConfig(recipe=recipe, family=family), directory)
        if isinstance(model, BrokenRule):
            raise BrokenRules(model)
        assert model.family.recipe is not None
        directory.parent.mkdir(parents=True, exist_ok=True)
        with naming(directory), tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            created = Path(scratch) / directory.name
            created.mkdir()
            write_tokenizer(created)
            write_model(created, model, model.family.recipe(recipe), recipe.init_std, seed)
            (created / _STAMP).write_text(stamp, encoding="utf-8")
            try:
                os.replace(created, directory)
            except OSError:
                if not directory.is_dir():  # another process created it first
                    raise
    if not (directory / _STAMP).is_file() or (directory / _STAMP).read_text(encoding="utf-8") != stamp:
        raise ValueError(f"{directory}: not the model of this recipe and seed {seed}. Move or delete the directory.")


def write_model(directory: Path, model: ModelDirectory, hf: Mapping[str, Any], std: float, seed: int) -> None:
    """Write the configuration and random weights of a model: ones for norms, and N(0, std^2) for matrices and biases.

    A tied output layer has no weights.
    """
    write_model_config(directory, hf)
    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(size, np.float32) if "norm" in name else np.float32(std) * rng.standard_normal(size, dtype=np.float32)
        for name, size in weight_shapes(model.shape).items()
    }
    write_bytes(directory / "model.safetensors", save(weights, metadata={"format": "pt"}))


def write_model_config(directory: Path, hf: Mapping[str, Any]) -> None:
    """Write `config.json` and `generation_config.json`."""
    _write_json(directory / "config.json", {**hf, **_SPECIAL_IDS})
    _write_json(directory / "generation_config.json", _SPECIAL_IDS)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
