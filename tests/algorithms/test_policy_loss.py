"""The complete objective: off-policy correction, policy loss, KL penalty, entropy bonus and metrics."""

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from titanrl.algorithms.batch_plan import mean_correction_weight, sequence_weights, without_rejected
from titanrl.algorithms.objective import ObjectiveInputs, measure_correction, policy_loss
from titanrl.carriers.tables import SEQUENCE as SEQUENCE_COLUMNS
from titanrl.carriers.tables import MicroBatch, RowTable
from titanrl.carriers.types import MeasuredCorrection
from titanrl.config.algorithm import AlgorithmConfig, Reduction

REDUCTIONS: tuple[Reduction, ...] = ("sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant")

LENGTHS = (9, 1, 14, 6, 10)
SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
NUM_TOKENS = sum(LENGTHS)
LOSS_NAMES = ("ppo", "importance_sampling", "reinforce", "gspo", "cispo", "dro", "sapo")
DECOUPLED: dict[str, Any] = {"proximal": "step_start", "correction": {"preset": "token_tis"}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss, "clip_low": 0.1, "clip_high": 0.1} for loss in LOSS_NAMES},
    "decoupled": DECOUPLED,
    "gspo, sequence weights": {"loss": "gspo", "proximal": "step_start", "correction": {"preset": "sequence_mis"}},
    "reinforce, icepop": {"loss": "reinforce", "correction": {"preset": "icepop"}},
    "geometric": {"correction": {"reject_geometric_prox_over_behavior": (0.9, 1.05), "veto_prox_over_behavior": (0.4, 2.5)}},
    "kl, entropy": {"kl": {"coef": 0.3}, "entropy_coef": 0.2},
    "everything": {**DECOUPLED, "kl": {"coef": 0.3, "estimator": "k3"}, "entropy_coef": 0.2, "dual_clip": 3.0},
    "kl in reward": {"loss": "reinforce", "kl": {"coef": 0.3, "estimator": "k1", "place": "reward"}},
}


def example(seed: int = 0, dtype: torch.dtype = torch.float64, drift: float = 0.3) -> ObjectiveInputs:
    """Return five sequences whose policy, proximal, reference and generator differ by about `drift`."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    behavior = -3.0 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64) / NUM_TOKENS
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return ObjectiveInputs(
        logprobs_N=(behavior + drift * normal()).to(dtype).requires_grad_(),
        generator_logprobs_N=behavior.to(dtype),
        proximal_logprobs_N=(behavior + drift * normal()).to(dtype),
        reference_logprobs_N=(behavior + drift * normal()).to(dtype),
        entropy_N=normal().abs().to(dtype).requires_grad_(),
        advantages_N=advantages[SEQUENCE].to(dtype),
        weights_N=weights[SEQUENCE].to(dtype),
        mask_N=torch.rand(NUM_TOKENS, generator=generator) < 0.8,
        sequence_N=SEQUENCE,
    )


def part(inputs: ObjectiveInputs, place: slice) -> ObjectiveInputs:
    """Return a slice of the tokens, with sequence ids from 0."""
    cut = {
        field.name: value[place]
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and field.name != "sequence_N"
    }
    return replace(inputs, **cut, sequence_N=inputs.sequence_N[place] - inputs.sequence_N[place][:1])


def gradients(inputs: ObjectiveInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by log-probabilities and entropies."""
    loss, _ = policy_loss(inputs, algorithm)
    by = torch.autograd.grad(loss, (inputs.logprobs_N, inputs.entropy_N), materialize_grads=True)
    return loss.detach(), *by


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "gspo", "sapo"])
@pytest.mark.parametrize("proximal", ["sampler", "step_start"])
def test_equal_policies_give_negative_weighted_advantages(loss: str, proximal: str) -> None:
    inputs = example()
    same = inputs.logprobs_N.detach().clone()
    inputs = replace(inputs, generator_logprobs_N=same, proximal_logprobs_N=same)
    correction = {"preset": "geometric_token_tis"} if proximal == "step_start" and loss != "importance_sampling" else {}
    algorithm = AlgorithmConfig(loss=loss, proximal=proximal, correction=correction)
    total, metrics = policy_loss(inputs, algorithm)
    expected = -(inputs.weights_N * inputs.advantages_N)[inputs.mask_N].sum()
    # The gate of sapo is 2 / tau where the ratio is 1; only its gradient is that of the others.
    if loss != "sapo":
        assert total.item() == pytest.approx(expected.item(), rel=1e-14)
    assert metrics.sums["policy/ratio_mean"] == metrics.sums["num_tokens"]
    assert metrics.maxima["policy/ratio_max"] == 1.0
    assert metrics.sums["policy/clip_frac"] == 0.0
    assert metrics.sums["correction/reject_frac"] == 0.0
    if correction:
        assert metrics.sums["correction_weight"] == metrics.sums["num_tokens"]
        assert metrics.sums["correction/clip_frac"] == 0.0


