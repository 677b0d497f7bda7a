"""Off-policy correction: importance weights and rejection of tokens and sequences, computed without gradient.

Shape suffix: N tokens. d = prox - behavior is the log-ratio of each token: its log-probability under the proximal policy minus
its log-probability under the sampling (behavior) policy. All bounds apply to the ratio exp(d).
Sources: truncated importance sampling (https://fengyao.notion.site/off-policy-rl), sequence-level and geometric rejection
(https://richardli.xyz/rl-collapse), decoupled PPO (arXiv:2505.24298).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.ratios import bounded_exp, log_ratio
from titanrl.algorithms.segments import segment_any, segment_first, segment_mean, segment_sum
from titanrl.config.algorithm import CorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Effect of a correction on each token."""

    kept_N: Tensor
    """The mask without the rejected tokens."""
    weights_N: Tensor | None
    """Importance weight of each token's loss, 1 at masked tokens; None if the config uses no weights."""
    truncated_N: Tensor
    """True at kept tokens whose weight was truncated."""


@torch.no_grad()
def correct(
    proximal_logprobs_N: Tensor, generator_logprobs_N: Tensor, sequence_N: Tensor, config: CorrectionConfig, *, mask: Tensor
) -> Correction:
    """Compute importance weights and rejections of the unmasked tokens, whose log-probabilities must be finite.

    Each rejection rule is evaluated on all unmasked tokens. A token is kept if no rule rejects it. Weights are
    min(exp(d), max_prox_over_behavior), where d is summed over the sequence if `config.weight` is `sequence`.
    """
    d_N = log_ratio(proximal_logprobs_N, generator_logprobs_N, mask=mask)
    kept_N = mask & ~_rejected(d_N, sequence_N, config, mask)
    if config.weight == "none":
        return Correction(kept_N=kept_N, weights_N=None, truncated_N=torch.zeros_like(mask))
    log_weight_N = d_N if config.weight == "token" else segment_sum(d_N, sequence_N, mask=mask)
    ratio_N = bounded_exp(log_weight_N)
    weights_N = torch.where(mask, ratio_N.clamp(max=config.max_prox_over_behavior), 1.0)
    return Correction(kept_N=kept_N, weights_N=weights_N, truncated_N=kept_N & (ratio_N > config.max_prox_over_behavior))


@torch.no_grad()
def weight_sums(correction: Correction, sequence_N: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return the sum of the weights and their number, 0-dim each, from which the caller computes the mean over a step.

    Each kept token adds its weight, or with sequence weights each sequence with a kept token.
    """
    kept_N = correction.kept_N
    counted_N = segment_first(sequence_N, mask=kept_N) if config.weight == "sequence" else kept_N
    weights_N = torch.ones_like(kept_N, dtype=torch.float32) if correction.weights_N is None else correction.weights_N
    return torch.where(counted_N, weights_N, 0.0).sum(), counted_N.sum()


def _rejected(d_N: Tensor, sequence_N: Tensor, config: CorrectionConfig, mask: Tensor) -> Tensor:
    """Return True at tokens that at least one rejection rule rejects."""
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
    """Return True where exp(log_ratio) is outside the bounds. An overflow to inf is harmless in a comparison."""
    ratio_N, (low, high) = log_ratio_N.exp(), bounds
    return (ratio_N < low) | (ratio_N > high)
