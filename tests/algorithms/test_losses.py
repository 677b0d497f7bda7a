import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from titanrl.algorithms import losses
from titanrl.algorithms.contracts import LossInputs
from titanrl.algorithms.losses import cross_entropy

NAN, INF = math.nan, math.inf


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of a loss for the metrics."""

    ratio: Tensor
    clipped: Tensor


def compute(
    loss: Callable[..., object],
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    sequence: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Values]:
    """Call a loss as the objective does; return it with 0 at masked tokens."""
    inputs = LossInputs.of(logprobs, old, advantages, mask_N=mask, sequence_N=sequence)
    result = loss(inputs, **options)
    loss_N, values = result if isinstance(result, tuple) else (result, {})
    ratio, clip = values.get("ratio", inputs.ratio_N), values.get("clip", torch.zeros_like(mask))
    return torch.where(inputs.mask_N, loss_N, 0.0), Values(ratio=ratio.detach(), clipped=clip)


ppo_clip = partial(compute, losses.ppo)
importance_sampling = partial(compute, losses.importance_sampling)
reinforce = partial(compute, losses.reinforce)
gspo = partial(compute, losses.gspo)
cispo = partial(compute, losses.cispo)
dro = partial(compute, losses.dro)
sapo = partial(compute, losses.sapo)
dppo_tv = partial(compute, losses.dppo_tv)
dppo_kl = partial(compute, losses.dppo_kl)
clip_cov = partial(compute, losses.clip_cov)
kl_cov = partial(compute, losses.kl_cov)


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_nan_logprob_of_policy_propagates_to_loss() -> None:
    loss, _ = ppo_clip(
        torch.tensor([NAN]), torch.tensor([-1.0]), torch.ones(1), clip_low=0.2, clip_high=0.2, mask=torch.tensor([True])
    )
    assert loss.isnan().all()


def test_log_ratios_are_clamped_before_exp() -> None:
    logprobs = torch.tensor([0.0, -1000.0], requires_grad=True)
    old, advantages = torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, 1.0])
    loss, _ = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, mask=torch.ones(2, dtype=torch.bool))
    assert loss.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-6)


def test_cross_entropy_is_negative_log_probability() -> None:
    logprobs = log(0.5, 0.25, NAN).requires_grad_()
    loss = cross_entropy(logprobs, mask=torch.tensor([True, True, False]))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4), 0.0], rel=1e-15)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [-1.0, -1.0, 0.0]


# Every loss against a loop over plain numbers, and its gradient against finite differences.

TOKENS, SEQUENCE = 24, [0] * 7 + [1] * 11 + [2] * 6
TokenLoss = Callable[..., tuple[Tensor, Values]]
LOSSES: dict[str, TokenLoss] = {
    "ppo": partial(ppo_clip, clip_low=0.2, clip_high=0.28),
    "dual_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=2.0),
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "gspo": partial(gspo, sequence=torch.tensor(SEQUENCE), clip_low=0.1, clip_high=0.15),
    "cispo": partial(cispo, clip_low=0.3, clip_high=0.5),
    "dro": partial(dro, dro_beta=0.7),
    "sapo": partial(sapo, sapo_temperatures=(0.5, 4.0)),
    "dppo_tv": partial(dppo_tv, dppo_threshold=0.1),
    "dppo_kl": partial(dppo_kl, dppo_threshold=0.08),
    "kl_cov": partial(kl_cov, cov_share=0.2, kl_cov_coef=0.5),
}


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new and old log-probabilities, advantages and mask; some ratios are beyond every bound."""
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    logprobs = old + 0.6 * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, generator=generator, dtype=torch.float64)[torch.tensor(SEQUENCE)]
    return logprobs, old, advantages, torch.rand(TOKENS, generator=generator) < 0.8


def covariances(logprobs: list[float], advantages: list[float], mask: list[bool], only: int | None = None) -> list[float]:
    """Compute the covariance of each unmasked token, or of one."""
    unmasked = [t for t in range(len(mask)) if mask[t]]
    means = [sum(values[t] for t in unmasked) / len(unmasked) for values in (logprobs, advantages)]
    return [(logprobs[t] - means[0]) * (advantages[t] - means[1]) for t in (unmasked if only is None else [only])]