def test_decoupled_ppo_with_all_terms_matches_definition() -> None:
    algorithm = AlgorithmConfig(
        proximal="step_start",
        clip_low=0.1,
        clip_high=0.15,
        correction={"weight": "token", "max_prox_over_behavior": 1.2, "reject_token_prox_over_behavior": [0.7, 1.5]},
        kl={"coef": 0.3, "estimator": "k3"},
        entropy_coef=0.2,
    )
    inputs = example()
    expected, num_rejected = 0.0, 0
    rows = zip(
        *(
            getattr(inputs, field.name).tolist()
            for field in fields(inputs)
            if field.name not in ("mean_weight", "support_sizes_N")
        ),
        strict=True,
    )
    for now, sampled, proximal, reference, entropy, advantage, weight, counts, _ in rows:
        rho, r = math.exp(proximal - sampled), math.exp(now - proximal)
        if not counts:
            continue
        if not 0.7 <= rho <= 1.5:
            num_rejected += 1
            continue
        surrogate = min(r * advantage, min(max(r, 0.9), 1.15) * advantage)
        k3 = math.exp(reference - now) - 1 + (now - reference)
        expected += weight * (-min(rho, 1.2) * surrogate + 0.3 * math.exp(now - sampled) * k3 - 0.2 * entropy)
    total, metrics = policy_loss(inputs, algorithm)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert metrics.sums["correction/reject_frac"] == num_rejected > 0
    assert sum(metrics.sums[f"loss/{term}"].item() for term in ("policy", "kl", "entropy")) == pytest.approx(total.item())


@pytest.mark.parametrize("name", ["gspo", "decoupled", "everything"])  # test_losses has the others
def test_gradients_match_finite_differences(name: str) -> None:
    settings = ALGORITHMS[name]
    if "kl" in settings:
        settings = settings | {"kl": settings["kl"] | {"importance_weighted": False}}
    inputs, algorithm = example(), AlgorithmConfig(**settings)
    # gspo spreads the gradient over the tokens of a sequence, which needs the same mask and weight for all of them.
    inputs = replace(inputs, mask_N=torch.ones(NUM_TOKENS, dtype=torch.bool)) if name == "gspo" else inputs

    def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(replace(inputs, logprobs_N=logprobs, entropy_N=entropy), algorithm)[0]

    assert torch.autograd.gradcheck(objective, (inputs.logprobs_N, inputs.entropy_N))


def test_importance_weights_carry_no_gradient() -> None:
    # Without a pass of its own the proximal policy is the current one: r = 1, and the gradient is -w rho A.
    inputs = replace(example(), proximal_logprobs_N=None)
    _, by_logprobs, _ = gradients(inputs, AlgorithmConfig(**DECOUPLED))
    rho = (inputs.logprobs_N - inputs.generator_logprobs_N).exp().clamp(max=2.0).detach()
    expected = torch.where(inputs.mask_N, -inputs.weights_N * rho * inputs.advantages_N, 0.0)
    torch.testing.assert_close(by_logprobs, expected, atol=1e-14, rtol=1e-13)


def test_kl_in_reward_subtracts_kl_to_go_from_advantage() -> None:
    inputs = replace(example(), mask_N=torch.ones(NUM_TOKENS, dtype=torch.bool))
    _, by_logprobs, _ = gradients(inputs, AlgorithmConfig(**ALGORITHMS["kl in reward"]))
    k1 = (inputs.logprobs_N - inputs.reference_logprobs_N).detach()
    to_go = [k1[t:][SEQUENCE[t:] == SEQUENCE[t]].sum() for t in range(NUM_TOKENS)]
    expected = -inputs.weights_N * (inputs.advantages_N - 0.3 * torch.stack(to_go))
    torch.testing.assert_close(by_logprobs, expected)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("cuts", [[1], [2, 4], [1, 2, 3, 4]])
