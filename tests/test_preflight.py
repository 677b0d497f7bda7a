"""Mistakes that only this machine can show are found before anything starts: exit 2, no traceback."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from titanrl.config import ConfigError, read_source
from titanrl.config.errors import BrokenRules
from titanrl.config.explain import explain_rule
from titanrl.config.load import validate
from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import create_model
from titanrl.preflight import broken_rules, check_data, check_scorer, preflight

GOOD = "name: a\nnum_steps: 3\ndevice: cpu\n"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def problems(text: str = "", *overrides: str) -> list[str]:
    """Messages of all checks but those of child processes, which take a second."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    return [explain_rule(rule, source) for rule in broken_rules(validate(source))]


def problem(text: str = "", *overrides: str) -> str:
    (found,) = problems(text, *overrides)
    return found


def data_problem(text: str = "", *overrides: str) -> str:
    """Message of the check of task and data, made in this process."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    with pytest.raises(BrokenRules) as raised:
        check_data(validate(source))
    (rule,) = raised.value.broken
    return explain_rule(rule, source)


def write_questions(num: int) -> str:
    """Write a JSONL file of questions; return the configuration of it."""
    Path("few.jsonl").write_text("".join(json.dumps({"prompt": f"{i} =", "answer": "1"}) + "\n" for i in range(num)))
    return "source: jsonl, path: few.jsonl"


def preflight_error(text: str, *overrides: str) -> str:
    """Message of the whole preflight; also checks that it writes nothing."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    before = sorted(Path().iterdir())
    with pytest.raises(ConfigError) as raised:
        preflight(validate(source), source)
    assert [found for found in sorted(Path().iterdir()) if found.name != "__pycache__"] == before
    return str(raised.value)


def write_model(**changes: Any) -> Path:
    """Write the recipe's model as a checkpoint, with changes of its config.json."""
    path = Path("model")
    create_model(path, RecipeConfig(), seed=0)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


# Task and data


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("data.task=chainsum", "reasoning-gym has no such task", "did you mean chain_sum?"),
        ("data.task_config={min_term: 3}", "unexpected keyword argument 'min_term'", "correct data.task_config"),
        ("data.task_config={min_terms: 9}", "max_terms must be >= min_terms", "correct data.task_config"),
        ("data.task_config={seed: 1}", "the run sets this option", "remove it, and set seed"),
        ("data.max_prompt_tokens=4", "longer than data.max_prompt_tokens", "raise data.max_prompt_tokens"),
        ("data.system_prompt=Add.", "the tokenizer has no chat template", "remove it"),
    ],
)
def test_wrong_task_is_reported_with_its_line(override: str, rule: str, fix: str) -> None:
    text = data_problem("", override)
    assert text.startswith(f"override {override}: data.")
    assert rule in text.partition("\n  rule: ")[2]
    assert fix in text.partition("\n  fix:  ")[2]


def test_task_with_too_few_heldout_questions_is_reported() -> None:
    task = "{min_terms: 1, max_terms: 1, min_digits: 1, max_digits: 1}"  # ten questions
    assert "too few distinct questions" in data_problem(f"data: {{task_config: {task}, heldout_fraction: 0.5}}\n")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"question": "1 + 2 =", "answer": "3"}', "prompt is missing"),
        ('{"prompt": "1 + 2 =", "answer": 3}', "answer must be a string, got 3"),
        ('{"prompt": "1 + 2 = \\ud800", "answer": "3"}', "must be Unicode text, but has the lone surrogate U+D800"),
        ("[" * 10_000 + "]" * 10_000, "must not be nested deeper than 100 levels"),
        ("{not json}", "must be JSON"),
    ],
)
def test_wrong_jsonl_is_reported_with_the_line_of_the_file(line: str, rule: str) -> None:
    Path("bad.jsonl").write_text('{"prompt": "1 + 2 =", "answer": "3"}\n' + line + "\n")
    text = data_problem("data:\n  source: jsonl\n  path: bad.jsonl\n")
    assert text.startswith('run.yaml:6: data.path="bad.jsonl"\n')
    assert f"rule: bad.jsonl:2: {rule}" in text


def test_missing_jsonl_is_reported() -> None:
    assert "run.yaml:4: data.path" in data_problem("data: {source: jsonl, path: none.jsonl}\n")


def test_jsonl_with_too_few_heldout_questions_is_reported() -> None:
    text = data_problem(f"data: {{{write_questions(50)}}}\n")
    assert "evaluation.num_prompts=200" in text
    assert "lower evaluation.num_prompts" in text


