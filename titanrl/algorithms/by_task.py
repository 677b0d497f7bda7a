"""Advantage estimators of the tasks of a mixture."""

from titanrl.algorithms.batch_plan import TaskAdvantage
from titanrl.base.plugins import Plugins, loaded
from titanrl.config.data import TaskConfig
from titanrl.config.schema import Config


def advantages_by_task(config: Config, plugins: Plugins) -> list[TaskAdvantage]:
    """Return the advantage estimator of each task, by task index.

    Raises:
        ValueError: A user-defined advantage cannot be loaded.
    """
    chosen = []
    for name, task in config.data.tasks.items():
        key = "algorithm.advantage"
        if isinstance(task, TaskConfig) and task.advantage is not None:
            key = f"{task.key(name)}.advantage"
        chosen.append(TaskAdvantage(task.algorithm(config.algorithm), loaded(plugins, key)))
    return chosen
