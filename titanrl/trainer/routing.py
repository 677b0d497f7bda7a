"""Experts that the routers of a mixture of experts choose: the load of each expert over the passes of a step.

Shape suffixes: B rows, L tokens of a row, K experts of a token, Y layers, E experts.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanrl.models.experts import routers_of


class ExpertLoad:
    """Count of the loss tokens of each expert since the last optimizer step. Nothing is counted for a dense model."""

    def __init__(self, module: nn.Module, tp_rank: int) -> None:
        """Find the routers. `tp_rank` is this rank's index among those that share its rows."""
        self._routers, self._tp_rank = routers_of(module), tp_rank
        self._counts_YE: Tensor | None = None

    def add(self, mask_BL: Tensor) -> None:
        """Count the choices of the last forward pass, on this rank, at the positions where the mask is True.

        Call it before the backward pass, which may compute them again.
        """
        if not self._routers:
            return
        counts = []
        for router in self._routers:
            assert router.chosen_BLK is not None, "a router took no part in the pass"
            length = router.chosen_BLK.shape[1]
            # A rank whose routers see a part of L sees that of its place in the group.
            start = 0 if length == mask_BL.shape[1] else self._tp_rank * length
            chosen = router.chosen_BLK[mask_BL[:, start : start + length]]
            counts.append(chosen.flatten().bincount(minlength=router.num_experts))
        counts_YE = torch.stack(counts)
        self._counts_YE = counts_YE if self._counts_YE is None else self._counts_YE + counts_YE

    def reset(self) -> None:
        """Forget the counts since the last step."""
        self._counts_YE = None

    def take(self) -> Mapping[str, float]:
        """Return the metrics of all ranks' counts, and start again; none without routers. This is a collective with routers."""
        if not self._routers:
            return {}
        counts_YE, self._counts_YE = self._counts_YE, None
        if counts_YE is None:
            device = next(self._routers[0].parameters()).device
            counts_YE = torch.zeros(len(self._routers), self._routers[0].num_experts, dtype=torch.int64, device=device)
        if dist.is_initialized():
            dist.all_reduce(counts_YE)
        return load_metrics(counts_YE)


def load_metrics(counts_YE: Tensor) -> dict[str, float]:
    """Return how evenly the tokens of each layer are distributed over its experts; none if there are no tokens.

    `experts/max_load` is the largest number of tokens of an expert divided by the mean, averaged over layers, and
    `experts/worst_load` that of the worst layer. `experts/entropy` is the entropy of the distribution, divided by that of an
    even one, averaged over layers.
    """
    if not counts_YE.any():
        return {}
    shares_YE = counts_YE.double() / counts_YE.sum(-1, keepdim=True)
    num_experts = counts_YE.shape[-1]
    largest_Y = shares_YE.max(-1).values * num_experts
    entropy_Y = torch.special.entr(shares_YE).sum(-1) / math.log(max(num_experts, 2))
    return {
        "experts/max_load": float(largest_Y.mean()),
        "experts/worst_load": float(largest_Y.max()),
        "experts/entropy": float(entropy_Y.mean()),
    }
