"""Losses of single tokens. Nothing here divides: the loss weights carry every scale.

Every tensor of a call has the same shape, `[N]` or `[B, L]`. `mask` is true at the tokens that count. Values elsewhere may be
inf or NaN, which multiplication by 0 would keep; `torch.where` replaces them before they are used.

`old_logprobs` belong to the policy in the denominator of the ratio r = exp(logprobs - old_logprobs). Tokens where they are not
finite count as masked. Losses are 0 at masked tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.ratios import bounded_exp, importance_ratio, log_ratio
from titanrl.algorithms.segments import segment_mean

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound on the size of a sequence's mean log-ratio in `gspo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """Distance of the policy from the denominator of its ratio, by token and without gradient."""

    ratio: Tensor
    """The ratio of the loss; 1 at masked tokens."""
    clipped: Tensor
    """True where a bound takes effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Metrics of one micro-batch on one rank as 0-dim tensors, to be reduced over micro-batches and ranks."""

    sums: dict[str, Tensor]
    """Metrics to add up. `loss/*` and `num_tokens` are then complete; the others are divided by `num_tokens`."""
    maxima: dict[str, Tensor]
    """Metrics to combine by maximum; 0 without tokens."""


def valid_tokens(mask: Tensor, generator_logprobs: Tensor) -> Tensor:
    """Return `mask` without the tokens whose generator log-probability is not finite; they have no importance ratio."""
    return mask & generator_logprobs.isfinite()


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    mask: Tensor,
) -> tuple[Tensor, RatioStats]:
    """Compute PPO's clipped surrogate per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    `dual_clip` c > 1 bounds the loss by -c A where A < 0. Sources: PPO (arXiv:1707.06347); two separate bounds as in DAPO
    (arXiv:2503.14476); dual clip (arXiv:1912.09729).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = importance_ratio(logprobs, old_logprobs, mask=valid)
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        highest = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > highest)
        loss, clipped = torch.where(beyond, highest, loss), clipped | beyond
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=clipped & valid)


def importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """Compute -r A per token, without a clip on r."""
    valid = valid_tokens(mask, old_logprobs)
    ratio = importance_ratio(logprobs, old_logprobs, mask=valid)
    return torch.where(valid, -ratio * advantages, 0.0), RatioStats(ratio=ratio.detach(), clipped=torch.zeros_like(valid))


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor) -> tuple[Tensor, RatioStats]:
    """Compute -A logprobs per token; r is only reported. Source: Williams 1992; for language models arXiv:2402.14740."""
    valid = valid_tokens(mask, old_logprobs)
    ratio = importance_ratio(logprobs.detach(), old_logprobs, mask=valid)
    loss = -advantages * torch.where(valid, logprobs, 0.0)
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio, clipped=torch.zeros_like(valid))


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    mask: Tensor,
) -> tuple[Tensor, RatioStats]:
    """Compute PPO's surrogate with one ratio s per sequence: the geometric mean of the ratios of its tokens.

    s = exp(sg(mean of log r) + logprobs - sg(logprobs)), where sg stops the gradient. Each token carries its share of the
    gradient; with `sequence_mean` weights the shares add up to the gradient of s A. Source: GSPO (arXiv:2507.18071).

    Tensors must be `[N]`, with `sequence` as in `segments`.
    """
    valid = valid_tokens(mask, old_logprobs)
    mean = segment_mean(log_ratio(logprobs.detach(), old_logprobs, mask=valid), sequence, mask=valid)
    own = torch.where(valid, logprobs, 0.0)
    sequence_log_ratio = torch.where(valid, mean + own - own.detach(), 0.0)
    ratio = sequence_log_ratio.clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=clipped & valid)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """Compute -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs per token.

    A clipped token keeps its gradient, unlike in `ppo_clip`. Source: CISPO (arXiv:2506.13585).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = importance_ratio(logprobs.detach(), old_logprobs, mask=valid)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * advantages * torch.where(valid, logprobs, 0.0)
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio, clipped=(bounded != ratio) & valid)


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float, mask: Tensor) -> tuple[Tensor, RatioStats]:
    """Compute -(A logprobs - beta / 2 (log r)^2) per token, for data of other policies.

    The loss is not proportional to A, so loss weights cannot be multiplied into the advantages.
    Source: DRO (arXiv:2405.19107), in Tinker's form.
    """
    valid = valid_tokens(mask, old_logprobs)
    log_ratios = log_ratio(logprobs, old_logprobs, mask=valid)
    loss = 0.5 * beta * log_ratios.square() - advantages * torch.where(valid, logprobs, 0.0)
    ratio = bounded_exp(log_ratios.detach())
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio, clipped=torch.zeros_like(valid))


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, temperatures: tuple[float, float], mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """Compute -4 / tau sigmoid(tau (r - 1)) A per token: a soft gate instead of a clip.

    `temperatures` hold tau for A > 0 and for all other A. The gradient at r = 1 equals that of -r A.
    Source: SAPO (arXiv:2511.20347).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = importance_ratio(logprobs, old_logprobs, mask=valid)
    tau = torch.full_like(advantages, temperatures[1]).masked_fill(advantages > 0, temperatures[0])
    loss = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=torch.zeros_like(valid))


def cross_entropy(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Compute the negative log-likelihood per token; 0 at masked tokens."""
    return torch.where(mask, -logprobs, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
    """Sum w * l over the tokens that count, 0-dim: this share of the step's objective. Ranks and micro-batches add up."""
    return torch.where(mask, loss * torch.where(mask, weights, 0.0), 0.0).sum()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r) A), and where the clipped term is the smaller one."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), clipped > unclipped
