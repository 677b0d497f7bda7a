"""Proof that loading has written every element of some tensors: they are marked before, and searched for marks afterwards.

A comparison of names would not see a part of a tensor that no file has. A mark is a NaN with a payload that no arithmetic
produces, so a checkpoint with NaNs of its own loads.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titanrl.weights.layout import local_part

MARKS = {torch.float32: (torch.int32, 0x7FA5A5A5), torch.bfloat16: (torch.int16, 0x7FA5)}
"""Integer type of the bits, and the bits of a mark, for each type of weights."""


def mark(state: Mapping[str, Tensor]) -> None:
    """Fill this rank's shard of every tensor of weights with marks."""
    for tensor in state.values():
        if tensor.dtype in MARKS:
            kind, bits = MARKS[tensor.dtype]
            local_part(tensor.detach()).view(kind).fill_(bits)


def unwritten(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of which this rank's shard still has marks, sorted."""
    return sorted(name for name, tensor in state.items() if tensor.dtype in MARKS and _has_mark(local_part(tensor.detach())))


def _has_mark(local: Tensor) -> bool:
    kind, bits = MARKS[local.dtype]
    return bool((local.view(kind) == bits).any())
