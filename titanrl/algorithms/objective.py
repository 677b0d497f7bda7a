"""The objective of an optimizer step on one micro-batch: correction, loss, divergence from a reference, entropy, metrics.

Shape suffix: N tokens of the micro-batch. Every term is sum(w * l) with the same weights w, computed from the counts of the
whole step. Weights are not multiplied into the advantages, because not every loss is proportional to the advantage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanrl.algorithms.contracts import LossInputs, PolicyLoss, bound_loss
from titanrl.algorithms.corrections import Correction, correct, correction_sums, weights_after_rejection
from titanrl.algorithms.kl import kl_estimate
from titanrl.algorithms.losses import LossMetrics, valid_tokens, weighted_sum
from titanrl.algorithms.ratios import MAX_LOG_RATIO, bounded_exp, importance_ratio, log_ratio
from titanrl.algorithms.segments import segment_to_go
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.types import NOT_MEASURED, CorrectionTotals

STANDARD = ("ratio", "clip")
"""Values per token that every loss has for the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """Inputs of the objective on one micro-batch. Only `logprobs_N` and `entropy_N` carry gradients."""

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
    support_sizes_N: Tensor | None = None
    """Entries of the vocabulary that truncated sampling left for each token; None without it."""


def policy_loss(
    inputs: ObjectiveInputs, algorithm: AlgorithmConfig, loss: PolicyLoss | None = None
) -> tuple[Tensor, LossMetrics]:
    """Compute this micro-batch's share of the objective, 0-dim, and its metrics.

    The caller sums gradients over micro-batches and ranks, never averages them.

    Args:
        inputs: Tokens of the micro-batch.
        algorithm: Terms of the objective.
        loss: Loss of `algorithm.loss` with its options, see `bound_loss`; by default the built-in one of that name.
    """
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    proximal_N = _proximal(inputs)
    correction = correct(proximal_N, inputs.generator_logprobs_N, inputs.sequence_N, algorithm.correction, mask=valid_N)
    loss_N, values = token_loss(loss or bound_loss(algorithm), inputs, algorithm, proximal_N, correction.kept_N)
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
    return total, _metrics(inputs, terms, values, correction, proximal_N, valid_N)


@torch.no_grad()
def measure_correction(inputs: ObjectiveInputs, algorithm: AlgorithmConfig) -> LossMetrics:
    """Compute this micro-batch's share of the sums for `loss_weights.correction_totals`, without gradient."""
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    config, sequence_N = algorithm.correction, inputs.sequence_N
    correction = correct(_proximal(inputs), inputs.generator_logprobs_N, sequence_N, config, mask=valid_N)
    return LossMetrics(sums=correction_sums(correction, sequence_N, config, mask=valid_N), maxima={})