def test_micro_batches_change_neither_loss_nor_metrics(name: str, cuts: list[int]) -> None:
    inputs, algorithm = example(dtype=torch.float32), AlgorithmConfig(**ALGORITHMS[name])
    _, whole = policy_loss(inputs, algorithm)
    loss, *by = gradients(inputs, algorithm)
    borders = [sum(LENGTHS[:cut]) for cut in [0, *cuts, len(LENGTHS)]]
    pieces = [part(inputs, slice(start, end)) for start, end in itertools.pairwise(borders)]
    results = [policy_loss(piece, algorithm) for piece in pieces]
    total = torch.stack([piece_loss for piece_loss, _ in results]).sum()
    torch.testing.assert_close(total, loss, atol=1e-6, rtol=0)
    for one, other in zip(
        torch.autograd.grad(total, (inputs.logprobs_N, inputs.entropy_N), materialize_grads=True), by, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    for metric, value in whole.sums.items():
        assert sum(metrics.sums[metric].item() for _, metrics in results) == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
    for metric, value in whole.maxima.items():
        assert max(metrics.maxima[metric].item() for _, metrics in results) == pytest.approx(value.item())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_nan_affects_neither_loss_nor_gradient(name: str, bad: float) -> None:
    inputs, algorithm = example(), AlgorithmConfig(**ALGORITHMS[name])
    spoilt = {
        field.name: torch.where(inputs.mask_N, value.detach(), bad)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and value.is_floating_point()
    }
    for variable in ("logprobs_N", "entropy_N"):
        spoilt[variable].requires_grad_()
    for one, other in zip(gradients(replace(inputs, **spoilt), algorithm), gradients(inputs, algorithm), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batch_without_tokens_is_zero_everywhere(name: str) -> None:
    inputs = replace(example(), mask_N=torch.zeros(NUM_TOKENS, dtype=torch.bool))
    algorithm = AlgorithmConfig(**ALGORITHMS[name])
    assert not any(value.any() for value in gradients(inputs, algorithm))
    _, metrics = policy_loss(inputs, algorithm)
    assert {value.item() for value in (*metrics.sums.values(), *metrics.maxima.values())} == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_with_non_finite_sampler_logprob_are_masked(bad: float) -> None:
    inputs = example()
    counted = int(inputs.mask_N.nonzero()[3])
    generator = inputs.generator_logprobs_N.clone()
    generator[counted] = bad
    without = replace(inputs, mask_N=inputs.mask_N & (torch.arange(NUM_TOKENS) != counted))
    algorithm = AlgorithmConfig(**ALGORITHMS["everything"])
    spoilt = replace(inputs, generator_logprobs_N=generator)
    for one, other in zip(gradients(spoilt, algorithm), gradients(without, algorithm), strict=True):
        assert torch.equal(one, other)
    assert policy_loss(spoilt, algorithm)[1].sums["num_tokens"] == inputs.mask_N.sum() - 1


def measured(pieces: list[ObjectiveInputs], algorithm: AlgorithmConfig) -> list[ObjectiveInputs]:
    """Return the micro-batches with the correction totals over all micro-batches."""
    sums = [measure_correction(piece, algorithm)[:2] for piece in pieces]
    counts = np.zeros((0, 2), np.int64)
    mean_weight = mean_correction_weight(
        MeasuredCorrection(dp_rank=0, weight=weight.item(), num_weights=int(count), counts=counts) for weight, count in sums
    )
    return [replace(piece, mean_weight=mean_weight) for piece in pieces]


def post_weighted(
    pieces: list[ObjectiveInputs], rollouts: list[list[int]], algorithm: AlgorithmConfig
) -> list[ObjectiveInputs]:
    """Return the micro-batches with the weights of a step without the rejected tokens, given the rollout of each sequence."""
    microbatches, effects = [], []
    for piece, rollout_of in zip(pieces, rollouts, strict=True):
        ids = range(len(rollout_of))
        table = np.zeros(len(rollout_of), SEQUENCE_COLUMNS)
        table["rollout"] = rollout_of
        table["weight"] = [piece.weights_N[piece.sequence_N == i][0].item() for i in ids]
        microbatches.append(MicroBatch(rows=(RowTable(table, np.array([len(table)])),)))
        weight, count, before_N, after_N = measure_correction(piece, algorithm)
        counts = np.array([[int(mask_N[piece.sequence_N == i].sum()) for mask_N in (before_N, after_N)] for i in ids])
        effects.append([MeasuredCorrection(dp_rank=0, weight=weight.item(), num_weights=int(count), counts=counts)])
    scaled = without_rejected(microbatches, effects, algorithm.reduction)
    weights = [torch.from_numpy(microbatch.rows[0].sequences["weight"].copy()) for microbatch in scaled]
    return [replace(piece, weights_N=weights_S[piece.sequence_N]) for piece, weights_S in zip(pieces, weights, strict=True)]


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_normalized_weights_have_mean_one_over_step(weight: str) -> None:
    plain = {"weight": weight, "max_prox_over_behavior": 1.1}
    algorithm = AlgorithmConfig(loss="reinforce", correction=plain | {"batch_normalize": True})
    inputs = replace(example(), proximal_logprobs_N=None)
    border = sum(LENGTHS[:2])
    pieces = measured([part(inputs, slice(border)), part(inputs, slice(border, None))], algorithm)
    ratios = (inputs.logprobs_N - inputs.generator_logprobs_N).detach()
    by_sequence = [ratios[(sequence == SEQUENCE) & inputs.mask_N] for sequence in range(len(LENGTHS))]
    weights = torch.cat(by_sequence) if weight == "token" else torch.stack([d.sum() for d in by_sequence if len(d)])
    mean = weights.exp().clamp(max=1.1).mean().item()
    assert pieces[0].mean_weight == pytest.approx(mean)
    normalized = sum(policy_loss(piece, algorithm)[0].item() for piece in pieces)
    unnormalized, _ = policy_loss(inputs, AlgorithmConfig(loss="reinforce", correction=plain))
    assert normalized == pytest.approx(unnormalized.item() / mean)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_post_denominator_equals_batch_without_rejected_tokens(reduction: Reduction) -> None:
    bounds = {"reject_token_prox_over_behavior": (0.8, 1.2), "veto_prox_over_behavior": (0.6, 1.7), "denominator": "post"}
    more = {"reduction": reduction, "kl": {"coef": 0.3}, "entropy_coef": 0.2}
    algorithm = AlgorithmConfig(correction=bounds, **more)
    inputs = replace(example(4), proximal_logprobs_N=None)
    ratio = (inputs.logprobs_N - inputs.generator_logprobs_N).exp().detach()
    outlier = [not 0.6 <= r <= 1.7 for r in ratio.tolist()]
    vetoed = {int(s) for s, out, counts in zip(SEQUENCE, outlier, inputs.mask_N, strict=True) if out and counts}
    kept = inputs.mask_N & (ratio >= 0.8) & (ratio <= 1.2) & torch.tensor([int(s) not in vetoed for s in SEQUENCE])
    assert 0 < len(vetoed) < len(LENGTHS)

    rollout_of = torch.tensor([0, 1, 1, 2, 2])  # the second one has its segments in two micro-batches

    def with_weights(mask: Tensor) -> ObjectiveInputs:
        counts = [int(mask[rollout == rollout_of[SEQUENCE]].sum()) for rollout in range(3)]
        weights = sequence_weights(reduction, num_sampled=counts, prompt_of=[0, 0, 0], constant_length=7)
        return replace(inputs, weights_N=torch.tensor(weights, dtype=torch.float64)[rollout_of][SEQUENCE])

    border = sum(LENGTHS[:2])
    pieces = [part(with_weights(inputs.mask_N), place) for place in (slice(border), slice(border, None))]
    post = sum(policy_loss(piece, algorithm)[0] for piece in post_weighted(pieces, [[0, 1], [1, 2, 2]], algorithm))
    never_sampled, _ = policy_loss(replace(with_weights(kept), mask_N=kept), AlgorithmConfig(**more))
    assert post.item() == pytest.approx(never_sampled.item(), rel=1e-12)
    by_post, by_never_sampled = (torch.autograd.grad(loss, inputs.logprobs_N)[0] for loss in (post, never_sampled))
    torch.testing.assert_close(by_post, by_never_sampled, atol=1e-14, rtol=1e-12)


def test_step_with_all_tokens_rejected_has_zero_loss() -> None:
    algorithm = AlgorithmConfig(correction={"reject_token_prox_over_behavior": (0.999, 1.001), "denominator": "post"})
    inputs = replace(example(), proximal_logprobs_N=None)
    inputs = replace(inputs, generator_logprobs_N=inputs.logprobs_N.detach() - 1.0)
    (piece,) = post_weighted([inputs], [[0, 1, 1, 2, 2]], algorithm)
    assert not piece.weights_N.any()
    assert [value.any().item() for value in gradients(piece, algorithm)] == [False, False, False]


def test_terms_without_their_inputs_raise() -> None:
    inputs = replace(example(), reference_logprobs_N=None, entropy_N=None)
    with pytest.raises(AssertionError, match="reference"):
        policy_loss(inputs, AlgorithmConfig(kl={"coef": 0.1}))
    with pytest.raises(AssertionError, match="entropy"):
        policy_loss(inputs, AlgorithmConfig(entropy_coef=0.1))


# Metrics


def small(ratios: list[float], mask: list[bool] | None = None, dtype: torch.dtype = torch.float64) -> ObjectiveInputs:
    """Return one sequence with given ratios to the sampler, advantage 1, weight 0.5 and entropy 2."""
    ones = torch.ones(len(ratios), dtype=dtype)
    return ObjectiveInputs(
        logprobs_N=(torch.tensor(ratios, dtype=dtype).log() - 1.0).requires_grad_(),
        generator_logprobs_N=-ones,
        proximal_logprobs_N=None,
        reference_logprobs_N=None,
        entropy_N=2.0 * ones,
        advantages_N=ones,
        weights_N=0.5 * ones,
        mask_N=torch.tensor(mask or [True] * len(ratios)),
        sequence_N=torch.zeros(len(ratios), dtype=torch.int64),
    )


def test_metrics_by_hand() -> None:
    # Three tokens that count with ratios 0.5, 1.0 and 2.0, and one that does not.
    _, metrics = policy_loss(small([0.5, 1.0, 2.0, 9.0], [True, True, True, False]), AlgorithmConfig(clip_high=0.3))
    ln2 = math.log(2)
    assert {name: value.item() for name, value in metrics.sums.items()} == pytest.approx(
        {
            "policy/ratio_mean": 3.5,
            "policy/clip_frac": 1.0,  # 2.0 is above 1.3
            "policy/entropy": 6.0,
            "mismatch/logprob_abs_mean": 2 * ln2,
            "mismatch/kl": (0.5 - 1 + ln2) + (2 - 1 - ln2),
            "mismatch/kl_k1": 0.0,
            "mismatch/chi2": (0.25 - 1) + (4 - 1),
            "correction/reject_frac": 0.0,
            "loss/policy": 0.5 * -(0.5 + 1.0 + 1.3),
            "loss/total": 0.5 * -(0.5 + 1.0 + 1.3),
            "num_tokens": 3.0,
        },
        abs=1e-14,
    )
    assert {name: value.item() for name, value in metrics.maxima.items()} == pytest.approx(
        {"policy/ratio_max": 2.0, "mismatch/logprob_abs_max": ln2}, rel=1e-14
    )


def test_correction_metrics_by_hand() -> None:
    correction = {"weight": "token", "max_prox_over_behavior": 1.5, "reject_token_prox_over_behavior": [0.6, 9.0]}
    _, metrics = policy_loss(small([0.5, 1.0, 2.0]), AlgorithmConfig(loss="reinforce", correction=correction))
    values = {name[11:]: value.item() for name, value in metrics.sums.items() if name.startswith("correction")}
    assert values == pytest.approx({"reject_frac": 1.0, "clip_frac": 1.0, "weight": 2.5, "weight_squared": 1.0 + 2.25})


def test_kl_of_huge_mismatch_stays_finite() -> None:
    inputs = replace(small([1.0], dtype=torch.float32), generator_logprobs_N=torch.tensor([-301.0]))
    _, metrics = policy_loss(inputs, AlgorithmConfig())
    assert metrics.maxima["mismatch/logprob_abs_max"] == 300.0
    assert metrics.sums["mismatch/kl"].item() == pytest.approx(math.exp(20), rel=1e-6)
    assert metrics.sums["mismatch/chi2"].isfinite()


def test_metrics_are_scalars_without_gradient() -> None:
    _, metrics = policy_loss(example(), AlgorithmConfig(**ALGORITHMS["everything"]))
    values = [*metrics.sums.values(), *metrics.maxima.values()]
    assert all(value.shape == () and not value.requires_grad for value in values)


def test_kl_of_tiny_mismatch_survives_fp32() -> None:
    difference = 2.0**-17
    inputs = replace(
        small([1.0] * 1000, dtype=torch.float32), logprobs_N=torch.full((1000,), -1.0 + difference, requires_grad=True)
    )
    _, metrics = policy_loss(inputs, AlgorithmConfig())
    assert metrics.sums["mismatch/kl"].item() / 1000 == pytest.approx(difference**2 / 2, rel=0.02)
