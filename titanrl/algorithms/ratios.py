"""Importance ratios between two policies, from their log-probabilities of the same tokens.

All tensors of a call have the same shape. `mask` is True at loss tokens. Values at masked tokens may be inf or NaN, so they are
replaced before use.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on the absolute log-ratio before `exp`, so that a single token cannot overflow the sum over the batch."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Return log(policy / base policy) of each token; 0 at masked tokens."""
    return torch.where(mask, logprobs - base_logprobs, 0.0)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp(log_ratios), with each log-ratio clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Return the ratio policy / base policy of each token, clamped to [exp(-20), exp(20)]; 1 at masked tokens."""
    return bounded_exp(log_ratio(logprobs, base_logprobs, mask=mask))
