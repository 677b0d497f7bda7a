"""The objective of an optimizer step on one micro-batch: correction, loss, divergence from a reference, entropy, metrics.

Shape suffix: N tokens of the micro-batch. Every term is sum(w * l) with the same weights w, computed from the counts of the
whole step. Weights are not multiplied into the advantages, because not every loss is proportional to the advantage.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms import losses
from titanrl.algorithms.corrections import Correction, correct, correction_sums, weights_after_rejection
from titanrl.algorithms.kl import kl_estimate
from titanrl.algorithms.losses import LossMetrics, RatioStats, valid_tokens, weighted_sum
from titanrl.algorithms.ratios import MAX_LOG_RATIO, importance_ratio, log_ratio
from titanrl.algorithms.segments import segment_to_go
from titanrl.config.sections import AlgorithmConfig
from titanrl.types import NOT_MEASURED, CorrectionTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of one micro-batch. Only `logprobs_N` and `entropy_N` carry gradients."""

    logprobs_N: Tensor
    """Log-probability of each token under the policy being trained."""
    generator_logprobs_N: Tensor
    """Log-probability under the sampling policy; tokens where it is not finite count as masked."""
    proximal_logprobs_N: Tensor | None
    """Log-probability under the proximal policy; None if `algorithm.proximal` needs no separate forward pass."""
    reference_logprobs_N: Tensor | None
    """Log-probability under the reference policy; None without a divergence term."""
    entropy_N: Tensor | None
    """Entropy of each token's distribution; with gradient if there is an entropy bonus."""
    advantages_N: Tensor
    """Advantage of each token."""
    weights_N: Tensor
    """Loss weight of each token."""
    mask_N: Tensor
    """True at the tokens that count."""
    sequence_N: Tensor
    """Id of each token's sequence: int64, unique in the micro-batch, below N."""
    correction: CorrectionTotals = NOT_MEASURED
    """Totals of the correction over the whole step, if `algorithm.correction` is measured."""


def policy_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, LossMetrics]:
    """Compute this micro-batch's share of the objective, 0-dim, and its metrics.

    The caller sums gradients over micro-batches and ranks, never averages them.
    """
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    proximal_N = _proximal(inputs)
    correction = correct(proximal_N, inputs.generator_logprobs_N, inputs.sequence_N, algorithm.correction, mask=valid_N)
    loss_N, ratio = token_loss(inputs, algorithm, proximal_N, correction.kept_N)
    if correction.weights_N is not None:
        loss_N = loss_N * correction.weights_N
    if algorithm.correction.batch_normalize:
        loss_N = loss_N / inputs.correction.mean_weight
    weights_N = inputs.weights_N
    if algorithm.correction.denominator == "post":
        weights_N = weights_after_rejection(
            weights_N, correction, inputs.sequence_N, algorithm.reduction, inputs.correction, mask=valid_N
        )
    terms = {"loss/policy": weighted_sum(loss_N, weights_N, mask=correction.kept_N)}
    if algorithm.kl.coef and algorithm.kl.place == "loss":
        kl_N = algorithm.kl.coef * _kl(inputs, algorithm, correction.kept_N)
        terms["loss/kl"] = weighted_sum(kl_N, weights_N, mask=correction.kept_N)
    if algorithm.entropy_coef:
        assert inputs.entropy_N is not None, "an entropy bonus needs the entropy"
        bonus_N = algorithm.entropy_coef * inputs.entropy_N
        terms["loss/entropy"] = -weighted_sum(bonus_N, weights_N, mask=correction.kept_N)
    total = torch.stack(list(terms.values())).sum()
    return total, _metrics(inputs, terms, ratio, correction, proximal_N, valid_N)


@torch.no_grad()
def measure_correction(inputs: LossInputs, algorithm: AlgorithmConfig) -> LossMetrics:
    """Compute this micro-batch's share of the sums for `loss_weights.correction_totals`, without gradient."""
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    config, sequence_N = algorithm.correction, inputs.sequence_N
    correction = correct(_proximal(inputs), inputs.generator_logprobs_N, sequence_N, config, mask=valid_N)
    return LossMetrics(sums=correction_sums(correction, sequence_N, config, mask=valid_N), maxima={})


def token_loss(inputs: LossInputs, algorithm: AlgorithmConfig, proximal_N: Tensor, mask_N: Tensor) -> tuple[Tensor, RatioStats]:
    """Compute the loss that `algorithm.loss` names, per token and unweighted; 0 outside `mask_N`."""
    logprobs_N, advantages_N = inputs.logprobs_N, _advantages(inputs, algorithm)
    old_N = inputs.generator_logprobs_N if algorithm.ratio_starts_at_sampler else proximal_N
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo":
            return losses.ppo_clip(
                logprobs_N,
                old_N,
                advantages_N,
                clip_low=low,
                clip_high=high,
                dual_clip=algorithm.dual_clip,
                mask=mask_N,
            )
        case "importance_sampling":
            return losses.importance_sampling(logprobs_N, old_N, advantages_N, mask=mask_N)
        case "reinforce":
            return losses.reinforce(logprobs_N, inputs.generator_logprobs_N, advantages_N, mask=mask_N)
        case "gspo":
            return losses.gspo(logprobs_N, old_N, advantages_N, inputs.sequence_N, clip_low=low, clip_high=high, mask=mask_N)
        case "cispo":
            return losses.cispo(logprobs_N, old_N, advantages_N, clip_low=low, clip_high=high, mask=mask_N)
        case "dro":
            return losses.dro(logprobs_N, old_N, advantages_N, beta=algorithm.dro_beta, mask=mask_N)
        case "sapo":
            return losses.sapo(logprobs_N, old_N, advantages_N, temperatures=algorithm.sapo_temperatures, mask=mask_N)


