import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import make_record
from titanrl.algorithms.advantages import (
    TaskAdvantage,
    advantages_of,
    batch_advantages,
    group_advantages,
    group_rewards,
    pass_at_k,
    standardized,
)
from titanrl.algorithms.contracts import GroupRewards
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.carriers.types import DoubleArray
from titanrl.config.algorithm import AlgorithmConfig

METHODS: tuple[str, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl", "pass_at_k")
rewards_of_a_group = st.lists(st.floats(-100, 100).map(lambda reward: round(reward, 3)), min_size=2, max_size=16)


def test_grpo_adds_epsilon_to_standard_deviation() -> None:
    assert group_advantages([1.0, 0.0], "grpo", eps=0.5) == (0.5, -0.5)


def test_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"method: no such estimator \(got 'mean'\). Choose one of grpo"):
        group_advantages([1.0, 0.0], "mean")


def test_std_ddof_1_divides_by_sample_standard_deviation() -> None:
    # mean 1, sample variance (1 + 1) / 1 = 2
    assert group_advantages([0.0, 2.0], "grpo", std_ddof=1, eps=0.0) == pytest.approx(
        (-1 / math.sqrt(2), 1 / math.sqrt(2)), rel=1e-15
    )


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_exactly_zero(method: str) -> None:
    # 0.1 has no exact binary form: its mean over three would leave a residue.
    assert group_advantages([0.1, 0.1, 0.1], method, pass_k=2) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_group_of_one_has_advantage_zero(method: str) -> None:
    assert group_advantages([7.0], method, std_ddof=1, pass_k=1) == (0.0,)


def test_error_names_non_finite_reward() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\]: not a finite number \(got nan\)"):
        group_advantages([0.0, math.nan], "dr_grpo")


@given(rewards_of_a_group)
def test_advantages_match_their_definitions(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert group_advantages(rewards, "grpo") == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-6, abs=1e-6)
    assert group_advantages(rewards, "dr_grpo") == pytest.approx([r - mean for r in rewards], abs=1e-10)
    assert group_advantages(rewards, "rloo") == pytest.approx(
        [r - other for r, other in zip(rewards, others, strict=True)], abs=1e-10
    )


def test_maxrl_divides_by_mean() -> None:
    # Mean 0.25.
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "maxrl", eps=0.0) == (3.0, -1.0, -1.0, -1.0)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"none may be negative \(got -1.0\)"):
        group_advantages([1.0, -1.0], "maxrl")


