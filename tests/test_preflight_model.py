"""Preflight finds mistakes in a model directory or a recipe before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import add_changed_weights
from tests.preflight_cases import problem, problems, write_model
from titanrl.config import load_config
from titanrl.launch.preflight import dry_run, policy_notes

pytestmark = pytest.mark.usefixtures("scratch")


def test_complete_model_is_ready() -> None:
    assert problems() == []
    assert problems(f"model: {{path: {write_model()}}}") == []


def test_missing_model_is_reported_with_a_download_command() -> None:
    assert (
        'run.yaml:5: model.path="models/Qwen3-8B"\n'
        "  rule: must be a directory, but it does not exist\n"
        "  fix:  correct the path, or download a model: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`"
    ) in problems("model:\n  path: models/Qwen3-8B\n")


def test_directory_without_config_json_is_reported() -> None:
    Path("empty").mkdir()
    assert "it has no config.json" in problem("", "model.path=empty")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"model_type": "gemma3"},
            "must have one of the supported model types qwen3, qwen3_moe, qwen2, llama, mistral, not gemma3",
        ),
        ({"hidden_size": "big"}, "must contain positive integers for hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of its config.json must be at most 10,000, not 1000000000"),
        ({"head_dim": 16}, "config.json: head_dim: vLLM has no CPU attention kernel for this head size (got 16)"),
        ({"attention_bias": True}, "config.json: attention_bias: not supported (got True)"),
        ({"num_key_value_heads": 3}, "the 3 key-value heads of config.json must divide its 4 query heads"),
    ],
)
def test_unsupported_config_json_is_reported(changes: dict[str, Any], rule: str) -> None:
    assert rule in "\n".join(problems(f"model: {{path: {write_model(**changes)}}}"))


def test_wrong_family_error_lists_supported_families() -> None:
    supported = "must be one of the supported model types qwen3, qwen3_moe, qwen2, llama, mistral"
    assert problem("", "model.recipe.family=lama") == (
        f'override model.recipe.family=lama: model.recipe.family="lama"\n  rule: {supported}\n  fix:  did you mean llama?'
    )
    text = problem("model: {recipe: {family: qwen2, head_dim: 64}}")
    assert text.startswith('run.yaml:4: model.recipe.family="qwen2"\n  rule: config.json: head_dim: must be hidden_size')
    assert "no such file" in problem("model: {family: own.py:family}")
    Path("own.py").write_text("family = 5")
    assert "must name a titanrl.models.family.ModelFamily" in problem("model: {family: own.py:family}")


@pytest.mark.parametrize("content", ["{", "[" * 10_000, "[]", '{"model_type": "qwen3", "num_attention_heads": 0}'])
def test_malformed_config_json_is_reported(content: str) -> None:
    model = write_model()
    (model / "config.json").write_text(content)
    assert "its config.json must" in problem(f"model: {{path: {model}}}")


def test_incomplete_download_is_reported() -> None:
    model = write_model()
    (model / "model.safetensors").unlink()
    for file in model.glob("tokenizer*"):
        file.unlink()
    weights, tokenizer = problems(f"model: {{path: {model}}}")
    assert "must contain model.safetensors, or model.safetensors.index.json and" in weights
    assert "must contain the tokenizer" in tokenizer


def test_truncated_or_missing_weight_file_is_reported() -> None:
    model = write_model()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors must be a complete safetensors file" in problem(f"model: {{path: {model}}}")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    missing = problem(f"model: {{path: {model}}}")
    assert "the 2 files that model.safetensors.index.json names, but 1 are missing: model-2.safetensors" in missing


def test_weights_that_do_not_fit_are_reported_for_policy_and_teacher() -> None:
    model = write_model(num_hidden_layers=3)
    text = problem(f"model: {{path: {model}}}")
    assert text.startswith('run.yaml:4: model.path="model"')
    assert "11 of 35 tensors are missing: model.layers.2.input_layernorm.weight" in text
    teacher = problem("", "distill={teacher: {path: model}}", "warm_start=null")
    assert teacher.startswith('override distill={teacher: {path: model}}: distill.teacher.path="model"')
    assert "11 of 35 tensors are missing" in teacher


def test_dry_run_notes_unused_weights_of_policy_and_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model()
    shutil.copytree(model, "teacher")
    add_changed_weights(model, "model-old.safetensors")
    Path("teacher/pytorch_model.bin").touch()
    config = load_config("distill_quickstart", ["model.path=model", "distill.teacher.path=teacher", "warm_start=null"])
    dry_run(config, None, lambda: ("", [], {}))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: model: the weights are those of model.safetensors. Not read: model-old.safetensors",
        "note: teacher: the weights are those of model.safetensors. Not read: pytorch_model.bin",
    ]
    assert list(policy_notes(config)) == [notes[0].removeprefix("note: ")]
    assert list(policy_notes(load_config("quickstart"))) == []


def test_date_that_the_chat_template_writes_is_noted() -> None:
    model = write_model()
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    (note,) = policy_notes(load_config("quickstart", [f"model.path={model}", "warm_start=null"]))
    assert note.startswith(
        "the chat template writes a date, which is 2024-07-26 on every day; data.chat_template_kwargs: {strftime_now: "
    )
    own = "data.chat_template_kwargs={strftime_now: 2026-01-31}"
    assert list(policy_notes(load_config("quickstart", [f"model.path={model}", "warm_start=null", own]))) == []


def test_rules_on_the_size_of_the_model() -> None:
    model = write_model()
    heads, positions = problems(f"model: {{path: {model}}}\ntrainer: {{row_tokens: 516, parallelism: {{tp: 4}}}}")
    assert "tp must divide the model's 4 query heads and 2 key-value heads" in heads
    assert heads.startswith("run.yaml:5: trainer.parallelism.tp=4, model.path=")
    assert "a row must not be longer than the model's 512 positions" in positions
    text = problem(f"model: {{path: {model}}}\ntrainer: {{overlong: skip}}\nrollout: {{max_new_tokens: 600}}")
    assert "a prompt plus completion of 664 tokens must not be longer than the model's 512 positions" in text


def test_only_vllms_own_model_pads_a_vocabulary() -> None:
    recipe = "model: {recipe: {num_heads: 3, num_kv_heads: 3}}"
    assert "tp must divide the model's vocabulary of 112 tokens" in problem(f"{recipe}\ngenerator: {{tp: 3}}")
    assert problems(f"{recipe}\ngenerator: {{tp: 3, model_impl: native}}") == []


def test_kv_cache_smaller_than_one_sequence_is_reported() -> None:
    text = problem("generator: {kv_cache_bytes: 1000}\n")
    assert text.startswith("run.yaml:4: generator.kv_cache_bytes=1000\n  rule: too small for one sequence of 90 tokens\n")
