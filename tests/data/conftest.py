from pathlib import Path

import pytest

from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import write_tokenizer
from titanrl.data.tokenizer import Tokenizer, load_tokenizer
from titanrl.models.recipe import create_model

TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos> {% endfor %}"
REPLY = "{% if add_generation_prompt %}[assistant] {% endif %}"


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


def with_template(directory: Path, template: str) -> Tokenizer:
    """Write the quick start's tokenizer with a chat template."""
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The quick start's tokenizer with a chat template whose turns end with <eos> and a space."""
    return with_template(tmp_path_factory.mktemp("chat"), TURNS + REPLY)
