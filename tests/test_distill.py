"""Distillation without processes: its data and metrics, and the checks of its configuration."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl import ConfigError, load_config
from titanrl.carriers.rewards import Scored
from titanrl.carriers.types import FinishReason, FloatArray, Prompt
from titanrl.checks.preflight import broken_rules
from titanrl.config.load import check_program
from titanrl.config.sections import RecipeConfig
from titanrl.distill import Batch, batch_metrics, discounted, distillation_data, main
from titanrl.models.recipe import create_model
from titanrl.session.sampling import Sample

TEACHER = "distill.teacher.path"


def sample(logprobs: list[float], finish_reason: FinishReason = "stop") -> Sample:
    """A sample with the prompt [5, 6] and one token per log-probability."""
    return Sample(
        prompt=np.array([5, 6]),
        tokens=np.arange(7, 7 + len(logprobs)),
        logprobs=np.array(logprobs, np.float32),
        versions=np.zeros(len(logprobs), np.int64),
        text="",
        finish_reason=finish_reason,
    )


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def test_advantage_of_a_token_is_teacher_minus_policy() -> None:
    samples, divergences = [sample([-0.1, -0.7]), sample([-2.0])], [floats(0.4, -0.1), floats(1.5)]
    first, second = distillation_data(samples, divergences, discount=0.0)
    assert first.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, -0.4, 0.1])
    assert second.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, -1.5])
    for datum in (first, second):  # the sum of the losses is their mean over three tokens
        assert datum.loss_fn_inputs["weights"].tolist() == pytest.approx([0] + [1 / 3] * (len(datum.model_input) - 1))


def test_discount_adds_the_divergence_of_later_tokens() -> None:
    values = floats(1.0, 2.0, 4.0)
    assert discounted(values, 0.0).tolist() == [1.0, 2.0, 4.0]
    assert discounted(values, 0.5).tolist() == [1.0 + 0.5 * 2.0 + 0.25 * 4.0, 2.0 + 0.5 * 4.0, 4.0]
    assert values.tolist() == [1.0, 2.0, 4.0]


def test_metrics_average_over_tokens_and_exclude_failed_rewards() -> None:
    prompt = Prompt(index=0, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={})
    right, wrong = (Scored(reward=reward, parts={"answer": reward}) for reward in (1.0, 0.0))
    metrics = batch_metrics(
        Batch(
            prompts=[prompt],
            groups=[[sample([-0.1, -0.7]), sample([-2.0], "length"), sample([-1.0])]],
            scores=[[right, wrong, Scored(reward=None, parts={}, error="timeout")]],
            divergences=[floats(0.5, 0.25), floats(1.0), floats(0.25)],
        )
    )
    assert metrics["policy/kl_teacher"] == pytest.approx(0.5)
    assert (metrics["reward/mean"], metrics["reward/answer"], metrics["reward/error_frac"]) == (0.5, 0.5, pytest.approx(1 / 3))
    assert (metrics["tokens/response_len_mean"], metrics["tokens/response_len_max"]) == (pytest.approx(4 / 3), 2.0)
    assert metrics["tokens/truncated_frac"] == pytest.approx(1 / 3)


# Configuration


def test_each_command_rejects_configurations_of_others() -> None:
    plain, distillation = load_config("quickstart"), load_config("distill_quickstart")
    check_program(plain, "train")
    check_program(distillation, "distill")
    with pytest.raises(ConfigError, match="only `titanrl distill` uses this section"):
        check_program(distillation, "train")
    with pytest.raises(ConfigError, match="`titanrl distill` requires this section"):
        check_program(plain, "distill")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.temperature=0.8", "set rollout.temperature to 1"),
        ("max_staleness=1", "set max_staleness to 0"),
        ("algorithm.loss=cispo", "remove algorithm.loss"),
        ("algorithm.kl={coef: 0.1}", "remove algorithm.kl"),
        ("rollout.top_p=0.9", "remove rollout.top_p"),
        ("distill.discount=1.0", "must be a number"),
        ("distill.teacher={tp: 2}", "distill.teacher.path is missing"),
    ],
)
def test_keys_without_effect_are_rejected(override: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_config("distill_quickstart", [override])


def test_teacher_needs_separate_accelerator() -> None:
    options = ["device=cuda", "hosts.devices_per_host=2", "distill.teacher.tp=2"]
    with pytest.raises(ConfigError, match="teacher rank, which is 4") as raised:
        load_config("distill_quickstart", options)
    assert "distill.teacher.tp=2" in str(raised.value)


# The teacher


def teacher_problems(*overrides: str) -> list[str]:
    return [str(rule) for rule in broken_rules(load_config("distill_quickstart", overrides)) if TEACHER in rule.values]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A model with random weights and the vocabulary of the recipe."""
    create_model(tmp_path / "teacher", RecipeConfig(num_layers=1, max_positions=58), seed=0)
    return tmp_path / "teacher"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_teacher_with_policy_vocabulary_is_accepted(teacher: Path) -> None:
    assert teacher_problems(f"{TEACHER}={teacher}") == []


def test_teacher_with_different_vocabulary_is_rejected(teacher: Path) -> None:
    edit(teacher / "tokenizer.json", '"="', '"\u2603"')
    (problem,) = teacher_problems(f"{TEACHER}={teacher}")
    assert "the teacher must have the vocabulary of the policy" in problem
    assert "2 tokens differ, such as '='" in problem


def test_missing_incomplete_or_short_teacher_is_rejected(teacher: Path) -> None:
    (missing,) = teacher_problems(f"{TEACHER}=nowhere")
    assert missing.startswith('distill.teacher.path="nowhere": must be a directory')
    (short,) = teacher_problems(f"{TEACHER}={teacher}", "rollout.max_new_tokens=27")
    assert "59 tokens must not be longer than the teacher's 58 positions" in short
    (teacher / "model.safetensors").unlink()
    (incomplete,) = teacher_problems(f"{TEACHER}={teacher}")
    assert "but it has no weights" in incomplete


def test_dry_run_shows_teacher_keys(teacher: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(teacher.parent)  # a long path would be shortened
    with pytest.raises(SystemExit) as ended:
        main(["--config", "distill_quickstart", f"{TEACHER}={teacher.name}", "--dry-run"])
    assert ended.value.code == 0
    output: Any = capsys.readouterr().out
    assert any(line.split()[:2] == [TEACHER, f'"{teacher.name}"'] for line in output.splitlines())
    assert "Ready to start." in output
