"""Advantages: how much better each completion of a group was than its group, or than the batch.

Shape suffix: G completions of one prompt.
Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), RLOO (arXiv:2402.14740), REINFORCE++ (arXiv:2501.03262),
pass@k training (arXiv:2508.10751), MaxRL (maximum-likelihood RL) as its authors' code and SkyRL write it.
"""

import math
from collections.abc import Sequence
from typing import Literal

AdvantageMethod = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "pass_at_k"]

EPS = 1e-6
"""Added to what advantages are divided by."""


def batch_advantages(
    groups: Sequence[Sequence[float]],
    num_sampled: Sequence[Sequence[int]],
    method: AdvantageMethod,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
) -> list[tuple[float, ...]]:
    """Turn the rewards of all groups of a step into advantages, in their order.

    The REINFORCE++ methods standardize what `group_advantages` gives over the batch. `num_sampled` are the tokens of each
    completion that count in the loss.

    Raises ValueError as `group_advantages` does.
    """
    by_rewards: dict[tuple[float, ...], tuple[float, ...]] = {}  # few rewards are different, so few groups are
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

    `grpo` is (R_i - mean) / (std + eps), `dr_grpo` and `reinforce_pp_baseline` are R_i - mean, `rloo` is R_i minus the mean of
    the others, `maxrl` is (R_i - mean) / (mean + eps), `reinforce_pp` is R_i, `pass_at_k` see `pass_at_k_advantages`. But for
    `reinforce_pp`, a group of one and a group of equal rewards say nothing about what is better: all are exactly 0.

    Raises ValueError if a reward is not finite, or negative with `maxrl`.
    """
    for i, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(f"reward {i} of the group is {reward}: a scorer must return a finite number")
    if method == "reinforce_pp":
        return tuple(rewards_G)
    size = len(rewards_G)
    # Rounding in the mean would otherwise leave a residue such as 1e-17, which grpo blows up by 1 / eps.
    if len(set(rewards_G)) <= 1:
        return (0.0,) * size
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
        if min(rewards_G) < 0.0:
            raise ValueError(f"maxrl divides by the mean reward, so a scorer must not return {min(rewards_G)}, a negative one")
        scale = 1.0 / (mean + eps)
    return tuple((reward - mean) * scale for reward in rewards_G)


def pass_at_k_advantages(rewards_G: Sequence[float], k: int, *, eps: float = EPS) -> tuple[float, ...]:
    """What each completion adds to the best of k completions, by the group's standard deviation of that, `[G]`.

    With M(S) = the largest reward in S, over all k-subsets S of the group:
    A_i = (mean of M(S) with i in S - mean of M(S)) / (std of M(S) + eps). For rewards of 0 and 1 this is pass@k training
    (arXiv:2508.10751). The group must have at least k completions.
    """
    size = len(rewards_G)
    assert 1 <= k <= size, f"the best of {k} needs a group of {k}, this one has {size}"
    ordered = sorted(rewards_G)
    if ordered[k - 1] == ordered[-1]:  # no k completions without the best reward
        return (0.0,) * size
    # Of all k-subsets, comb(j, k - 1) have their largest reward at place j of the order.
    shares = [math.comb(j, k - 1) / math.comb(size, k) for j in range(size)]
    mean = math.fsum(share * reward for share, reward in zip(shares, ordered, strict=True))
    variance = math.fsum(share * (reward - mean) ** 2 for share, reward in zip(shares, ordered, strict=True))
    best_with = {ordered[place]: _best_with(ordered, place, k) for place in range(size)}
    return tuple((best_with[reward] - mean) / (math.sqrt(variance) + eps) for reward in rewards_G)


def standardized(values: Sequence[Sequence[float]], num_sampled: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """(value - mean) / (std + EPS), with mean and variance both over the tokens of the batch that count in the loss.

    All tokens of a sequence share its value, so it counts `num_sampled` times. Values that are all equal become exactly 0.
    """
    flat = zip((v for group in values for v in group), (n for group in num_sampled for n in group), strict=True)
    counted = [(value, count) for value, count in flat if count]
    if len({value for value, _ in counted}) <= 1:
        return [(0.0,) * len(group) for group in values]
    total = sum(count for _, count in counted)
    mean = math.fsum(count * value for value, count in counted) / total
    std = math.sqrt(math.fsum(count * (value - mean) ** 2 for value, count in counted) / total)
    return [tuple((value - mean) / (std + EPS) for value in group) for group in values]


def _best_with(ordered: Sequence[float], place: int, k: int) -> float:
    """Mean of the largest reward over the k-subsets that hold the completion at `place` of the ascending order."""
    others = [*ordered[:place], *ordered[place + 1 :]]
    number = math.comb(len(others), k - 1)
    if k == 1:
        return ordered[place]
    # The largest of the k - 1 others is at place j in comb(j, k - 2) of the subsets.
    return math.fsum(math.comb(j, k - 2) / number * max(other, ordered[place]) for j, other in enumerate(others))
