"""Divergence of the policy's distribution at each token from a teacher's.

With the teacher's distribution p, the policy's q, and m = beta p + (1 - beta) q:

- `forward_kl` is KL(p, q),
- `reverse_kl` is KL(q, p),
- `jsd` is beta KL(p, m) + (1 - beta) KL(q, m), the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649).

The gradient with respect to the logits of q needs no distribution but that of its own token: for an entry v, it is q_v - p_v,
q_v (log(q_v / p_v) - KL(q, p)), and (1 - beta) q_v (log(q_v / m_v) - KL(q, m)).

If only the K most likely entries of p are known, `forward_kl` is the divergence of the distributions over these entries and one
more, the rest, which has the probabilities p_r = 1 - sum p_k and q_r = 1 - sum q_k:

    sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

This is exact for that coarser distribution and a lower bound of KL(p, q), equal to it if p and q agree on the proportions
within the rest. Its gradient is q_k - p_k at the known entries, and q_v (1 - p_r / q_r) at the others.

Shape suffixes: N tokens, V vocabulary entries on this rank, C tokens of a chunk, M tokens with a teacher, K known entries.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanrl.algorithms.logprobs import chunks, shifted, zero_rows_

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
    """Logits of the teacher on this rank's vocabulary entries; with `ids_MK`, log-probabilities of these entries. There is at
    least one row."""
    ids_MK: Tensor | None = None
    """Known entries of the whole vocabulary, -1 for none; None if all are known."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        index_N, logits_MV = (value.to(device, non_blocking=non_blocking) for value in (self.index_N, self.logits_MV))
        ids_MK = None if self.ids_MK is None else self.ids_MK.to(device, non_blocking=non_blocking)
        return replace(self, index_N=index_N, logits_MV=logits_MV, ids_MK=ids_MK)

    def columns(self, num_rows: int, *parts: slice) -> Self:
        """Return the teacher of some columns, where the tokens are the flattened `num_rows` rows of a matrix."""
        index_BL = self.index_N.view(num_rows, -1)
        return replace(self, index_N=torch.cat([index_BL[:, part] for part in parts], dim=1).flatten())


def divergence(
    logits_NV: Tensor,
    teacher: TeacherTokens,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    temperature: float = 1.0,
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
        vocab_start: First vocabulary entry of this rank, for `TeacherTokens.ids_MK`.
        temperature: Divisor of the logits, but not of known log-probabilities.
    """
    if teacher.ids_MK is not None:
        partial_N: Tensor = _PartialKL.apply(logits_NV, teacher, group, vocab_start, temperature)  # type: ignore[no-untyped-call]
        return partial_N
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
            grad_logits_NV[rows] = zero_rows_(slope_CV.mul_(grad_N[rows, None]), unused_N[rows])
        return grad_logits_NV, None, None, None


class _PartialKL(torch.autograd.Function):
    """KL(p, q) over the known entries of p and the rest; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        teacher: TeacherTokens,
        group: dist.ProcessGroup | None,
        vocab_start: int,
        temperature: float,
    ) -> Tensor:
        assert teacher.ids_MK is not None
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        num_entries = logits_NV.shape[-1]
        log_z_N = _log_normalizer(logits_NV, dtype, group, temperature)
        has_teacher_N, index_N = teacher.index_N >= 0, teacher.index_N.clamp(min=0)
        ids_NK, logp_NK = teacher.ids_MK[index_N], teacher.logits_MV[index_N].to(dtype)
        is_here_NK = (ids_NK >= vocab_start) & (ids_NK < vocab_start + num_entries)
        column_NK = torch.where(is_here_NK, ids_NK - vocab_start, num_entries)  # the last column takes those of other ranks
        p_NK = logp_NK.exp()
        sums_2N = log_z_N.new_zeros(2, len(log_z_N))  # sum p_k log q_k, and q_r
        for rows in chunks(logits_NV):
            logq_CV = F.pad(shifted(logits_NV[rows], log_z_N[rows], temperature), (0, 1))
            sums_2N[0, rows] = (p_NK[rows] * logq_CV.gather(1, column_NK[rows])).sum(-1)
            rest_CV = logq_CV.exp_().scatter_(1, column_NK[rows], 0.0)  # not 1 - sum q_k, which would lose a small rest
            sums_2N[1, rows] = rest_CV[:, :-1].sum(-1)
        if group is not None:
            dist.all_reduce(sums_2N, group=group)
        cross_N, q_rest_N = sums_2N[0], sums_2N[1].clamp(min=torch.finfo(dtype).tiny)
        p_rest_N = (1.0 - p_NK.sum(-1)).clamp(min=0.0)
        entropy_N = torch.xlogy(p_NK, p_NK).sum(-1) + torch.xlogy(p_rest_N, p_rest_N)
        ctx.save_for_backward(logits_NV, log_z_N, column_NK, p_NK, p_rest_N / q_rest_N, has_teacher_N)
        ctx.temperature = temperature
        return torch.where(has_teacher_N, entropy_N - cross_N - p_rest_N * q_rest_N.log(), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Compute the gradient with respect to the policy's logits; see the module's docstring."""
        logits_NV, log_z_N, column_NK, p_NK, ratio_N, has_teacher_N = ctx.saved_tensors
        unused_N = ~has_teacher_N | (grad_N == 0)
        grad_N = grad_N / ctx.temperature
        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            q_CV = F.pad(shifted(logits_NV[rows], log_z_N[rows], ctx.temperature).exp_(), (0, 1))
            known_CK = q_CV.gather(1, column_NK[rows]) - p_NK[rows]
            slope_CV = q_CV.mul_(1.0 - ratio_N[rows, None]).scatter_(1, column_NK[rows], known_CK)[:, :-1]
            grad_logits_NV[rows] = zero_rows_(slope_CV * grad_N[rows, None], unused_N[rows])
        return grad_logits_NV, None, None, None, None


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
