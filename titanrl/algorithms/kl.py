"""Estimates of the divergence of the policy from a reference, on tokens the policy sampled.

Every tensor of a call has one shape. With u = logprobs - reference_logprobs, the mean of k1 and of k3 is KL(policy, reference);
k2 has its gradient. Source: http://joschu.net/blog/kl-approx.html; for gradients arXiv:2506.09477.
"""

from typing import Literal

import torch
from torch import Tensor

from titanrl.algorithms.losses import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator, *, mask: Tensor) -> Tensor:
    """The estimate of each token, with gradient; 0 at masked tokens.

    `k1` is u, `k2` u^2 / 2, `k3` exp(-u) - 1 + u. Averaged over samples of the policy, the gradient of k1 is 0 and that of k3
    is the one of KL(reference, policy); only k2 has the gradient of what is estimated. `k3_straight_through` takes it from k2
    and the value from k3, which has less variance than k1.
    """
    u = torch.where(mask, logprobs - reference_logprobs, 0.0)
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
    """exp(-u) - 1 + u, exact near 0; u is clamped before exp."""
    bounded = u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
