"""A model directory is read, and refused if torchtitan would compute something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import create_model
from titanrl.models.hf_config import read_hf_config


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    create_model(tmp_path / "tiny", RecipeConfig(), seed=3)
    return tmp_path / "tiny"


def edit(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_plain_qwen3_is_read(model_dir: Path) -> None:
    assert read_hf_config(model_dir)["hidden_size"] == 128


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
    ],
)
def test_what_torchtitan_would_compute_otherwise_is_refused_by_name(model_dir: Path, change: dict[str, Any]) -> None:
    edit(model_dir, **change)
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))}="):
        read_hf_config(model_dir)
