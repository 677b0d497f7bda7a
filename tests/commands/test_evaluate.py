"""The command `titanrl evaluate`: arguments, messages and result table. `tests/e2e/test_evaluations.py` runs it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.blocks import all_blocks, shell_lines
from titanrl.carriers.types import EvaluationResult
from titanrl.commands import evaluate, serve
from titanrl.config import ConfigError

RESULT = EvaluationResult(
    task="hard",
    version=0,
    mean=0.5,
    num_prompts=100,
    response_len_mean=17.25,
    environment={"calls": 1.5},
    num_errors=7,
    num_unscored_prompts=1,
    num_truncated=40,
    num_unjudged=2,
    first_error="answer: broken",
    num_samples=4,
    statistics={"mean": 0.5, "mean_ci95": 0.1, "avg@4": 0.25, "pass@4": 0.75},
)


def made_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_run_directory_provides_the_configuration(tmp_path: Path) -> None:
    model = made_model(tmp_path / "run" / "checkpoints" / "final")
    (tmp_path / "run" / "config.yaml").write_text("name: a\nnum_steps: 3\nwarm_start: {num_steps: 5}\n")
    found, config, _ = evaluate.evaluated_model(tmp_path / "run", None, ["evaluation.num_prompts=7"])
    assert (found, config.model.path) == (model, model)
    assert config.warm_start is None  # the model is evaluated as it is
    assert evaluate.chosen_sets(config, []) == ["chain_sum"]
    assert config.evaluation.num_prompts == 7


def test_model_directory_needs_a_configuration(tmp_path: Path) -> None:
    model = made_model(tmp_path / "model with spaces: odd")
    with pytest.raises(ConfigError, match="--config: required, unless --model is a run directory"):
        evaluate.evaluated_model(model, None, [])
    _, config, _ = evaluate.evaluated_model(model, Path("configs/quickstart.yaml"), ["evaluation.sets={hard: {}}"])
    assert config.model.path == model
    assert evaluate.chosen_sets(config, []) == ["chain_sum", "hard"]
    assert evaluate.chosen_sets(config, ["hard"]) == ["hard"]
    with pytest.raises(ConfigError, match=r"--set: .*no such set \(got 'easy'\)\. Choose one of chain_sum, hard"):
        evaluate.chosen_sets(config, ["hard", "easy"])


def test_configuration_without_prompts_is_rejected(tmp_path: Path) -> None:
    model = made_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="a fine-tuning run has no prompts to evaluate"):
        evaluate.evaluated_model(model, Path("configs/sft_quickstart.yaml"), [])
    quick = Path("configs/quickstart.yaml")
    _, config, _ = evaluate.evaluated_model(model, quick, ["evaluation.num_prompts=0"])
    with pytest.raises(ConfigError, match=r"--set: evaluation: no set is configured \(got num_prompts=0\)"):
        evaluate.chosen_sets(config, [])


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("nowhere", "must be a directory, but it does not exist"),
        ("", "must be a Hugging Face model directory, but it has no config.json"),
        ("a" * 300, "must be a directory, but it cannot be read"),
        ("run", "checkpoints/final has no exported model"),
    ],
)
def test_missing_model_exits_with_2_and_suggests_fix(
    folder: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"^2$"):
        evaluate.main(["--model", str(tmp_path / folder)])
    shown = capsys.readouterr().err
    assert re.search(f"--model.*: {problem}", shown)


def test_table_and_json_have_every_statistic() -> None:
    assert list(evaluate.rows({"hard": RESULT})) == [
        ("hard", "100 x 4", "mean", "0.5000", "0.4000 to 0.6000"),
        ("", "", "avg@4", "0.2500", ""),
        ("", "", "pass@4", "0.7500", ""),
        ("", "", "response_len_mean", "17.2", ""),
        ("", "", "environment/calls_mean", "1.5000", ""),
        ("", "", "truncated", "40", ""),
        ("", "", "truncated and not judged", "2", ""),
        ("", "", "failed rewards", "7 of 400", "answer: broken"),
        ("", "", "prompts in the mean", "99 of 100", ""),
    ]
    found = json.loads(json.dumps(evaluate.as_dict(Path("model"), {"hard": RESULT})))
    assert found["model"] == "model"
    assert found["sets"]["hard"] == {
        **RESULT.statistics,
        "num_prompts": 100,
        "num_samples": 4,
        "response_len_mean": 17.25,
        "environment/calls_mean": 1.5,
        "num_truncated": 40,
        "num_unjudged": 2,
        "num_completions": 400,
        "num_scored_prompts": 99,
        "num_errors": 7,
        "first_error": "answer: broken",
    }


def test_commands_in_docs_have_valid_arguments() -> None:
    commands = [line for block in all_blocks("sh") for line in shell_lines(block) if line.startswith("titanrl evaluate ")]
    assert len(commands) > 1
    for line in commands:
        assert evaluate.parse(shlex.split(line)[2:], prog="titanrl evaluate").model.parts[0] == "runs"


def test_policy_of_a_distillation_run_is_sampled_from_without_what_only_distillation_may_have(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made_model(run / "checkpoints" / "final")
    (run / "config.yaml").write_text(
        "name: a\nnum_steps: 3\ndistill: {teacher: {path: t}, teachers: {coder: {path: c}}}\nrollout: {group_size: 1}\n"
        "data: {mixture: {a: {task: chain_sum, teacher: coder, distill_weight: 0.5, reward_weight: 1.0}, b: {}}}\n"
    )
    _, config, _ = evaluate.evaluated_model(run, None, [])
    assert config.distill is None
    assert evaluate.chosen_sets(config, []) == ["a", "b"]
    assert serve.find_policy(run, None, [], tmp_path).config.data.mixture.keys() == {"a", "b"}
