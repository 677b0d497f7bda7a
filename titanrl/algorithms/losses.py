"""Built-in policy losses, one value per token. They are not normalized: the loss weights contain all normalization.

A loss is a function of `LossInputs` that follows the protocol `contracts.PolicyLoss`. To add a built-in loss, register it in
`titanrl.config.algorithm.LOSSES`.

Shape suffix: N tokens. In the formulas, r = exp(logprobs - old_logprobs) is the importance ratio, A the advantage, and sg the
stop-gradient (`detach`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms.contracts import LossInputs
from titanrl.algorithms.segments import segment_mean

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound on the absolute mean log-ratio of a sequence in `gspo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Metrics of one micro-batch on one rank as 0-dim tensors, to be reduced over micro-batches and ranks."""

    sums: dict[str, Tensor]
    """Metrics that are reduced by sum. All but `loss/*` and `num_tokens` are then divided by `num_tokens`."""
    maxima: dict[str, Tensor]
    """Metrics that are reduced by maximum; 0 without tokens."""


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """Compute the critic's loss per token, 0.5 max((v - R)^2, (v_clip - R)^2), and a mask of the tokens whose v is clipped.

    v_clip is v, clipped to `clip` around its value before the update. A clipped token has no gradient. Without `clip`, the loss
    is 0.5 (v - R)^2. Source: PPO (arXiv:1707.06347) as in OpenAI's baselines.
    """
    loss_N = 0.5 * (values_N - returns_N).square()
    if clip is None:
        return loss_N, torch.zeros_like(loss_N, dtype=torch.bool)
    bounded_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    bounded_loss_N = 0.5 * (bounded_N - returns_N).square()
    return torch.maximum(loss_N, bounded_loss_N), bounded_loss_N > loss_N


def ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute the clipped surrogate loss of PPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    `dual_clip` c > 1 also bounds the loss by -c A where A < 0. Sources: PPO (arXiv:1707.06347, equation 7); separate lower and
    upper bounds as in DAPO (arXiv:2503.14476); dual clip (arXiv:1912.09729).
    """
    advantages_N = inputs.advantages_N
    loss_N, clipped_N = _clipped_surrogate(inputs.ratio_N, advantages_N, clip_low, clip_high)
    if dual_clip is not None:
        bound_N = -dual_clip * advantages_N
        beyond_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N, clipped_N = torch.where(beyond_N, bound_N, loss_N), clipped_N | beyond_N
    return loss_N, {"clip": clipped_N}


def importance_sampling(inputs: LossInputs) -> Tensor:
    """Compute -r A, without clipping r. Source: `importance_sampling` in Tinker."""
    return -inputs.ratio_N * inputs.advantages_N


def reinforce(inputs: LossInputs) -> Tensor:
    """Compute -A logprobs. Sources: REINFORCE (Williams 1992); for language models arXiv:2402.14740."""
    return -inputs.advantages_N * inputs.logprobs_N


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute PPO's clipped surrogate with a sequence-level ratio s, the geometric mean of the token ratios.

    s = exp(sg(mean of log r) + logprobs - sg(logprobs)), the GSPO-token form: its value is the same at every token of the
    sequence, and each token has its own gradient. With `sequence_mean` weights, the token gradients sum to the gradient of s A.
    Source: GSPO (arXiv:2507.18071).
    """
    logprobs_N, mask_N = inputs.logprobs_N, inputs.mask_N
    mean_N = segment_mean(inputs.log_ratio_N.detach(), inputs.sequence_N, mask=mask_N)
    log_ratio_N = torch.where(mask_N, mean_N + logprobs_N - logprobs_N.detach(), 0.0)
    ratio_N = log_ratio_N.clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    loss_N, clipped_N = _clipped_surrogate(ratio_N, inputs.advantages_N, clip_low, clip_high)
    return loss_N, {"ratio": ratio_N, "clip": clipped_N}


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs.

    Unlike in `ppo`, clipped tokens keep a gradient. Source: CISPO (arXiv:2506.13585).
    """
    ratio_N = inputs.ratio_N.detach()
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded_N * inputs.advantages_N * inputs.logprobs_N, {"clip": bounded_N != ratio_N}


def dro(inputs: LossInputs, *, dro_beta: float) -> Tensor:
    """Compute -(A logprobs - beta / 2 (log r)^2), for off-policy data.

    The loss is not proportional to A, so loss weights cannot be multiplied into the advantages.
    Source: DRO (arXiv:2405.19107), in Tinker's form.
    """
    return 0.5 * dro_beta * inputs.log_ratio_N.square() - inputs.advantages_N * inputs.logprobs_N


def sapo(inputs: LossInputs, *, sapo_temperatures: tuple[float, float]) -> Tensor:
    """Compute -4 / tau sigmoid(tau (r - 1)) A: a soft gate instead of a hard clip.

    `sapo_temperatures` are tau for A > 0 and tau for A <= 0. At r = 1 the gradient equals that of -r A.
    Source: SAPO (arXiv:2511.20347).
    """
    positive, other = sapo_temperatures
    advantages_N = inputs.advantages_N
    tau_N = torch.full_like(advantages_N, other).masked_fill(advantages_N > 0, positive)
    return -4.0 / tau_N * torch.sigmoid(tau_N * (inputs.ratio_N - 1.0)) * advantages_N


def valid_tokens(mask: Tensor, generator_logprobs: Tensor) -> Tensor:
    """Return `mask` without tokens whose generator log-probability is not finite, because they have no importance ratio."""
    return mask & generator_logprobs.isfinite()


def cross_entropy(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Compute the negative log-likelihood per token; 0 at masked tokens."""
    return torch.where(mask, -logprobs, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum of w * l over unmasked tokens, 0-dim. Its sum over micro-batches and ranks is the step's objective."""
    return torch.where(mask, loss * torch.where(mask, weights, 0.0), 0.0).sum()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r) A), and True where clip(r) A is less than r A."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), clipped > unclipped
