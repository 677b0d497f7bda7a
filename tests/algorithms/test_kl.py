"""KL estimators: values worked out by hand, and exact expectations over a small vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from titanrl.algorithms.ratios import kl_estimate
from titanrl.base.choices import KLEstimator

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3", "k3_straight_through")
LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.5, -0.9], dtype=torch.float64).log_softmax(0)
ALL = torch.ones(4, dtype=torch.bool)


def divergence(logits: Tensor) -> Tensor:
    """Compute KL(policy, reference) exactly."""
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - REFERENCE)).sum()


def expectation(logits: Tensor, estimator: KLEstimator) -> Tensor:
    """Compute the expected estimate under the policy; the probabilities of samples carry no gradient."""
    logp = logits.log_softmax(0)
    return (logp.detach().exp() * kl_estimate(logp, REFERENCE, estimator, mask=ALL)).sum()


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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_match_finite_differences(estimator: KLEstimator) -> None:
    logp = LOGITS.log_softmax(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda logp: kl_estimate(logp, REFERENCE, estimator, mask=ALL), (logp,))


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
