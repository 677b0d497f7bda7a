"""Advantages: how much better each completion of a group was than its group.

Shape suffix: G completions of one prompt.
Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), RLOO (arXiv:2402.14740).
"""

import math
from collections.abc import Sequence
from typing import Literal

AdvantageMethod = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(
    rewards_G: Sequence[float], method: AdvantageMethod, *, std_ddof: int = 0, eps: float = 1e-6
) -> tuple[float, ...]:
    """Turn the rewards of one group into advantages, `[G]`.

    `grpo` is (R_i - mean) / (std + eps), `dr_grpo` is R_i - mean, `rloo` is R_i minus the mean of the others. A group of
    one and a group of equal rewards say nothing about what is better: all advantages are exactly 0.

    Raises ValueError if a reward is not finite.
    """
    for i, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(f"reward {i} of the group is {reward}: a scorer must return a finite number")
    size = len(rewards_G)
    # Rounding in the mean would otherwise leave a residue such as 1e-17, which grpo blows up by 1 / eps.
    if len(set(rewards_G)) <= 1:
        return (0.0,) * size
    mean = math.fsum(rewards_G) / size
    scale = 1.0
    if method == "grpo":
        variance = math.fsum((reward - mean) ** 2 for reward in rewards_G) / (size - std_ddof)
        scale = 1.0 / (math.sqrt(variance) + eps)
    elif method == "rloo":
        scale = size / (size - 1)
    return tuple((reward - mean) * scale for reward in rewards_G)
