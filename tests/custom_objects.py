"""User-defined objects for tests of the extension points; most behave like their built-in counterparts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import titanrl
from titanrl import GroupRewards, LossInputs, ScoredGroup


@titanrl.policy_loss(ratio="proximal", zero_without_advantage=True)
def clipped(inputs: LossInputs, *, clip_low: float, clip_high: float, bonus: float = 0.0) -> torch.Tensor:
    bounded_N = inputs.ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-inputs.ratio_N * inputs.advantages_N, -bounded_N * inputs.advantages_N) - bonus


@titanrl.policy_loss(ratio="none")
def one_sided(inputs: LossInputs) -> torch.Tensor:
    """Raises on the first data-parallel rank only."""
    if torch.distributed.get_rank() == 0:
        raise KeyError("advantage")
    return -inputs.logprobs_N * inputs.advantages_N


def centred(group: GroupRewards) -> Sequence[float]:
    mean = sum(group.rewards) / len(group.rewards)
    return [reward - mean for reward in group.rewards]


def odd(group: ScoredGroup) -> bool:
    return group.index % 2 == 1


def closeness(group: GroupRewards, advantages: Sequence[float]) -> float:
    return sum(abs(advantage) for advantage in advantages) / len(group.rewards)


class Tracker:
    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        self.logged: list[int] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append(step)

    def close(self) -> None:
        pass


class Hook(titanrl.Hook):
    def before_step(self, run: list[str]) -> None:
        run.append("called")


# Objects with wrong signatures


def two_arguments(inputs: LossInputs, advantages: torch.Tensor) -> torch.Tensor:
    return -inputs.logprobs_N * advantages


def no_arguments() -> list[float]:
    return []


keep = True
