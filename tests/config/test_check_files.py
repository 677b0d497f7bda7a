import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config import check_files, load_config, read_source, render_dry_run
from titanrl.config.load import validate

HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "vocab_size": 112,
    "max_position_embeddings": 256,
}


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "run.yaml"
    path.write_text(f"name: a\nnum_steps: 3\n{text}", encoding="utf-8")
    source = read_source(path, overrides)
    return [problem.replace(str(folder), "here") for problem in check_files(validate(source), source)]


def make_model(folder: Path, **changes: Any) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").touch()
    return model


def test_a_run_that_names_no_files_is_ready(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == []


def test_a_complete_model_is_ready(tmp_path: Path) -> None:
    assert problems(tmp_path, f"model: {{path: {make_model(tmp_path)}}}") == []


def test_a_missing_model_is_told_with_line_and_download_command(tmp_path: Path) -> None:
    (text,) = problems(tmp_path, "model:\n  path: models/Qwen3-8B\n")
    assert text == (
        'here/run.yaml:4: model.path="models/Qwen3-8B"\n'
        "  rule: must be a directory, but it does not exist\n"
        "  fix:  correct the path, or download a model: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`"
    )


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    (text,) = problems(tmp_path, "", f"model.path={tmp_path}")
    assert text.startswith("override model.path=here: model.path=")
    assert "it has no config.json" in text


def test_a_config_json_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    model = make_model(tmp_path, model_type="llama")
    assert "must have model_type qwen3, not llama" in problems(tmp_path, f"model: {{path: {model}}}")[0]
    (model / "config.json").write_text("{")
    assert "its config.json must be JSON" in problems(tmp_path, f"model: {{path: {model}}}")[0]
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 5}))
    assert "must contain the numbers num_hidden_layers, num_attention_heads" in problems(tmp_path, f"model: {{path: {model}}}")[0]


def test_an_incomplete_download_is_told(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    weights, tokenizer = problems(tmp_path, f"model: {{path: {model}}}")
    assert "must hold the weights (*.safetensors)" in weights
    assert "must hold the tokenizer" in tokenizer


def test_rules_that_need_the_shape_of_the_model(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    heads, positions = problems(tmp_path, f"model: {{path: {model}}}\ntrainer: {{row_tokens: 260, parallelism: {{tp: 4}}}}")
    assert "tp must divide the model's 4 query heads and 2 key and value heads" in heads
    assert heads.startswith("here/run.yaml:4: trainer.parallelism.tp=4, model.path=")
    assert "must not be longer than the model's 256 positions" in positions
    (heads,) = problems(tmp_path, f"model: {{path: {model}}}\ngenerator: {{tp: 4}}")
    assert heads.startswith("here/run.yaml:4: generator.tp=4, model.path=")
    assert "set generator.tp to 1, or to a common divisor" in heads


def test_only_vllms_own_model_fills_up_a_vocabulary_that_ranks_cannot_share(tmp_path: Path) -> None:
    recipe = "model: {recipe: {num_heads: 3, num_kv_heads: 3}}"
    (vocabulary,) = problems(tmp_path, f"{recipe}\ngenerator: {{tp: 3}}")
    assert "tp must divide the model's vocabulary of 112 tokens" in vocabulary
    assert problems(tmp_path, f"{recipe}\ngenerator: {{tp: 3, model_impl: native}}") == []


def test_missing_data_and_loggers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tracker leaves a folder of its own name behind; that is not the package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: iter(()))
    text = f"data: {{source: jsonl, path: {tmp_path}/none.jsonl}}\nlogging:\n  loggers: [wandb]\n"
    data, logger = problems(tmp_path, text)
    assert data.startswith("here/run.yaml:3: data.path=")
    assert "must be a file" in data
    assert 'run.yaml:5: logging.loggers=["wandb"]\n  rule: the package wandb must be installed' in logger


def test_a_dry_run_shows_config_sizes_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nnum_steps: 3\nmodel: {path: models/Qwen3-9B}\ngenerator: {replicas: 9}\n")
    text = render_dry_run(load_config(path), read_source(path))
    assert text.startswith("# Resolved configuration\nname: a\nseed: 0\nnum_steps: 3\n")
    assert "sequences per step      64 (8 groups of 8)" in text
    assert "not known: model.path has no readable config.json yet" in text
    assert "# Does not fit\n" in text
    assert f"# Not ready yet\n{path}:3: model.path=" in text
    assert list(tmp_path.iterdir()) == [path]
