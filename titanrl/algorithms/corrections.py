"""Off-policy correction: importance weights and rejection of tokens and sequences, from log-probabilities without gradient.

Shape suffix: N tokens. Everything follows from d = prox - behavior, the proximal policy's log-probability of each token minus
that of the policy that sampled it: exp(d) is the ratio that all bounds are on.
Sources: truncated importance sampling (https://fengyao.notion.site/off-policy-rl), sequence-level and geometric rejection
(https://richardli.xyz/rl-collapse), decoupled PPO (arXiv:2505.24298).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.losses import MAX_LOG_RATIO
from titanrl.algorithms.segments import segment_any, segment_first, segment_mean, segment_sum
from titanrl.config.objective import CorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a correction does to each token."""

    kept_N: Tensor
    """The mask without what was rejected."""
    weights_N: Tensor | None
    """What the loss of each token is multiplied by; 1 at tokens that are masked. None where nothing is weighted."""
    truncated_N: Tensor
    """True where such a weight was truncated."""


@torch.no_grad()
def correct(
    proximal_logprobs_N: Tensor, generator_logprobs_N: Tensor, sequence_N: Tensor, config: CorrectionConfig, *, mask: Tensor
) -> Correction:
    """Weights and rejections of the tokens of `mask`, whose log-probabilities must be finite.

    Rejections are all judged on the whole mask, and a token stays only if each of them lets it.
    """
    d_N = torch.where(mask, proximal_logprobs_N - generator_logprobs_N, 0.0)
    kept_N = mask & ~_rejected(d_N, sequence_N, config, mask)
    if config.weight == "none":
        return Correction(kept_N=kept_N, weights_N=None, truncated_N=torch.zeros_like(mask))
    log_weight_N = d_N if config.weight == "token" else segment_sum(d_N, sequence_N, mask=mask)
    ratio_N = log_weight_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights_N = torch.where(mask, ratio_N.clamp(max=config.max_prox_over_behavior), 1.0)
    return Correction(kept_N=kept_N, weights_N=weights_N, truncated_N=kept_N & (ratio_N > config.max_prox_over_behavior))


def weight_sums(correction: Correction, sequence_N: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Sum of the weights and their number, 0-dim each, over the tokens that are kept, or over the sequences that have one.

    Both are to be added up over micro-batches and ranks; the quotient is what `batch_normalize` divides by.
    """
    assert correction.weights_N is not None, "nothing is weighted"
    counted_N = correction.kept_N
    if config.weight == "sequence":
        counted_N = segment_first(sequence_N, mask=counted_N)
    return torch.where(counted_N, correction.weights_N, 0.0).sum(), counted_N.sum()


def _rejected(d_N: Tensor, sequence_N: Tensor, config: CorrectionConfig, mask: Tensor) -> Tensor:
    rejected_N = torch.zeros_like(mask)
    if config.reject_token_prox_over_behavior is not None:
        rejected_N |= _outside(d_N, config.reject_token_prox_over_behavior)
    if config.reject_sequence_prox_over_behavior is not None:
        total_N = segment_sum(d_N, sequence_N, mask=mask)
        rejected_N |= _outside(total_N, config.reject_sequence_prox_over_behavior)
    if config.reject_geometric_prox_over_behavior is not None:
        mean_N = segment_mean(d_N, sequence_N, mask=mask)
        rejected_N |= _outside(mean_N, config.reject_geometric_prox_over_behavior)
    if config.veto_prox_over_behavior is not None:
        outlier_N = _outside(d_N, config.veto_prox_over_behavior)
        rejected_N |= segment_any(outlier_N, sequence_N, mask=mask)
    return rejected_N


def _outside(log_ratio_N: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Whether exp(log_ratio) is outside; it may overflow, as nothing is multiplied by it."""
    ratio_N, (low, high) = log_ratio_N.exp(), bounds
    return (ratio_N < low) | (ratio_N > high)