# Scorer


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (None, "importing rewards raised ModuleNotFoundError: No module named 'rewards'"),
        ("def other(text, entry): return 1.0", "module rewards has no attribute 'score'"),
        ("score = 5", "rewards:score is not callable"),
        ("def score(text): return 1.0", "the signature does not fit: too many positional arguments"),
        ("def score(text, entry: return 1.0", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_unusable_scorer_is_rejected(module: str | None, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    if module is not None:
        Path("rewards.py").write_text(module)
    importlib.invalidate_caches()
    Path("run.yaml").write_text(GOOD + "data: {scorer: rewards:score}\n")
    with pytest.raises(ValueError, match=r"data\.scorer: ") as raised:
        check_scorer(validate(read_source("run.yaml")))
    assert rule in str(raised.value)


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        ("1 / 0", "importing rewards raised ZeroDivisionError: division by zero"),
        ("import sys; print('bye'); sys.exit(3)", "must not end the Python process (exit code 3, bye)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "must not end the Python process (SIGSEGV"),
        ("import time; time.sleep(100)", "must not take longer than 4 s"),
    ],
)
def test_scorer_that_crashes_or_hangs_is_reported(module: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in module:
        monkeypatch.setattr("titanrl.preflight.CHECK_LIMIT_S", 4.0)
    Path("rewards.py").write_text(module)
    text = preflight_error(f"data: {{scorer: rewards:score, {write_questions(50)}}}\nevaluation: {{num_prompts: 1}}\n")
    assert text.startswith("run.yaml:4: data.scorer=")
    assert rule in text.partition("\n  rule: ")[2]


def test_usable_config_passes_and_calls_meanwhile() -> None:
    Path("rewards.py").write_text("print('loading')\ndef score(text, entry, scale=2.0): return scale\n")
    data = f"data: {{scorer: rewards:score, {write_questions(50)}}}\nevaluation: {{num_prompts: 1}}\n"
    Path("run.yaml").write_text(GOOD + data)
    calls: list[int] = []
    preflight(validate(read_source("run.yaml")), meanwhile=lambda: calls.append(1))
    assert calls == [1]


def test_hanging_check_ends_with_its_parent() -> None:
    Path("rewards.py").write_text("import os, time; open('pid', 'w').write(f'{os.getpid()}\\n'); time.sleep(100)")
    data = f"data: {{scorer: rewards:score, {write_questions(50)}}}\nevaluation: {{num_prompts: 1}}\n"
    Path("run.yaml").write_text(GOOD + data)
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "run.yaml", "--dry-run"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (Path("pid").is_file() and Path("pid").read_text().endswith("\n")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pid, deadline = int(Path("pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Model


def test_complete_model_is_ready() -> None:
    assert problems() == []
    assert problems(f"model: {{path: {write_model()}}}") == []


def test_missing_model_is_reported_with_a_download_command() -> None:
    assert problems("model:\n  path: models/Qwen3-8B\n")[-1] == (
        'run.yaml:5: model.path="models/Qwen3-8B"\n'
        "  rule: must be a directory, but it does not exist\n"
        "  fix:  correct the path, or download a model: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`"
    )


def test_directory_without_config_json_is_reported() -> None:
    Path("empty").mkdir()
    assert "it has no config.json" in problem("", "model.path=empty")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_type": "llama"}, "must have model_type qwen3, not llama"),
        ({"hidden_size": "big"}, "must contain the positive numbers hidden_size"),
        ({"head_dim": 16}, "config.json: head_dim: vLLM has no CPU attention kernel for this head size (got 16)"),
        ({"attention_bias": True}, "config.json: attention_bias: not supported (got True)"),
        ({"num_key_value_heads": 3}, "the 3 key-value heads of config.json must divide its 4 query heads"),
    ],
)
def test_unsupported_config_json_is_reported(changes: dict[str, Any], rule: str) -> None:
    assert rule in "\n".join(problems(f"model: {{path: {write_model(**changes)}}}"))


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
    assert "must contain the weights (*.safetensors)" in weights
    assert "must contain the tokenizer" in tokenizer


def test_truncated_or_missing_weight_file_is_reported() -> None:
    model = write_model()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors must be a complete safetensors file" in problem(f"model: {{path: {model}}}")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    missing, _ = problems(f"model: {{path: {model}}}")
    assert "model-2.safetensors must be a complete safetensors file" in missing


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


# Machine


def test_missing_device_is_reported() -> None:
    assert "the device must be usable on this machine" in problem("", "device=npu")


def test_too_many_processes_for_this_machine_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    text = problem("rollout: {num_workers: 1000}\n")
    assert "must not start more than 200 processes on this machine, 100 per CPU core, and these values start 9,004" in text


def test_model_without_room_in_memory_is_reported() -> None:
    text = problem("", "model.recipe.hidden_size=1000000", "model.recipe.num_layers=100")
    assert "weights, gradients, optimizer state and KV cache need" in text


def test_unwritable_output_is_reported() -> None:
    Path("file").touch()
    assert 'output_dir="file/runs"\n  rule: must be a writable directory, but' in problem("", "output_dir=file/runs")


def test_missing_tracker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("wandb").mkdir()  # left behind by the tracker; not the package
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: iter(()))
    text = problem("logging:\n  loggers: [wandb]\n")
    assert 'run.yaml:5: logging.loggers=["wandb"]\n  rule: the package wandb must be installed' in text


def test_unknown_engine_argument_is_reported() -> None:
    assert problem("generator: {vllm: {gpu_memory_utilisation: 0.4}}\n") == (
        "run.yaml:4: generator.vllm.gpu_memory_utilisation=0.4\n"
        "  rule: no such vLLM option\n"
        "  fix:  did you mean gpu_memory_utilization?"
    )
    assert problems("generator: {vllm: {gpu_memory_utilization: 0.4}}\n") == []


# The interface


def test_all_problems_are_reported_together() -> None:
    text = preflight_error("", "data.task=chainsum", "data.scorer=none:f", "output_dir=run.yaml/x")
    assert text.count("rule: ") == 3


@pytest.mark.parametrize("option", [["--dry-run"], []])
def test_command_exits_with_2_without_a_traceback(option: list[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "run.yaml", *option, "data.task=chainsum"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr.endswith("rule: reasoning-gym has no such task\n  fix:  did you mean chain_sum?\n")
    assert "Traceback" not in result.stdout + result.stderr
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
