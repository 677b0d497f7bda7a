"""KL estimates, importance weights and rejections, by hand."""

import math

import pytest
import torch
from torch import Tensor

from titanrl.algorithms.ratios import Correction, correct, kl_estimate, weight_sums
from titanrl.config.algorithm import CORRECTION_PRESETS, CorrectionConfig, KLEstimator

# Ratios of proximal to sampling policy: sequence 0 has 2, 0.5 and 4; sequence 1 has 1.25 and 1.25; sequence 2 has 0.1.
RATIOS = torch.tensor([2.0, 0.5, 4.0, 1.25, 1.25, 0.1], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])
ALL = torch.ones(6, dtype=torch.bool)


def corrected(mask: Tensor = ALL, **config) -> Correction:
    behavior = torch.linspace(-3, -1, 6, dtype=torch.float64)
    return correct(behavior + RATIOS.log(), behavior, SEQUENCE, CorrectionConfig(**config), mask=mask)


def test_default_neither_weights_nor_rejects() -> None:
    mask = torch.tensor([True, False, True, True, True, True])
    correction = corrected(mask)
    assert correction.weights_N is None
    assert torch.equal(correction.kept_N, mask)


def test_token_weights_are_ratios_up_to_bound() -> None:
    correction = corrected(weight="token", max_prox_over_behavior=2.0)
    assert correction.weights_N.tolist() == pytest.approx([2.0, 0.5, 2.0, 1.25, 1.25, 0.1])
    assert correction.truncated_N[2]
    assert not correction.truncated_N[3:].any()


def test_sequence_weights_are_products_up_to_bound() -> None:
    correction = corrected(weight="sequence", max_prox_over_behavior=3.0)
    assert correction.weights_N.tolist() == pytest.approx([3.0] * 3 + [1.5625] * 2 + [0.1])
    assert correction.truncated_N.tolist() == [True, True, True, False, False, False]


def test_masked_tokens_do_not_enter_sequence_product() -> None:
    mask = torch.tensor([True, True, False, True, True, True])
    correction = corrected(mask, weight="sequence")
    assert correction.weights_N.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.5625, 1.5625, 0.1])
    assert correction.kept_N.tolist() == mask.tolist()


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"reject_token_prox_over_behavior": (0.4, 3.0)}, [1, 1, 0, 1, 1, 0]),
        ({"reject_sequence_prox_over_behavior": (0.5, 2.0)}, [0, 0, 0, 1, 1, 0]),
        ({"reject_geometric_prox_over_behavior": (0.5, 1.5)}, [0, 0, 0, 1, 1, 0]),  # means 4^(1/3) = 1.59, 1.25, 0.1
        ({"reject_geometric_prox_over_behavior": (0.05, 1.6)}, [1, 1, 1, 1, 1, 1]),
        ({"veto_prox_over_behavior": (0.05, 3.0)}, [0, 0, 0, 1, 1, 1]),
        ({"reject_token_prox_over_behavior": (0.6, 9.0), "reject_sequence_prox_over_behavior": (0.5, 2.0)}, [0, 0, 0, 1, 1, 0]),
        ({"reject_token_prox_over_behavior": (0.6, 9.0), "veto_prox_over_behavior": (0.05, 3.9)}, [0, 0, 0, 1, 1, 0]),
    ],
)
def test_ratios_outside_bounds_are_rejected(bounds: dict[str, tuple[float, float]], kept: list[int]) -> None:
    assert corrected(**bounds).kept_N.int().tolist() == kept


def test_ratio_on_bound_is_kept() -> None:
    behavior = torch.tensor([0.0])
    config = CorrectionConfig(reject_token_prox_over_behavior=(1.0, 2.0))
    one = torch.ones(1, dtype=torch.bool)
    assert correct(behavior, behavior, torch.zeros(1, dtype=torch.int64), config, mask=one).kept_N.item()


def test_bounds_apply_to_proximal_over_behavior() -> None:
    behavior, mask, ids = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.arange(2)
    config = CorrectionConfig(reject_token_prox_over_behavior=(0.2, 1.5))
    assert correct(torch.tensor([4.0, 0.25]).log(), behavior, ids, config, mask=mask).kept_N.tolist() == [False, True]


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_presets_keep_tokens_of_equal_policies_unchanged(preset: str) -> None:
    logprobs = -torch.rand(6) * 20
    config = CorrectionConfig(preset=preset)
    correction = correct(logprobs, logprobs.clone(), SEQUENCE, config, mask=ALL)
    assert correction.kept_N.all()
    assert not correction.truncated_N.any()
    if config.weight != "none":
        assert correction.weights_N.tolist() == [1.0] * 6


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_values_of_masked_tokens_are_ignored(preset: str) -> None:
    mask = torch.tensor([True, False, True, True, True, False])
    behavior = torch.linspace(-3, -1, 6)
    proximal = behavior + 0.01
    bad = torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0, math.inf])
    config = CorrectionConfig(preset=preset)
    clean = correct(proximal, behavior, SEQUENCE, config, mask=mask)
    spoilt = correct(proximal + bad, behavior, SEQUENCE, config, mask=mask)
    assert torch.equal(clean.kept_N, spoilt.kept_N)
    if clean.weights_N is not None:
        assert torch.equal(clean.weights_N, spoilt.weights_N)


