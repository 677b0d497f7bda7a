"""Losses per token, and the sums that become metrics. Nothing here divides: the loss weights carry every scale.

Every tensor of a call has one shape, `[N]` or `[B, L]`. `mask` is true at the tokens that count. What stands elsewhere is
taken out with `torch.where` before it is used, as inf or NaN there would survive a multiplication by 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before exp, so that one token cannot overflow the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """How far the policy is from the one that sampled, by token and without gradient."""

    ratio: Tensor
    """Probability under the policy over that under the sampling policy; 1 at masked tokens."""
    clipped: Tensor
    """True where the clipped term is the one that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Metrics of one micro-batch on one rank as 0-dim tensors, to be reduced over micro-batches and ranks."""

    sums: dict[str, Tensor]
    """To be added up. `loss/policy` and `num_tokens` are then complete; the others are divided by `num_tokens`."""
    maxima: dict[str, Tensor]
    """To be combined by maximum; 0 without tokens."""


def valid_tokens(mask: Tensor, generator_logprobs: Tensor) -> Tensor:
    """`mask` without the tokens whose generator log-probability is not finite, which have no importance ratio."""
    return mask & generator_logprobs.isfinite()


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token; 0 at masked tokens.

    r = exp(logprobs - old_logprobs). Tokens whose old log-probability is not finite count as masked. Source: PPO
    (arXiv:1707.06347); two separate bounds as in DAPO (arXiv:2503.14476).
    """
    valid = valid_tokens(mask, old_logprobs)
    log_ratio = torch.where(valid, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.where(valid, torch.maximum(unclipped, clipped), 0.0)
    return loss, RatioStats(ratio=ratio.detach(), clipped=(clipped > unclipped) & valid)


def cross_entropy(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Negative log-likelihood per token; 0 at masked tokens."""
    return torch.where(mask, -logprobs, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
    """Sum of w * l over the tokens that count, 0-dim: this share of the step's objective. Ranks and micro-batches add up."""
    return torch.where(mask, loss * weights, 0.0).sum()


@torch.no_grad()
def loss_metrics(
    *,
    loss: Tensor,
    weights: Tensor,
    ratio_stats: RatioStats,
    entropy: Tensor,
    logprobs: Tensor,
    generator_logprobs: Tensor,
    mask: Tensor,
) -> LossMetrics:
    """Sums and maxima of one micro-batch, over the tokens that count and have a finite generator log-probability.

    `mismatch/*` compares the trainer's `logprobs` with the generator's: d = logprobs - generator_logprobs. Its two
    estimates of KL(generator || trainer) are k3, exp(d) - 1 - d (`mismatch/kl`, never negative), and k1, -d (`mismatch/kl_k1`).
    Source: http://joschu.net/blog/kl-approx.html
    """
    valid = valid_tokens(mask, generator_logprobs)
    difference = torch.where(valid, logprobs - generator_logprobs, 0.0)
    clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "policy/ratio_mean": ratio_stats.ratio,
        "policy/clip_frac": ratio_stats.clipped.to(logprobs.dtype),
        "policy/entropy": entropy,
        "mismatch/logprob_abs_mean": difference.abs(),
        # expm1, as exp(d) - 1 in fp32 would drown the small differences that this is to show.
        "mismatch/kl": clamped.expm1() - clamped,
        "mismatch/kl_k1": -difference,
    }
    sums = {name: torch.where(valid, values, 0.0).sum() for name, values in by_token.items()}
    sums["loss/policy"] = weighted_sum(loss, weights, mask=valid)
    sums["num_tokens"] = valid.sum().to(logprobs.dtype)
    maxima = {
        "policy/ratio_max": _masked_max(ratio_stats.ratio, valid),
        "mismatch/logprob_abs_max": _masked_max(difference.abs(), valid),
    }
    return LossMetrics(sums=sums, maxima=maxima)


def _masked_max(values: Tensor, valid: Tensor) -> Tensor:
    """Largest of the values that count, which are never negative; 0 if there are none."""
    counted = torch.where(valid, values, 0.0).flatten()
    return torch.cat([counted, counted.new_zeros(1)]).max()
