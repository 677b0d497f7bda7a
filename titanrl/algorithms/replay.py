"""Priorities of groups for replay, and the schedule of their importance weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from titanrl.algorithms.batch_plan import WeightOf, group_rewards
from titanrl.algorithms.contracts import GroupRewards
from titanrl.config.replay import ReplayConfig
from titanrl.tables import DoubleArray, RecordTable

PRIORITY_EXPECTED = "def priority(group: GroupRewards, advantages: Sequence[float]) -> float"
"""Code of a priority, for error messages."""


class Priority(Protocol):
    """Importance of training on a group again.

    Example: `def hard(group, advantages): return 1.0 - sum(group.rewards) / len(group.rewards)`
    """

    def __call__(self, group: GroupRewards, advantages: Any, /) -> float:
        """Return the priority of a group that was just trained on, of which the absolute value counts."""
        ...


def mean_advantage(group: GroupRewards, advantages: DoubleArray) -> float:
    """Return the mean absolute advantage."""
    return float(np.abs(advantages).mean())


def reward_variance(group: GroupRewards, advantages: DoubleArray) -> float:
    """Return the variance of the rewards."""
    return float(np.var(group.rewards))


def mean_reward(group: GroupRewards, advantages: DoubleArray) -> float:
    """Return the mean reward."""
    return float(np.mean(group.rewards))


def constant(group: GroupRewards, advantages: DoubleArray) -> float:
    """Return 1: the priority of `recency` depends on the time of the draw."""
    return 1.0


PRIORITIES: dict[str, Priority] = {
    "advantage": mean_advantage,
    "variance": reward_variance,
    "reward": mean_reward,
    "recency": constant,
}
"""Values of `replay.priority`."""


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """The part of `ReplayConfig` that the controller applies."""

    config: ReplayConfig
    num_steps: int
    own_priority: Callable[..., float] | None = None
    """Priority of the user; None selects the built-in one that the configuration names."""

    def beta(self, step: int) -> float:
        """Return the exponent of the importance weights after `step` optimizer steps."""
        share = min(step / max(self.num_steps - 1, 1), 1.0)
        return self.config.beta_end if share == 1.0 else self.config.beta + (self.config.beta_end - self.config.beta) * share

    def priorities(
        self, records: RecordTable, advantages_N: DoubleArray, weight_of: WeightOf = lambda part, task: 1.0
    ) -> DoubleArray:
        """Return the priority of each group of a batch, `[P]`.

        Args:
            records: Groups of the batch, in prompt order.
            advantages_N: Advantages of their rollouts.
            weight_of: Function from a part of the reward, and the number of a task, to its factor in the sum.

        Raises:
            ValueError: The priority of the user raised, or returned something else than a finite number.
        """
        ends = np.cumsum(records.groups["num_rollouts"])
        groups = zip(group_rewards(records, weight_of), np.split(advantages_N, ends[:-1]), strict=True)
        return np.array([self._priority(group, advantages) for group, advantages in groups])

    def _priority(self, group: GroupRewards, advantages: DoubleArray) -> float:
        if self.own_priority is None:
            return PRIORITIES[self.config.priority](group, advantages)
        name = self.config.priority
        try:
            value = float(self.own_priority(group, advantages.tolist()))
        except Exception as error:  # the priority is the user's and may raise anything
            raise ValueError(
                f"replay.priority: {name} raised {type(error).__name__}: {error}. Correct the priority."
            ) from error
        if not np.isfinite(value):
            raise ValueError(f"replay.priority: {name} returned {value}. Return a finite number.")
        return value
