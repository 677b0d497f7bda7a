from pathlib import Path

import pytest

from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import create_model
from titanrl.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def recipe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model directory."""
    directory = tmp_path_factory.mktemp("recipe") / "model"
    create_model(directory, RecipeConfig(), seed=0)
    return directory


@pytest.fixture(scope="session")
def tokenizer(recipe_dir: Path) -> Tokenizer:
    """The quick start's tokenizer."""
    return load_tokenizer(recipe_dir)
