"""Difference between the log-probabilities of sampler and trainer, by the age of each token.

Shapes: N tokens, K ages.
"""

import torch

OLDEST = 4
"""Largest age that is counted separately; it includes all older tokens."""


@torch.no_grad()
def lag_metrics(
    logprobs_N: torch.Tensor, generator_logprobs_N: torch.Tensor, lags_N: torch.Tensor, mask_N: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return sums and maxima of the differences of log-probabilities, and numbers of tokens, by age.

    Tokens sampled by the version being trained (lag 0) show the effect of numerics alone. Older tokens also show how far the
    policy has moved. `lag/<k>` counts tokens, `lag/<k>/logprob_abs` sums their absolute differences.

    Args:
        logprobs_N: Log-probabilities of the trainer, in nats.
        generator_logprobs_N: Log-probabilities of the generator, in nats, finite where the mask is true.
        lags_N: Optimizer steps between the version that sampled a token and the version being trained.
        mask_N: True at the tokens that count.
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
