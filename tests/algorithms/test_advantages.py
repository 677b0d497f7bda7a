import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.algorithms.advantages import AdvantageMethod, group_advantages

METHODS: tuple[AdvantageMethod, ...] = ("grpo", "dr_grpo", "rloo")
rewards_of_a_group = st.lists(st.floats(-100, 100).map(lambda reward: round(reward, 3)), min_size=2, max_size=16)


def test_grpo_divides_by_the_population_standard_deviation() -> None:
    # mean 0.5, standard deviation 0.5
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "grpo", eps=0.0) == (1.0, -1.0, -1.0, 1.0)


def test_grpo_adds_epsilon_to_the_standard_deviation() -> None:
    assert group_advantages([1.0, 0.0], "grpo", eps=0.5) == (0.5, -0.5)


def test_grpo_with_one_degree_of_freedom_divides_by_the_sample_standard_deviation() -> None:
    # mean 1, sample variance (1 + 1) / 1 = 2
    assert group_advantages([0.0, 2.0], "grpo", std_ddof=1, eps=0.0) == pytest.approx(
        (-1 / math.sqrt(2), 1 / math.sqrt(2)), rel=1e-15
    )


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert group_advantages([6.0, 3.0], "dr_grpo") == (1.5, -1.5)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert group_advantages([6.0, 3.0], "rloo") == (3.0, -3.0)
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert group_advantages([1.0, 2.0, 6.0], "rloo") == pytest.approx((-3.0, -1.5, 4.5), rel=1e-15)


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_exactly_zero(method: AdvantageMethod) -> None:
    # 0.1 has no exact binary form: its mean over three would leave a residue.
    assert group_advantages([0.1, 0.1, 0.1], method) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_has_advantage_zero(method: AdvantageMethod) -> None:
    assert group_advantages([7.0], method, std_ddof=1) == (0.0,)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"reward 1 of the group is nan"):
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


@given(rewards_of_a_group, st.sampled_from(METHODS))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], method: AdvantageMethod) -> None:
    assert sum(group_advantages(rewards, method)) == pytest.approx(0.0, abs=1e-9 * len(rewards) * 100)
