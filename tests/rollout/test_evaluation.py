"""Statistics of an evaluation, with numbers worked out by hand."""

import itertools
import math

import pytest

from titanrl.rollout.open_tasks import evaluation_statistics, pass_at_k
from titanrl.run.checkpoints import improves


@pytest.mark.parametrize(
    ("num_samples", "num_solved", "k", "expected"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 0, 2, 0.0), (4, 4, 4, 1.0), (4, 1, 4, 1.0), (4, 3, 2, 1.0)],
)
def test_pass_at_k_is_fraction_of_subsets_with_solution(num_samples: int, num_solved: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(expected)
    subsets = list(itertools.combinations(range(num_samples), k))
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(
        sum(any(sample < num_solved for sample in subset) for subset in subsets) / len(subsets)
    )


def test_statistics_are_means_over_prompts_with_intervals() -> None:
    rewards = [[1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    found = evaluation_statistics(rewards, num_samples=4, pass_k=(2,), solved_from=1.0)
    # Means of the prompts: 0.5, 0 and 1, with variance 0.25. Solved: 1, 0 and 4 of 4.
    assert found["mean"] == pytest.approx(0.5)
    assert found["mean_ci95"] == pytest.approx(1.959964 * math.sqrt(0.25 / 3))
    assert found["avg@4"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["pass@2_ci95"] == pytest.approx(1.959964 * math.sqrt(0.25 / 3))
    assert sorted(found) == ["avg@4", "avg@4_ci95", "mean", "mean_ci95", "pass@2", "pass@2_ci95"]


def test_failed_rewards_are_excluded_instead_of_counted_as_zero() -> None:
    found = evaluation_statistics([[1.0, 1.0], [], [0.0]], num_samples=2, pass_k=(2,), solved_from=1.0)
    assert found["mean"] == found["avg@2"] == 0.5  # of the prompts with a reward
    assert found["pass@2"] == 1.0  # of the only prompt with two rewards
    assert "pass@2_ci95" not in found
    assert "pass@2" not in evaluation_statistics([[1.0], []], num_samples=2, pass_k=(2,), solved_from=1.0)


def test_single_sample_per_prompt_has_only_mean() -> None:
    assert evaluation_statistics([[0.25]], num_samples=1, pass_k=(), solved_from=1.0) == {"mean": 0.25}


def test_rounding_below_threshold_counts_as_solved() -> None:
    reward = 0.7 + 0.2 + 0.1  # 0.9999999999999999
    assert reward < 1.0
    assert evaluation_statistics([[reward, 0.99]], num_samples=2, pass_k=(), solved_from=1.0)["avg@2"] == 0.5


@pytest.mark.parametrize(
    ("value", "best", "min_improvement", "expected"),
    [
        (0.0, None, 0.0, True),
        (0.5, 0.5, 0.0, False),
        (0.5 + 1e-12, 0.5, 0.0, False),  # rounding
        (0.51, 0.5, 0.0, True),
        (0.51, 0.5, 0.02, False),
        (0.6, 0.5, 0.1, True),  # 0.6 - 0.5 is 0.09999999999999998
        (math.nan, None, 0.0, False),
    ],
)
def test_improvement_must_exceed_rounding_and_required_increase(
    value: float, best: float | None, min_improvement: float, expected: bool
) -> None:
    assert improves(value, best, min_improvement) == expected
