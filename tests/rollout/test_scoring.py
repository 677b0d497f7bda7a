"""Scoring with several rewards, confined and trusted, with real processes and threads."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import titanrl
from tests.processes.processes import needs_confinement
from tests.rollout.scored import ANSWERS, right, score, score_with, score_with_paths, values
from titanrl.carriers.rewards import Answers, Reward, RewardSpec, Score, Scored
from titanrl.config.data import DataConfig, RewardConfig
from titanrl.config.schema import Config
from titanrl.config.sections import SandboxConfig
from titanrl.rollout.scoring import reward_specs, weighted

pytestmark = needs_confinement


@titanrl.group_reward
def longest(completions: Sequence[str], entry: Mapping[str, Any], num_tokens: Sequence[int]) -> list[float]:
    return [float(num == max(num_tokens)) for num in num_tokens]


MODULE = """
import asyncio, titanrl
from beside_rewards import BONUS

def right(completion, entry):
    return BONUS + (completion == entry["answer"])

async def parts(completion, entry, finish_reason):
    await asyncio.sleep(0)
    return {"short": len(completion) < 2, "ended": finish_reason == "stop"}

@titanrl.group_reward
def rank(completions, entry):
    return [float(sorted(completions).index(text)) for text in completions]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with rewards, in a folder from which modules can be imported."""
    (tmp_path / "beside_rewards.py").write_text("BONUS = 2.0\n")
    (tmp_path / "file_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "file_rewards.py"


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("by_file", [False, True])
def test_rewards_are_loaded_by_import_path_and_by_file(module: Path, by_file: bool, trusted: bool) -> None:
    where = str(module) if by_file else "file_rewards"
    rewards = {
        name: {"function": f"{where}:{name}", "trusted": trusted, "weight": weight}
        for name, weight in {"right": 1.0, "parts": 0.5, "rank": 10.0}.items()
    }
    first, second = score_with_paths(rewards)
    assert first.parts == {"right": 3.0, "parts/short": 1.0, "parts/ended": 1.0, "rank": 0.0}
    assert second.parts == {"right": 2.0, "parts/short": 0.0, "parts/ended": 0.0, "rank": 1.0}
    assert (first.reward, second.reward) == (3.0 + 0.5 * 2.0, 2.0 + 10.0)


def test_file_is_relative_to_the_configuration_file(module: Path) -> None:
    (module.parent / "run.yaml").write_text("name: a\nnum_steps: 1\ndata: {rewards: {answer: file_rewards.py:right}}\n")
    config = titanrl.load_config(module.parent / "run.yaml")
    assert config.data.rewards["answer"].function == f"{module}:right"
    assert values(score(config, {})) == [3.0, 2.0]


@pytest.mark.parametrize("trusted", [False, True])
def test_objects_of_every_kind_are_scored_together(trusted: bool) -> None:
    factor = 3.0  # a closure

    class Judge:
        def __call__(self, completion: str, entry: Mapping[str, Any]) -> float:
            return factor

    async def waits(completion: str, entry: Mapping[str, Any]) -> float:
        return len(completion)

    @titanrl.group_reward
    async def distinct(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
        return [float(len(set(completions)))] * len(completions)

    first, second = score_with(
        right=right,
        judge=Reward(Judge(), weight=0.5, trusted=trusted),
        waits=Reward(waits, weight=-1.0, trusted=not trusted),
        distinct=Reward(distinct, trusted=trusted),
        longest=longest,
        exact="exact",
    )
    assert first.parts == {"right": 1.0, "judge": 3.0, "waits": 1.0, "distinct": 2.0, "longest": 0.0, "exact": 1.0}
    assert second.parts == {"right": 0.0, "judge": 3.0, "waits": 4.0, "distinct": 2.0, "longest": 1.0, "exact": 0.0}
    assert (first.reward, second.reward) == (1.0 + 1.5 - 1.0 + 2.0 + 0.0 + 1.0, 0.0 + 1.5 - 4.0 + 2.0 + 1.0 + 0.0)


def test_single_python_reward_is_named_answer() -> None:
    scores = score(Config(name="a", num_steps=1), {"rewards": right})
    assert [scored.parts for scored in scores] == [{"answer": 1.0}, {"answer": 0.0}]


def test_failure_of_one_part_fails_the_completion_and_names_the_part() -> None:
    def fussy(completion: str, entry: Mapping[str, Any]) -> float:
        return 1 / (len(completion) - 1)

    first, second = score_with(right=right, fussy=fussy, also=Reward(fussy, trusted=True))
    error = "ZeroDivisionError: division by zero (test_scoring.py:110)"
    assert first == Scored(reward=None, parts={}, error=f"fussy: {error}; also: {error}")
    assert second.parts == {"right": 0.0, "fussy": 1 / 3, "also": 1 / 3}


@pytest.mark.parametrize("trusted", [False, True])
def test_group_reward_fails_as_a_whole_or_for_one_value(trusted: bool) -> None:
    @titanrl.group_reward
    def wrong(completions: Sequence[str], entry: Mapping[str, Any]) -> list[object]:
        return {"short": [1.0], "odd": [1.0, "two"]}[entry["answer"]]  # type: ignore[list-item,return-value]

    def scored(answer: str) -> list[Scored]:
        answers = Answers(entry={"answer": answer}, completions=("a", "b"), num_tokens=(1, 1), finish_reasons=("stop",) * 2)
        return score(Config(name="a", num_steps=1), {"rewards": {"wrong": Reward(wrong, trusted=trusted)}}, answers)

    assert [s.error for s in scored("short")] == [
        "wrong: TypeError: the reward returned 1 of 2 values. Expected one per completion."
    ] * 2
    first, second = scored("odd")
    assert first.reward == 1.0
    assert second.error.startswith("wrong: TypeError: the reward returned 'two'. Expected a finite number: `def reward(")
    assert [s.error for s in scored("none")] == ["wrong: KeyError: 'none' (test_scoring.py:122)"] * 2


# Time limits


@pytest.mark.parametrize(("trusted", "what"), [(False, "a whole group"), (True, "one completion")])
def test_slow_reward_names_its_time_limit(trusted: bool, what: str) -> None:
    def slow(completion: str, entry: Mapping[str, Any]) -> float:
        time.sleep(0.0 if completion == "4" else 30.0)
        return 1.0

    started = time.monotonic()
    first, second = score_with(slow=Reward(slow, trusted=trusted))
    assert time.monotonic() - started < 15.0
    assert first.reward == 1.0
    assert second.error == f"slow: timeout: the reward did not return in time (sandbox.timeout_s=2, for {what})"


def test_slow_async_and_group_rewards_are_stopped() -> None:
    async def slow(completion: str, entry: Mapping[str, Any]) -> float:
        await asyncio.sleep(30.0)
        return 1.0

    @titanrl.group_reward
    def slow_group(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
        time.sleep(30.0)
        return []

    def times_out(completion: str, entry: Mapping[str, Any]) -> float:
        raise TimeoutError("the judge is busy")

    trusted = {
        "slow": Reward(slow, trusted=True),
        "group": Reward(slow_group, trusted=True),
        "busy": Reward(times_out, trusted=True),
    }
    first, second = score_with(**trusted, confined=slow_group)
    assert first.error == second.error
    limit = "timeout: the reward did not return in time (sandbox.timeout_s=2, for"
    assert first.error.split("; ") == [
        f"slow: {limit} one completion)",
        f"group: {limit} the whole group)",
        "busy: TimeoutError: the judge is busy",
        f"confined: {limit} a whole group)",
    ]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_trusted_reward_may_raise_anything(error: BaseException) -> None:
    def raises(completion: str, entry: Mapping[str, Any]) -> float:
        raise error

    async def raises_later(completion: str, entry: Mapping[str, Any]) -> float:
        raise error

    for reward in (raises, raises_later):
        (first, _) = score_with(judge=Reward(reward, trusted=True))
        assert first.error.startswith("judge: ")
        assert type(error).__name__ in first.error or type(error) is StopIteration


@pytest.mark.parametrize("trusted", [False, True])
def test_reward_cannot_change_the_entry_of_other_calls_and_of_later_epochs(trusted: bool) -> None:
    def forgets(completion: str, entry: dict[str, Any]) -> float:
        return float(entry.pop("answer", None) is not None)

    for _ in range(2):
        scores = score_with(forgets=Reward(forgets, trusted=trusted), right=Reward(right, trusted=trusted))
        assert [scored.parts["right"] for scored in scores] == [1.0, 0.0]
        assert [scored.parts["forgets"] for scored in scores] == [1.0, 1.0]


# Weights, and the configuration


def parts(**values: float) -> Score:
    return Score(parts={name.replace("__", "/"): value for name, value in values.items()}, status="ok")


def test_weights_of_rewards_and_of_their_parts_multiply() -> None:
    rewards = {
        "right": RewardConfig(function="exact"),
        "judge": RewardConfig(function="exact", weight=0.5, weights={"style": 0.1}),
    }
    scored = weighted({"right": parts(right=1.0), "judge": parts(judge__style=2.0, judge__facts=3.0)}, rewards, ANSWERS, 0)
    assert scored.reward == pytest.approx(1.0 + 0.5 * 0.1 * 2.0 + 0.5 * 3.0)
    assert scored.parts == {"right": 1.0, "judge/style": 2.0, "judge/facts": 3.0}


def test_infinite_sum_of_rewards_is_a_failure() -> None:
    rewards = {"right": RewardConfig(function="exact", weight=1e200)}
    scored = weighted({"right": parts(right=1e200)}, rewards, ANSWERS, 0)
    assert (scored.reward, scored.error) == (None, "the weighted sum of right is not a finite number")


def test_weight_of_a_missing_part_is_an_error() -> None:
    rewards = {"judge": RewardConfig(function="exact", weights={"stile": 0.1})}
    scored = weighted({"judge": parts(judge__style=2.0, judge__facts=3.0)}, rewards, ANSWERS, 0)
    assert scored.error == "judge: it returned facts, style, but data.rewards.judge.weights names stile"
    scored = weighted({"judge": parts(judge=2.0)}, rewards, ANSWERS, 0)
    assert scored.error == "judge: it returned a number, but data.rewards.judge.weights names stile"


def specs_of(data: DataConfig) -> list[RewardSpec]:
    return reward_specs(Config(name="a", num_steps=1, data=data), {})


def test_prompt_source_selects_the_default_reward() -> None:
    (gym,) = specs_of(DataConfig(task="countdown", task_config={"min_numbers": 2}))
    assert (gym.name, gym.factory, gym.bounds) == ("answer", "titanrl.rollout.scorers:reasoning_gym", (0.0, 1.0))
    assert gym.kwargs == {"task": "countdown", "config": {"min_numbers": 2}, "levels": []}
    (exact,) = specs_of(DataConfig(source="jsonl", path=Path("prompts.jsonl")))
    assert (exact.name, exact.factory, exact.is_custom) == ("answer", "titanrl.rollout.scorers:exact", False)
    (own,) = specs_of(DataConfig(rewards={"short": RewardConfig(function="a.b:c")}))
    assert (own.name, own.factory, own.kwargs["plugin"].name, own.is_custom) == (
        "short",
        "titanrl.carriers.rewards:custom_reward",
        "a.b:c",
        True,
    )
    assert specs_of(DataConfig(rewards={"short": RewardConfig(function="a.b:c", trusted=True)})) == []


# Built-in rewards with options


def test_built_in_rewards_run_in_the_sandbox_with_weights_and_options() -> None:
    first, second = score_with_paths(
        {
            "right": "exact",
            "short": {"function": "overlong", "weight": 0.5, "options": {"cache_tokens": 2, "max_tokens": 4}},
            "default": {"function": "overlong", "options": {"cache_tokens": 25}},  # of rollout.max_new_tokens, 26
            "again": {"function": "repetition", "options": {"ngram_size": 1, "unit": "character"}},
            "digits": {"function": "regex", "weight": 2.0, "options": {"pattern": r"\d"}},
        }
    )
    assert first.parts == {"right": 1.0, "short": 0.0, "default": -0.04, "again": 0.0, "digits": 1.0}
    assert first.reward == 1.0 - 0.04 + 2.0
    assert second.parts == {"right": 0.0, "short": -0.5, "default": -0.08, "again": 0.0, "digits": 0.0}
    assert second.reward == -0.25 - 0.08


def test_built_in_rewards_are_named_from_python() -> None:
    short = Reward("overlong", weight=2.0, options={"cache_tokens": 2, "max_tokens": 4})
    assert values(score_with(right="exact", short=short)) == [1.0, -1.0]


def test_endless_backtracking_fails_only_its_completion() -> None:
    answers = Answers(
        entry={"question": "", "answer": "", "metadata": {}},
        completions=("a" * 40 + "b", "aaa"),
        num_tokens=(41, 3),
        finish_reasons=("stop", "stop"),
    )
    reward = Reward("regex", options={"pattern": "(a+)+"})
    first, second = score(Config(name="a", num_steps=1), {"rewards": {"r": reward}}, answers)
    assert (first.reward, second.reward) == (None, 1.0)
    assert first.error.startswith("r: timeout: the reward did not return in time (sandbox.timeout_s=2")


def test_math_verify_uses_its_time_limit_in_the_sandbox() -> None:
    pytest.importorskip("math_verify")
    answers = Answers(
        entry={"question": "", "answer": r"\frac{1}{2}", "metadata": {}},
        completions=(r"\boxed{0.5}", r"\boxed{9^{9^{9^{9}}}}", "3"),
        num_tokens=(5, 9, 2),
        finish_reasons=("stop",) * 3,
    )
    reward = Reward("math_verify", options={"timeout_s": 1})
    patient = SandboxConfig(timeout_s=60.0)
    first, second, third = score(Config(name="a", num_steps=1), {"rewards": {"right": reward}}, answers, patient)
    assert (first.parts, third.parts) == ({"right": 1.0}, {"right": 0.0})
    assert second.error == "right: TimeoutError: comparing two expressions took longer than 1 s"
