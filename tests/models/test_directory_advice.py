"""Paths that are no model directory: each error says what the path is, and what to do."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from titanrl.config.errors import BrokenRule
from titanrl.models.directory import read_model


def files(**contents: str) -> Callable[[Path], object]:
    """Return a function that writes files with these contents; `__` in a name separates folders."""

    def write(path: Path) -> None:
        path.mkdir()
        for name, content in contents.items():
            file = path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

    return write


GPT2 = json.dumps({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12})
ADVICE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "GPT-2": (files(config_dot_json=GPT2), "supported model types qwen3, .*, not gpt2", "use a model of one of these"),
    "no model_type": (files(config_dot_json='{"n_embd": 768}'), "must have a model_type, such as qwen3", "for transformers"),
    "adapter": (
        files(adapter_config_dot_json="{}", adapter_model_dot_safetensors=""),
        "must be the directory of a complete model, but it is that of a PEFT adapter",
        "merge the adapter into its base model",
    ),
    "GGUF folder": (files(model_dot_gguf=""), "it has GGUF files and no config.json", "download the original model"),
    "authors' format": (files(params_dot_json="{}", consolidated_dot_00_dot_pth=""), "model's authors", "for transf"),
    "run": (files(checkpoints__final__config_dot_json="{}"), "no config.json", "set it to .*/checkpoints/final$"),
    "unfinished run": (files(checkpoints__step_dot_1=""), "a run without an exported model", "finish the run"),
    "checkpoint": (files(commit_dot_json="{}", state__a=""), "is a checkpoint or a run without", "finish the run"),
    "cache of the hub": (files(snapshots__8f3a__config_dot_json="{}"), "no config.json", "set it to .*/snapshots/8f3a$"),
    "folder of models": (
        files(a__config_dot_json="{}", b__config_dot_json="{}"), "no config.json", "set it to .*/a, which is one of 2"
    ),
    "weights only": (files(model_dot_safetensors=""), "no config.json", "complete the download: `hf download"),
    "file": (lambda path: path.write_text(""), "must be a directory, but it is a file", "give its directory, /"),
    "nothing": (lambda path: None, "must be a directory, but it does not exist", "`hf download ORGANIZATION/model --local"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ADVICE)
def test_path_that_is_no_model_is_explained(kind: str, tmp_path: Path) -> None:
    write, rule, fix = ADVICE[kind]
    write(path := tmp_path / "model")
    found = read_model(path)
    assert isinstance(found, BrokenRule)
    assert found.values == {"model.path": str(path)}
    assert re.search(rule, found.rule)
    assert re.search(fix, found.fix)


@pytest.mark.parametrize(
    ("path", "rule", "fix"),
    [
        ("Qwen/Qwen3-8B", "a directory on this machine", "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`"),
        ("openai-community/gpt2", "a directory on this machine", "`hf download openai-community/gpt2 --local-dir models/gpt2`"),
        ("models/Qwen3-8B", "must be a directory, but", "or download a model: `hf download Qwen/Qwen3-8B --local-dir models/Q"),
        ("there/model", "must be a directory, but", "or download a model: `hf download ORGANIZATION/model --local-dir there/m"),
        ("there/model-q4.gguf", "must be a directory, but it is a GGUF file", "download the original model"),
    ],
)
def test_name_on_the_hub_has_a_download_command(
    path: str, rule: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/model-q4.gguf").touch()
    found = read_model(Path(path))
    assert isinstance(found, BrokenRule)
    assert rule in found.rule
    assert fix in found.fix
