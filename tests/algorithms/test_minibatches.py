from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.test_batch_plan import sequences
from tests.records import plan_rewards
from titanrl.algorithms.batch_plan import StepPlan, minibatches, next_entropy_coef, plan_step
from titanrl.carriers.tables import BatchPlan, RecordTable
from titanrl.carriers.types import GroupRecord
from titanrl.config.algorithm import AlgorithmConfig

RecordMaker = Callable[..., GroupRecord]


def plan(dp_size: int = 1, **algorithm) -> Callable[..., BatchPlan]:
    return partial(
        plan_rewards,
        algorithm=AlgorithmConfig(**algorithm),
        constant_length=26,
        row_tokens=64,
        rows_per_microbatch=2,
        dp_size=dp_size,
    )


def steps(records: list[GroupRecord], epochs: int, num_minibatches: int, *, seed: int = 0, **algorithm) -> StepPlan:
    table = RecordTable.of(records)
    return plan_step(table, plan(**algorithm), epochs=epochs, num_minibatches=num_minibatches, seed=(seed, 3))


def locations(update: BatchPlan) -> set[int]:
    return {sequence.handle.location for sequence in sequences(update)}


@given(num_groups=st.integers(1, 40), num_minibatches=st.integers(1, 40), epoch=st.integers(0, 3))
def test_epoch_assigns_each_group_to_one_minibatch(num_groups: int, num_minibatches: int, epoch: int) -> None:
    dealt = list(minibatches(num_groups, num_minibatches, (0, 1, epoch)))
    assert sorted(np.concatenate(dealt)) == list(range(num_groups))
    sizes = [len(groups) for groups in dealt]
    assert len(sizes) == min(num_groups, num_minibatches)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    again = minibatches(num_groups, num_minibatches, (0, 1, epoch))
    assert all(np.array_equal(one, other) for one, other in zip(dealt, again, strict=True))


def test_order_depends_on_seed_step_and_epoch() -> None:
    orders = [np.concatenate(list(minibatches(32, 4, seed))).tolist() for seed in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1))]
    assert len({tuple(order) for order in orders}) == 4


def test_single_epoch_and_minibatch_equal_plan_of_batch(make_record: RecordMaker) -> None:
    records = [make_record(index, [1.0, 0.0, 0.25], [3, 5, 4]) for index in (4, 1, 2)]
    found = steps(records, 1, 1)
    assert found.updates == (plan()(RecordTable.of(records)),)
    assert found.first_epoch == found.microbatches == found.updates[0].microbatches
    assert found.packing_efficiency == found.updates[0].packing_efficiency


def test_each_epoch_has_all_groups_in_new_order(make_record: RecordMaker) -> None:
    records = [make_record(index) for index in range(12)]
    found = steps(records, 3, 4)
    assert (len(found.updates), found.num_in_first_epoch) == (12, 4)
    epochs = [[locations(update) for update in found.updates[start : start + 4]] for start in (0, 4, 8)]
    for epoch in epochs:
        assert [len(minibatch) for minibatch in epoch] == [3, 3, 3, 3]
        assert set.union(*epoch) == set(range(12))
    assert epochs[0] != epochs[1] != epochs[2]
    assert {sequence.handle.location for part in found.first_epoch for row in part.rows[0] for sequence in row} == set(
        range(12)
    )
    assert steps(records[::-1], 3, 4) == found, "the order of arrival does not matter"
    assert steps(records, 3, 4, seed=1) != found


def test_epochs_without_minibatches_repeat_the_plan(make_record: RecordMaker) -> None:
    found = steps([make_record(index) for index in range(4)], 3, 1)
    assert len(found.updates) == 3
    assert found.updates[0] == found.updates[1] == found.updates[2]
    assert found.first_epoch == found.updates[0].microbatches


def test_loss_weights_are_computed_per_optimizer_step(make_record: RecordMaker) -> None:
    records = [make_record(0, [1.0, 0.0], [3, 5]), make_record(1, [1.0, 0.0], [10, 2])]
    found = steps(records, 1, 2)
    weights = {min(locations(update)): {sequence.weight for sequence in sequences(update)} for update in found.updates}
    assert weights == {0: {1 / 8}, 1: {1 / 12}}
    assert {sequence.weight for sequence in sequences(steps(records, 1, 1).updates[0])} == {1 / 20}


def test_advantages_are_computed_over_full_batch(make_record: RecordMaker) -> None:
    records = [make_record(0, [1.0, 0.0], [2, 2]), make_record(1, [4.0, 3.0], [2, 2])]
    found = steps(records, 2, 2, advantage="reinforce_pp")
    # Rewards 1, 0, 4, 3 with two tokens each: mean 2, variance 2.5 (ddof 0).
    expected = {(0, 0): -1.0, (0, 1): -2.0, (1, 0): 2.0, (1, 1): 1.0}
    trained = [sequence for update in found.updates for sequence in sequences(update)]
    assert len(trained) == 8
    ratios = {round(sequence.advantage / expected[sequence.handle.location, sequence.segment], 6) for sequence in trained}
    assert len(ratios) == 1, "one scale for the whole batch"
    assert found.advantages_N.tolist() == pytest.approx([next(iter(ratios)) * value for value in expected.values()], rel=1e-5)


def test_minibatch_without_gradient_takes_no_optimizer_step(make_record: RecordMaker) -> None:
    equal = [make_record(index, [1.0, 1.0], has_payload=False) for index in range(1, 4)]
    found = steps([make_record(0), *equal], 2, 4)
    assert [locations(update) for update in found.updates] == [{0}, {0}]
    assert found.num_in_first_epoch == 1
    nothing = steps(equal, 2, 3)
    assert len(nothing.updates) == 1, "a step without any gradient is one empty optimizer step"
    assert nothing.num_placed == 0


def test_packing_efficiency_covers_all_optimizer_steps(make_record: RecordMaker) -> None:
    records = [make_record(0, num_sampled=[14, 14]), make_record(1, num_sampled=[62, 62])]
    # Rows of 64: 2 x 16 tokens share one row, two sequences of 64 fill one each.
    found = steps(records, 1, 2)
    assert found.num_placed == 32 + 128
    assert found.packing_efficiency == pytest.approx(160 / 192)


def test_entropy_coefficient_rises_below_the_target_and_falls_above_it() -> None:
    algorithm, coef = AlgorithmConfig(entropy_coef=0.01, entropy_target=0.2, entropy_delta=0.004), None
    coefs: list[float] = []
    for entropy in (0.3, 0.19, 0.2, 0.18, 0.25, 0.25, 0.25, 0.1):
        coef = next_entropy_coef(coef, entropy, algorithm)
        coefs.append(coef)
    assert coefs == pytest.approx([0.006, 0.01, 0.01, 0.014, 0.01, 0.006, 0.002, 0.006], rel=1e-12)
    assert next_entropy_coef(0.003, 0.21, algorithm) == 0.0, "never negative"
