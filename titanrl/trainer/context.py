"""Context parallelism: the ranks of a group divide the columns of their rows, and all of them know the scores of whole rows.

Only the model computes on a part of each row. Its scores, a few numbers per token, are gathered, so losses and metrics see
whole sequences on every rank, as without context parallelism. Each rank then propagates the gradient of its own columns, and
FSDP, whose mesh includes the group, sums the gradients once.

A row is cut into 2 P chunks for P ranks, and rank p computes chunks p and 2 P - 1 - p. A token attends to those before it, so
such pairs cost about the same in a row with one sequence.

Shape suffixes: B rows, L tokens of a row, C columns of this rank, D hidden size, M selected tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanrl.models.attention import Order
from titanrl.trainer.collate import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Group of ranks that compute the same rows, and this rank's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def parts(self, length: int) -> tuple[slice, slice]:
        """Return this rank's columns of rows of a length, which must be a multiple of twice the group's size."""
        assert length % (2 * self.size) == 0, f"{self.size} ranks cannot divide rows of {length} tokens"
        return head_tail(length, self.rank, self.size)

    def cut(self, rows: PackedRows) -> PackedRows:
        """Return this rank's columns of the rows."""
        return rows.columns(*self.parts(rows.length))

    def order(self, length: int, device: torch.device) -> Order:
        """Return the columns of this rank's queries, and of the keys that attention gathers in the order of the ranks."""
        columns_L = torch.arange(length, device=device)
        by_rank = [torch.cat([columns_L[part] for part in head_tail(length, rank, self.size)]) for rank in range(self.size)]
        return by_rank[self.rank], torch.cat(by_rank)

    def whole(self, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gather scores of whole rows, `[B, L]` each, from those of the ranks, `[B, C]` each. This is a collective.

        The gradient of a rank's scores is that of its own columns, without communication, because all ranks compute the same
        loss.
        """
        gathered: tuple[Tensor, ...] = _Gather.apply(self, *scores)  # type: ignore[no-untyped-call]
        return gathered

    def select(self, hidden_BCD: Tensor, tokens_M: Tensor) -> Tensor:
        """Return the hidden states of some tokens of the flattened whole rows, `[M, D]`. This is a collective."""
        num_columns = hidden_BCD.shape[1]
        length = num_columns * self.size
        own_C, _ = self.order(length, hidden_BCD.device)
        place_L = torch.full((length,), -1, device=hidden_BCD.device)
        place_L[own_C] = torch.arange(num_columns, device=hidden_BCD.device)
        place_M = place_L[tokens_M % length]
        selected_MD = hidden_BCD[tokens_M // length, place_M.clamp(min=0)]
        selected_MD = torch.where(place_M[:, None] >= 0, selected_MD, 0.0)
        dist.all_reduce(selected_MD, group=self.group)  # each token is on one rank, and zero on the others
        return selected_MD


def head_tail(length: int, rank: int, size: int) -> tuple[slice, slice]:
    """Return the two chunks of a row that a rank computes.

    Example: of rows of 8 tokens, the first of two ranks has columns 0, 1, 6, 7, and the second 2 to 5.
    """
    width = length // (2 * size)
    last = 2 * size - 1 - rank
    return slice(rank * width, (rank + 1) * width), slice(last * width, (last + 1) * width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: ContextGroup, *scores: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parts = context.parts(scores[0].shape[1] * context.size)
        local_SBC = torch.stack(scores)
        by_rank = [torch.empty_like(local_SBC) for _ in range(context.size)]
        dist.all_gather(by_rank, local_SBC, group=context.group)
        halves = [part_SBC.chunk(2, dim=2) for part_SBC in by_rank]
        whole_SBL = torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim=2)
        # Copies, because autograd does not allow changes in place of several views of one tensor.
        return tuple(score_BL.clone() for score_BL in whole_SBL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's columns."""
        return None, *(None if g is None else torch.cat([g[:, part] for part in ctx.parts], dim=1) for g in gradients)
