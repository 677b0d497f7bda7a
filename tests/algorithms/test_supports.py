"""Log-probabilities and entropies over the supports of truncated sampling."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.test_logprobs import objective
from tests.trainer.ranks import World
from titanrl.algorithms import logprobs as logprobs_module
from titanrl.algorithms.logprobs import TokenSupports, logprobs_and_entropy, token_supports
from titanrl.carriers.supports import supports_of, words_of


def supports_from(inside_NV: Tensor) -> TokenSupports:
    """Return supports from a dense mask."""
    vocab_size = inside_NV.shape[1]
    ids = [row.nonzero()[:, 0].numpy().astype(np.int32) for row in inside_NV]
    made = token_supports([(0, supports_of([words_of(some, vocab_size) for some in ids], vocab_size))], len(ids))
    assert made is not None
    return made


def reference(logits_NV: Tensor, labels_N: Tensor, inside_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the definitions in fp64 with a dense mask."""
    logp_NV = (logits_NV.double() / temperature).masked_fill(~inside_NV, -math.inf).log_softmax(-1)
    summands_NV = logp_NV.exp() * logp_NV.masked_fill(~inside_NV, 0.0)
    return logp_NV.gather(-1, labels_N[:, None])[:, 0], -summands_NV.sum(-1)


def example(num_tokens: int = 12, vocab_size: int = 137, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels, and a mask of supports of all sizes, which contain the labels."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 3 * torch.randn(num_tokens, vocab_size, generator=generator)
    labels_N = torch.randint(vocab_size, (num_tokens,), generator=generator)
    shares_N = torch.tensor([0.0, 0.02, 0.3, 1.0]).repeat(num_tokens)[:num_tokens]
    inside_NV = torch.rand(num_tokens, vocab_size, generator=generator) < shares_N[:, None]
    inside_NV[torch.arange(num_tokens), labels_N] = True
    return logits_NV, labels_N, inside_NV


def test_probability_is_renormalized_over_support() -> None:
    # Of 1/2, 1/4, 1/8, 1/8, the first three together have 7/8.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 2).log() + 7.0
    inside = torch.tensor([[True, True, True, False], [True] * 4])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1, 1]), supports=supports_from(inside))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 7), math.log(1 / 4)], abs=1e-6)
    first = -(4 / 7 * math.log(4 / 7) + 2 / 7 * math.log(2 / 7) + 1 / 7 * math.log(1 / 7))
    assert entropy.tolist() == pytest.approx([first, 1.75 * math.log(2)], abs=1e-6)


def test_support_of_one_entry_is_certain_and_has_no_gradient() -> None:
    logits = torch.tensor([[3.0, -60.0, 1.0]], requires_grad=True)
    inside = torch.tensor([[False, True, False]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1]), supports=supports_from(inside))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == entropy.item() == 0.0
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1, 300, 1 << 22])
def test_values_and_gradients_match_dense_reference(monkeypatch, temperature: float, chunk_elements: int) -> None:
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, labels, inside = example()
    logits.requires_grad_()
    results = logprobs_and_entropy(logits, labels, temperature=temperature, supports=supports_from(inside))
    expected = reference(logits, labels, inside, temperature)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact.float(), atol=2e-6, rtol=0)
    gradient, exact_gradient = (torch.autograd.grad(objective(*pair), logits)[0] for pair in (results, expected))
    torch.testing.assert_close(gradient, exact_gradient, atol=2e-6, rtol=0)
    assert (gradient[~inside] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 100), st.sampled_from([0.3, 1.0, 2.0]))
def test_random_supports_match_dense_fp64_reference(seed: int, num_tokens: int, vocab_size: int, temperature: float) -> None:
    logits, labels, inside = example(num_tokens, vocab_size, seed)
    logits = (10 * logits).double().requires_grad_()  # differences of probability that fp32 exponentials cannot hold
    results = logprobs_and_entropy(logits, labels, temperature=temperature, supports=supports_from(inside))
    expected = reference(logits, labels, inside, temperature)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, atol=1e-12, rtol=1e-12)
    gradient, exact_gradient = (torch.autograd.grad(objective(*pair), logits)[0] for pair in (results, expected))
    torch.testing.assert_close(gradient, exact_gradient, atol=1e-12, rtol=1e-12)