def best_of_k_by_enumeration(rewards: list[float], k: int) -> list[float]:
    """Compute the definition over every k-subset."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean, std = statistics.fmean(best), statistics.pstdev(best)
    with_i = [statistics.fmean(b for b, s in zip(best, subsets, strict=True) if i in s) for i in range(len(rewards))]
    return [(value - mean) / (std + 1e-6) for value in with_i]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0]), min_size=2, max_size=8), st.data())
def test_pass_at_k_matches_enumeration_of_subsets(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    expected = best_of_k_by_enumeration(rewards, k)
    assert pass_at_k(GroupRewards(rewards=rewards), pass_k=k) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_pass_at_k_of_group_smaller_than_k_is_zero() -> None:
    assert group_advantages([1.0, 0.0], "pass_at_k", pass_k=3) == (0.0, 0.0)


def test_standardization_counts_only_sampled_tokens() -> None:
    # Six tokens of 3 and two of -1: mean 2, variance (6 * 1 + 2 * 9) / 8 = 3. The 100 belongs to no token.
    z = 1 / math.sqrt(3)
    scores = standardized([(3.0, -1.0), (3.0, 100.0)], [(4, 2), (2, 0)], keeps_zero_groups=False)
    assert scores[0] == pytest.approx((z, -3 * z), rel=1e-5)
    assert scores[1][0] == pytest.approx(z, rel=1e-5)


def test_standardized_equal_values_are_exactly_zero() -> None:
    assert standardized([(0.1, 0.1), (0.1,)], [(1, 3), (7,)], keeps_zero_groups=False) == [(0.0, 0.0), (0.0,)]


def test_reinforce_pp_standardizes_rewards_over_batch() -> None:
    groups, counts = [(1.0, 1.0), (0.0, 2.0)], [(5, 5), (5, 5)]
    plain = batch_advantages(groups, counts, "reinforce_pp")
    # Mean 1, standard deviation sqrt(1 / 2).
    assert [*plain[0], *plain[1]] == pytest.approx([0.0, 0.0, -math.sqrt(2), math.sqrt(2)], rel=1e-5, abs=1e-12)
    # 0, 0, -1, 1: mean 0, standard deviation sqrt(1 / 2).
    baseline = batch_advantages(groups, counts, "reinforce_pp_baseline")
    assert [*baseline[0], *baseline[1]] == pytest.approx([0.0, 0.0, -math.sqrt(2), math.sqrt(2)], rel=1e-5)


@given(
    st.lists(st.tuples(st.lists(st.floats(-10, 10), min_size=2, max_size=5), st.integers(1, 50)), min_size=1, max_size=6),
    st.sampled_from(["reinforce_pp", "reinforce_pp_baseline"]),
)
def test_standardized_advantages_have_token_mean_zero(groups: list[tuple[list[float], int]], method: str) -> None:
    rewards = [[round(reward, 2) for reward in group] for group, _ in groups]
    counts = [[count + i for i in range(len(group))] for group, count in groups]
    advantages = batch_advantages(rewards, counts, method)
    pairs = [(a, n) for group, ns in zip(advantages, counts, strict=True) for a, n in zip(group, ns, strict=True)]
    if method == "reinforce_pp" or all(len(set(group)) > 1 for group in rewards):  # else groups of equal rewards stay at 0
        assert sum(a * n for a, n in pairs) / sum(n for _, n in pairs) == pytest.approx(0.0, abs=1e-6)
    assert sum(a * a * n for a, n in pairs) / sum(n for _, n in pairs) <= 1.0 + 1e-9


@pytest.mark.parametrize("method", METHODS)
@given(groups=st.lists(st.permutations([0.0, 0.1, 0.1, 0.7, 1.0]) | st.permutations([1.0, 1.0, 0.0]), min_size=1, max_size=8))
def test_other_methods_depend_only_on_their_group(method: str, groups: list[list[float]]) -> None:
    alone = [group_advantages(group, method, pass_k=2) for group in groups]
    if method != "reinforce_pp_baseline":
        assert batch_advantages(groups, (), method, pass_k=2) == alone
    for group, advantages in zip(groups, alone, strict=True):  # exactly, in any order
        assert group_advantages(group[::-1], method, pass_k=2) == advantages[::-1]


HUGE = 1e200


@pytest.mark.parametrize("method", ["grpo", "maxrl", "pass_at_k"])
@pytest.mark.parametrize("factor", [1.0, HUGE, 1.7e308])
def test_huge_rewards_give_same_scale_free_advantages(method: str, factor: float) -> None:
    small = [1.0, 0.0, 0.25, 1.0, 0.5]
    advantages = group_advantages([factor * reward for reward in small], method, pass_k=2)
    assert advantages == pytest.approx(group_advantages(small, method, pass_k=2), rel=1e-4)


@pytest.mark.parametrize("method", ["reinforce_pp", "reinforce_pp_baseline"])
def test_huge_rewards_are_standardized_over_batch(method: str) -> None:
    small, counts = [[1.0, 0.0], [-1.0, 0.5]], [[3, 4], [5, 6]]
    huge = [[HUGE * reward for reward in group] for group in small]
    for found, expected in zip(batch_advantages(huge, counts, method), batch_advantages(small, counts, method), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.0, HUGE, 1.0], [1.0, -1.7e308, 1.7e308]])
def test_error_names_reward_whose_advantage_overflows(method: str, rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\]: the advantage does not fit float32 \(got -?1\.?7?e\+\d{3}\)"):
        group_advantages(rewards, method)


def test_baseline_beyond_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards\[0\]: the advantage does not fit"):
        batch_advantages([[1.7e308, -1.7e308, -1.7e308]], [[1, 1, 1]], "reinforce_pp_baseline")


TABLE = RecordTable.join(
    [
        pack_record(make_record(0, (0.0, 2.0), reward_parts={"a": (0.0, 2.0)}), task=0),
        pack_record(make_record(1, (1.0, 3.0), reward_parts={"a": (1.0, 3.0)}), task=1),
        pack_record(make_record(2, (4.0, 8.0), reward_parts={"a": (4.0, 8.0)}), task=2),
    ]
)
DR_GRPO, GRPO = AlgorithmConfig(), AlgorithmConfig(advantage="grpo")
STANDARDIZED = AlgorithmConfig(advantage="reinforce_pp_baseline")


def advantages(*by_task: TaskAdvantage) -> DoubleArray:
    return advantages_of(TABLE, by_task)[0]


def test_each_task_has_its_advantage() -> None:
    mixed = advantages(TaskAdvantage(DR_GRPO), TaskAdvantage(GRPO), TaskAdvantage(DR_GRPO))
    assert mixed.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0, -2.0, 2.0], abs=1e-5)


def test_custom_advantage_receives_only_groups_of_its_task() -> None:
    seen = []

    def own(group: GroupRewards) -> list[float]:
        seen.append(group.index)
        return [5.0, -5.0]

    mixed = advantages(TaskAdvantage(DR_GRPO), TaskAdvantage(AlgorithmConfig(advantage="a.py:b"), own), TaskAdvantage(DR_GRPO))
    assert mixed.tolist() == [-1.0, 1.0, 5.0, -5.0, -2.0, 2.0]
    assert seen == [1]


def test_tasks_with_equal_estimators_are_standardized_together() -> None:
    together = advantages(*[TaskAdvantage(STANDARDIZED)] * 3)
    std = np.std([-1.0, 1.0, -1.0, 1.0, -2.0, 2.0])
    assert together.tolist() == pytest.approx([-1 / std, 1 / std, -1 / std, 1 / std, -2 / std, 2 / std], abs=1e-5)
    apart = advantages(TaskAdvantage(STANDARDIZED), TaskAdvantage(STANDARDIZED), TaskAdvantage(DR_GRPO))
    assert apart.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0, -2.0, 2.0], abs=1e-5)


def test_rewards_have_the_weights_of_their_task() -> None:
    groups = list(group_rewards(TABLE, lambda part, task: 10.0 * task))
    assert [group.weights["a"] for group in groups] == [0.0, 10.0, 20.0]
