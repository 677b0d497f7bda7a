import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from titanrl.algorithms import losses
from titanrl.algorithms.contracts import LossInputs
from titanrl.algorithms.losses import cross_entropy, valid_tokens, weighted_sum

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


def test_ppo_clip_by_hand() -> None:
    # Ratios 0.5, 1.1, 2 with a positive and with a negative advantage; the clip is [0.8, 1.3].
    logprobs, old = log(0.1, 0.22, 0.4, 0.1, 0.22, 0.4), log(0.2, 0.2, 0.2, 0.2, 0.2, 0.2)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    loss, stats = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.3, mask=torch.ones(6, dtype=torch.bool))
    assert loss.tolist() == pytest.approx([-0.5, -1.1, -1.3, 1.6, 2.2, 4.0], rel=1e-14)
    assert stats.ratio.tolist() == pytest.approx([0.5, 1.1, 2.0, 0.5, 1.1, 2.0], rel=1e-14)
    assert stats.clipped.tolist() == [False, False, True, True, False, False]


def test_ppo_clip_has_zero_gradient_where_clipped() -> None:
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


def test_unchanged_policy_has_ratio_one() -> None:
    torch.manual_seed(0)
    logprobs, advantages, weights = -torch.rand(64) * 10, torch.randn(64), torch.rand(64)
    mask = torch.rand(64) < 0.5
    loss, stats = ppo_clip(logprobs, logprobs.clone(), advantages, clip_low=0.2, clip_high=0.2, mask=mask)
    assert stats.ratio.tolist() == [1.0] * 64
    assert not stats.clipped.any()
    assert torch.equal(weighted_sum(loss, weights, mask=mask), -torch.where(mask, weights * advantages, 0.0).sum())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_values_of_masked_tokens_are_ignored(bad: float) -> None:
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
def test_tokens_without_finite_generator_logprob_are_masked(bad: float) -> None:
    logprobs, old = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.0, bad])
    mask = torch.tensor([True, True])
    assert valid_tokens(mask, old).tolist() == [True, False]
    loss, stats = ppo_clip(logprobs, old, torch.ones(2), clip_low=0.2, clip_high=0.2, mask=mask)
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0]
    assert stats.ratio.tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [-1.0, 0.0]


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


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_fully_masked_micro_batch_has_zero_loss(shape: tuple[int, ...]) -> None:
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    old, mask = torch.full(shape, -3.0), torch.zeros(shape, dtype=torch.bool)
    loss, _ = ppo_clip(logprobs, old, torch.ones(shape), clip_low=0.2, clip_high=0.2, mask=mask)
    objective = weighted_sum(loss, torch.ones(shape), mask=mask)
    objective.backward()
    assert objective.item() == 0.0
    assert not logprobs.grad.any()


def test_cross_entropy_is_negative_log_probability() -> None:
    loss = cross_entropy(log(0.5, 0.25, 0.1), mask=torch.tensor([True, True, False]))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4), 0.0], rel=1e-15)


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
    "sapo": partial(sapo, sapo_temperatures=(1.0, 1.05)),
    "dppo_tv": partial(dppo_tv, dppo_threshold=0.1),
    "dppo_kl": dppo_kl,
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
            "sapo": -a * 4 / (1.0 if a > 0 else 1.05) / (1 + math.exp(-(1.0 if a > 0 else 1.05) * (r - 1))),
            "dppo_tv": 0.0 if away and abs(p - p_old) > 0.1 else -r * a,
            "dppo_kl": 0.0 if away and kl > 0.05 else -r * a,
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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_nan_affects_neither_value_nor_gradient(name: str, bad: float) -> None:
    logprobs, old, advantages, mask = example()

    def run(values: list[Tensor]) -> tuple[Tensor, Tensor]:
        values[0].requires_grad_()
        loss, _ = LOSSES[name](values[0], values[1], values[2], mask=mask)
        return loss, torch.autograd.grad(loss.sum(), values[0])[0]

    clean = run([logprobs.clone(), old, advantages])
    spoilt = run([torch.where(mask, tensor, bad) for tensor in (logprobs, old, advantages)])
    for one, other in zip(clean, spoilt, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_dppo_masks_tokens_beyond_the_threshold_that_would_move_further_away() -> None:
    # Probabilities 0.2 -> 0.4 and 0.4 -> 0.2: total variation 0.2, KL 0.2 log(0.2/0.4) + 0.8 log(0.8/0.6) = 0.0915 and
    # 0.4 log(0.4/0.2) + 0.6 log(0.6/0.8) = 0.1046.
    logprobs, old, mask = log(0.4, 0.4, 0.2, 0.2), log(0.2, 0.2, 0.4, 0.4), torch.ones(4, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for loss, below, above in ((dppo_tv, 0.19, 0.21), (dppo_kl, 0.09, 0.11)):
        assert loss(logprobs, old, advantages, mask=mask, dppo_threshold=below)[0].tolist() == pytest.approx([0, 2, -0.5, 0])
        assert loss(logprobs, old, advantages, mask=mask, dppo_threshold=above)[0].tolist() == pytest.approx([-2, 2, -0.5, 0.5])
    first, last = (dppo_kl(logprobs, old, advantages, mask=mask, dppo_threshold=0.1)[0][place].item() for place in (0, 3))
    assert (first, last) == (pytest.approx(-2.0), 0.0)  # between the two divergences


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


def test_gspo_leaves_masked_tokens_out_of_sequence_mean() -> None:
    # Log-ratios 0.2 and 0.4 count, 5 does not: s = exp(0.3).
    logprobs = torch.tensor([0.2, 5.0, 0.4], dtype=torch.float64)
    mask = torch.tensor([True, False, True])
    _, stats = gspo(logprobs, torch.zeros(3), -torch.ones(3), clip_low=0.2, clip_high=0.2, mask=mask)
    assert stats.ratio.tolist() == pytest.approx([math.exp(0.3), 1.0, math.exp(0.3)])


def test_sapo_uses_second_temperature_for_other_advantages() -> None:
    logprobs, old, mask = log(0.4, 0.4), log(0.2, 0.2), torch.ones(2, dtype=torch.bool)
    loss, _ = sapo(logprobs, old, torch.tensor([1.0, -1.0]), sapo_temperatures=(0.5, 4.0), mask=mask)
    assert loss.tolist() == pytest.approx([-8.0 / (1 + math.exp(-0.5)), 1.0 / (1 + math.exp(-4.0))], rel=1e-6)
