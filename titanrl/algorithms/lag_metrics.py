"""Mismatch between the log-probabilities of generator and trainer, by policy lag of each token.

The lag (age) of a token is the policy version being trained minus the policy version that sampled the token.

Shape suffixes: N tokens, K lags.
"""

import torch

OLDEST = 4
"""Lag of the last bin, which also contains all larger lags."""


@torch.no_grad()
def lag_metrics(
    logprobs_N: torch.Tensor, generator_logprobs_N: torch.Tensor, lags_N: torch.Tensor, mask_N: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return sums and maxima of absolute log-probability differences, and token counts, by lag.

    At lag 0 the difference is numerical only. At larger lags it also includes the change of the policy. The sum `lag/<k>` is
    the number of tokens with lag k, and `lag/<k>/logprob_abs` is the sum of their absolute differences.

    Args:
        logprobs_N: Log-probabilities of the trainer, in nats.
        generator_logprobs_N: Log-probabilities of the generator, in nats, finite at unmasked tokens.
        lags_N: Lag of each token.
        mask_N: True at loss tokens.
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
