"""Divergence of the policy's distribution at each token from a teacher's, over the whole vocabulary.

With the teacher's distribution p, the policy's q, and m = beta p + (1 - beta) q:

- `forward_kl` is KL(p, q),
- `reverse_kl` is KL(q, p),
- `jsd` is beta KL(p, m) + (1 - beta) KL(q, m), the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649).

The gradient with respect to the logits of q needs no distribution but that of its own token: for an entry v, it is q_v - p_v,
q_v (log(q_v / p_v) - KL(q, p)), and (1 - beta) q_v (log(q_v / m_v) - KL(q, m)).

Shape suffixes: N tokens, V vocabulary entries on this rank, C tokens of a chunk, M tokens with a teacher.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanrl.algorithms.logprobs import chunks, shifted

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherTokens:
    """Distributions of a teacher at some of the tokens."""

    name: DivergenceName
    """Divergence to compute."""
    beta: float
    """Weight of the teacher in the mixture of `jsd`."""
    index_N: Tensor
    """Row of `logits_MV` with each token's distribution; -1 at tokens without one."""
    logits_MV: Tensor
    """Logits of the teacher on this rank's vocabulary entries. There is at least one row."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        index_N, logits_MV = (value.to(device, non_blocking=non_blocking) for value in (self.index_N, self.logits_MV))
        return replace(self, index_N=index_N, logits_MV=logits_MV)

    def columns(self, num_rows: int, *parts: slice) -> Self:
        """Return the teacher of some columns, where the tokens are the flattened `num_rows` rows of a matrix."""
        index_BL = self.index_N.view(num_rows, -1)
        return replace(self, index_N=torch.cat([index_BL[:, part] for part in parts], dim=1).flatten())


def divergence(
    logits_NV: Tensor, teacher: TeacherTokens, *, group: dist.ProcessGroup | None = None, temperature: float = 1.0
) -> Tensor:
    """Compute the divergence at each token in nats, `[N]`; 0 at tokens without a teacher.

    Both distributions are softmax(logits / temperature), computed in fp32 (fp64 for fp64 logits), in chunks of tokens. Autograd
    saves both logits and three numbers per token; the backward pass recomputes the distributions. No gradient flows to the
    teacher.

    Args:
        logits_NV: Logits of the policy on this rank's vocabulary entries.
        teacher: Distributions of the teacher, sharded in the same way.
        group: Process group over which the vocabulary is sharded; None if this rank holds all of it. The forward pass runs five
            all-reduces of one or two numbers per token, and the backward pass none. The result is the same on every rank.
        temperature: Divisor of the logits.
    """
    assert logits_NV.shape[-1] == teacher.logits_MV.shape[-1], "the teacher's vocabulary is sharded in another way"
    value_N: Tensor = _Divergence.apply(logits_NV, teacher, group, temperature)  # type: ignore[no-untyped-call]
    return value_N


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, teacher: TeacherTokens, group: dist.ProcessGroup | None, temperature: float
    ) -> Tensor:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        has_teacher_N, index_N = teacher.index_N >= 0, teacher.index_N.clamp(min=0)
        log_z_N = _log_normalizer(logits_NV, dtype, group, temperature)
        teacher_log_z_N = _log_normalizer(teacher.logits_MV, dtype, group, temperature)[index_N]
        # Per token: the divergence, and the term that makes the sum of the gradients over the vocabulary 0.
        sums_2N = log_z_N.new_zeros(2, len(log_z_N))
        for rows in chunks(logits_NV):
            logq_CV = shifted(logits_NV[rows], log_z_N[rows], temperature)
            logp_CV = shifted(teacher.logits_MV[index_N[rows]], teacher_log_z_N[rows], temperature)
            if teacher.name == "forward_kl":
                sums_2N[0, rows] = (logp_CV.exp() * (logp_CV - logq_CV)).sum(-1)
                continue
            logm_CV = logp_CV if teacher.name == "reverse_kl" else _log_mixture(logp_CV, logq_CV, teacher.beta)
            sums_2N[1, rows] = (logq_CV.exp() * (logq_CV - logm_CV)).sum(-1)
            if teacher.name == "jsd":
                from_teacher_C = (logp_CV.exp() * (logp_CV - logm_CV)).sum(-1)
                sums_2N[0, rows] = teacher.beta * from_teacher_C + (1 - teacher.beta) * sums_2N[1, rows]
            else:
                sums_2N[0, rows] = sums_2N[1, rows]
        if group is not None:
            dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(logits_NV, log_z_N, teacher.logits_MV, teacher.index_N, teacher_log_z_N, sums_2N[1])
        ctx.name, ctx.beta, ctx.temperature = teacher.name, teacher.beta, temperature
        return torch.where(has_teacher_N, sums_2N[0], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        """Compute the gradient with respect to the policy's logits; see the module's docstring."""
        logits_NV, log_z_N, logits_MV, index_N, teacher_log_z_N, kl_N = ctx.saved_tensors
        has_teacher_N, index_N = index_N >= 0, index_N.clamp(min=0)
        unused_N = ~has_teacher_N | (grad_N == 0)
        grad_N = grad_N / ctx.temperature
        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            logq_CV = shifted(logits_NV[rows], log_z_N[rows], ctx.temperature)
            logp_CV = shifted(logits_MV[index_N[rows]], teacher_log_z_N[rows], ctx.temperature)
            if ctx.name == "forward_kl":
                slope_CV = logq_CV.exp_().sub_(logp_CV.exp_())
            elif ctx.name == "reverse_kl":
                slope_CV = logq_CV.exp() * (logq_CV - logp_CV - kl_N[rows, None])
            else:
                logm_CV = _log_mixture(logp_CV, logq_CV, ctx.beta)
                slope_CV = (1 - ctx.beta) * logq_CV.exp() * (logq_CV - logm_CV - kl_N[rows, None])
            # Where logits are not finite, a zero output gradient would not remove NaN.
            grad_logits_NV[rows] = slope_CV.mul_(grad_N[rows, None]).masked_fill_(unused_N[rows, None], 0.0)
        return grad_logits_NV, None, None, None


def _log_mixture(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Return log(beta p + (1 - beta) q)."""
    return torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))


def _log_normalizer(logits_NV: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None, temperature: float) -> Tensor:
    """Return the logarithm of the sum of exp(logits / temperature) over the whole vocabulary, `[N]`."""
    max_N = logits_NV.amax(-1).to(dtype) / temperature
    if group is not None:
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
    sum_N = torch.empty_like(max_N)
    for rows in chunks(logits_NV):
        sum_N[rows] = shifted(logits_NV[rows], max_N[rows], temperature).exp_().sum(-1)
    if group is not None:
        dist.all_reduce(sum_N, group=group)
    return max_N + sum_N.log()