def test_full_supports_are_bitwise_equal_to_none() -> None:
    logits, labels, inside = example()
    logits.requires_grad_()
    results = logprobs_and_entropy(logits, labels, supports=supports_from(torch.ones_like(inside)))
    expected = logprobs_and_entropy(logits, labels)
    gradient, exact_gradient = (torch.autograd.grad(objective(*pair), logits)[0] for pair in (results, expected))
    assert all(torch.equal(result, exact) for result, exact in zip(results, expected, strict=True))
    assert torch.equal(gradient, exact_gradient)


def test_full_supports_build_no_mask(monkeypatch) -> None:
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", 1)
    logits, labels, inside = example()
    supports, masked = supports_from(inside), []

    def outside(self: TokenSupports, tokens: slice, vocab_start: int, num_entries: int) -> Tensor:
        masked.append(tokens.start)
        return make_mask(self, tokens, vocab_start, num_entries)

    make_mask = TokenSupports.outside
    monkeypatch.setattr(TokenSupports, "outside", outside)
    logprobs_and_entropy(logits.requires_grad_(), labels, supports=supports)[0].sum().backward()
    assert set(masked) == {token for token in range(12) if token % 4 != 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_logits_outside_the_support_have_no_effect(value: float) -> None:
    logits, labels, inside = example()
    supports = supports_from(inside)
    changed = logits.masked_fill(~inside, value).requires_grad_()
    results, expected = logprobs_and_entropy(changed, labels, supports=supports), reference(logits, labels, inside, 1.0)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact.float(), atol=2e-6, rtol=0)
    objective(*results).backward()
    assert changed.grad.isfinite().all()
    assert (changed.grad[~inside] == 0).all()


def test_columns_select_supports_of_their_tokens() -> None:
    _, _, inside_NV = example(num_tokens=12)
    supports, inside_BLV = supports_from(inside_NV), inside_NV.view(3, 4, -1)
    part = supports.columns(3, slice(1, 3))
    expected_NV = inside_BLV[:, 1:3].flatten(0, 1)
    assert torch.equal(part.outside(slice(None), 0, 137), ~expected_NV)
    assert part.sizes_N.tolist() == expected_NV.sum(-1).tolist()
    assert torch.equal(supports.columns(1, slice(2, 7)).outside(slice(1, 3), 0, 137), ~inside_NV[3:5])


@pytest.mark.parametrize(("start", "end"), [(0, 32), (0, 137), (31, 97), (64, 96), (100, 137), (100, 140)])
def test_ranks_mask_their_vocabulary_shard(start: int, end: int) -> None:
    _, _, inside_NV = example()
    outside_NV = supports_from(inside_NV).outside(slice(None), start, end - start)
    known = min(end, 137) - start
    assert torch.equal(outside_NV[:, :known], ~inside_NV[:, start:end])


def run_rank(is_truncated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one of two ranks: the first holds 70 of the 137 vocabulary entries, the second 67."""
    logits, labels, inside = example()
    start, end = [0, 70, 137][dist.get_rank() :][:2]
    shard, supports = logits[:, start:end].contiguous().requires_grad_(), supports_from(inside) if is_truncated else None
    logprobs, entropy = logprobs_and_entropy(
        shard, labels, group=dist.group.WORLD, vocab_start=start, temperature=1.3, supports=supports
    )
    objective(logprobs, entropy).backward()
    assert shard.grad is not None
    return logprobs.detach(), entropy.detach(), shard.grad


@pytest.mark.parametrize("is_truncated", [False, True])
def test_vocabulary_sharded_unevenly_gives_same_result(world: Callable[[int], World], is_truncated: bool) -> None:
    ranks = world(2).run(run_rank, is_truncated)
    logits, labels, inside = example()
    assert not inside[:, :70].any(-1).all(), "the first rank holds nothing of some supports"
    logits.requires_grad_()
    logprobs, entropy = reference(logits, labels, inside if is_truncated else torch.ones_like(inside), 1.3)
    objective(logprobs, entropy).backward()
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert torch.equal(ranks[0][1], ranks[1][1])
    torch.testing.assert_close(ranks[0][0], logprobs.float(), atol=2e-6, rtol=0)
    torch.testing.assert_close(ranks[0][1], entropy.float(), atol=2e-6, rtol=0)
    torch.testing.assert_close(torch.cat([ranks[0][2], ranks[1][2]], dim=-1), logits.grad, atol=2e-6, rtol=0)
