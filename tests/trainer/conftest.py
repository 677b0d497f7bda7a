"""Tiny models that all tests of the folder share."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with tied embeddings."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    recipe = RecipeConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96)
    create_model(folder, recipe, seed=3)
    return folder


@pytest.fixture(scope="session")
def untied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a separate output layer."""
    folder = tmp_path_factory.mktemp("models") / "untied"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    head = np.random.default_rng(5).normal(0.0, 0.05, embedding.shape).astype(np.float32)
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
