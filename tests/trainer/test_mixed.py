"""Mixed precision on one data-parallel rank, compared with casts by hand."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanrl.trainer import model
from titanrl.trainer.model import CastParameters


class Tied(nn.Module):
    """A model whose embedding is also its output layer, with a frozen and a trained matrix in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.frozen, self.trained = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_N: Tensor) -> Tensor:
        """Return the logits, `[N, V]`."""
        return self.head(self.trained(self.frozen(self.embedding(tokens_N)).tanh()))


def loss_of(module: nn.Module, tokens_N: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens_N).float(), tokens_N.roll(1), reduction="sum")


BATCHES = [torch.tensor([1, 2, 3, 10]), torch.tensor([0, 5])]


def test_gradients_are_those_of_a_cast_model_summed_in_the_dtype_of_the_parameters(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(model, "ADDED_AT_ONCE", 5)  # several additions per parameter
    for dtype, compute_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        module = Tied().to(dtype)
        parameters = dict(module.named_parameters())
        copies = CastParameters(module, compute_dtype)
        expected: dict[str, Tensor] = {}
        for tokens_N in BATCHES:
            with copies.in_use():
                assert module.head.weight is module.embedding.weight
                assert module(tokens_N).dtype == compute_dtype
                loss_of(module, tokens_N).backward()
            cast = copy.deepcopy(module).to(compute_dtype)
            cast.zero_grad()
            loss_of(cast, tokens_N).backward()
            for name, value in cast.named_parameters():
                if value.grad is not None:
                    added = value.grad.float() + expected[name].float() if name in expected else value.grad
                    expected[name] = added.to(dtype)
        assert all(value is parameters[name] for name, value in module.named_parameters())
        found = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
        assert found.keys() == expected.keys() == {"embedding.weight", "trained.weight", "trained.bias"}
        for name, gradient in found.items():
            assert gradient.dtype == dtype
            assert torch.equal(gradient, expected[name]), name


def test_gradients_of_a_transposed_parameter_are_summed() -> None:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(torch.zeros(3, 2).t())
    copies = CastParameters(module, torch.bfloat16)
    for value in (1.0, 2.0):
        with copies.in_use():
            module(torch.full((1, 3), value, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.tolist() == [[3.0] * 3] * 2


def test_copies_follow_the_weights_and_leave_them_alone_after_an_error() -> None:
    module = Tied()
    copies = CastParameters(module, torch.bfloat16)
    with copies.in_use():
        before = module(BATCHES[0])
    with torch.no_grad():
        module.trained.weight.mul_(2.0)
    copies.weights_changed()
    with copies.in_use():
        after = module(BATCHES[0])
    assert not torch.equal(before, after)
    assert torch.equal(after, copy.deepcopy(module).to(torch.bfloat16)(BATCHES[0]))
    try:
        with copies.in_use():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert module.trained.weight.dtype == torch.float32
