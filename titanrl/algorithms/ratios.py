"""Compare two policies token by token: importance ratios, KL estimates, and the off-policy correction.

Shape suffix: N tokens. All tensors of a call have the same shape. `mask` is True at loss tokens. Values at masked tokens may be
inf or NaN, so they are replaced before use.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.segments import segment_any, segment_first, segment_mean, segment_sum
from titanrl.config.algorithm import CorrectionConfig, KLEstimator

MAX_LOG_RATIO = 20.0
"""Bound on the absolute log-ratio before `exp`, so that a single token cannot overflow the sum over the batch."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Return log(policy / base policy) of each token; 0 at masked tokens."""
    return torch.where(mask, logprobs - base_logprobs, 0.0)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp(log_ratios), with each log-ratio clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator, *, mask: Tensor) -> Tensor:
    """Return an estimate of KL(policy, reference) at each token sampled from the policy, with gradient; 0 at masked tokens.

    With u = logprobs - reference_logprobs, `k1` is u, `k2` is u^2 / 2, and `k3` is exp(-u) - 1 + u. `k3_straight_through` has
    the value of k3, whose variance is lower than that of k1, and the gradient of k2. k1 and k3 are unbiased estimators.

    Over samples of the policy, the expected gradient of k1 is 0, that of k2 is the gradient of KL(policy, reference), and that
    of k3 is the gradient of KL(reference, policy).
    Source: http://joschu.net/blog/kl-approx.html; for the gradients arXiv:2506.09477.
    """
    u = log_ratio(logprobs, reference_logprobs, mask=mask)
    match estimator:
        case "k1":
            return u
        case "k2":
            return 0.5 * u.square()
        case "k3":
            return _k3(u)
        case "k3_straight_through":
            k2 = 0.5 * u.square()
            return k2 - k2.detach() + _k3(u.detach())


def _k3(u: Tensor) -> Tensor:
    """Compute exp(-u) - 1 + u without cancellation near 0; u is clamped to `MAX_LOG_RATIO` before exp."""
    bounded = u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Effect of an off-policy correction on each token."""

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

    d = prox - behavior is the log-ratio of a token: its log-probability under the proximal policy minus that under the sampling
    (behavior) policy. All bounds apply to the ratio exp(d). Each rejection rule is evaluated on all unmasked tokens. A token is
    kept if no rule rejects it. Weights are min(exp(d), max_prox_over_behavior), where d is summed over the sequence if
    `config.weight` is `sequence`.
    Sources: truncated importance sampling (https://fengyao.notion.site/off-policy-rl), sequence-level and geometric rejection
    (https://richardli.xyz/rl-collapse), decoupled PPO (arXiv:2505.24298).
    """
    d_N = log_ratio(proximal_logprobs_N, generator_logprobs_N, mask=mask)
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
    kept_N = mask & ~rejected_N
    if config.weight == "none":
        return Correction(kept_N=kept_N, weights_N=None, truncated_N=torch.zeros_like(mask))
    ratio_N = bounded_exp(d_N if config.weight == "token" else segment_sum(d_N, sequence_N, mask=mask))
    weights_N = torch.where(mask, ratio_N.clamp(max=config.max_prox_over_behavior), 1.0)
    return Correction(kept_N=kept_N, weights_N=weights_N, truncated_N=kept_N & (ratio_N > config.max_prox_over_behavior))


def _outside(log_ratio_N: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return True where exp(log_ratio) is outside the bounds. An overflow to inf is harmless in a comparison."""
    ratio_N, (low, high) = log_ratio_N.exp(), bounds
    return (ratio_N < low) | (ratio_N > high)


@torch.no_grad()
def weight_sums(correction: Correction, sequence_N: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return the sum of the weights and their number, 0-dim each, from which the caller computes the mean over a step.

    Each kept token adds its weight, or with sequence weights each sequence with a kept token.
    """
    kept_N = correction.kept_N
    counted_N = segment_first(sequence_N, mask=kept_N) if config.weight == "sequence" else kept_N
    weights_N = torch.ones_like(kept_N, dtype=torch.float32) if correction.weights_N is None else correction.weights_N
    return torch.where(counted_N, weights_N, 0.0).sum(), counted_N.sum()