def _proximal(inputs: LossInputs) -> Tensor:
    """Return the proximal policy's log-probabilities, by default the current ones without gradient."""
    given_N = inputs.proximal_logprobs_N
    return inputs.logprobs_N.detach() if given_N is None else given_N


def _advantages(inputs: LossInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the advantages. With `kl.place: reward`, subtract the divergence of each token and the later ones."""
    if not (algorithm.kl.coef and algorithm.kl.place == "reward"):
        return inputs.advantages_N
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    k1_N = kl_estimate(inputs.logprobs_N.detach(), _reference(inputs), "k1", mask=valid_N)
    return inputs.advantages_N - algorithm.kl.coef * segment_to_go(k1_N, inputs.sequence_N, mask=valid_N)


def _kl(inputs: LossInputs, algorithm: AlgorithmConfig, mask_N: Tensor) -> Tensor:
    """Compute the divergence from the reference per token, with gradient."""
    kl_N = kl_estimate(inputs.logprobs_N, _reference(inputs), algorithm.kl.estimator, mask=mask_N)
    if not algorithm.kl.importance_weighted:
        return kl_N
    return importance_ratio(inputs.logprobs_N.detach(), inputs.generator_logprobs_N, mask=mask_N) * kl_N


def _reference(inputs: LossInputs) -> Tensor:
    assert inputs.reference_logprobs_N is not None, "a divergence term needs the reference's log-probabilities"
    return inputs.reference_logprobs_N


@torch.no_grad()
def _metrics(
    inputs: LossInputs,
    terms: Mapping[str, Tensor],
    ratio: RatioStats,
    correction: Correction,
    proximal_N: Tensor,
    valid_N: Tensor,
) -> LossMetrics:
    """Compute sums and maxima of one micro-batch, over the tokens that count and have a finite generator log-probability.

    `mismatch/*` compares the proximal policy with the generator's: d = proximal - generator log-probability. Its estimates of
    KL(generator, proximal) are k3, exp(d) - 1 - d (`mismatch/kl`, never negative), and k1, -d (`mismatch/kl_k1`).
    Source: http://joschu.net/blog/kl-approx.html
    """
    d_N = log_ratio(proximal_N, inputs.generator_logprobs_N, mask=valid_N)
    bounded_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "policy/ratio_mean": ratio.ratio,
        "policy/clip_frac": ratio.clipped.to(d_N.dtype),
        "mismatch/logprob_abs_mean": d_N.abs(),
        # In fp32 exp(d) - 1 would round the small differences away that this metric shows.
        "mismatch/kl": bounded_N.expm1() - bounded_N,
        "mismatch/kl_k1": -d_N,
        "mismatch/chi2": (2.0 * bounded_N).expm1(),
        **_correction_by_token(correction, valid_N, d_N.dtype),
    }
    if inputs.entropy_N is not None:
        by_token["policy/entropy"] = inputs.entropy_N
    if inputs.reference_logprobs_N is not None:
        by_token["policy/kl_ref"] = kl_estimate(inputs.logprobs_N, inputs.reference_logprobs_N, "k3", mask=valid_N)
    sums = {name: torch.where(valid_N, values_N, 0.0).sum() for name, values_N in by_token.items()}
    sums |= {name: term.detach() for name, term in terms.items()}
    sums |= {"loss/total": torch.stack(list(terms.values())).sum(), "num_tokens": valid_N.sum().to(d_N.dtype)}
    maxima = {
        "policy/ratio_max": _masked_max(ratio.ratio, valid_N),
        "mismatch/logprob_abs_max": _masked_max(d_N.abs(), valid_N),
    }
    return LossMetrics(sums=sums, maxima=maxima)


def _correction_by_token(correction: Correction, valid_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the correction's metrics; `correction_weight` and its square give the effective sample size."""
    by_token = {"correction/reject_frac": (valid_N & ~correction.kept_N).to(dtype)}
    if correction.weights_N is not None:
        weights_N = torch.where(correction.kept_N, correction.weights_N, 0.0)
        by_token |= {
            "correction/clip_frac": correction.truncated_N.to(dtype),
            "correction_weight": weights_N,
            "correction_weight_squared": weights_N.square(),
        }
    return by_token


def _masked_max(values_N: Tensor, valid_N: Tensor) -> Tensor:
    """Return the largest of the counted values, which must not be negative; 0 without values."""
    counted_N = torch.where(valid_N, values_N, 0.0)
    return torch.cat([counted_N, counted_N.new_zeros(1)]).max()
