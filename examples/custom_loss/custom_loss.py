"""A custom policy loss, advantage, group filter, tracker and hook for the quick start."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import titanrl
from titanrl import GroupRewards, LossInputs, ScoredGroup
from titanrl.carriers.types import EvaluationResult, StepMetrics


@titanrl.policy_loss(ratio="proximal", zero_without_advantage=True)
def uncertain_ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, min_entropy: float = 0.0
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the clipped PPO loss at tokens with an entropy of at least `min_entropy`, and 0 elsewhere.

    A few high-entropy tokens determine the course of a solution (arXiv:2506.01939).
    """
    ratio_N, advantages_N = inputs.ratio_N, inputs.advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(-ratio_N * advantages_N, -bounded_N * advantages_N)
    uncertain_N = inputs.entropy_N >= min_entropy
    return torch.where(uncertain_N, loss_N, 0.0), {"uncertain": uncertain_N}


def centered(group: GroupRewards) -> Sequence[float]:
    """Return each reward minus the mean of the group."""
    mean = sum(group.rewards) / len(group.rewards)
    return [reward - mean for reward in group.rewards]


def unsolved(group: ScoredGroup) -> bool:
    """Return False if every completion of the group is right, so that nothing is left to learn from its prompt."""
    return min(group.rewards) < 1.0


class CsvTracker:
    """Writes the reward of every step to `reward.csv` in the run directory."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Open the file; a resumed run appends to it."""
        self._file = (run_dir / "reward.csv").open("w" if resume_step is None else "a", newline="")
        self._rows = csv.writer(self._file)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row. Evaluations are logged separately and have no `reward/mean`."""
        if "reward/mean" in values:
            self._rows.writerow([step, values["reward/mean"]])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SlowDown(titanrl.Hook):
    """Halves the learning rate once the held-out reward reaches a target."""

    def __init__(self, target: float = 0.9) -> None:
        """Set the held-out reward to wait for."""
        self.target = target
        self._learning_rate: float | None = None

    def after_step(self, run: titanrl.GRPO, metrics: StepMetrics) -> None:
        """Store the current learning rate."""
        self._learning_rate = metrics.values["optim/lr"]

    async def after_evaluation(self, run: titanrl.GRPO, result: EvaluationResult) -> None:
        """Set half the learning rate once the target is reached."""
        if result.mean >= self.target and self._learning_rate is not None:
            run.set_learning_rate(0.5 * self._learning_rate)
            self.target = float("inf")
