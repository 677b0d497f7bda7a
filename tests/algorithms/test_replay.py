"""Priorities of groups, the schedule of importance weights, and their effect on loss weights."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.records import plan_rewards
from titanrl.algorithms.batch_plan import ReplaySchedule
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.carriers.types import GroupRecord
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import ReplayConfig

RecordMaker = Callable[..., GroupRecord]


def test_beta_changes_linearly_from_the_first_step_to_the_last() -> None:
    rising = ReplaySchedule(ReplayConfig(beta=0.4, beta_end=1.0), num_steps=101)
    assert [rising.beta(step) for step in (0, 50, 100, 200)] == pytest.approx([0.4, 0.7, 1.0, 1.0], abs=1e-15)
    falling = ReplaySchedule(ReplayConfig(beta=1.0, beta_end=0.0), num_steps=5)
    assert [falling.beta(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert ReplaySchedule(ReplayConfig(), num_steps=1).beta(0) == 0.4


@pytest.mark.parametrize(
    ("priority", "expected"),
    [("advantage", [0.5, 2 / 9 * 2]), ("variance", [0.25, 2 / 9]), ("reward", [0.5, 1 / 3]), ("recency", [1.0, 1.0])],
)
def test_built_in_priorities(make_record: RecordMaker, priority: str, expected: list[float]) -> None:
    records = RecordTable.of([make_record(0, rewards=[0.0, 1.0]), make_record(1, rewards=[0.0, 1.0, 0.0])])
    schedule = ReplaySchedule(ReplayConfig(priority=priority), num_steps=1)
    advantages = np.array([-0.5, 0.5, -1 / 3, 2 / 3, -1 / 3])
    assert schedule.priorities(records, advantages).tolist() == pytest.approx(expected)


def test_custom_priority_receives_group_and_advantages(make_record: RecordMaker) -> None:
    records = RecordTable.of([make_record(4, rewards=[0.0, 1.0])])
    config = ReplayConfig(priority="object:mine")

    def with_priority(function: Callable[..., float]) -> np.ndarray:
        return ReplaySchedule(config, 1, function).priorities(records, np.array([-0.5, 0.5]))

    assert with_priority(lambda group, advantages: group.index + advantages[1]).tolist() == [4.5]
    with pytest.raises(ValueError, match=r"^replay\.priority: object:mine raised ZeroDivisionError: .*Correct the priority\."):
        with_priority(lambda group, advantages: 1 / 0)
    with pytest.raises(ValueError, match=r"^replay\.priority: object:mine must return a finite number \(got nan\)\."):
        with_priority(lambda group, advantages: float("nan"))


def test_importance_weight_multiplies_the_loss_weights_of_its_group(make_record: RecordMaker) -> None:
    packed = [pack_record(make_record(index, rewards=[0.0, 1.0])) for index in range(3)]

    def weights(records: RecordTable) -> list[float]:
        plan = plan_rewards(
            records,
            algorithm=AlgorithmConfig(reduction="token_mean"),
            constant_length=4,
            row_tokens=100,
            rows_per_microbatch=1,
            dp_size=1,
        )
        (row,) = plan.microbatches[0].rows[0]
        by_location = {(sequence.handle.location, sequence.segment): sequence.weight for sequence in row}
        return [by_location[key] for key in sorted(by_location)]

    plain = weights(RecordTable.join(packed))
    replayed = weights(RecordTable.join(packed[:2]) + RecordTable.join([packed[2].with_weight(0.25)]))
    assert plain == [1 / 12] * 6
    assert replayed == [1 / 12] * 4 + [1 / 48] * 2
