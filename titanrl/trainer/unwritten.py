"""Detect tensor elements that loading a checkpoint did not write.

Tensors are filled with a marker value before loading and searched for it afterwards. A comparison of tensor names would miss
a slice of a tensor that no file contains. The marker is a NaN with a payload that no arithmetic produces, so checkpoints that
contain NaNs can be loaded.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titanrl.weights.layout import local_part

MARKS = {torch.float32: (torch.int32, 0x7FA5A5A5), torch.bfloat16: (torch.int16, 0x7FA5)}
"""Integer dtype and bit pattern of the marker, by dtype of the weights."""


def mark(state: Mapping[str, Tensor]) -> None:
    """Fill this rank's shard of each tensor with the marker. Tensors of other dtypes are skipped."""
    for tensor in state.values():
        if tensor.dtype in MARKS:
            kind, bits = MARKS[tensor.dtype]
            local_part(tensor.detach()).view(kind).fill_(bits)


def unwritten(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the tensors whose shard on this rank still contains the marker."""
    return sorted(name for name, tensor in state.items() if tensor.dtype in MARKS and _has_mark(local_part(tensor.detach())))


def _has_mark(local: Tensor) -> bool:
    kind, bits = MARKS[local.dtype]
    return bool((local.view(kind) == bits).any())
