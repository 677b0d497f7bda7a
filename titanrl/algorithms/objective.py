"""Compute a micro-batch's share of the objective: policy loss with off-policy correction, KL penalty, entropy bonus, metrics.

Each term is sum(w * l) with the same loss weights w, which are computed from the counts of the complete step. The weights are
not multiplied into the advantages, because not every loss is proportional to the advantage.

Shape suffix: N tokens of the micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanrl.algorithms.contracts import LossInputs, PolicyLoss, bound_loss
from titanrl.algorithms.losses import LossMetrics, valid_tokens, weighted_sum
from titanrl.algorithms.ratios import MAX_LOG_RATIO, Correction, bounded_exp, correct, kl_estimate, log_ratio, weight_sums
from titanrl.algorithms.segments import segment_to_go
from titanrl.carriers.rewards import PART_NAME
from titanrl.config.algorithm import AlgorithmConfig

OLDEST = 4
"""Lag of the last bin of `lag_metrics`, which also contains all larger lags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """Inputs of the objective on one micro-batch. Only `logprobs_N` and `entropy_N` require grad."""

    logprobs_N: Tensor
    """Log-probability of each token under the current policy."""
    generator_logprobs_N: Tensor
    """Log-probability under the sampling policy; tokens where it is not finite are masked."""
    proximal_logprobs_N: Tensor | None
    """Log-probability under the proximal policy; None if `algorithm.proximal` needs no separate forward pass."""
    reference_logprobs_N: Tensor | None
    """Log-probability under the reference policy; None without a KL penalty."""
    entropy_N: Tensor | None
    """Entropy of the current policy's distribution at each token, with gradient if there is an entropy bonus."""
    advantages_N: Tensor
    """Advantage of each token."""
    weights_N: Tensor
    """Loss weight of each token."""
    mask_N: Tensor
    """True at loss tokens."""
    sequence_N: Tensor
    """Id of each token's sequence: int64, unique in the micro-batch, less than N."""
    mean_weight: float = 1.0
    """Mean correction weight of the complete step, if `algorithm.correction` needs it."""
    support_sizes_N: Tensor | None = None
    """Number of vocabulary entries in each token's support; None without truncated sampling."""


