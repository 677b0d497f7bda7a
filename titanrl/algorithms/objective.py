"""The objective of an optimizer step on one micro-batch: correction, loss, divergence from a reference, entropy, metrics.

Shape suffix: N tokens of the micro-batch. Every term is sum(w * l) with the same weights w, which come from the counts of the
whole step and stay apart from the advantages: not every loss would stand their being folded in.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titanrl.algorithms import losses
from titanrl.algorithms.corrections import Correction, correct, correction_sums, weights_after_rejection
from titanrl.algorithms.kl import kl_estimate
from titanrl.algorithms.losses import MAX_LOG_RATIO, LossMetrics, RatioStats, valid_tokens, weighted_sum
from titanrl.algorithms.segments import segment_to_go
from titanrl.config.sections import AlgorithmConfig
from titanrl.types import NOT_MEASURED, CorrectionTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of one micro-batch is made of. Only `logprobs_N` and `entropy_N` carry gradients."""

    logprobs_N: Tensor
    """Log-probability of each token under the policy that is trained."""
    generator_logprobs_N: Tensor
    """Under the policy that sampled it; tokens where it is not finite count as masked."""
    proximal_logprobs_N: Tensor | None
    """Under the proximal policy; None where `algorithm.proximal` needs no pass of its own."""
    reference_logprobs_N: Tensor | None
    """Under the reference policy; None without a divergence term."""
    entropy_N: Tensor | None
    """Entropy of each token's distribution; with gradient if there is an entropy bonus."""
    advantages_N: Tensor
    """Advantage of each token."""
    weights_N: Tensor
    """Loss weight of each token."""
    mask_N: Tensor
    """True at the tokens that count."""
    sequence_N: Tensor
    """Sequence that each token belongs to: int64, unique in the micro-batch, below N."""
    correction: CorrectionTotals = NOT_MEASURED
    """The correction over the whole step, where `algorithm.correction` wants it measured."""


def policy_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, LossMetrics]:
    """This micro-batch's share of the objective, 0-dim, and its metrics.

    Micro-batches and ranks add up: gradients are to be summed over them, never averaged.
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
    """This micro-batch's share of what `weights.correction_totals` needs of the whole step; no gradient."""
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    config, sequence_N = algorithm.correction, inputs.sequence_N
    correction = correct(_proximal(inputs), inputs.generator_logprobs_N, sequence_N, config, mask=valid_N)
    return LossMetrics(sums=correction_sums(correction, sequence_N, config, mask=valid_N), maxima={})


def token_loss(inputs: LossInputs, algorithm: AlgorithmConfig, proximal_N: Tensor, mask_N: Tensor) -> tuple[Tensor, RatioStats]:
    """The loss that `algorithm.loss` names, per token, without weights of any kind; 0 outside `mask_N`."""
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
    """Log-probabilities of the proximal policy; without a pass of its own it is the current one, taken as it is."""
    given_N = inputs.proximal_logprobs_N
    return inputs.logprobs_N.detach() if given_N is None else given_N


def _advantages(inputs: LossInputs, algorithm: AlgorithmConfig) -> Tensor:
    """The advantages; with the divergence in the reward, less that of a token and the later ones of its sequence."""
    if not (algorithm.kl.coef and algorithm.kl.place == "reward"):
        return inputs.advantages_N
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    k1_N = kl_estimate(inputs.logprobs_N.detach(), _reference(inputs), "k1", mask=valid_N)
    return inputs.advantages_N - algorithm.kl.coef * segment_to_go(k1_N, inputs.sequence_N, mask=valid_N)


def _kl(inputs: LossInputs, algorithm: AlgorithmConfig, mask_N: Tensor) -> Tensor:
    """Divergence from the reference per token, with gradient."""
    kl_N = kl_estimate(inputs.logprobs_N, _reference(inputs), algorithm.kl.estimator, mask=mask_N)
    if not algorithm.kl.importance_weighted:
        return kl_N
    log_ratio_N = torch.where(mask_N, inputs.logprobs_N.detach() - inputs.generator_logprobs_N, 0.0)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl_N


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
    """Sums and maxima of one micro-batch, over the tokens that count and have a finite generator log-probability.

    `mismatch/*` compares the proximal policy with the generator's: d = proximal - generator log-probability. Its estimates of
    KL(generator, proximal) are k3, exp(d) - 1 - d (`mismatch/kl`, never negative), and k1, -d (`mismatch/kl_k1`).
    Source: http://joschu.net/blog/kl-approx.html
    """
    d_N = torch.where(valid_N, proximal_N - inputs.generator_logprobs_N, 0.0)
    bounded_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "policy/ratio_mean": ratio.ratio,
        "policy/clip_frac": ratio.clipped.to(d_N.dtype),
        "mismatch/logprob_abs_mean": d_N.abs(),
        # expm1, as exp(d) - 1 in fp32 would drown the small differences that this is to show.
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
    """What the correction did; `correction_weight` and its square give the effective sample size."""
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
    """Largest of the values that count, which are never negative; 0 if there are none."""
    counted_N = torch.where(valid_N, values_N, 0.0)
    return torch.cat([counted_N, counted_N.new_zeros(1)]).max()
