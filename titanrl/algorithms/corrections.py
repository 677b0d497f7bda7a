"""Off-policy correction: importance weights and rejection of tokens and sequences, from log-probabilities without gradient.

Shape suffix: N tokens. Everything follows from d = prox - behavior, the proximal policy's log-probability of each token minus
that of the policy that sampled it: exp(d) is the ratio that all bounds are on.
Sources: truncated importance sampling (https://fengyao.notion.site/off-policy-rl), sequence-level and geometric rejection
(https://richardli.xyz/rl-collapse), decoupled PPO (arXiv:2505.24298).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.loss_weights import Reduction
from titanrl.algorithms.losses import MAX_LOG_RATIO
from titanrl.algorithms.segments import segment_any, segment_first, segment_mean, segment_sum
from titanrl.config.objective import CorrectionConfig
from titanrl.types import CorrectionTotals


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


@torch.no_grad()
def correction_sums(correction: Correction, sequence_N: Tensor, config: CorrectionConfig, *, mask: Tensor) -> dict[str, Tensor]:
    """Weights, tokens and sequences before and after rejection, 0-dim, to be added up over micro-batches and ranks.

    Weights are counted by kept token, or by sequence that keeps one; `weights.correction_totals` makes quotients of the sums.
    """
    kept_N = correction.kept_N
    kept_sequences_N = segment_first(sequence_N, mask=kept_N)
    counted_N = kept_sequences_N if config.weight == "sequence" else kept_N
    weights_N = torch.ones_like(kept_N, dtype=torch.float32) if correction.weights_N is None else correction.weights_N
    return {
        "weight": torch.where(counted_N, weights_N, 0.0).sum(),
        "num_weights": counted_N.sum(),
        "kept_tokens": kept_N.sum(),
        "num_tokens": mask.sum(),
        "kept_sequences": kept_sequences_N.sum(),
        "num_sequences": segment_first(sequence_N, mask=mask).sum(),
    }


def weights_after_rejection(
    weights_N: Tensor,
    correction: Correction,
    sequence_N: Tensor,
    reduction: Reduction,
    totals: CorrectionTotals,
    *,
    mask: Tensor,
) -> Tensor:
    """The loss weights that `sequence_weights` would give if what is rejected had never been sampled.

    `totals` are those of the whole step. Not for `prompt_mean`, whose sequences may lie on several ranks.
    """
    assert reduction != "prompt_mean", "tokens of a prompt cannot be counted on one rank"
    match reduction:
        case "sum":
            return weights_N
        case "token_mean":
            return weights_N / totals.kept_tokens_frac
        case "sequence_mean_token_sum" | "constant":
            return weights_N / totals.kept_sequences_frac
        case "sequence_mean":
            ones_N = torch.ones_like(weights_N)
            before_N = segment_sum(ones_N, sequence_N, mask=mask)
            after_N = segment_sum(ones_N, sequence_N, mask=correction.kept_N).clamp(min=1.0)
            return weights_N * before_N / after_N / totals.kept_sequences_frac


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
