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


def dppo_tv(inputs: LossInputs, *, dppo_threshold: float | None = None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute -r A, and 0 where the update would increase a total-variation distance that exceeds the threshold.

    The distance is that of the two outcomes "this token" and "another one", |p - p_old|. Masked are tokens with A > 0 and
    r > 1, or A < 0 and r < 1. Source: DPPO (arXiv:2602.04879), Binary-TV.
    """
    distance_N = (inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()).abs()
    return _trusted(inputs, distance_N > (0.15 if dppo_threshold is None else dppo_threshold))


def dppo_kl(inputs: LossInputs, *, dppo_threshold: float | None = None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute the loss `dppo_tv` with the KL divergence p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).

    Source: DPPO (arXiv:2602.04879), Binary-KL.
    """
    logp_N, old_N = inputs.logprobs_N.detach(), inputs.old_logprobs_N
    tiny = torch.finfo(old_N.dtype).tiny
    rest_N, old_rest_N = ((-values_N.expm1()).clamp(min=tiny) for values_N in (logp_N, old_N))  # 1 - p
    divergence_N = old_N.exp() * (old_N - logp_N) + old_rest_N * (old_rest_N / rest_N).log()
    return _trusted(inputs, divergence_N > (0.05 if dppo_threshold is None else dppo_threshold))


def clip_cov(
    inputs: LossInputs, *, clip_low: float, clip_high: float, cov_share: float, clip_cov_bounds: tuple[float, float]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute the loss `ppo`, and 0 at randomly selected tokens whose log-probability and advantage vary together.

    The covariance of a token is (logprob - mean)(A - mean), with the means over the tokens of the micro-batch. A share
    `cov_share` of these tokens, at least one, is selected among those that are not clipped and have a covariance within the
    bounds. Such tokens reduce the entropy most. Source: Clip-Cov (arXiv:2505.22617).
    """
    loss_N, clipped_N = _clipped_surrogate(inputs.ratio_N, inputs.advantages_N, clip_low, clip_high)
    covariance_N, (low, high) = _covariance(inputs), clip_cov_bounds
    (places,) = (inputs.mask_N & ~clipped_N & (covariance_N > low) & (covariance_N < high)).nonzero(as_tuple=True)
    # All ranks of a tensor-parallel group, and a repeated run, must select the same tokens.
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))
    chosen = places[order[: max(int(cov_share * int(inputs.mask_N.sum())), 1)].to(places.device)]
    selected_N = torch.zeros_like(inputs.mask_N).index_fill(0, chosen, True)
    return torch.where(selected_N, 0.0, loss_N), {"clip": clipped_N | selected_N, "selected": selected_N}


def kl_cov(inputs: LossInputs, *, cov_share: float, kl_cov_coef: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute -r A, plus `kl_cov_coef` |log r| at the share `cov_share` of tokens with the largest covariance, at least one.

    The covariance is that of `clip_cov`. Source: KL-Cov (arXiv:2505.22617).
    """
    covariance_N = torch.where(inputs.mask_N, _covariance(inputs), -torch.inf)
    num = int(inputs.mask_N.sum())
    chosen = covariance_N.topk(min(max(int(cov_share * num), 1), num)).indices
    selected_N = torch.zeros_like(inputs.mask_N).index_fill(0, chosen, True)
    penalty_N = torch.where(selected_N, kl_cov_coef * inputs.log_ratio_N.abs(), 0.0)
    return penalty_N - inputs.ratio_N * inputs.advantages_N, {"selected": selected_N}


def valid_tokens(mask: Tensor, generator_logprobs: Tensor) -> Tensor:
    """Return `mask` without tokens whose generator log-probability is not finite, because they have no importance ratio."""
    return mask & generator_logprobs.isfinite()


def cross_entropy(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Compute the negative log-likelihood per token; 0 at masked tokens."""
    return torch.where(mask, -logprobs, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum of w * l over unmasked tokens, 0-dim. Its sum over micro-batches and ranks is the step's objective."""
    return torch.where(mask, loss * torch.where(mask, weights, 0.0), 0.0).sum()


def _trusted(inputs: LossInputs, is_far_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return -r A, and 0 at far tokens whose update would move them further away."""
    masked_N = is_far_N & (inputs.advantages_N * inputs.log_ratio_N.detach() > 0)
    return torch.where(masked_N, 0.0, -inputs.ratio_N * inputs.advantages_N), {"clip": masked_N}


def _covariance(inputs: LossInputs) -> Tensor:
    """Return the product of each token's distances from the mean log-probability and the mean advantage; 0 at masked tokens."""
    mask_N, count = inputs.mask_N, inputs.mask_N.sum().clamp(min=1)
    # Masked values are 0, and do not count.
    logprob_N, advantage_N = (
        values_N - values_N.sum() / count for values_N in (inputs.logprobs_N.detach(), inputs.advantages_N)
    )
    return torch.where(mask_N, logprob_N * advantage_N, 0.0)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r) A), and True where clip(r) A is less than r A."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), clipped > unclipped