def test_overflowing_ratio_is_truncated_or_rejected() -> None:
    behavior, proximal, mask = torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]), torch.ones(2, dtype=torch.bool)
    config = CorrectionConfig(weight="token", veto_prox_over_behavior=(1e-30, 1e30))
    correction = correct(proximal, behavior, torch.arange(2), config, mask=mask)
    assert correction.weights_N.tolist() == pytest.approx([2.0, math.exp(-20)])
    assert not correction.kept_N.any()


def test_weights_are_summed_per_token_or_sequence() -> None:
    token = CorrectionConfig(weight="token", max_prox_over_behavior=2.0, veto_prox_over_behavior=(0.2, 9.0))
    weight, count = weight_sums(corrected(**token.model_dump()), SEQUENCE, token)
    assert (weight.item(), count.item()) == (pytest.approx(2.0 + 0.5 + 2.0 + 2.5), 5)
    sequence = CorrectionConfig(weight="sequence", max_prox_over_behavior=3.0)
    weight, count = weight_sums(corrected(**sequence.model_dump()), SEQUENCE, sequence)
    assert (weight.item(), count.item()) == (pytest.approx(3.0 + 1.5625 + 0.1), 3)


ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3", "k3_straight_through")
LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.5, -0.9], dtype=torch.float64).log_softmax(0)
ALL_VOCABULARY = torch.ones(4, dtype=torch.bool)


def divergence(logits: Tensor) -> Tensor:
    """Compute KL(policy, reference) exactly."""
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - REFERENCE)).sum()


def expectation(logits: Tensor, estimator: KLEstimator) -> Tensor:
    """Compute the expected estimate under the policy; the probabilities of samples carry no gradient."""
    logp = logits.log_softmax(0)
    return (logp.detach().exp() * kl_estimate(logp, REFERENCE, estimator, mask=ALL_VOCABULARY)).sum()


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def test_estimates_by_hand() -> None:
    logp, reference, mask = torch.tensor([0.5, 9.0]).log(), torch.tensor([0.25, 1.0]).log(), torch.tensor([True, False])
    values = {name: kl_estimate(logp, reference, name, mask=mask).tolist() for name in ESTIMATORS}
    ln2 = math.log(2)
    assert values["k1"] == pytest.approx([ln2, 0.0])
    assert values["k2"] == pytest.approx([ln2**2 / 2, 0.0])
    assert values["k3"] == values["k3_straight_through"] == pytest.approx([0.5 - 1 + ln2, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_straight_through"])
def test_expected_value_is_divergence(estimator: KLEstimator) -> None:
    assert expectation(LOGITS, estimator).item() == pytest.approx(divergence(LOGITS).item(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3_straight_through"])
def test_expected_gradient_is_gradient_of_divergence(estimator: KLEstimator) -> None:
    logits = LOGITS.clone().requires_grad_()
    torch.testing.assert_close(gradient(expectation(logits, estimator), logits), gradient(divergence(logits), logits))


def test_expected_gradients_of_k1_and_k3() -> None:
    logits = LOGITS.clone().requires_grad_()
    torch.testing.assert_close(gradient(expectation(logits, "k1"), logits), torch.zeros(4, dtype=torch.float64))
    logp = logits.log_softmax(0)
    other_way_round = (REFERENCE.exp() * (REFERENCE - logp)).sum()
    torch.testing.assert_close(gradient(expectation(logits, "k3"), logits), gradient(other_way_round, logits))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_and_huge_log_ratios_stay_finite(estimator: KLEstimator) -> None:
    logp = torch.tensor([-1.0, -1.0, -500.0], requires_grad=True)
    reference = torch.tensor([-1.0, -math.inf, 0.0])
    estimate = kl_estimate(logp, reference, estimator, mask=torch.tensor([True, False, True]))
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert logp.grad.isfinite().all()
    assert estimate[:2].tolist() == [0.0, 0.0]


def test_tiny_divergence_survives_fp32() -> None:
    difference = 2.0**-14
    logp = torch.full((1000,), -1.0 + difference)
    k3 = kl_estimate(logp, torch.full((1000,), -1.0), "k3", mask=torch.ones(1000, dtype=torch.bool))
    assert k3.mean().item() == pytest.approx(difference**2 / 2, rel=0.02)
