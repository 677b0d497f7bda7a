import math

import pytest
import torch
from torch import Tensor

from titanrl.algorithms.losses import LossMetrics, cross_entropy, loss_metrics, ppo_clip, valid_tokens, weighted_sum

NAN, INF = math.nan, math.inf


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def metrics(logprobs: Tensor, generator_logprobs: Tensor, mask: Tensor, *, advantage: float = 1.0) -> LossMetrics:
    """Metrics with weight 0.5 and entropy 2 at every token."""
    advantages, half = torch.full_like(logprobs, advantage), torch.full_like(logprobs, 0.5)
    loss, stats = ppo_clip(logprobs, generator_logprobs, advantages, clip_low=0.2, clip_high=0.3, mask=mask)
    return loss_metrics(
        loss=loss,
        weights=half,
        ratio_stats=stats,
        entropy=torch.full_like(logprobs, 2.0),
        logprobs=logprobs,
        generator_logprobs=generator_logprobs,
        mask=mask,
    )


def test_ppo_clip_by_hand() -> None:
    # Ratios 0.5, 1.1, 2 with a positive and with a negative advantage; the clip is [0.8, 1.3].
    logprobs, old = log(0.1, 0.22, 0.4, 0.1, 0.22, 0.4), log(0.2, 0.2, 0.2, 0.2, 0.2, 0.2)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    loss, stats = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.3, mask=torch.ones(6, dtype=torch.bool))
    assert loss.tolist() == pytest.approx([-0.5, -1.1, -1.3, 1.6, 2.2, 4.0], rel=1e-14)
    assert stats.ratio.tolist() == pytest.approx([0.5, 1.1, 2.0, 0.5, 1.1, 2.0], rel=1e-14)
    assert stats.clipped.tolist() == [False, False, True, True, False, False]


def test_ppo_clip_matches_its_definition_and_is_flat_where_clipped() -> None:
    torch.manual_seed(0)
    logprobs = torch.randn(4, 50, dtype=torch.float64, requires_grad=True)
    old, advantages, mask = (
        torch.randn(4, 50, dtype=torch.float64),
        torch.randn(4, 50, dtype=torch.float64),
        torch.rand(4, 50) < 0.7,
    )
    loss, _ = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.28, mask=mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    for i, j in torch.cartesian_prod(torch.arange(4), torch.arange(50)).tolist():
        ratio, advantage = math.exp(logprobs[i, j].item() - old[i, j].item()), advantages[i, j].item()
        clipped = min(max(ratio, 0.8), 1.28)
        expected = -min(ratio * advantage, clipped * advantage) if mask[i, j] else 0.0
        is_flat = not mask[i, j] or clipped * advantage < ratio * advantage
        assert loss[i, j].item() == pytest.approx(expected, rel=1e-12)
        assert gradient[i, j].item() == pytest.approx(0.0 if is_flat else -ratio * advantage, rel=1e-12)


def test_unchanged_policy_has_ratio_one_and_loss_minus_weighted_advantages() -> None:
    torch.manual_seed(0)
    logprobs, advantages, weights = -torch.rand(64) * 10, torch.randn(64), torch.rand(64)
    mask = torch.rand(64) < 0.5
    loss, stats = ppo_clip(logprobs, logprobs.clone(), advantages, clip_low=0.2, clip_high=0.2, mask=mask)
    assert stats.ratio.tolist() == [1.0] * 64
    assert not stats.clipped.any()
    assert torch.equal(weighted_sum(loss, weights, mask=mask), -torch.where(mask, weights * advantages, 0.0).sum())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_stands_at_masked_places_does_not_matter(bad: float) -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, bad], requires_grad=True)
    old, advantages, weights = torch.tensor([-1.5, bad]), torch.tensor([2.0, bad]), torch.tensor([0.5, bad])
    loss, _ = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.8, mask=mask)
    objective = weighted_sum(loss, weights, mask=mask) + weighted_sum(cross_entropy(logprobs, mask=mask), weights, mask=mask)
    objective.backward()
    ratio = math.exp(0.5)
    assert objective.item() == pytest.approx(-ratio + 0.5)
    assert logprobs.grad.tolist() == pytest.approx([-ratio - 0.5, 0.0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_tokens_without_a_finite_generator_logprob_are_dropped(bad: float) -> None:
    logprobs, old = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.0, bad])
    mask = torch.tensor([True, True])
    assert valid_tokens(mask, old).tolist() == [True, False]
    loss, stats = ppo_clip(logprobs, old, torch.ones(2), clip_low=0.2, clip_high=0.2, mask=mask)
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0]
    assert stats.ratio.tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert metrics(logprobs, old, mask).sums["num_tokens"] == 1.0