def expected_losses(
    name: str, logprobs: list[float], old: list[float], advantages: list[float], mask: list[bool]
) -> list[float]:
    """Compute the definitions token by token."""
    losses = []
    for t, (now, before, a) in enumerate(zip(logprobs, old, advantages, strict=True)):
        r = math.exp(now - before)
        own = [s for s in range(len(mask)) if SEQUENCE[s] == SEQUENCE[t] and mask[s]]
        whole = math.exp(sum(logprobs[s] - old[s] for s in own) / max(len(own), 1))
        surrogate = -min(r * a, min(max(r, 0.8), 1.28) * a)
        p, p_old = math.exp(now), math.exp(before)
        away = (a > 0 and r > 1) or (a < 0 and r < 1)
        kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p)) if p < 1 else math.inf
        largest = sorted(covariances(logprobs, advantages, mask), reverse=True)[: max(int(0.2 * sum(mask)), 1)]
        is_selected = mask[t] and covariances(logprobs, advantages, mask, t)[0] >= largest[-1]
        value = {
            "ppo": surrogate,
            "dual_clip": min(surrogate, -2.0 * a) if a < 0 else surrogate,
            "importance_sampling": -r * a,
            "reinforce": -a * now,
            "gspo": -min(whole * a, min(max(whole, 0.9), 1.15) * a),
            "cispo": -min(max(r, 0.7), 1.5) * a * now,
            "dro": -(a * now - 0.35 * (now - before) ** 2),
            "sapo": -a * 4 / (0.5 if a > 0 else 4.0) / (1 + math.exp(-(0.5 if a > 0 else 4.0) * (r - 1))),
            "dppo_tv": 0.0 if away and abs(p - p_old) > 0.1 else -r * a,
            "dppo_kl": 0.0 if away and kl > 0.08 else -r * a,
            "kl_cov": -r * a + (0.5 * abs(now - before) if is_selected else 0.0),
        }[name]
        losses.append(value if mask[t] else 0.0)
    return losses


@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_their_definitions(name: str) -> None:
    for seed in range(5):
        logprobs, old, advantages, mask = example(seed)
        loss, _ = LOSSES[name](logprobs, old, advantages, mask=mask)
        expected = expected_losses(name, logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist())
        assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cispo"])
def test_gradients_match_finite_differences(name: str) -> None:
    for seed in range(5):
        logprobs, old, advantages, mask = example(seed)
        # The same weight for each token of a sequence: gspo spreads the gradient of a sequence over its tokens.
        counts = torch.bincount(torch.tensor(SEQUENCE)[mask], minlength=3)[torch.tensor(SEQUENCE)].clamp(min=1)

        def objective(logprobs: Tensor, old=old, advantages=advantages, mask=mask, counts=counts) -> Tensor:
            return (LOSSES[name](logprobs, old, advantages, mask=mask)[0] / counts).sum()

        assert torch.autograd.gradcheck(objective, (logprobs.requires_grad_(),))


def test_cispo_gradient_is_bounded_ratio_times_advantage() -> None:
    logprobs, old, advantages, mask = example()
    loss, stats = LOSSES["cispo"](logprobs.requires_grad_(), old, advantages, mask=mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    ratio = (logprobs - old).exp().detach()
    expected = torch.where(mask, -ratio.clamp(0.7, 1.5) * advantages, 0.0)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-14)
    assert torch.equal(stats.clipped, mask & ((ratio < 0.7) | (ratio > 1.5)))
    assert stats.clipped.any()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dro"])
def test_on_policy_gradients_equal_reinforce(name: str) -> None:
    old, _, advantages, mask = example()
    logprobs = old.clone().requires_grad_()
    loss, stats = LOSSES[name](logprobs, old, advantages, mask=mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.where(mask, -advantages, 0.0), atol=1e-15, rtol=1e-15)
    assert stats.ratio.tolist() == [1.0] * TOKENS
    assert not stats.clipped.any()


def test_clip_cov_drops_unclipped_tokens_with_a_covariance_within_the_bounds() -> None:
    # Means over the four unmasked tokens: log-probability -2, advantage 0. Covariances: 3, 1, 3, 1; the ratios are 1.
    logprobs = torch.tensor([-1.0, -1.0, -3.0, -3.0, -9.0], dtype=torch.float64)
    advantages = torch.tensor([3.0, 1.0, -3.0, -1.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True] * 4 + [False])
    options = {"clip_low": 0.2, "clip_high": 0.2, "mask": mask, "clip_cov_bounds": (2.0, 5.0)}
    one, stats = clip_cov(logprobs, logprobs.clone(), advantages, cov_share=0.1, **options)  # at least one
    assert one.tolist().count(0.0) == 2  # with the masked token
    assert stats.clipped.nonzero().flatten().tolist() in ([0], [2])
    both, _ = clip_cov(logprobs, logprobs.clone(), advantages, cov_share=0.9, **options)
    assert both.tolist() == [0.0, -1.0, 0.0, 1.0, 0.0]
    # A clipped token is not selected: the ratio of the first is e.
    clipped, stats = clip_cov(logprobs, logprobs - torch.tensor([1.0, 0, 0, 0, 0]), advantages, cov_share=0.9, **options)
    assert clipped.tolist() == pytest.approx([-1.2 * 3.0, -1.0, 0.0, 1.0, 0.0])
    assert stats.clipped.tolist() == [True, False, True, False, False]
