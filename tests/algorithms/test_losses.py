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
}


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new and old log-probabilities, advantages and mask; some ratios are beyond every bound."""
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    logprobs = old + 0.6 * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, generator=generator, dtype=torch.float64)[torch.tensor(SEQUENCE)]
    return logprobs, old, advantages, torch.rand(TOKENS, generator=generator) < 0.8


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
        value = {
            "ppo": surrogate,
            "dual_clip": min(surrogate, -2.0 * a) if a < 0 else surrogate,
            "importance_sampling": -r * a,
            "reinforce": -a * now,
            "gspo": -min(whole * a, min(max(whole, 0.9), 1.15) * a),
            "cispo": -min(max(r, 0.7), 1.5) * a * now,
            "dro": -(a * now - 0.35 * (now - before) ** 2),
            "sapo": -a * 4 / (1.0 if a > 0 else 1.05) / (1 + math.exp(-(1.0 if a > 0 else 1.05) * (r - 1))),
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
