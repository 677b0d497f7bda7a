"""The resolved evaluation sets, and the background evaluator."""

from pathlib import Path

import pytest

from titanrl.config import Config


def config_of(**evaluation: object) -> Config:
    return Config.model_validate({"name": "a", "num_steps": 3, "evaluation": evaluation})


def test_section_defines_the_default_set() -> None:
    (eval_set,) = config_of(every_steps=5, num_prompts=7).evaluation_sets.values()
    assert (eval_set.name, eval_set.key) == ("chain_sum", "evaluation")
    assert (eval_set.every_steps, eval_set.num_prompts, eval_set.num_samples, eval_set.temperature) == (5, 7, 1, 0.0)
    assert eval_set.metrics == ("eval/chain_sum/mean",)
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
        ({"device": "cuda", "hosts": {"devices_per_host": 3}}, 1),
        ({"evaluation": {"every_steps": 0, "sets": {"hard": {"every_steps": 5}}}}, 1),
    ],
)
def test_background_evaluator_only_runs_between_first_and_last_step(changes: dict[str, object], ranks: int) -> None:
    assert asynchronous(**changes).num_evaluator_ranks == ranks
