"""Divergences from a teacher against fp64 over the whole vocabulary, and over a sharded one."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from titanrl.algorithms.logprobs import DivergenceName, TeacherTokens, divergence

NAMES: tuple[DivergenceName, ...] = ("forward_kl", "reverse_kl", "jsd")


def expected(logits_NV: Tensor, teacher_NV: Tensor, name: DivergenceName, beta: float) -> Tensor:
    """The definition, in the dtype of the logits."""
    p, q = teacher_NV.softmax(-1), logits_NV.softmax(-1)
    if name == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if name == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def teacher_of(logits_MV: Tensor, index: list[int], name: DivergenceName, beta: float = 0.5) -> TeacherTokens:
    return TeacherTokens(name=name, beta=beta, index_N=torch.tensor(index), logits_MV=logits_MV)


def test_divergences_of_two_coins_by_hand() -> None:
    logits, teacher = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])  # q = (1/4, 3/4), p = (1/2, 1/2)
    forward, reverse, jsd = (float(divergence(logits, teacher_of(teacher, [0], name))) for name in NAMES)
    assert forward == pytest.approx(0.5 * math.log(4 / 3))
    assert reverse == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    of_teacher = 0.5 * math.log(0.5 / 0.375) + 0.5 * math.log(0.5 / 0.625)
    of_policy = 0.25 * math.log(0.25 / 0.375) + 0.75 * math.log(0.75 / 0.625)
    assert jsd == pytest.approx(0.5 * of_teacher + 0.5 * of_policy)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_value_and_gradient_match_fp64_over_the_whole_vocabulary(name: DivergenceName, beta: float) -> None:
    torch.manual_seed(0)
    reference = (torch.randn(40, 9000, dtype=torch.float64) * 4).requires_grad_()
    teacher = torch.randn(12, 9000, dtype=torch.float64) * 4
    index = [-1 if token % 3 == 0 else token % 12 for token in range(40)]  # 40 x 9000 logits are two chunks
    weights = torch.rand(40, dtype=torch.float64)
    has_teacher = torch.tensor([row >= 0 for row in index])
    value = torch.where(has_teacher, expected(reference, teacher[[max(row, 0) for row in index]], name, beta), 0.0)
    (value * weights).sum().backward()
    assert reference.grad is not None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = reference.detach().to(dtype).requires_grad_()
        found = divergence(logits, teacher_of(teacher.to(dtype), index, name, beta))
        (found * weights.to(dtype)).sum().backward()
        torch.testing.assert_close(found.double(), value.detach(), rtol=10 * tolerance, atol=10 * tolerance)
        torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=0, atol=tolerance)
        assert not logits.grad[~has_teacher].any()


def known_of(logits_MV: Tensor, index: list[int], num: int) -> TeacherTokens:
    """A teacher of which only the most likely entries are known."""
    logprobs_MK, ids_MK = logits_MV.log_softmax(-1).topk(num)
    return TeacherTokens(name="forward_kl", beta=0.5, index_N=torch.tensor(index), logits_MV=logprobs_MK, ids_MK=ids_MK)


def test_divergence_over_known_entries_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[0.25, 0.5, 0.05, 0.2]], dtype=torch.float64).log()
    found = divergence(logits, known_of(teacher, [0], 2))
    found.sum().backward()
    # Known are entries 1 and 0 of p, with 0.5 and 0.25; the rest has 0.25 of p and 0.2 of q.
    by_hand = 0.5 * math.log(0.5 / 0.3) + 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.2)
    assert float(found.detach()) == pytest.approx(by_hand, abs=1e-12)
    assert float(found.detach()) < float(expected(logits.detach(), teacher, "forward_kl", 0.5))  # a lower bound
    assert logits.grad is not None
    slopes = [0.5 - 0.25, 0.3 - 0.5, 0.1 * (1 - 0.25 / 0.2), 0.1 * (1 - 0.25 / 0.2)]
    torch.testing.assert_close(logits.grad, torch.tensor([slopes], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num", [1, 20, 9000])
def test_value_and_gradient_over_known_entries_match_fp64(num: int) -> None:
    torch.manual_seed(0)
    reference = (torch.randn(40, 9000, dtype=torch.float64) * 4).requires_grad_()
    teacher = torch.randn(12, 9000, dtype=torch.float64) * 4
    index = [-1 if token % 3 == 0 else token % 12 for token in range(40)]
    known = known_of(teacher, index, num)
    has_teacher, rows = torch.tensor([row >= 0 for row in index]), [max(row, 0) for row in index]
    p, q = known.logits_MV[rows].exp(), reference.softmax(-1)
    known_q, p_rest = q.gather(1, known.ids_MK[rows]), (1 - known.logits_MV[rows].exp().sum(-1)).clamp(min=0)
    q_rest = q.scatter(1, known.ids_MK[rows], 0.0).sum(-1)
    rest = torch.where(q_rest > 0, p_rest * (p_rest / q_rest.clamp(min=1e-300)).log(), 0.0) if num < 9000 else 0.0
    value = torch.where(has_teacher, (p * (p / known_q).log()).sum(-1) + rest, 0.0)
    value.sum().backward()
    assert reference.grad is not None
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        logits = reference.detach().to(dtype).requires_grad_()
        found = divergence(logits, replace(known, logits_MV=known.logits_MV.to(dtype)))
        found.sum().backward()
        torch.testing.assert_close(found.double(), value.detach(), rtol=10 * tolerance, atol=10 * tolerance)
        torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=0, atol=tolerance)
        assert not logits.grad[~has_teacher].any()
    if num == 9000:  # all entries are known
        torch.testing.assert_close(value, divergence(reference, teacher_of(teacher, index, "forward_kl")), rtol=1e-9, atol=1e-9)


def test_unknown_entries_belong_to_the_rest() -> None:
    logits, logprobs = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[math.log(0.5), -math.inf]], dtype=torch.float64)
    known = TeacherTokens(
        name="forward_kl", beta=0.5, index_N=torch.tensor([0]), logits_MV=logprobs, ids_MK=torch.tensor([[2, -1]])
    )
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(divergence(logits, known)) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", NAMES)
def test_divergence_and_gradient_are_zero_at_the_teacher(name: DivergenceName) -> None:
    logits = torch.randn(5, 30, dtype=torch.float64, requires_grad=True)
    found = divergence(logits, teacher_of(logits.detach() + 7.0, [0, 1, 2, 3, 4], name))
    found.sum().backward()
    assert float(found.detach().abs().max()) < 1e-14
    assert float(logits.grad.abs().max()) < 1e-14


def test_tokens_without_teacher_have_no_gradient_even_if_logits_are_not_finite() -> None:
    logits = torch.zeros(2, 4)
    logits[0] = math.nan
    logits.requires_grad_()
    divergence(logits, teacher_of(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), [-1, 0], "jsd")).sum().backward()
    assert not logits.grad[0].any()
    assert logits.grad[1].isfinite().all()


def test_temperature_divides_both_logits() -> None:
    logits, teacher = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    found = divergence(logits, teacher_of(teacher, [0, 1, 2], "forward_kl"), temperature=2.0)
    torch.testing.assert_close(found, expected(logits / 2, teacher / 2, "forward_kl", 0.5))
