"""Custom losses, which the trainer imports by path."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titanrl.carriers.types import Datum


def ppo(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
    """Clipped surrogate with the thresholds 0.8 and 1.2, summed over all tokens."""
    total = torch.zeros(())
    for datum, current in zip(data, logprobs, strict=True):
        old, advantages = (torch.as_tensor(datum.loss_fn_inputs[name]) for name in ("logprobs", "advantages"))
        ratio = (current - old).exp()
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return total, {"num_data:sum": float(len(data))}


def broken(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
    """Raises."""
    raise RuntimeError("the loss itself is broken")


def slow(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
    """Compute nothing for 0.3 seconds."""
    time.sleep(0.3)
    return torch.stack([values.sum() for values in logprobs]).sum(), {}
