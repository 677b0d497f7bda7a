"""Advantages: how much better each completion of a group was than its group, or than the batch.

A method is a function of `GroupRewards`, see `contracts.Advantage`. Registering one takes an entry in
`titanrl.config.registry.ADVANTAGES`.

Shape suffix: G completions of one prompt.
Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), RLOO (arXiv:2402.14740), REINFORCE++ (arXiv:2501.03262),
pass@k training (arXiv:2508.10751), GDPO (arXiv:2601.05242), MaxRL (maximum-likelihood RL) as its authors' code and SkyRL write
it.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from titanrl.algorithms.contracts import GroupRewards, option_names
from titanrl.config.registry import ADVANTAGES
from titanrl.loading import import_object

EPS = 1e-6
"""Added to every divisor of advantages."""

Unit = Literal["rollout", "turn", "token"]
"""Part of the batch that has an advantage of its own."""

HUGE = 2.0**120
"""Size from which rewards are scaled down first. Squares of smaller ones are finite, and their advantages fit float32."""

MAX_ADVANTAGE = 3.4e38
"""Largest advantage: the trainer holds advantages in float32."""


def batch_advantages(
    groups: Sequence[Sequence[float]],
    num_sampled: Sequence[Sequence[int]],
    method: str,
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
    return standardized(advantages, num_sampled) if ADVANTAGES[method].traits.is_standardized else advantages


def group_advantages(
    rewards_G: Sequence[float],
    method: str,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
    eps: float = EPS,
) -> tuple[float, ...]:
    """Turn the rewards of one group into advantages by a built-in method, `[G]`.

    The REINFORCE++ methods still have to be standardized over the batch. A group of one and a group of equal rewards have
    advantages of exactly 0, except under `reinforce_pp`.

    Raises:
        ValueError: A reward is not finite, is negative with `maxrl`, or gives an advantage that does not fit float32.
    """
    if not all(map(math.isfinite, rewards_G)):
        i, reward = next((i, reward) for i, reward in enumerate(rewards_G) if not math.isfinite(reward))
        raise ValueError(f"rewards[{i}]: not a finite number (got {reward}). Make the reward return finite numbers.")
    traits = ADVANTAGES[method].traits
    # The rounded mean of equal rewards can leave a residue such as 1e-17, which grpo would multiply by 1 / eps.
    if not traits.keeps_equal_rewards and len(set(rewards_G)) <= 1:
        return (0.0,) * len(rewards_G)
    if traits.divides_by_mean and min(rewards_G) < 0.0:
        fix = "Make the reward return numbers from 0 up, or choose another algorithm.advantage."
        raise ValueError(f"rewards: {method} divides by their mean, so none may be negative (got {min(rewards_G)}). {fix}")
    is_huge = max(rewards_G) >= HUGE or min(rewards_G) <= -HUGE
    if not is_huge or traits.keeps_equal_rewards:
        return tuple(_built_in(method, std_ddof, pass_k, eps)(GroupRewards(rewards=rewards_G)))
    unit = unit_of(rewards_G)
    function = _built_in(method, std_ddof, pass_k, eps / unit)
    scaled_G = tuple(function(GroupRewards(rewards=[reward / unit for reward in rewards_G])))
    return scaled_G if traits.is_scale_free else _multiplied(scaled_G, unit, rewards_G, is_final=not traits.is_standardized)


def grpo(group: GroupRewards, *, std_ddof: int = 0, eps: float = EPS) -> tuple[float, ...]:
    """Return (R_i - mean) / (std + eps)."""
    mean = _mean(group.rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in group.rewards) / (len(group.rewards) - std_ddof)
    scale = 1.0 / (math.sqrt(variance) + eps)
    return tuple((reward - mean) * scale for reward in group.rewards)


def dr_grpo(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i - mean."""
    mean = _mean(group.rewards)
    return tuple(reward - mean for reward in group.rewards)


