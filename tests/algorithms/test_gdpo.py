"""GDPO advantages, which normalize each reward component separately; expected numbers are worked out by hand."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import plan_rewards
from titanrl.algorithms.advantages import decoupled_advantages, gdpo, group_advantages
from titanrl.algorithms.contracts import GroupRewards
from titanrl.carriers.tables import BatchPlan, RecordTable
from titanrl.carriers.types import GroupRecord
from titanrl.config.algorithm import AlgorithmConfig

NAN = math.nan
ROOT = math.sqrt(1.25)


def group(weights: Mapping[str, float] | None = None, **parts: Sequence[float]) -> GroupRewards:
    weights = weights or dict.fromkeys(parts, 1.0)
    size = len(next(iter(parts.values())))
    rewards = [sum(weights[part] * values[i] for part, values in parts.items()) for i in range(size)]
    return GroupRewards(rewards=rewards, parts=parts, weights=weights)


def test_gdpo_distinguishes_parts_with_equal_sums() -> None:
    # The example of the paper: two binary rewards, groups of two, sample standard deviation.
    one, both = group(right=(0.0, 1.0), short=(0.0, 0.0)), group(right=(0.0, 1.0), short=(0.0, 1.0))
    half = 1 / math.sqrt(2)
    for summed in (one, both):  # rewards 0, 1 and 0, 2 are the same to GRPO
        assert group_advantages(summed.rewards, "grpo", std_ddof=1, eps=0.0) == pytest.approx((-half, half), rel=1e-15)
    assert gdpo(one, std_ddof=1, eps=0.0) == pytest.approx((-half, half), rel=1e-15)
    assert gdpo(both, std_ddof=1, eps=0.0) == pytest.approx((-2 * half, 2 * half), rel=1e-15)


def test_weighted_sums_are_divided_by_the_standard_deviation_over_the_batch() -> None:
    weights = {"right": 1.0, "short": 0.5}
    groups = [
        group(weights, right=(1.0, 0.0), short=(7.0, 3.0)),  # 1 + 0.5 * 1 = 1.5
        group(weights, right=(0.0, 1.0), short=(4.0, 0.0)),  # -1 + 0.5 * 1 = -0.5
    ]
    assert [gdpo(one, eps=0.0) for one in groups] == [(1.5, -1.5), (-0.5, 0.5)]
    first, second = decoupled_advantages(groups, eps=0.0)  # variance (2.25 + 2.25 + 0.25 + 0.25) / 4 = 1.25
    assert first == pytest.approx((1.5 / ROOT, -1.5 / ROOT), rel=1e-15)
    assert second == pytest.approx((-0.5 / ROOT, 0.5 / ROOT), rel=1e-15)


def test_epsilon_is_added_to_both_standard_deviations() -> None:
    # (1 - 0.5) / (0.5 + 0.5) = 0.5; over the batch 0.5 / (0.5 + 0.5).
    assert decoupled_advantages([group(right=(1.0, 0.0))], eps=0.5) == [(0.5, -0.5)]


def test_missing_part_is_excluded_from_its_mean() -> None:
    one = group({"right": 1.0, "style": 2.0}, right=(1.0, 0.0, 0.5), style=(3.0, NAN, 1.0))
    spread = math.sqrt(1 / 6)  # of 1, 0, 0.5
    assert gdpo(one, eps=0.0) == pytest.approx((0.5 / spread + 2, -0.5 / spread, -2), rel=1e-15)
    assert gdpo(group(right=(1.0, 0.0), style=(NAN, 5.0)), eps=0.0) == (1.0, -1.0)


def test_group_of_equal_parts_has_advantage_exactly_zero() -> None:
    same, different = group(right=(0.1, 0.1, 0.1)), group(right=(1.0, 0.3, 0.2))
    assert decoupled_advantages([same, different])[0] == (0.0, 0.0, 0.0)
    assert decoupled_advantages([same, same]) == [(0.0, 0.0, 0.0)] * 2
    assert decoupled_advantages([]) == []


def test_rewards_without_parts_are_treated_as_one_part() -> None:
    assert gdpo(GroupRewards(rewards=(1.0, 0.0))) == group_advantages((1.0, 0.0), "grpo")


def test_huge_rewards_and_weights_stay_finite_or_raise() -> None:
    ((large, small),) = decoupled_advantages([group({"right": 1e300}, right=(1e308, -1e308))])
    assert (large, small) == (1.0, -1.0)
    with pytest.raises(ValueError, match=r"^data\.rewards: .* not finite \(got weight 1e\+308 for right\)\. Use smaller"):
        gdpo(group({"right": 1e308}, right=(1.0, *[0.0] * 8)))


parts_of_a_group = st.integers(2, 6).flatmap(
    lambda size: st.fixed_dictionaries(
        {part: st.lists(st.integers(-9, 9).map(float), min_size=size, max_size=size) for part in ("right", "short", "style")}
    )
)
WEIGHTS = {"right": 1.0, "short": 0.5, "style": -0.25}


@given(st.lists(parts_of_a_group, min_size=1, max_size=6), st.integers(0, 1))
def test_batch_has_mean_zero_and_standard_deviation_one(batch: list[dict[str, list[float]]], std_ddof: int) -> None:
    groups = [group(WEIGHTS, **parts) for parts in batch]
    flat = [value for advantages in decoupled_advantages(groups, std_ddof=std_ddof) for value in advantages]
    assert math.fsum(flat) == pytest.approx(0.0, abs=1e-9)
    if any(abs(value) > 1e-9 for one in groups for value in gdpo(one, std_ddof=std_ddof)):
        assert math.fsum(value**2 for value in flat) / len(flat) == pytest.approx(1.0, rel=1e-4)


@given(st.lists(parts_of_a_group, min_size=1, max_size=4), st.sampled_from(list(WEIGHTS)), st.floats(0.1, 100.0))
def test_scale_of_a_part_does_not_matter(batch: list[dict[str, list[float]]], part: str, factor: float) -> None:
    scaled = [{**parts, part: [factor * value for value in parts[part]]} for parts in batch]
    before, after = ([gdpo(group(WEIGHTS, **parts), eps=0.0) for parts in parts_of] for parts_of in (batch, scaled))
    for one, other in zip(before, after, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-9)


@given(st.lists(parts_of_a_group, min_size=2, max_size=5), st.randoms())
def test_order_of_groups_does_not_matter(batch: list[dict[str, list[float]]], random) -> None:
    order = random.sample(range(len(batch)), len(batch))
    groups = [group(WEIGHTS, **parts) for parts in batch]
    advantages = decoupled_advantages(groups)
    assert decoupled_advantages([groups[i] for i in order]) == [advantages[i] for i in order]


# In the plan of a step


def plan(records: list[GroupRecord], weights: Mapping[str, float]) -> BatchPlan:
    return plan_rewards(
        RecordTable.of(records),
        algorithm=AlgorithmConfig(advantage="gdpo"),
        constant_length=26,
        row_tokens=100,
        rows_per_microbatch=1,
        dp_size=1,
        weight_of=lambda part, task: weights[part],
    )


def test_plan_weights_parts_and_keeps_groups_with_equal_sums(make_record: Callable[..., GroupRecord]) -> None:
    # Every summed reward is 2, but 1 * (1, -1) + 2 * (-1, 1) = (-1, 1).
    equal_sums = make_record(0, rewards=[2.0, 2.0], reward_parts={"right": (2.0, 0.0), "short": (0.0, 1.0)})
    assert plan([equal_sums], {"right": 1.0, "short": 2.0}).advantages_N == pytest.approx([-1.0, 1.0], rel=1e-5)


def test_groups_without_tokens_enter_batch_standard_deviation(make_record: Callable[..., GroupRecord]) -> None:
    trained = make_record(0, rewards=[1.0, 0.0], reward_parts={"right": (1.0, 0.0)})
    masked = make_record(1, rewards=[0.0, 3.0], reward_parts={"right": (0.0, 3.0)}, num_sampled=[0, 0], has_payload=False)
    silent = make_record(2, rewards=[1.0] * 4, reward_parts={"right": (1.0,) * 4}, has_payload=False)
    batch = plan([trained, masked, silent], {"right": 1.0})
    # Sums 1, -1, -1, 1 and four times 0: variance 4 / 8.
    expected = [math.sqrt(2), -math.sqrt(2), -math.sqrt(2), math.sqrt(2), 0.0, 0.0, 0.0, 0.0]
    assert batch.advantages_N == pytest.approx(expected, rel=1e-5)
    assert {
        s.handle.location for microbatch in batch.microbatches for rank in microbatch.rows for row in rank for s in row
    } == {0}
