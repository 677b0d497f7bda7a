"""Scorers, called without a sandbox."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.utils import extract_answer

from titanrl.config.sections import DataConfig
from titanrl.rollout.scorers import exact, imported, last_answer, reasoning_gym
from titanrl.sandbox.scores import ScorerSpec, scorer_spec


@given(st.lists(st.sampled_from(["<answer>", "</answer>", " ", "\n", "7", "x y"]), max_size=12).map("".join))
def test_last_answer_equals_reasoning_gyms_extraction(text: str) -> None:
    assert last_answer(text) == extract_answer(text)


def test_last_answer_takes_linear_time() -> None:
    assert last_answer("<answer>" * 200_000) is None  # a backtracking pattern would take minutes


@pytest.mark.parametrize(
    ("text", "expected", "reward"),
    [
        ("<answer>Paris</answer>", "Paris", 1.0),
        ("<answer>Rome</answer> or <answer> Paris </answer>.", "Paris", 1.0),
        ("Paris\n", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("<answer>Paris", "Paris", 0.0),
        ("<answer>paris</answer>", "Paris", 0.0),
        ("<answer>two\n words</answer>", "two  words", 1.0),
        ("<answer>1.50</answer>", "1.5", 1.0),
        ("<answer>1e3</answer>", 1000, 1.0),
        ("<answer>0.1</answer>", 0.1, 1.0),
        ("<answer>1.5000000000000000001</answer>", "1.5", 0.0),
        ("<answer>NaN</answer>", "1", 0.0),
        ("<answer>sNaN</answer>", "1", 0.0),
        ("<answer>1e9999999999999999999</answer>", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_exact_compares_words_and_numbers(text: str, expected: object, reward: float) -> None:
    assert exact()(text, {"answer": expected}) == {"answer": reward}


def test_reasoning_gym_scores_the_text_in_the_tags() -> None:
    score = reasoning_gym("chain_sum", {"min_terms": 2})
    entry = {"question": "3 + 4 =", "answer": "7", "metadata": {}}
    assert score("so <answer>7</answer>", entry) == {"answer": 1.0}
    assert score("so 7", entry) == {"answer": 0.0}


def test_malformed_answer_of_a_gym_task_is_wrong_not_an_error() -> None:
    score = reasoning_gym("prime_factorization", {})
    entry = {"question": "", "answer": "2 \u00d7 3", "metadata": {}}
    assert score("<answer>2 \u00d7 3</answer>", entry) == {"answer": 1.0}
    assert score("<answer>two</answer>", entry) == {"answer": 0.0}


def test_gym_scorer_that_fails_on_the_right_answer_raises() -> None:
    score = reasoning_gym("prime_factorization", {})
    with pytest.raises(ValueError, match="two times three"):
        score("<answer>2 \u00d7 3 \u00d7 x</answer>", {"question": "", "answer": "two times three", "metadata": {}})


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="chain_sam"):
        reasoning_gym("chain_sam", {})


def test_custom_scorer_is_imported() -> None:
    assert imported("operator:eq")("a", {"a": 1}) == {"answer": False}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("math:pi", r"math:pi is not callable \(got 3\.14"),
        ("math:nothing", "module math has no attribute 'nothing'"),
        ("nowhere:run", "importing nowhere raised ModuleNotFoundError: No module named 'nowhere'"),
        ("math", r"not an import path \(got 'math'\)"),
    ],
)
def test_wrong_scorer_path_names_the_key(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"data.scorer: {problem}"):
        imported(path)


def test_configuration_selects_the_scorer() -> None:
    assert scorer_spec(DataConfig(task="countdown", task_config={"min_numbers": 2})) == ScorerSpec(
        factory="titanrl.rollout.scorers:reasoning_gym",
        kwargs={"task": "countdown", "config": {"min_numbers": 2}},
        bounds=(0.0, 1.0),
    )
    jsonl = DataConfig(source="jsonl", path=Path("prompts.jsonl"))
    assert scorer_spec(jsonl) == ScorerSpec(factory="titanrl.rollout.scorers:exact", bounds=(0.0, 1.0))
    assert scorer_spec(DataConfig(scorer="a.b:c")) == ScorerSpec(
        factory="titanrl.rollout.scorers:imported", kwargs={"path": "a.b:c"}
    )
