"""Statistics of an evaluation: mean reward, avg@k and pass@k over prompts, with confidence intervals.

The prompts are a random sample of all possible ones, and the samples of a prompt depend on each other. So every statistic is a
mean over prompts, and its standard error is that of a mean of independent prompts (arXiv:2411.00640, sections 2.1 and 2.2).
"""

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
TOLERANCE = 1e-9
"""Rounding error by which a weighted sum of rewards may fall short of its value."""


def evaluation_statistics(
    rewards: Sequence[Sequence[float]], *, num_samples: int, pass_k: Sequence[int], solved_from: float
) -> dict[str, float]:
    """Return the statistics by name: `mean`, `avg@n` and `pass@k`, each with the half-width of its interval, `<name>_ci95`.

    Args:
        rewards: Rewards of each prompt, without completions whose reward failed; not all of them empty.
        num_samples: Completions per prompt, n.
        pass_k: Numbers k; a prompt with fewer than k rewards is left out of pass@k.
        solved_from: Reward from which a completion counts as solved.
    """
    scored = [values for values in rewards if values]
    statistics = _with_interval("mean", [float(np.mean(values)) for values in scored])
    solved = [(len(values), sum(value >= solved_from - TOLERANCE for value in values)) for values in scored]
    if num_samples > 1:
        statistics |= _with_interval(f"avg@{num_samples}", [num_solved / num for num, num_solved in solved])
    for k in pass_k:
        enough = [pass_at_k(num, num_solved, k) for num, num_solved in solved if num >= k]
        statistics |= _with_interval(f"pass@{k}", enough) if enough else {}
    return statistics


def improves(value: float, best: float | None, min_improvement: float) -> bool:
    """Return True if a value is better than the best one so far by more than rounding, or by an increase that is required."""
    return not math.isnan(value) and (best is None or value - best > max(min_improvement - TOLERANCE, TOLERANCE))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that one of k samples solves a prompt.

    Of n samples, c solve it: 1 - C(n - c, k) / C(n, k), the share of subsets of size k with a solution (arXiv:2107.03374,
    equation 1).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _with_interval(name: str, values_N: Sequence[float]) -> dict[str, float]:
    """Return the mean over prompts and the half-width of its 95 % interval, which one prompt does not have."""
    mean = float(np.mean(values_N))
    if len(values_N) < 2:
        return {name: mean}
    return {name: mean, f"{name}_ci95": Z_95 * float(np.std(values_N, ddof=1)) / math.sqrt(len(values_N))}
