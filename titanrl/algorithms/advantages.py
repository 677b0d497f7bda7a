"""Advantages: how much better each completion of a group was than its group, or than the batch.

Shape suffix: G completions of one prompt.
Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), RLOO (arXiv:2402.14740), REINFORCE++ (arXiv:2501.03262),
pass@k training (arXiv:2508.10751), MaxRL (maximum-likelihood RL) as its authors' code and SkyRL write it.
"""

import math
import sys
from collections.abc import Collection, Sequence

from titanrl.config.choices import AdvantageMethod

EPS = 1e-6
"""Added to every divisor of advantages."""

SCALE_FREE = frozenset({"grpo", "maxrl", "pass_at_k"})
"""Methods whose advantages do not change if all rewards and the divisor's `EPS` are multiplied by the same number."""

HUGE = 2.0**120
"""Size from which rewards are scaled down first. Squares of smaller ones are finite, and their advantages fit float32."""

MAX_ADVANTAGE = 3.4e38
"""Largest advantage: the trainer holds advantages in float32."""


def batch_advantages(
    groups: Sequence[Sequence[float]],
    num_sampled: Sequence[Sequence[int]],
    method: AdvantageMethod,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
) -> list[tuple[float, ...]]:
    """Turn the rewards of all groups of a step into advantages, in the order of the groups.

    The REINFORCE++ methods standardize the result of `group_advantages` over the batch. `num_sampled` holds the number of
    tokens of each completion that count in the loss.

    Raises:
        ValueError: See `group_advantages`.
    """
    by_rewards: dict[tuple[float, ...], tuple[float, ...]] = {}  # many groups have the same rewards
    advantages = []
    for rewards in map(tuple, groups):
        if rewards not in by_rewards:
            by_rewards[rewards] = group_advantages(rewards, method, std_ddof=std_ddof, pass_k=pass_k)
        advantages.append(by_rewards[rewards])
    return standardized(advantages, num_sampled) if method.startswith("reinforce_pp") else advantages


def group_advantages(
    rewards_G: Sequence[float],
    method: AdvantageMethod,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
    eps: float = EPS,
) -> tuple[float, ...]:
    """Turn the rewards of one group into advantages, `[G]`.

    - `grpo`: (R_i - mean) / (std + eps)
    - `dr_grpo`, `reinforce_pp_baseline`: R_i - mean
    - `rloo`: R_i - mean of the others
    - `maxrl`: (R_i - mean) / (mean + eps)
    - `reinforce_pp`: R_i
    - `pass_at_k`: see `pass_at_k_advantages`

    A group of one and a group of equal rewards have advantages of exactly 0, except under `reinforce_pp`. So does a group of
    fewer than `pass_k` completions under `pass_at_k`.

    Raises:
        ValueError: A reward is not finite, is negative with `maxrl`, or gives an advantage that does not fit float32.
    """
    if not all(map(math.isfinite, rewards_G)):
        i, reward = next((i, reward) for i, reward in enumerate(rewards_G) if not math.isfinite(reward))
        raise ValueError(f"rewards[{i}]: not a finite number (got {reward}). Make the scorer return finite numbers.")
    if method == "reinforce_pp":
        return tuple(rewards_G)
    size = len(rewards_G)
    # The rounded mean of equal rewards can leave a residue such as 1e-17, which grpo would multiply by 1 / eps.
    if len(set(rewards_G)) <= 1:
        return (0.0,) * size
    if method == "maxrl" and min(rewards_G) < 0.0:
        fix = "Make the scorer return numbers from 0 up, or choose another algorithm.advantage."
        raise ValueError(f"rewards: maxrl divides by their mean, so none may be negative (got {min(rewards_G)}). {fix}")
    if max(rewards_G) >= HUGE or min(rewards_G) <= -HUGE:
        unit = unit_of(rewards_G)
        scaled_G = group_advantages([r / unit for r in rewards_G], method, std_ddof=std_ddof, pass_k=pass_k, eps=eps / unit)
        return scaled_G if method in SCALE_FREE else _multiplied(scaled_G, unit, rewards_G, method)
    if method == "pass_at_k":
        assert pass_k is not None, "pass_at_k needs a k"
        # Rollouts whose scorer failed are missing from their group, which may leave fewer than k.
        return pass_at_k_advantages(rewards_G, pass_k, eps=eps) if size >= pass_k else (0.0,) * size
    mean = math.fsum(rewards_G) / size
    scale = 1.0
    if method == "grpo":
        variance = math.fsum((reward - mean) ** 2 for reward in rewards_G) / (size - std_ddof)
        scale = 1.0 / (math.sqrt(variance) + eps)
    elif method == "rloo":
        scale = size / (size - 1)
    elif method == "maxrl":
        scale = 1.0 / (mean + eps)
    return tuple((reward - mean) * scale for reward in rewards_G)


