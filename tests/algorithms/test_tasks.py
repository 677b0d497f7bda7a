"""Advantage estimators per task of a mixture."""

import numpy as np
import pytest

from tests.records import make_record
from titanrl.algorithms.batch_plan import TaskAdvantage, group_rewards, plan_batch
from titanrl.algorithms.contracts import GroupRewards
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.carriers.types import DoubleArray
from titanrl.config.algorithm import AlgorithmConfig

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
    return plan_batch(
        TABLE, algorithm=DR_GRPO, constant_length=1, row_tokens=64, rows_per_microbatch=1, dp_size=1, by_task=by_task
    ).advantages_N


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
