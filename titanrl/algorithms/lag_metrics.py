"""How far sampler and trainer disagree, told apart by how old a token is.

Shapes: N tokens, K ages.
"""

import torch

OLDEST = 4
"""Ages from 0 to this are counted one by one; the last stands for itself and everything older."""


@torch.no_grad()
def lag_metrics(
    logprobs_N: torch.Tensor, generator_logprobs_N: torch.Tensor, lags_N: torch.Tensor, mask_N: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums and maxima of the mismatch of log-probabilities, and counts of tokens, by lag.

    Tokens of the very version that is trained (lag 0) show what numerics alone do; the rest is what the policy has moved
    since. `lag/<k>` counts tokens, `lag/<k>/logprob_abs` adds up their absolute differences.

    Args:
        logprobs_N: the trainer's, in nats.
        generator_logprobs_N: the generator's, in nats, finite where the mask is true.
        lags_N: optimizer steps between the version that sampled a token and the one trained.
        mask_N: tokens that count.
    """
    difference_N = torch.where(mask_N, (logprobs_N - generator_logprobs_N).abs(), 0.0)
    ages_K = torch.arange(OLDEST + 1, device=lags_N.device)
    by_age_NK = (lags_N.clamp(0, OLDEST)[:, None] == ages_K) & mask_N[:, None]
    counts_K = by_age_NK.sum(0)
    differences_NK = difference_N[:, None] * by_age_NK
    totals_K, largest_K = differences_NK.sum(0), differences_NK.amax(0)
    sums = {f"lag/{age}": counts_K[age] for age in range(OLDEST + 1)}
    sums |= {f"lag/{age}/logprob_abs": totals_K[age] for age in range(OLDEST + 1)}
    maxima = {
        "mismatch/numeric/logprob_abs_max": largest_K[0],
        "mismatch/stale/logprob_abs_max": largest_K[1:].max(),
    }
    return sums, maxima
