"""Experts of a mixture of experts in the trainer: those that a generator recorded, the load of each, and the bias against it.

Shape suffixes: B rows, L tokens of a row, K experts of a token, Y layers, E experts.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanrl.carriers.supports import id_dtype
from titanrl.models.experts import biased_layers, routers_of
from titanrl.trainer.collate import PackedRows
from titanrl.weights.layout import local_part

NUM_COUNTS = 3
"""Number of the counts of `ExpertLoad` besides those of experts."""


class ExpertLoad:
    """Counts of the loss tokens of each expert, and of tokens by recorded experts, since the last optimizer step.

    Nothing is counted for a dense model.
    """

    def __init__(self, module: nn.Module, tp_rank: int) -> None:
        """Find the routers. `tp_rank` is this rank's index among those that share its rows."""
        self._routers, self._tp_rank = routers_of(module), tp_rank
        self._biased = biased_layers(module)
        self._counts_YE: Tensor | None = None
        self._tokens: Tensor | None = None
        self._is_recorded = any(router.mode != "own" for router in self._routers)

    def record(self, rows: PackedRows) -> None:
        """Give the routers the recorded experts of the rows of the next forward pass, or none if they do not use them.

        Raises:
            ValueError: They are those of another model.
        """
        ids_BLYK = rows.experts_BLYK if self._is_recorded else None
        if ids_BLYK is not None:
            expected = [len(self._routers), self._routers[0].top_k]
            if list(ids_BLYK.shape[2:]) != expected:
                raise ValueError(
                    f"experts: the model has {expected[0]} layers with {expected[1]} experts for each token (got ids of "
                    f"{ids_BLYK.shape[2]} and {ids_BLYK.shape[3]}). Use data of this model, or set trainer.routing to own."
                )
        for number, router in enumerate(self._routers):
            router.recorded_BLK = None if ids_BLYK is None else ids_BLYK[:, :, number]
            router.tp_rank = self._tp_rank

    def add(self, rows: PackedRows) -> None:
        """Count the experts of the last forward pass on this rank, at its loss tokens.

        Call it before the backward pass, which may compute them again.
        """
        if not self._routers:
            return
        counts = []
        for router in self._routers:
            assert router.chosen_BLK is not None, "a router took no part in the pass"
            part = self._part(rows, router.chosen_BLK.shape[1])
            chosen = router.chosen_BLK[rows.mask_BL[:, part]]
            counts.append(chosen.flatten().bincount(minlength=router.num_experts))
        counts_YE = torch.stack(counts)
        self._counts_YE = counts_YE if self._counts_YE is None else self._counts_YE + counts_YE
        tokens = self._compared_tokens(rows, part)
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def reset(self) -> None:
        """Forget the counts since the last step."""
        self._counts_YE = self._tokens = None

    def take(self, *, balance: bool) -> Mapping[str, float]:
        """Return the metrics of all ranks' counts, and start again; none without routers. This is a collective with routers.

        With `balance`, the bias of the experts changes first, if they have one.
        """
        if not self._routers:
            return {}
        counts_YE, tokens = self._counts_YE, self._tokens
        self.reset()
        num_layers, num_experts = len(self._routers), self._routers[0].num_experts
        device = next(self._routers[0].parameters()).device
        totals = torch.zeros(num_layers * num_experts + NUM_COUNTS, dtype=torch.int64, device=device)
        if counts_YE is not None and tokens is not None:
            totals += torch.cat([counts_YE.flatten(), tokens])
        if dist.is_initialized():
            dist.all_reduce(totals)
        all_YE = totals[:-NUM_COUNTS].view(num_layers, num_experts)
        counted = load_metrics(all_YE)
        if self._biased:
            bias_YE = torch.stack([local_part(layer.expert_bias_E) for layer in self._biased])
            if balance:
                bias_YE += bias_change(all_YE, self._biased[0].load_balance_coeff)
                for layer, bias_E in zip(self._biased, bias_YE, strict=True):
                    local_part(layer.expert_bias_E).copy_(bias_E)
            counted["experts/max_bias"] = float(bias_YE.abs().max())
        if not counted or not self._is_recorded:
            return counted
        num_tokens, num_recorded, num_different = totals[-NUM_COUNTS:].tolist()
        return counted | {
            "experts/differ_frac": num_different / max(num_recorded, 1),
            "experts/no_ids_frac": 1 - num_recorded / max(num_tokens, 1),
            "experts/id_bytes": float(num_layers * self._routers[0].top_k * id_dtype(num_experts).itemsize),
        }

    def _part(self, rows: PackedRows, length: int) -> slice:
        """Return the part of L that the routers of this rank saw, of this length, from its place in the group."""
        start = 0 if length == rows.length else self._tp_rank * length
        return slice(start, start + length)

    def _compared_tokens(self, rows: PackedRows, part: slice) -> Tensor:
        """Return the numbers of tokens in all, with recorded experts, and with others than the routers would choose."""
        predicts_BL, ids_BLYK = rows.predicts_BL[:, part], rows.experts_BLYK
        if ids_BLYK is None or not self._is_recorded:
            return torch.stack([predicts_BL.sum(), *[predicts_BL.new_zeros((), dtype=torch.int64)] * 2])
        first_BLK = ids_BLYK[:, part, 0].to(torch.int64)
        has_ids_BL = predicts_BL & (first_BLK != torch.iinfo(ids_BLYK.dtype).max).any(-1)
        differs = [router.differs_BL for router in self._routers if router.differs_BL is not None]
        differs_BL = predicts_BL & torch.stack(differs).any(0)
        return torch.stack([predicts_BL.sum(), has_ids_BL.sum(), differs_BL.sum()])


def bias_change(counts_YE: Tensor, rate: float) -> Tensor:
    """Return the change of the bias of each expert after a step, in float64: `rate` times the sign of mean - count, centered.

    The sum of the changes of a layer is 0, as in torchtitan, so that the biases stay small. A constant changes no choice.
    Source: arXiv:2408.15664, algorithm 1.
    """
    signs_YE = (counts_YE.sum(-1, keepdim=True) - counts_YE.shape[-1] * counts_YE).sign().double()
    return rate * (signs_YE - signs_YE.mean(-1, keepdim=True))


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