def token_loss(
    loss: PolicyLoss, inputs: ObjectiveInputs, algorithm: AlgorithmConfig, proximal_N: Tensor, mask_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss per token, unweighted and 0 outside `mask_N`, and its values for the metrics.

    Raises:
        ValueError: The loss did not return one value per token.
    """
    old_N = proximal_N if algorithm.divides_by_proximal else inputs.generator_logprobs_N
    tokens = LossInputs.of(
        inputs.logprobs_N,
        old_N,
        _advantages(inputs, algorithm),
        mask_N=mask_N,
        sequence_N=inputs.sequence_N,
        generator_logprobs_N=inputs.generator_logprobs_N,
        reference_logprobs_N=inputs.reference_logprobs_N,
        entropy_N=inputs.entropy_N,
    )
    loss_N, values = _checked(loss(tokens), mask_N, algorithm.loss)
    ratio_N = values["ratio"] if "ratio" in values else bounded_exp(tokens.log_ratio_N.detach())
    clip_N = values["clip"] if "clip" in values else torch.zeros_like(mask_N)
    return torch.where(tokens.mask_N, loss_N, 0.0), {"ratio": ratio_N, "clip": clip_N, **values}


def _checked(result: object, mask_N: Tensor, name: str) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return what a loss returned as a pair; raise ValueError if it is not one value per token."""
    loss_N: Any
    values: Mapping[str, Any]
    loss_N, values = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    for what, values_N in {"it": loss_N, **values}.items():
        found = tuple(values_N.shape) if isinstance(values_N, Tensor) else type(values_N).__name__
        if found != tuple(mask_N.shape):
            raise ValueError(
                f"algorithm.loss: {name} must return one value per token, {tuple(mask_N.shape)} (got {found} for {what}). "
                "Return a tensor without a sum or a mean."
            )
    return loss_N, values


def _proximal(inputs: ObjectiveInputs) -> Tensor:
    """Return the proximal policy's log-probabilities, by default the current ones without gradient."""
    given_N = inputs.proximal_logprobs_N
    return inputs.logprobs_N.detach() if given_N is None else given_N


def _advantages(inputs: ObjectiveInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the advantages. With `kl.place: reward`, subtract the divergence of each token and the later ones."""
    if not (algorithm.kl.coef and algorithm.kl.place == "reward"):
        return inputs.advantages_N
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    k1_N = kl_estimate(inputs.logprobs_N.detach(), _reference(inputs), "k1", mask=valid_N)
    return inputs.advantages_N - algorithm.kl.coef * segment_to_go(k1_N, inputs.sequence_N, mask=valid_N)


def _kl(inputs: ObjectiveInputs, algorithm: AlgorithmConfig, mask_N: Tensor) -> Tensor:
    """Compute the divergence from the reference per token, with gradient."""
    kl_N = kl_estimate(inputs.logprobs_N, _reference(inputs), algorithm.kl.estimator, mask=mask_N)
    if not algorithm.kl.importance_weighted:
        return kl_N
    return importance_ratio(inputs.logprobs_N.detach(), inputs.generator_logprobs_N, mask=mask_N) * kl_N


def _reference(inputs: ObjectiveInputs) -> Tensor:
    assert inputs.reference_logprobs_N is not None, "a divergence term needs the reference's log-probabilities"
    return inputs.reference_logprobs_N


@torch.no_grad()
def _metrics(
    inputs: ObjectiveInputs,
    terms: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
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
        "policy/ratio_mean": values["ratio"],
        "policy/clip_frac": values["clip"].to(d_N.dtype),
        "mismatch/logprob_abs_mean": d_N.abs(),
        # In fp32 exp(d) - 1 would round the small differences away that this metric shows.
        "mismatch/kl": bounded_N.expm1() - bounded_N,
        "mismatch/kl_k1": -d_N,
        "mismatch/chi2": (2.0 * bounded_N).expm1(),
        **_correction_by_token(correction, valid_N, d_N.dtype),
        **{_metric_name(name, values_N): values_N.to(d_N.dtype) for name, values_N in values.items() if name not in STANDARD},
    }
    if inputs.entropy_N is not None:
        by_token["policy/entropy"] = inputs.entropy_N
    if inputs.reference_logprobs_N is not None:
        by_token["policy/kl_ref"] = kl_estimate(inputs.logprobs_N, inputs.reference_logprobs_N, "k3", mask=valid_N)
    if inputs.support_sizes_N is not None:
        by_token["tokens/support_size_mean"] = inputs.support_sizes_N.to(d_N.dtype)
    sums = {name: torch.where(valid_N, values_N, 0.0).sum() for name, values_N in by_token.items()}
    sums |= {name: term.detach() for name, term in terms.items()}
    sums |= {"loss/total": torch.stack(list(terms.values())).sum(), "num_tokens": valid_N.sum().to(d_N.dtype)}
    maxima = {
        "policy/ratio_max": _masked_max(values["ratio"], valid_N),
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


def _metric_name(name: str, values_N: Tensor) -> str:
    return f"policy/{name}_frac" if values_N.dtype == torch.bool else f"policy/{name}_mean"


def _masked_max(values_N: Tensor, valid_N: Tensor) -> Tensor:
    """Return the largest of the counted values, which must not be negative; 0 without values."""
    counted_N = torch.where(valid_N, values_N, 0.0)
    return torch.cat([counted_N, counted_N.new_zeros(1)]).max()
