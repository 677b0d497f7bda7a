"""Attention over packed rows: who may look at whom, and SDPA with a dense mask where FlexAttention has no backward pass.

Shapes: B rows, L tokens of a row, N heads, H width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import create_attention_mask
from torchtitan.protocols.module import Module

MayLook = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From row, head, place of the query and place of the key, which broadcast, whether the query may look at the key."""


def sequence_starts(positions_BL: Tensor) -> Tensor:
    """Where a sequence of packed rows starts, `[B, L]`: at position 0, or where positions do not go on by 1."""
    goes_on_BL = torch.zeros_like(positions_BL, dtype=torch.bool)
    goes_on_BL[:, 1:] = positions_BL[:, 1:] == positions_BL[:, :-1] + 1
    return (positions_BL == 0) | ~goes_on_BL


def may_look(positions_BL: Tensor) -> MayLook:
    """The rule of packed rows: a token sees its own sequence up to itself, and what its sequence shares.

    The positions alone carry it. Position 0 starts a sequence that stands whole. One that starts at p > 0 shares its first p
    tokens with the last one that stands whole, and sees these instead of tokens of its own.
    """
    starts_BL = sequence_starts(positions_BL)
    sequence_BL = starts_BL.cumsum(dim=1)
    whole_BL = (positions_BL == 0).cumsum(dim=1)
    places_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    start_BL = torch.where(starts_BL, places_L, 0).cummax(dim=1).values
    num_shared_BL = positions_BL.gather(1, start_BL)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = sequence_BL[b, q] == sequence_BL[b, k]
        shared = (whole_BL[b, q] == whole_BL[b, k]) & (positions_BL[b, k] < num_shared_BL[b, q])
        return (q >= k) & (own | shared)

    return rule


def packed_mask(positions_BL: Tensor) -> Tensor:
    """Who may look at whom in packed rows: bool `[B, 1, L, L]`."""
    num_rows, length = positions_BL.shape
    places_L = torch.arange(length, device=positions_BL.device)
    rows_B111 = torch.arange(num_rows, device=positions_BL.device)[:, None, None, None]
    return may_look(positions_BL)(rows_B111, torch.zeros_like(rows_B111), places_L[:, None], places_L[None, :])


def packed_block_mask(positions_BL: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
    """The same for FlexAttention."""
    num_rows, length = positions_BL.shape
    mask: BlockMask = create_attention_mask(
        may_look(positions_BL), num_rows, None, length, length, device=positions_BL.device, BLOCK_SIZE=block_size
    )
    return mask


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
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:
        """Attend; output `[B, L, N, H]` like the queries."""
        q_BNLH, k_BNLH, v_BNLH = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)
