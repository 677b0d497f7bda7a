"""Evaluation statistics: mean reward, avg@n and pass@k over prompts, with 95 % confidence intervals.

Prompts are treated as independent draws from a population, and the completions of one prompt as a cluster. Each statistic is
therefore a mean over prompts with the standard error of a mean of independent prompts (arXiv:2411.00640, sections 2.1 and 2.2).
"""

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959964
"""Critical value of a two-sided 95 % interval of the normal distribution."""
TOLERANCE = 1e-9
"""Bound on the rounding error of a weighted sum of rewards."""


def evaluation_statistics(
    rewards: Sequence[Sequence[float]], *, num_samples: int, pass_k: Sequence[int], solved_from: float
) -> dict[str, float]:
    """Return `mean`, `avg@n` and `pass@k` by name, each with the half-width of its 95 % interval as `<name>_ci95`.

    avg@n is the fraction of completions that solve their prompt, averaged over prompts; it is omitted for n = 1. Prompts with
    fewer than k rewards are excluded from pass@k. `rewards` are those of each prompt, without completions whose reward failed;
    at least one prompt has a reward. A completion solves its prompt with a reward of at least `solved_from`.
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
    """Return True if a value exceeds the best one so far by at least `min_improvement`, with a tolerance for rounding.

    An increase within the tolerance is never an improvement. The first value that is not NaN always is.
    """
    return not math.isnan(value) and (best is None or value - best > max(min_improvement - TOLERANCE, TOLERANCE))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that at least one of k samples solves a prompt.

    With c solutions in n samples, it is 1 - C(n - c, k) / C(n, k), the fraction of k-subsets that contain a solution
    (arXiv:2107.03374, equation 1).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _with_interval(name: str, values_N: Sequence[float]) -> dict[str, float]:
    """Return the mean over prompts and, for at least two prompts, the half-width of its 95 % interval."""
    mean = float(np.mean(values_N))
    if len(values_N) < 2:
        return {name: mean}
    return {name: mean, f"{name}_ci95": Z_95 * float(np.std(values_N, ddof=1)) / math.sqrt(len(values_N))}
