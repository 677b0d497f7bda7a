"""Prioritized replay of groups: priorities, and the annealing of the importance-weight exponent beta."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from titanrl.algorithms.batch_plan import WeightOf, group_rewards
from titanrl.algorithms.contracts import GroupRewards
from titanrl.base.plugins import Point
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import DoubleArray
from titanrl.config.sections import ReplayConfig

PRIORITY_EXPECTED = "def priority(group: GroupRewards, advantages: Sequence[float]) -> float"
"""Signature of a priority, for error messages."""


class Priority(Protocol):
    """Replay priority: a function that scores how useful it is to train on a group again.

    Example: `def hard(group, advantages): return 1.0 - sum(group.rewards) / len(group.rewards)`
    """

    def __call__(self, group: GroupRewards, advantages: Any, /) -> float:
        """Return the priority of a group that was just trained on. Only its absolute value is used."""
        ...


POINT = Point(
    key="replay.priority", argument="priority", protocol=Priority.__call__, expected=PRIORITY_EXPECTED, in_controller=True
)


PRIORITIES: dict[str, Priority] = {
    "advantage": lambda group, advantages: float(np.abs(advantages).mean()),
    "variance": lambda group, advantages: float(np.var(group.rewards)),
    "reward": lambda group, advantages: float(np.mean(group.rewards)),
    "recency": lambda group, advantages: 1.0,  # the priority depends only on the time of the draw
}
"""Values of `replay.priority`: the mean absolute advantage, and the variance and mean of the rewards."""


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """Priorities and beta schedule of a run, which the controller computes."""

    config: ReplayConfig
    """Replay settings of the run."""
    num_steps: int
    """Number of training steps of the run."""
    custom_priority: Callable[..., float] | None = None
    """User-defined priority; None selects the built-in one that the configuration names."""

    def beta(self, step: int) -> float:
        """Return the exponent of the importance weights after `step` steps, annealed linearly to `beta_end`."""
        progress = min(step / max(self.num_steps - 1, 1), 1.0)
        if progress == 1.0:
            return self.config.beta_end
        return self.config.beta + (self.config.beta_end - self.config.beta) * progress

    def priorities(
        self, records: RecordTable, advantages_N: DoubleArray, weight_of: WeightOf = lambda part, task: 1.0
    ) -> DoubleArray:
        """Return the priority of each group of a batch.

        Args:
            records: Groups of the batch, in prompt order.
            advantages_N: Advantages of their rollouts.
            weight_of: Weight of a reward component in the summed reward, see `WeightOf`.

        Raises:
            ValueError: The user-defined priority raised, or did not return a finite number.
        """
        ends = np.cumsum(records.groups["num_rollouts"])
        groups = zip(group_rewards(records, weight_of), np.split(advantages_N, ends[:-1]), strict=True)
        return np.array([self._priority(group, advantages) for group, advantages in groups])

    def _priority(self, group: GroupRewards, advantages: DoubleArray) -> float:
        if self.custom_priority is None:
            return PRIORITIES[self.config.priority](group, advantages)
        name = self.config.priority
        try:
            value = float(self.custom_priority(group, advantages.tolist()))
        except Exception as error:  # user-defined code may raise anything
            raise ValueError(
                f"replay.priority: {name} raised {type(error).__name__}: {error}. Correct the priority."
            ) from error
        if not np.isfinite(value):
            raise ValueError(f"replay.priority: {name} must return a finite number (got {value}). Correct the priority.")
        return value
