"""Losses per token. Nothing here divides: the loss weights carry every scale.

Every tensor of a call has one shape, `[N]` or `[B, L]`. `mask` is true at the tokens that count. What stands elsewhere is
taken out with `torch.where` before it is used, as inf or NaN there would survive a multiplication by 0.

`old_logprobs` are those of the policy that the ratio r = exp(logprobs - old_logprobs) starts from; tokens where they are not
finite count as masked. Losses are 0 at masked tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.segments import segment_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before exp, so that one token cannot overflow the batch."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""What the mean log-ratio of a sequence is clamped to in `gspo`."""

HOMOGENEOUS = frozenset({"importance_sampling", "ppo", "gspo", "cispo", "reinforce", "sapo"})
"""Losses l with l(w * A) = w * l(A) for w >= 0: a loss weight may as well be folded into the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """How far the policy is from the one its ratio starts from, by token and without gradient."""

    ratio: Tensor
    """The ratio of the loss; 1 at masked tokens."""
    clipped: Tensor
    """True where a bound takes effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Metrics of one micro-batch on one rank as 0-dim tensors, to be reduced over micro-batches and ranks."""

    sums: dict[str, Tensor]
    """To be added up. `loss/*` and `num_tokens` are then complete; the others are divided by `num_tokens`."""
    maxima: dict[str, Tensor]
    """To be combined by maximum; 0 without tokens."""


def valid_tokens(mask: Tensor, generator_logprobs: Tensor) -> Tensor:
    """`mask` without the tokens whose generator log-probability is not finite, which have no importance ratio."""
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
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token.

    With `dual_clip` c > 1, no more than -c A where A < 0. Sources: PPO (arXiv:1707.06347); two separate bounds as in DAPO
    (arXiv:2503.14476); dual clip (arXiv:1912.09729).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = _log_ratio(logprobs, old_logprobs, valid).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        highest = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > highest)
        loss, clipped = torch.where(beyond, highest, loss), clipped | beyond
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=clipped & valid)


def importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """-r A per token, without any bound on r."""
    valid = valid_tokens(mask, old_logprobs)
    ratio = _log_ratio(logprobs, old_logprobs, valid).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(valid, -ratio * advantages, 0.0), RatioStats(ratio=ratio.detach(), clipped=torch.zeros_like(valid))


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor) -> tuple[Tensor, RatioStats]:
    """-A logprobs per token; r is only reported. Source: Williams 1992; for language models arXiv:2402.14740."""
    valid = valid_tokens(mask, old_logprobs)
    ratio = _log_ratio(logprobs.detach(), old_logprobs, valid).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
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
    """PPO's surrogate with one ratio s a sequence, the geometric mean of its r; `[N]` only, `sequence` as in `segments`.

    s = exp(sg(mean of log r) + logprobs - sg(logprobs)), where sg stops the gradient: each token carries its share of the
    gradient, so that with `sequence_mean` weights it is the one of s A. Source: GSPO (arXiv:2507.18071).
    """
    valid = valid_tokens(mask, old_logprobs)
    mean = segment_mean(_log_ratio(logprobs.detach(), old_logprobs, valid), sequence, mask=valid)
    own = torch.where(valid, logprobs, 0.0)
    log_ratio = torch.where(valid, mean + own - own.detach(), 0.0)
    ratio = log_ratio.clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=clipped & valid)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs per token: the bound on r silences no token.

    Source: CISPO (arXiv:2506.13585).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = _log_ratio(logprobs.detach(), old_logprobs, valid).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * advantages * torch.where(valid, logprobs, 0.0)
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio, clipped=(bounded != ratio) & valid)


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float, mask: Tensor) -> tuple[Tensor, RatioStats]:
    """-(A logprobs - beta / 2 (log r)^2) per token, off-policy by design.

    Not homogeneous in A: weights must not be folded into advantages. Source: DRO (arXiv:2405.19107), as Tinker writes it.
    """
    valid = valid_tokens(mask, old_logprobs)
    log_ratio = _log_ratio(logprobs, old_logprobs, valid)
    loss = 0.5 * beta * log_ratio.square() - advantages * torch.where(valid, logprobs, 0.0)
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio, clipped=torch.zeros_like(valid))


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, temperatures: tuple[float, float], mask: Tensor
) -> tuple[Tensor, RatioStats]:
    """-4 / tau sigmoid(tau (r - 1)) A per token: a soft gate for the clip, with tau for A > 0 and for the others.

    The gradient at r = 1 is that of -r A. Source: SAPO (arXiv:2511.20347).
    """
    valid = valid_tokens(mask, old_logprobs)
    ratio = _log_ratio(logprobs, old_logprobs, valid).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.full_like(advantages, temperatures[1]).masked_fill(advantages > 0, temperatures[0])
    loss = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return torch.where(valid, loss, 0.0), RatioStats(ratio=ratio.detach(), clipped=torch.zeros_like(valid))


def cross_entropy(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Negative log-likelihood per token; 0 at masked tokens."""
    return torch.where(mask, -logprobs, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
    """Sum of w * l over the tokens that count, 0-dim: this share of the step's objective. Ranks and micro-batches add up."""
    return torch.where(mask, loss * torch.where(mask, weights, 0.0), 0.0).sum()


def fold_weights(advantages: Tensor, weights: Tensor, loss: str) -> Tensor:
    """A * w, for a caller that sums a loss without weights; the result is the same only for homogeneous losses.

    Raises ValueError for the other losses.
    """
    if loss not in HOMOGENEOUS:
        names = ", ".join(sorted(HOMOGENEOUS))
        raise ValueError(f"loss {loss}: weights can be folded into the advantages only of {names}; pass them as weights")
    return advantages * weights


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, logprobs - old_logprobs, 0.0)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the clipped term is the one that counts."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), clipped > unclipped
