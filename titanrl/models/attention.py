"""Attention over packed rows: attention masks, and SDPA with a dense mask for devices without a FlexAttention backward pass.

Shape suffixes: B rows, L tokens of a row, N heads, H head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from torchtitan.protocols.module import Module

from titanrl.config.device import Device

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key indices, which broadcast. It returns True where the query attends to the key."""
Order = tuple[Tensor, Tensor]
"""Columns of the rows that a rank's queries and keys are, `[Q]` and `[K]`, in their order."""


def sequence_starts(positions_BL: Tensor) -> Tensor:
    """Return True where a sequence starts, `[B, L]`: at position 0, or where the position is not the previous one plus 1."""
    continues_BL = torch.zeros_like(positions_BL, dtype=torch.bool)
    continues_BL[:, 1:] = positions_BL[:, 1:] == positions_BL[:, :-1] + 1
    return (positions_BL == 0) | ~continues_BL


def _replaced_at(positions_BL: Tensor) -> Tensor:
    """Return for each token the column of the next token with its position or a smaller one, `[B, L]`; L if there is none."""
    starts_BL, positions = sequence_starts(positions_BL).cpu().numpy(), positions_BL.cpu().numpy()
    replaced_BL = np.full_like(positions, positions.shape[1])
    for starts_L, positions_L, replaced_L in zip(starts_BL, positions, replaced_BL, strict=True):
        columns = np.flatnonzero(starts_L)
        complete = columns[positions_L[columns] == 0]
        since = complete[np.searchsorted(complete, columns) - 1]  # start of the complete sequence before
        for column, start in zip(columns[:0:-1].tolist(), since[:0:-1].tolist(), strict=True):  # the first one counts
            replaced_L[start:column][positions_L[start:column] >= positions_L[column]] = column
    return torch.from_numpy(replaced_BL).to(positions_BL.device)


def mask_rule(positions_BL: Tensor, order: Order | None = None) -> MaskRule:
    """Return the mask rule of packed rows: causal attention within each sequence and to the tokens that it shares.

    The rule follows from the positions. A sequence that starts at position p > 0 shares p tokens with sequences before it: of
    each position below p the last token. So a token is seen until a sequence starts at its position or a smaller one. Rows hold
    trees of sequences in depth-first order.

    `positions_BL` are those of whole rows. With an `order`, the rule takes indices of its queries and keys instead of columns.
    """
    replaced_BL = _replaced_at(positions_BL)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < replaced_BL[b, k])

    if order is None:
        return rule
    queries_Q, keys_K = order
    return lambda b, h, q, k: rule(b, h, queries_Q[q], keys_K[k])


def packed_mask(positions_BL: Tensor, order: Order | None = None) -> Tensor:
    """Return the dense mask of packed rows, bool `[B, 1, L, L]`, True where the query attends to the key.

    With an `order`, it is the mask of these queries and keys, `[B, 1, Q, K]`.
    """
    num_rows, length = positions_BL.shape
    indices_L = torch.arange(length, device=positions_BL.device)
    rows_B111 = torch.arange(num_rows, device=positions_BL.device)[:, None, None, None]
    queries_Q, keys_K = (indices_L, indices_L) if order is None else order
    return mask_rule(positions_BL)(rows_B111, torch.zeros_like(rows_B111), queries_Q[:, None], keys_K[None, :])


def packed_block_mask(positions_BL: Tensor, block_size: int | tuple[int, int], order: Order | None = None) -> BlockMask:
    """Return the mask of `packed_mask` as a `BlockMask` for FlexAttention."""
    num_rows, length = positions_BL.shape
    num_queries, num_keys = (length, length) if order is None else (len(order[0]), len(order[1]))
    mask: BlockMask = create_attention_mask(
        mask_rule(positions_BL, order), num_rows, None, num_queries, num_keys, device=positions_BL.device, BLOCK_SIZE=block_size
    )
    return mask


class PackedAttention(FlexAttention):
    """Inner attention for torchtitan that uses SDPA with the mask of `packed_mask`.

    It derives from FlexAttention because torchtitan gathers the keys and values of context parallelism for this class only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Configuration with the fields of FlexAttention, which are not used."""

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
