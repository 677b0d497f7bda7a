"""The command `titanrl chat`: where completions of a trained policy end."""

from pathlib import Path

import pytest
import torch

from titanrl.commands.chat import load_policy
from titanrl.config import load_config
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "model"
    create_model(directory, RecipeConfig(), seed=3)
    return directory


def test_stop_texts_end_the_completions_of_chat(model_dir: Path) -> None:
    def complete(*overrides: str) -> str:
        policy = load_policy(model_dir, load_config("quickstart", ["rollout.max_new_tokens=12", *overrides]), 1.0)
        torch.manual_seed(1)
        return policy("1 + 2 =")

    free = complete()
    place, wanted = next((i, free[i : i + 2]) for i in range(1, 6) if free.index(free[i : i + 2]) == i and free[i].isalnum())
    assert complete(f'rollout.stop=["{wanted}"]') == free[:place]
    assert complete(f'rollout.stop=["{wanted}"]', "rollout.keep_stop=true") == free[: place + 2]
