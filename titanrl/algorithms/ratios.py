"""Importance ratios of two policies, from the log-probabilities they give to the same tokens.

Every tensor of a call has the same shape. `mask` is true at the tokens that count. Values elsewhere may be inf or NaN, so they
are replaced before they are used.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on the size of a log-ratio before `exp`, so that one token cannot overflow the batch."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Return log(policy / base policy) of each token; 0 at masked tokens."""
    return torch.where(mask, logprobs - base_logprobs, 0.0)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return exp of log-ratios, each clamped to `MAX_LOG_RATIO`."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """Return policy / base policy of each token, within exp(-20) and exp(20); 1 at masked tokens."""
    return bounded_exp(log_ratio(logprobs, base_logprobs, mask=mask))
