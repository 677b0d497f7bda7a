"""Attention over packed rows where FlexAttention has no backward pass (CPU, NPU): SDPA with a dense mask.

Shapes: B rows, L tokens of a row, N heads, H width of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module


def packed_mask(positions_BL: torch.Tensor) -> torch.Tensor:
    """Who may look at whom in packed rows: bool `[B, 1, L, L]`, causal and inside one sequence.

    A sequence starts wherever its position is 0, so the positions alone carry the boundaries.
    """
    sequence_BL = (positions_BL == 0).cumsum(dim=1)
    same_BLL = sequence_BL[:, :, None] == sequence_BL[:, None, :]
    return same_BLL.tril().unsqueeze(1)


class PackedAttention(Module):
    """torchtitan inner attention that takes the mask of `packed_mask`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """No options."""

    def __init__(self, config: Config) -> None:
        """Hold nothing: the mask comes with every call."""
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Attend; output `[B, L, N, H]` like the queries."""
        q_BNLH, k_BNLH, v_BNLH = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)