def rloo(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i - mean of the others."""
    mean, size = _mean(group.rewards), len(group.rewards)
    scale = size / (size - 1)
    return tuple((reward - mean) * scale for reward in group.rewards)


def maxrl(group: GroupRewards, *, eps: float = EPS) -> tuple[float, ...]:
    """Return (R_i - mean) / (mean + eps), for rewards from 0 up."""
    mean = _mean(group.rewards)
    scale = 1.0 / (mean + eps)
    return tuple((reward - mean) * scale for reward in group.rewards)


def reinforce_pp(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i, which is then standardized over the batch."""
    return tuple(group.rewards)


def pass_at_k(group: GroupRewards, *, pass_k: int, eps: float = EPS) -> tuple[float, ...]:
    """Return `pass_at_k_advantages`; 0 for a group of fewer than `pass_k`, which rollouts whose reward failed have left."""
    rewards_G = group.rewards
    return pass_at_k_advantages(rewards_G, pass_k, eps=eps) if len(rewards_G) >= pass_k else (0.0,) * len(rewards_G)


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


def decoupled_advantages(groups: Iterable[GroupRewards], *, std_ddof: int = 0, eps: float = EPS) -> list[tuple[float, ...]]:
    """Return the advantages of GDPO for all groups of a step: `gdpo` of each, divided by the standard deviation over the batch.

    The advantages of each part sum to 0 in a group, and so does their weighted sum. The mean that the paper subtracts over the
    completions of the batch is therefore 0, and a group whose parts are all equal has advantages of exactly 0.

    Raises:
        ValueError: See `gdpo`.
    """
    sums = [gdpo(group, std_ddof=std_ddof, eps=eps) for group in groups]
    flat = [value for group in sums for value in group]
    largest = max(map(abs, flat), default=0.0)
    if largest == 0.0:
        return sums
    # Relative to the largest value the squares neither overflow nor vanish.
    std = largest * math.sqrt(math.fsum((value / largest) ** 2 for value in flat) / len(flat))
    return [tuple(value / (std + eps) for value in group) for group in sums]


def gdpo(group: GroupRewards, *, std_ddof: int = 0, eps: float = EPS) -> tuple[float, ...]:
    """Return the sum over the parts of weight * (r_i - mean) / (std + eps), with mean and std of that part in the group.

    A completion without a part gets nothing for it and is not in its mean. Rewards without parts are one part of weight 1.
    `decoupled_advantages` scales the sums over the batch.

    Raises:
        ValueError: The weights are so large that a sum is not finite.
    """
    sums = [0.0] * len(group.rewards)
    for part, values in (group.parts or {"": group.rewards}).items():
        weight = group.weights.get(part, 1.0)
        present = [i for i, value in enumerate(values) if not math.isnan(value)]
        by_part = _normalized(tuple([values[i] for i in present]), std_ddof, eps)
        for i, advantage in zip(present, by_part, strict=True):
            sums[i] += weight * advantage
    if not all(map(math.isfinite, sums)):
        largest = max(group.weights, key=lambda part: abs(group.weights[part]))
        raise ValueError(
            "data.rewards: the weighted sum of the normalized parts is not finite "
            f"(got the weight {group.weights[largest]:g} of {largest}). Use smaller weights."
        )
    return tuple(sums)


def unit_of(values: Collection[float]) -> float:
    """Return the power of two that brings the largest of some huge values below `HUGE`; dividing by it does not round."""
    return 2.0 ** (math.frexp(max(map(abs, values)))[1] - 120)


def checked_advantages(
    advantage: Callable[[GroupRewards], Iterable[Any]], group: GroupRewards, name: str
) -> tuple[Unit, list[list[float]]]:
    """Call an advantage of the user for one group.

    Args:
        advantage: Function of the group.
        group: Rewards of the group.
        name: Import path or name of the function, for error messages.

    Returns:
        The unit that has an advantage each, and the advantages of the units of each completion.

    Raises:
        ValueError: The function raised, or did not return one finite number per completion, turn or token.
    """
    rewards = list(group.rewards)
    try:
        returned = list(advantage(group))
        is_nested = any(np.ndim(value) for value in returned)
        numbers = [[float(number) for number in value] if is_nested else [float(value)] for value in returned]
    except Exception as error:  # the function is the user's and may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"algorithm.advantage: {name} raised {cause} (got the rewards {rewards}). Correct it.") from error
    unit = _unit_of([len(own) for own in numbers], group, is_nested=is_nested)
    if unit is None or not all(abs(number) <= MAX_ADVANTAGE for own in numbers for number in own):
        got = numbers if is_nested else [number for own in numbers for number in own]
        raise ValueError(
            f"algorithm.advantage: {name} must return one finite number per completion (got {got} for the rewards {rewards}), "
            "or for each completion a list of one number per turn or per token. Correct it."
        )
    return unit, numbers


def _unit_of(counts: Sequence[int], group: GroupRewards, *, is_nested: bool) -> Unit | None:
    """Return the unit of which each completion has so many; None if there is none."""
    if not is_nested:
        return "rollout" if len(counts) == len(group.rewards) else None
    if counts == [len(turns) for turns in group.turn_rewards]:
        return "turn"
    return "token" if counts == list(group.num_tokens) else None


@lru_cache(maxsize=4096)
def _normalized(values_G: tuple[float, ...], std_ddof: int, eps: float) -> tuple[float, ...]:
    """Return `grpo` of one part; many groups have the same values of a part."""
    return group_advantages(values_G, "grpo", std_ddof=std_ddof, eps=eps)


@lru_cache(maxsize=64)
def _built_in(method: str, std_ddof: int, pass_k: int | None, eps: float) -> Callable[[GroupRewards], Sequence[float]]:
    """Return the function of a built-in advantage with those of the options that it has."""
    function = import_object(ADVANTAGES[method].path, key="algorithm.advantage")
    names = option_names(function) or ()
    given = {"std_ddof": std_ddof, "pass_k": pass_k, "eps": eps}
    return partial(function, **{name: value for name, value in given.items() if name in names})


def _mean(rewards_G: Sequence[float]) -> float:
    return math.fsum(rewards_G) / len(rewards_G)


def _multiplied(scaled_G: Sequence[float], unit: float, rewards_G: Sequence[float], *, is_final: bool) -> tuple[float, ...]:
    """Multiply the advantages of scaled rewards by the unit, or raise ValueError if they overflow."""
    advantages_G = tuple(advantage * unit for advantage in scaled_G)
    # Advantages that `batch_advantages` will standardize only have to be finite here.
    if max(map(abs, advantages_G)) > (MAX_ADVANTAGE if is_final else sys.float_info.max):
        largest = max(rewards_G, key=abs)
        fix = "Make the reward return smaller numbers, or set algorithm.advantage to grpo."
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
