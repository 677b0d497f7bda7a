"""The section `evaluation`: its rules, and the resolved evaluation sets."""

from pathlib import Path

import pytest

from tests.config.test_wrong_configs import complaint
from titanrl.config import Config

BASE = "name: a\nnum_steps: 3\nevaluation:\n  sets:\n"


def config_of(**evaluation: object) -> Config:
    return Config.model_validate({"name": "a", "num_steps": 3, "evaluation": evaluation})


def test_section_defines_the_default_set() -> None:
    (subset,) = config_of(every_steps=5, num_prompts=7).evaluation_sets.values()
    assert (subset.name, subset.key) == ("chain_sum", "evaluation")
    assert (subset.every_steps, subset.num_prompts, subset.num_samples, subset.temperature) == (5, 7, 1, 0.0)
    assert subset.metrics == ("eval/chain_sum/mean",)
    assert config_of(num_prompts=0).evaluation_sets == {}


def test_set_inherits_missing_values_from_the_run() -> None:
    own = {"source": "jsonl", "path": Path("test.jsonl"), "max_prompt_tokens": 100}
    sets = config_of(
        every_steps=5,
        sets={
            "plain": {},
            "sampled": {"every_steps": 0, "num_samples": 8, "temperature": 1.0, "pass_k": [2, 4]},
            "other": {"data": own, "split": "all", "max_new_tokens": 50},
        },
    ).evaluation_sets
    assert list(sets) == ["chain_sum", "plain", "sampled", "other"]
    assert (sets["plain"].every_steps, sets["plain"].max_new_tokens, sets["plain"].has_own_data) == (5, 26, False)
    assert (sets["sampled"].every_steps, sets["sampled"].pass_k) == (0, (2, 4))
    assert sets["sampled"].metrics == ("eval/sampled/mean", "eval/sampled/avg@8", "eval/sampled/pass@2", "eval/sampled/pass@4")
    assert (sets["other"].has_own_data, sets["other"].max_tokens) == (True, 150)


def test_max_sampled_tokens_covers_the_longest_set() -> None:
    long = {"data": {"max_prompt_tokens": 100}, "max_new_tokens": 200}
    assert config_of(sets={"long": long}).max_sampled_tokens == 300
    assert config_of().max_sampled_tokens == 64 + 26


@pytest.mark.parametrize(
    ("text", "key", "rule", "fix"),
    [
        ("a b: {}", "evaluation.sets.a b", "must consist of letters", "rename it"),
        ("hard: {num_samples: 4}", "evaluation.sets.hard.temperature=0", "are all equal", "set temperature, for example to 1"),
        ("hard: {pass_k: [2]}", "evaluation.sets.hard.pass_k=[2]", "at least k samples", "set num_samples to at least 2"),
        (
            "hard: {split: all}",
            'evaluation.sets.hard.split="all"',
            "prompts of the run that are trained on",
            "set split to heldout",
        ),
        ("chain_sum: {}", "evaluation.sets.chain_sum", "this name is taken by the default set", "rename the set"),
        (
            "hard: {num_prompt: 4}",
            "evaluation.sets.hard.num_prompt",
            "no such key in evaluation.sets.hard",
            "Keys of evaluation.sets.hard: every_steps",
        ),
        (
            "hard: {max_new_tokens: 600}",
            "evaluation.sets.hard.max_new_tokens=600",
            "the model has only 512 positions",
            "lower evaluation.sets.hard.max_new_tokens",
        ),
    ],
)
def test_wrong_set_is_an_error(tmp_path: Path, text: str, key: str, rule: str, fix: str) -> None:
    found = complaint(tmp_path, f"{BASE}    {text}\n")
    assert key in found
    assert rule in found
    assert fix.lower() in found.lower()


def test_fine_tuning_and_distillation_restrict_the_sets(tmp_path: Path) -> None:
    found = complaint(tmp_path, f"{BASE}    hard: {{}}\nsft: {{path: a.jsonl}}\n")
    assert "evaluates only the loss on held-out examples" in found
    text = "name: a\nnum_steps: 3\nevaluation: {num_prompts: 0}\ndistill: {teacher: {path: big}}\n"
    assert "needs the default set, on which it evaluates the teacher" in complaint(tmp_path, text)


def asynchronous(**changes: object) -> Config:
    """Return a configuration that evaluates in the background."""
    return Config.model_validate({"name": "a", "num_steps": 30, "max_staleness": 1, "algorithm": {"loss": "ppo"}} | changes)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        ({"generator": {"tp": 2}}, 2),
        ({"max_staleness": 0}, 0),  # the order of a synchronous run stays
        ({"evaluation": {"background": False}}, 0),
        ({"evaluation": {"every_steps": 0}}, 0),  # before and after training alone
        ({"num_steps": 20}, 0),
        ({"evaluation": {"every_steps": 0, "sets": {"hard": {"every_steps": 5}}}}, 1),
    ],
)
def test_background_evaluator_only_runs_between_first_and_last_step(changes: dict[str, object], ranks: int) -> None:
    assert asynchronous(**changes).num_evaluator_ranks == ranks


def test_background_evaluator_needs_a_separate_device(tmp_path: Path) -> None:
    text = "name: a\nnum_steps: 30\ndevice: cuda\nmax_staleness: 1\nhosts: {devices_per_host: 2}\n"
    found = complaint(tmp_path, text)
    assert "one accelerator per trainer rank, generator rank and evaluator rank, which is 3" in found
    assert "set evaluation.background to false" in found
    assert asynchronous(device="cuda", hosts={"devices_per_host": 3}).num_evaluator_ranks == 1


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        ("best_metric: eval/hard/mean", "must be a metric of an evaluation set", "choose one of eval/chain_sum/mean"),
        ("best_metric: eval/chain_sum/response_len_mean", "that can be maximized", "choose one of"),
        ("patience: 3", "patience requires best_metric", "set best_metric"),
        ("min_improvement: 0.1", "min_improvement requires best_metric", "set best_metric"),
        ("max_error_frac: 0.1", "max_error_frac requires best_metric", "set best_metric"),
    ],
)
def test_invalid_best_metric_is_an_error(tmp_path: Path, text: str, rule: str, fix: str) -> None:
    found = complaint(tmp_path, f"name: a\nnum_steps: 3\nevaluation: {{{text}}}\n")
    assert rule in found
    assert fix.lower() in found.lower()


def test_best_metric_requires_evaluations_of_published_versions(tmp_path: Path) -> None:
    text = (
        "name: a\nnum_steps: 4\nalgorithm: {updates_per_publish: 2}\n"
        "evaluation: {every_steps: 3, best_metric: eval/chain_sum/mean}\n"
    )
    assert "every_steps must be a multiple of updates_per_publish" in complaint(tmp_path, text)