def pass_at_k_advantages(rewards_G: Sequence[float], k: int, *, eps: float = EPS) -> tuple[float, ...]:
    """Return how much each completion adds to the best of k completions, in standard deviations of that best, `[G]`.

    With M(S) = the largest reward in S, over all k-subsets S of the group:
    A_i = (mean of M(S) with i in S - mean of M(S)) / (std of M(S) + eps). For rewards of 0 and 1 this is pass@k training
    (arXiv:2508.10751). The group must have at least k completions.
    """
    size = len(rewards_G)
    assert 1 <= k <= size, f"the best of {k} needs a group of {k}, this one has {size}"
    ordered = sorted(rewards_G)
    if ordered[k - 1] == ordered[-1]:  # every k completions include the best reward
        return (0.0,) * size
    # Of all k-subsets, comb(j, k - 1) have their largest reward at index j of the order.
    shares = [math.comb(j, k - 1) / math.comb(size, k) for j in range(size)]
    mean = math.fsum(share * reward for share, reward in zip(shares, ordered, strict=True))
    variance = math.fsum(share * (reward - mean) ** 2 for share, reward in zip(shares, ordered, strict=True))
    best_with = {ordered[index]: _best_with(ordered, index, k) for index in range(size)}
    return tuple((best_with[reward] - mean) / (math.sqrt(variance) + eps) for reward in rewards_G)


def standardized(
    values: Sequence[Sequence[float]], num_sampled: Sequence[Sequence[int]], *, eps: float = EPS
) -> list[tuple[float, ...]]:
    """Return (value - mean) / (std + eps), with mean and variance over the tokens of the batch that count in the loss.

    All tokens of a sequence share its value, so it counts `num_sampled` times. Equal values become exactly 0.
    """
    flat = zip((v for group in values for v in group), (n for group in num_sampled for n in group), strict=True)
    counted = [(value, count) for value, count in flat if count]
    distinct = {value for value, _ in counted}
    if len(distinct) <= 1:
        return [(0.0,) * len(group) for group in values]
    if max(distinct) >= HUGE or min(distinct) <= -HUGE:
        unit = unit_of(distinct)
        return standardized([[value / unit for value in group] for group in values], num_sampled, eps=eps / unit)
    total = sum(count for _, count in counted)
    mean = math.fsum(count * value for value, count in counted) / total
    std = math.sqrt(math.fsum(count * (value - mean) ** 2 for value, count in counted) / total)
    return [tuple((value - mean) / (std + eps) for value in group) for group in values]


def unit_of(values: Collection[float]) -> float:
    """Return the power of two that brings the largest of some huge values below `HUGE`; dividing by it does not round."""
    return 2.0 ** (math.frexp(max(map(abs, values)))[1] - 120)


def _multiplied(
    scaled_G: Sequence[float], unit: float, rewards_G: Sequence[float], method: AdvantageMethod
) -> tuple[float, ...]:
    """Multiply the advantages of scaled rewards by the unit, or raise ValueError if they overflow."""
    advantages_G = tuple(advantage * unit for advantage in scaled_G)
    # `batch_advantages` standardizes the REINFORCE++ values, so these only have to be finite here.
    limit = sys.float_info.max if method == "reinforce_pp_baseline" else MAX_ADVANTAGE
    if max(map(abs, advantages_G)) > limit:
        largest = max(rewards_G, key=abs)
        fix = "Make the scorer return smaller numbers, or set algorithm.advantage to grpo."
        raise ValueError(f"rewards[{rewards_G.index(largest)}]: the advantage does not fit float32 (got {largest:g}). {fix}")
    return advantages_G


def _best_with(ordered: Sequence[float], index: int, k: int) -> float:
    """Return the mean of the largest reward over the k-subsets that include the completion at `index`, in ascending order."""
    if k == 1:
        return ordered[index]
    others = [*ordered[:index], *ordered[index + 1 :]]
    number = math.comb(len(others), k - 1)
    # The largest of the k - 1 others is at index j in comb(j, k - 2) of the subsets.
    return math.fsum(math.comb(j, k - 2) / number * max(other, ordered[index]) for j, other in enumerate(others))