def policy_loss(
    inputs: ObjectiveInputs, algorithm: AlgorithmConfig, loss: PolicyLoss | None = None
) -> tuple[Tensor, LossMetrics]:
    """Compute this micro-batch's share of the objective, 0-dim, and its metrics.

    The objective is sum of w * (rho * loss + kl.coef * KL - entropy_coef * entropy) over the tokens that the correction keeps,
    where rho is the correction weight. Gradients must be summed over micro-batches and ranks, not averaged.

    `loss` has its options bound, see `bound_loss`; None selects the built-in loss `algorithm.loss`. Raise `ValueError` if the
    loss raised, did not return one value per token, or does not depend on the log-probabilities.
    """
    tokens = token_terms(inputs, algorithm, loss)
    kept_N = tokens.correction.kept_N
    terms = {name: weighted_sum(term_N, inputs.weights_N, mask=kept_N) for name, term_N in tokens.terms_N.items()}
    total = torch.stack(list(terms.values())).sum()
    if torch.is_grad_enabled() and inputs.logprobs_N.requires_grad and not total.requires_grad:
        what = "must depend on logprobs_N or entropy_N through operations of torch, but has no gradient"
        raise ValueError(f"algorithm.loss: {algorithm.loss} {what} (got a constant). Remove detach() or .item() from it.")
    return total, _metrics(inputs, terms, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Terms of the objective at each token, before loss weights. Tokens that the correction rejects have no loss."""

    terms_N: Mapping[str, Tensor]
    """Each term by the name of its metric, such as `loss/policy`."""
    values: Mapping[str, Tensor]
    """Importance ratio (`ratio`), `clip`, and other values of the loss for the metrics."""
    correction: Correction
    proximal_N: Tensor
    """Log-probability under the proximal policy, without gradient."""
    valid_N: Tensor
    """True at loss tokens with a finite generator log-probability."""
    advantages_N: Tensor
    """Advantages, with `kl.place: reward` after the KL penalty."""


def token_terms(inputs: ObjectiveInputs, algorithm: AlgorithmConfig, loss: PolicyLoss | None = None) -> TokenTerms:
    """Compute the terms of the objective at each token; see `policy_loss`."""
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    proximal_N, advantages_N = _proximal(inputs), _advantages(inputs, algorithm)
    correction = correct(proximal_N, inputs.generator_logprobs_N, inputs.sequence_N, algorithm.correction, mask=valid_N)
    kept_N = correction.kept_N
    loss_N, values = token_loss(loss or bound_loss(algorithm), inputs, algorithm, proximal_N, advantages_N, kept_N)
    if correction.weights_N is not None:
        loss_N = loss_N * correction.weights_N
    if algorithm.correction.batch_normalize:
        loss_N = loss_N / inputs.mean_weight
    terms_N = {"loss/policy": loss_N}
    if algorithm.kl.coef and algorithm.kl.place == "loss":
        kl_N = kl_estimate(inputs.logprobs_N, _reference(inputs), algorithm.kl.estimator, mask=kept_N)
        if algorithm.kl.importance_weighted:
            to_sampler_N = log_ratio(inputs.logprobs_N.detach(), inputs.generator_logprobs_N, mask=kept_N)
            kl_N = bounded_exp(to_sampler_N) * kl_N
        terms_N["loss/kl"] = algorithm.kl.coef * kl_N
    if algorithm.has_entropy_bonus:
        assert inputs.entropy_N is not None, "the entropy bonus needs entropies"
        terms_N["loss/entropy"] = -algorithm.entropy_coef * inputs.entropy_N
    return TokenTerms(
        terms_N=terms_N,
        values=values,
        correction=correction,
        proximal_N=proximal_N,
        valid_N=valid_N,
        advantages_N=advantages_N,
    )


@torch.no_grad()
def measure_correction(inputs: ObjectiveInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum and the number of a micro-batch's correction weights, and masks of its loss tokens before and after
    rejection.

    `mean_correction_weight` and `without_rejected` combine them over micro-batches and ranks.
    """
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    config, sequence_N = algorithm.correction, inputs.sequence_N
    correction = correct(_proximal(inputs), inputs.generator_logprobs_N, sequence_N, config, mask=valid_N)
    return *weight_sums(correction, sequence_N, config), valid_N, correction.kept_N


def token_loss(
    loss: PolicyLoss,
    inputs: ObjectiveInputs,
    algorithm: AlgorithmConfig,
    proximal_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss per token, `[N]`, unweighted and 0 at masked tokens, and its per-token values for the metrics."""
    old_N = proximal_N if algorithm.divides_by_proximal else inputs.generator_logprobs_N
    tokens = LossInputs.of(
        inputs.logprobs_N,
        old_N,
        advantages_N,
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
    """Return the result of a loss as a pair; raise ValueError if a tensor does not have one value per token."""
    loss_N: Any
    values: Mapping[str, Any]
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss_N, values = result if is_pair else (result, {})  # type: ignore[misc]
    if wrong := [value for value in map(str, values) if PART_NAME.fullmatch(value) is None]:
        rule = "must name its values with letters, digits, _, . and -, because these are parts of metrics"
        raise ValueError(f"algorithm.loss: {name} {rule} (got {wrong[0]!r:.60}). Rename it.")
    for what, values_N in (("it", loss_N), *values.items()):
        found = tuple(values_N.shape) if isinstance(values_N, Tensor) else type(values_N).__name__
        if found != tuple(mask_N.shape):
            raise ValueError(
                f"algorithm.loss: {name} must return one value per token, {tuple(mask_N.shape)} (got {found} for {what}). "
                "Return the losses without a sum or mean over tokens, or a pair of them and a mapping of such values."
            )
    return loss_N, values


def _proximal(inputs: ObjectiveInputs) -> Tensor:
    """Return the log-probabilities under the proximal policy, by default the current policy, without gradient."""
    return inputs.logprobs_N.detach() if inputs.proximal_logprobs_N is None else inputs.proximal_logprobs_N


def _advantages(inputs: ObjectiveInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Return the advantages. With `kl.place: reward`, subtract the KL penalty: kl.coef times the k1-to-go of each token."""
    if not (algorithm.kl.coef and algorithm.kl.place == "reward"):
        return inputs.advantages_N
    valid_N = valid_tokens(inputs.mask_N, inputs.generator_logprobs_N)
    k1_N = kl_estimate(inputs.logprobs_N.detach(), _reference(inputs), "k1", mask=valid_N)
    return inputs.advantages_N - algorithm.kl.coef * segment_to_go(k1_N, inputs.sequence_N, mask=valid_N)


def _reference(inputs: ObjectiveInputs) -> Tensor:
    assert inputs.reference_logprobs_N is not None, "the KL penalty needs reference log-probabilities"
    return inputs.reference_logprobs_N


@torch.no_grad()
def _metrics(
    inputs: ObjectiveInputs,
    terms: Mapping[str, Tensor],
    tokens: TokenTerms,
) -> LossMetrics:
    """Compute sums and maxima of one micro-batch, over loss tokens with a finite generator log-probability.

    `mismatch/*` compares the proximal policy with the sampler, with d = proximal - generator log-probability. It estimates
    KL(generator, proximal) by k3 = exp(d) - 1 - d (`mismatch/kl`, never negative) and by k1 = -d (`mismatch/kl_k1`), and the
    chi-squared divergence by exp(2 d) - 1 (`mismatch/chi2`). Source: http://joschu.net/blog/kl-approx.html
    """
    values, correction, valid_N = tokens.values, tokens.correction, tokens.valid_N
    d_N = log_ratio(tokens.proximal_N, inputs.generator_logprobs_N, mask=valid_N)
    bounded_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "policy/ratio_mean": values["ratio"],
        "policy/clip_frac": values["clip"].to(d_N.dtype),
        "mismatch/logprob_abs_mean": d_N.abs(),
        # In fp32, exp(d) - 1 would lose the small differences that this metric measures.
        "mismatch/kl": bounded_N.expm1() - bounded_N,
        "mismatch/kl_k1": -d_N,
        "mismatch/chi2": (2.0 * bounded_N).expm1(),
        "correction/reject_frac": (valid_N & ~correction.kept_N).to(d_N.dtype),
    }
    if correction.weights_N is not None:  # the sums of weights and squared weights give the effective sample size
        kept_weights_N = torch.where(correction.kept_N, correction.weights_N, 0.0)
        by_token["correction/clip_frac"] = correction.truncated_N.to(d_N.dtype)
        by_token |= {"correction_weight": kept_weights_N, "correction_weight_squared": kept_weights_N.square()}
    for name, values_N in values.items():
        if name not in ("ratio", "clip"):
            by_token[f"policy/{name}_{'frac' if values_N.dtype == torch.bool else 'mean'}"] = values_N.to(d_N.dtype)
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


def _masked_max(values_N: Tensor, valid_N: Tensor) -> Tensor:
    """Return the maximum of nonnegative values over valid tokens, or 0 without valid tokens."""
    masked_N = torch.where(valid_N, values_N, 0.0)
    return torch.cat([masked_N, masked_N.new_zeros(1)]).max()


@torch.no_grad()
def lag_metrics(
    logprobs_N: Tensor, generator_logprobs_N: Tensor, lags_N: Tensor, mask_N: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sums and maxima of absolute log-probability differences, and token counts, by lag.

    The lag (age) of a token is the policy version being trained minus the policy version that sampled it. At lag 0 the
    difference is numerical only. At larger lags it also includes the change of the policy. The sum `lag/<k>` is the number of
    tokens with lag k, and `lag/<k>/logprob_abs` is the sum of their absolute differences, in nats. Log-probabilities of the
    generator must be finite at unmasked tokens.
    """
    difference_N = torch.where(mask_N, (logprobs_N - generator_logprobs_N).abs(), 0.0)
    ages_K = torch.arange(OLDEST + 1, device=lags_N.device)
    by_age_NK = (lags_N.clamp(0, OLDEST)[:, None] == ages_K) & mask_N[:, None]
    counts_K = by_age_NK.sum(0)
    differences_NK = difference_N[:, None] * by_age_NK
    totals_K, largest_K = differences_NK.sum(0), differences_NK.amax(0)
    sums = {f"lag/{age}": counts_K[age] for age in range(OLDEST + 1)}
    sums |= {f"lag/{age}/logprob_abs": totals_K[age] for age in range(OLDEST + 1)}
    return sums, {"lag/0/logprob_abs": largest_K[0], "lag/stale/logprob_abs": largest_K[1:].max()}
