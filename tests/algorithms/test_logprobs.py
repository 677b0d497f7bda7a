import math

import pytest
import torch
from torch import Tensor

from titanrl.algorithms import logprobs as logprobs_module
from titanrl.algorithms.logprobs import logprobs_and_entropy


def reference(logits_NV: Tensor, labels_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the definitions in fp64."""
    p_NV = torch.softmax(logits_NV.double() / temperature, dim=-1)
    return p_NV.log().gather(-1, labels_N[:, None])[:, 0], -(p_NV * p_NV.log()).sum(-1)


def objective(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
    """Compute a function that is nonlinear in both results."""
    weights_N = torch.linspace(-1, 1, len(logprobs_N), dtype=logprobs_N.dtype)
    return (weights_N * logprobs_N.exp()).sum() - 0.3 * (weights_N * entropy_N**2).sum()


def example(num_tokens: int = 12, vocab_size: int = 37) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(num_tokens, vocab_size, generator=generator)
    return logits_NV, torch.randint(vocab_size, (num_tokens,), generator=generator)


def test_log_probability_and_entropy_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log() + 100.0
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1, 2]))
    assert logprobs.tolist() == pytest.approx([-math.log(4), -math.log(3)], abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2), math.log(3)], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 22])
def test_values_and_gradients_match_fp64_reference(monkeypatch, temperature: float, chunk_elements: int) -> None:
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, labels = example()
    logits.requires_grad_()
    results, expected = logprobs_and_entropy(logits, labels, temperature=temperature), reference(logits, labels, temperature)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact.float(), atol=2e-6, rtol=0)
    gradient, exact_gradient = (torch.autograd.grad(objective(*pair), logits)[0] for pair in (results, expected))
    torch.testing.assert_close(gradient, exact_gradient, atol=2e-6, rtol=0)


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_can_be_used_alone(used: int) -> None:
    logits, labels = example()
    logits.requires_grad_()
    result, expected = logprobs_and_entropy(logits, labels)[used], reference(logits, labels, 1.0)[used]
    gradient, exact = (torch.autograd.grad((value * torch.arange(12)).sum(), logits)[0] for value in (result, expected))
    torch.testing.assert_close(gradient, exact, atol=2e-5, rtol=0)


def test_bf16_logits_give_fp32_results_and_bf16_gradients() -> None:
    logits, labels = example()
    logits = logits.bfloat16().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, labels)
    assert logprobs.dtype == entropy.dtype == torch.float32
    for result, exact in zip((logprobs, entropy), reference(logits, labels, 1.0), strict=True):
        torch.testing.assert_close(result, exact.float(), atol=2e-6, rtol=0)
    objective(logprobs, entropy).backward()
    assert logits.grad.dtype == torch.bfloat16


def test_logits_are_not_modified() -> None:
    logits, labels = example()
    before = logits.clone()
    logprobs_and_entropy(logits.requires_grad_(), labels, temperature=0.5)[0].sum().backward()
    assert torch.equal(logits, before)


def test_autograd_saves_only_logits_labels_and_two_values_per_token() -> None:
    logits, labels = example()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logprobs_and_entropy(logits.requires_grad_(), labels)
    assert sorted(tuple(tensor.shape) for tensor in kept) == [(12,), (12,), (12,), (12, 37)]
    assert any(tensor.data_ptr() == logits.data_ptr() for tensor in kept)


def test_non_finite_logits_affect_only_their_row() -> None:
    logits, labels = example()
    logits[3], logits[5, 0] = math.nan, math.inf
    logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, labels)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[3, 5]] = False
    torch.where(mask, logprobs - entropy, 0.0).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[mask].any(-1).all()


def test_unmasked_row_with_non_finite_logits_gives_nan_gradient() -> None:
    logits, labels = example()
    logits[3] = math.nan
    logits.requires_grad_()
    logprobs_and_entropy(logits, labels)[0].sum().backward()
    assert logits.grad[3].isnan().all()


def test_label_outside_vocabulary_gives_finite_value() -> None:
    logits, _ = example(num_tokens=2)
    logits.requires_grad_()
    logprobs, _ = logprobs_and_entropy(logits, torch.tensor([-100, 1000]))
    logprobs.sum().backward()
    assert logprobs.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_tokens_give_empty_results() -> None:
    logits = torch.empty(0, 5, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.empty(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert logits.grad.shape == (0, 5)
