"""Per-token estimators of KL(policy, reference), on tokens sampled from the policy.

All tensors of a call have the same shape. With u = logprobs - reference_logprobs, k1 and k3 are unbiased estimators of
KL(policy, reference). The expected gradient of k2 is the gradient of KL(policy, reference).
Source: http://joschu.net/blog/kl-approx.html; for the gradients arXiv:2506.09477.
"""

import torch
from torch import Tensor

from titanrl.algorithms.ratios import MAX_LOG_RATIO, log_ratio
from titanrl.base.choices import KLEstimator


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator, *, mask: Tensor) -> Tensor:
    """Return the KL estimate of each token, with gradient; 0 at masked tokens.

    `k1` is u, `k2` is u^2 / 2, and `k3` is exp(-u) - 1 + u. `k3_straight_through` has the value of k3, whose variance is lower
    than that of k1, and the gradient of k2.

    Over samples of the policy, the expected gradient of k1 is 0, that of k2 is the gradient of KL(policy, reference), and that
    of k3 is the gradient of KL(reference, policy).
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
    """Compute exp(-u) - 1 + u without cancellation near 0; u is clamped to `MAX_LOG_RATIO` before exp."""
    bounded = u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
