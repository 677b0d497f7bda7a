"""Estimates of the divergence of the policy from a reference, on tokens the policy sampled.

Every tensor of a call has the same shape. With u = logprobs - reference_logprobs, k1 and k3 estimate KL(policy, reference)
without bias; the expected gradient of k2 is the gradient of that divergence.
Source: http://joschu.net/blog/kl-approx.html; for gradients arXiv:2506.09477.
"""

import torch
from torch import Tensor

from titanrl.algorithms.ratios import MAX_LOG_RATIO, log_ratio
from titanrl.config.choices import KLEstimator


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator, *, mask: Tensor) -> Tensor:
    """Return the estimate of each token, with gradient; 0 at masked tokens.

    `k1` is u, `k2` is u^2 / 2, `k3` is exp(-u) - 1 + u. Over samples of the policy the expected gradient of k1 is 0, that of k3
    belongs to KL(reference, policy), and that of k2 to KL(policy, reference). `k3_straight_through` has the gradient of k2 and
    the value of k3, which varies less than k1.
    """
    u = log_ratio(logprobs, reference_logprobs, mask=mask)
    match estimator:
        case "k1":
            return u
        case "k2":
            return 0.5 * u.square()
        case "k3":
            return _k3(u)
        case "k3_straight_through":
            k2 = 0.5 * u.square()
            return k2 - k2.detach() + _k3(u.detach())


def _k3(u: Tensor) -> Tensor:
    """Compute exp(-u) - 1 + u, exact near 0; u is clamped before exp."""
    bounded = u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