def test_a_policy_that_is_not_finite_is_not_hidden() -> None:
    loss, _ = ppo_clip(
        torch.tensor([NAN]), torch.tensor([-1.0]), torch.ones(1), clip_low=0.2, clip_high=0.2, mask=torch.tensor([True])
    )
    assert loss.isnan().all()


def test_log_ratios_are_clamped_before_exp() -> None:
    logprobs = torch.tensor([0.0, -1000.0], requires_grad=True)
    old, advantages = torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, 1.0])
    loss, _ = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, mask=torch.ones(2, dtype=torch.bool))
    assert loss.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_a_fully_masked_micro_batch_has_loss_and_metrics_of_zero(shape: tuple[int, ...]) -> None:
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    old, mask = torch.full(shape, -3.0), torch.zeros(shape, dtype=torch.bool)
    loss, _ = ppo_clip(logprobs, old, torch.ones(shape), clip_low=0.2, clip_high=0.2, mask=mask)
    objective = weighted_sum(loss, torch.ones(shape), mask=mask)
    objective.backward()
    assert objective.item() == 0.0
    assert not logprobs.grad.any()
    result = metrics(logprobs, old, mask)
    assert {value.item() for value in (*result.sums.values(), *result.maxima.values())} == {0.0}


def test_cross_entropy_is_minus_the_log_probability() -> None:
    loss = cross_entropy(log(0.5, 0.25, 0.1), mask=torch.tensor([True, True, False]))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4), 0.0], rel=1e-15)


def test_loss_metrics_by_hand() -> None:
    # Three tokens that count with ratios 0.5, 1.0 and 2.0, and one that does not.
    mask = torch.tensor([True, True, True, False])
    result = metrics(log(0.1, 0.3, 0.4, 0.9), log(0.2, 0.3, 0.2, 0.1), mask)
    ln2 = math.log(2)
    assert {name: value.item() for name, value in result.sums.items()} == pytest.approx(
        {
            "policy/ratio_mean": 3.5,
            "policy/clip_frac": 1.0,  # 2.0 is above 1.3
            "policy/entropy": 6.0,
            "mismatch/logprob_abs_mean": 2 * ln2,
            "mismatch/kl": (0.5 - 1 + ln2) + (2 - 1 - ln2),
            "mismatch/kl_k1": 0.0,
            "loss/policy": 0.5 * -(0.5 + 1.0 + 1.3),
            "num_tokens": 3.0,
        },
        abs=1e-14,
    )
    assert {name: value.item() for name, value in result.maxima.items()} == pytest.approx(
        {"policy/ratio_max": 2.0, "mismatch/logprob_abs_max": ln2}, rel=1e-14
    )


def test_a_huge_mismatch_is_reported_as_it_is_and_its_kl_stays_finite() -> None:
    result = metrics(torch.tensor([-1.0]), torch.tensor([-301.0]), torch.tensor([True]))
    assert result.maxima["mismatch/logprob_abs_max"] == 300.0
    assert result.sums["mismatch/kl"].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_metrics_are_zero_dimensional_and_carry_no_gradient() -> None:
    result = metrics(torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.0]), torch.tensor([True]))
    values = [*result.sums.values(), *result.maxima.values()]
    assert all(value.shape == () and not value.requires_grad for value in values)


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    torch.manual_seed(1)
    logprobs, old, mask = torch.randn(90), torch.randn(90), torch.rand(90) < 0.8
    whole = metrics(logprobs, old, mask)
    parts = [metrics(logprobs[cut], old[cut], mask[cut]) for cut in (slice(7), slice(7, 60), slice(60, 90))]
    for name, value in whole.sums.items():
        assert sum(part.sums[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-5)
    for name, value in whole.maxima.items():
        assert max(part.maxima[name].item() for part in parts) == value.item()


def test_kl_of_a_tiny_mismatch_survives_fp32() -> None:
    difference = 2.0**-17
    logprobs = torch.full((1000,), -1.0 + difference)
    result = metrics(logprobs, torch.full((1000,), -1.0), torch.ones(1000, dtype=torch.bool))
    assert result.sums["mismatch/kl"].item() / 1000 == pytest.approx(difference**2 / 2, rel=0.02)
