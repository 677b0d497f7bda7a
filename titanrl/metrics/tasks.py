"""Per-task metrics of a mixture. docs/metrics.md lists names and units."""

from collections.abc import Mapping

import numpy as np

from titanrl.carriers.tables import RecordTable
from titanrl.config.data import DataConfig
from titanrl.metrics.steps import mean, part_means


def task_metrics(records: RecordTable, tasks: Mapping[str, DataConfig], dropped: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of each task in a batch.

    A run with a single task has no per-task metrics. A task without groups in the batch has only its counts of groups.

    Args:
        records: Groups of the batch.
        tasks: Tasks by name, in the order of their indices.
        dropped: Number of groups discarded since the previous batch, by task.
    """
    values: dict[str, float] = {}
    for number, (name, task) in enumerate(tasks.items() if len(tasks) > 1 else ()):
        groups = records.take(np.flatnonzero(records.tasks == number))
        values |= {f"task/{name}/groups": float(len(groups)), f"task/{name}/dropped": float(dropped.get(name, 0))}
        if len(groups):
            values |= _rollout_metrics(name, groups, 1.0 if task.curriculum is None else task.curriculum.solved_from)
    return values


def _rollout_metrics(task: str, records: RecordTable, solved_from: float) -> dict[str, float]:
    groups, rewards = records.groups, records.rewards
    return {
        f"task/{task}/reward_mean": mean(rewards.tolist()),
        f"task/{task}/solved_frac": float(np.mean(rewards >= solved_from)),
        **{f"task/{task}/reward/{part}": value for part, value in part_means(records).items()},
        f"task/{task}/response_len_mean": mean(records.num_sampled_by_rollout.tolist()),
        f"task/{task}/truncated_frac": int(groups["num_truncated"].sum()) / len(rewards),
        f"task/{task}/generate_s_mean": mean(groups["generate_s"].tolist()),
    }
