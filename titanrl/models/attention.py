"""Attention over packed rows: attention masks, and SDPA with a dense mask for devices without a FlexAttention backward pass.

Shape suffixes: B rows, L tokens of a row, N heads, H head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from torchtitan.protocols.module import Module

from titanrl.config.device import Device

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key indices, which broadcast. It returns True where the query attends to the key."""


def sequence_starts(positions_BL: Tensor) -> Tensor:
    """Return True where a sequence starts, `[B, L]`: at position 0, or where the position is not the previous one plus 1."""
    continues_BL = torch.zeros_like(positions_BL, dtype=torch.bool)
    continues_BL[:, 1:] = positions_BL[:, 1:] == positions_BL[:, :-1] + 1
    return (positions_BL == 0) | ~continues_BL


def mask_rule(positions_BL: Tensor) -> MaskRule:
    """Return the mask rule of packed rows: causal attention within each sequence and to the prefix that it shares.

    The rule follows from the positions. A sequence that starts at position 0 is complete. A sequence that starts at position
    p > 0 shares the first p tokens of the last complete sequence before it, and attends to these tokens as its prefix.
    """
    starts_BL = sequence_starts(positions_BL)
    sequence_BL = starts_BL.cumsum(dim=1)
    complete_BL = (positions_BL == 0).cumsum(dim=1)
    indices_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    start_BL = torch.where(starts_BL, indices_L, 0).cummax(dim=1).values
    num_shared_BL = positions_BL.gather(1, start_BL)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = sequence_BL[b, q] == sequence_BL[b, k]
        shared = (complete_BL[b, q] == complete_BL[b, k]) & (positions_BL[b, k] < num_shared_BL[b, q])
        return (q >= k) & (own | shared)

    return rule


def packed_mask(positions_BL: Tensor) -> Tensor:
    """Return the dense mask of packed rows, bool `[B, 1, L, L]`, True where the query attends to the key."""
    num_rows, length = positions_BL.shape
    indices_L = torch.arange(length, device=positions_BL.device)
    rows_B111 = torch.arange(num_rows, device=positions_BL.device)[:, None, None, None]
    return mask_rule(positions_BL)(rows_B111, torch.zeros_like(rows_B111), indices_L[:, None], indices_L[None, :])


def packed_block_mask(positions_BL: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
    """Return the mask of packed rows as a `BlockMask` for FlexAttention."""
    num_rows, length = positions_BL.shape
    mask: BlockMask = create_attention_mask(
        mask_rule(positions_BL), num_rows, None, length, length, device=positions_BL.device, BLOCK_SIZE=block_size
    )
    return mask


class PackedAttention(Module):
    """Inner attention for torchtitan that uses SDPA with the mask of `packed_mask`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Configuration without options."""

    def __init__(self, config: Config) -> None:
        super().__init__()  # without state: the mask is an argument of `forward`

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
        """Compute attention. The output has the shape of the queries, `[B, L, N, H]`."""
        q_BNLH, k_BNLH, v_BNLH = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


def attention_for(device: Device) -> Module.Config:
    """Return the config of the attention for packed rows on a device."""
    return FlexAttention.Config() if device.attention == "flex" else PackedAttention.Config()
