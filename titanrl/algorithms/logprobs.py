"""Numbers of each token from logits that may be sharded over the vocabulary: log-probability, entropy, and divergence.

With truncated sampling (top-p, top-k, min-p) the first two are those of the token's support, the entries that truncation kept.
The divergence, in the second half of the module, is that of the policy's distribution from a teacher's.

Shape suffixes: N tokens, V vocabulary entries on this rank, C tokens of a chunk, I listed ids, M bitmaps or tokens with a
teacher, W words of a bitmap, K entries that a teacher gives.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanrl.carriers.supports import WORD_BITS, Supports, bitmap_words, placed

CHUNK_ELEMENTS = {"cpu": 1 << 18}
"""Number of logits per chunk. Converting chunks avoids an fp32 copy of all logits. On a CPU, a chunk fits into the cache."""

CHUNK_ELEMENTS_ELSEWHERE = 1 << 22
"""Number of logits per chunk on an accelerator, where many small kernel launches cost more than 16 MiB of fp32 memory."""

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSupports:
    """Supports of tokens: the full vocabulary, a list of ids, or a bitmap.

    Offsets are stored on the host, so slicing the supports of some tokens needs no device synchronization.
    """

    sizes_N: Tensor
    """Number of entries in each token's support."""
    is_whole_N: Tensor
    """True where the support is the full vocabulary."""
    ids_I: Tensor
    """Vocabulary ids of the small supports, concatenated over tokens, int32."""
    id_tokens_I: Tensor
    """Index of the token that each id belongs to, int32."""
    id_starts: Starts
    """Offsets of the tokens in `ids_I`, `[N + 1]`, on the host."""
    bitmaps_MW: Tensor
    """Bitmaps of the other supports, int32."""
    bitmap_tokens_M: Tensor
    """Index of the token that each bitmap belongs to, int32."""
    bitmap_starts: Starts
    """Offsets of the tokens in `bitmaps_MW`, `[N + 1]`, on the host."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return type(self)(**values | {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors.items()})

    def limits_any(self, tokens: slice) -> bool:
        """Return True if any of these tokens has a support smaller than the vocabulary."""
        first, last, _ = tokens.indices(len(self.is_whole_N))
        has_ids = self.id_starts[first] < self.id_starts[last]
        return bool(has_ids or self.bitmap_starts[first] < self.bitmap_starts[last])

    def outside(self, tokens: slice, vocab_start: int, num_entries: int) -> Tensor:
        """Return a mask that is True at vocabulary entries outside the support of the tokens of a slice, bool `[C, V]`.

        This rank has `num_entries` vocabulary entries, V, of which the first has the id `vocab_start`.
        """
        first, last, _ = tokens.indices(len(self.is_whole_N))
        size = (last - first) * num_entries
        # The extra last element is a dummy target for ids that belong to other ranks.
        flat = torch.empty(size + 1, dtype=torch.bool, device=self.is_whole_N.device)
        outside = flat[:size].view(last - first, num_entries)
        torch.logical_not(self.is_whole_N[first:last, None].expand_as(outside), out=outside)
        listed = slice(self.id_starts[first], self.id_starts[last])
        columns_I = self.ids_I[listed].long() - vocab_start
        flat_indices_I = (self.id_tokens_I[listed].long() - first) * num_entries + columns_I
        flat.index_fill_(0, torch.where((columns_I >= 0) & (columns_I < num_entries), flat_indices_I, size), 0)
        mapped = slice(self.bitmap_starts[first], self.bitmap_starts[last])
        if mapped.start < mapped.stop:
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=outside.device)
            words = slice(vocab_start // WORD_BITS, bitmap_words(vocab_start + num_entries))
            unpacked = ((self.bitmaps_MW[mapped, words, None] >> bits) & 1).flatten(1)
            inside = unpacked[:, vocab_start % WORD_BITS :][:, :num_entries]
            outside[self.bitmap_tokens_M[mapped].long() - first, : inside.shape[1]] = inside == 0
        return outside

    def columns(self, num_rows: int, *parts: slice) -> Self:
        """Return the supports of some columns, where the tokens are the flattened `num_rows` rows of a matrix."""
        length = len(self.is_whole_N) // num_rows
        slices = [slice(row * length + part.start, row * length + part.stop) for row in range(num_rows) for part in parts]
        listed = [slice(self.id_starts[tokens.start], self.id_starts[tokens.stop]) for tokens in slices]
        mapped = [slice(self.bitmap_starts[tokens.start], self.bitmap_starts[tokens.stop]) for tokens in slices]
        ends = accumulate((tokens.stop - tokens.start for tokens in slices), initial=0)
        shifts = [tokens.start - end for tokens, end in zip(slices, ends, strict=False)]
        return replace(
            self,
            sizes_N=torch.cat([self.sizes_N[tokens] for tokens in slices]),
            is_whole_N=torch.cat([self.is_whole_N[tokens] for tokens in slices]),
            ids_I=torch.cat([self.ids_I[ids] for ids in listed]),
            id_tokens_I=torch.cat([self.id_tokens_I[ids] - shift for ids, shift in zip(listed, shifts, strict=True)]),
            id_starts=_joined_starts(self.id_starts, slices),
            bitmaps_MW=torch.cat([self.bitmaps_MW[bitmaps] for bitmaps in mapped]),
            bitmap_tokens_M=torch.cat([self.bitmap_tokens_M[rows] - shift for rows, shift in zip(mapped, shifts, strict=True)]),
            bitmap_starts=_joined_starts(self.bitmap_starts, slices),
        )


def token_supports(parts: Sequence[tuple[int, Supports]], num_tokens: int) -> TokenSupports | None:
    """Convert supports, placed like `carriers.supports.placed`, to tensors on the host; None without parts."""
    if not parts:
        return None
    supports = placed(parts, num_tokens)
    counts = supports.counts_S.astype(np.int64)
    is_bitmap = supports.is_bitmap_S
    words_are_bitmaps = np.repeat(is_bitmap, counts)
    id_counts = np.where(is_bitmap, 0, counts)
    tokens = np.arange(len(counts), dtype=np.int32)
    return TokenSupports(
        sizes_N=torch.from_numpy(supports.sizes_S()),
        is_whole_N=torch.from_numpy(counts == 0),
        ids_I=torch.from_numpy(supports.words_K[~words_are_bitmaps]),
        id_tokens_I=torch.from_numpy(np.repeat(tokens, id_counts)),
        id_starts=_starts(id_counts),
        bitmaps_MW=torch.from_numpy(supports.words_K[words_are_bitmaps].reshape(-1, bitmap_words(supports.vocab_size))),
        bitmap_tokens_M=torch.from_numpy(tokens[is_bitmap]),
        bitmap_starts=_starts(is_bitmap.astype(np.int64)),
    )


def _starts(counts: npt.NDArray[np.int64]) -> Starts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _joined_starts(starts: Starts, slices: Sequence[slice]) -> Starts:
    return _starts(np.concatenate([np.diff(starts[tokens.start : tokens.stop + 1]) for tokens in slices]))


def logprobs_and_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    temperature: float = 1.0,
    supports: TokenSupports | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label and the entropy of each distribution, in nats, `[N]` each.

    The distribution is softmax(logits / temperature), computed in fp32 (fp64 for fp64 logits). Both results are differentiable.
    The backward pass recomputes the softmax, so autograd saves only the logits, the labels and two `[N]` tensors.

    The log-probability of a label outside the vocabulary is finite but meaningless, so the caller must mask it. Rows whose
    gradients are 0 get a zero gradient even if their logits are not finite.

    Args:
        logits_NV: Logits of this rank's vocabulary entries.
        labels_N: Token ids over the full vocabulary, the same on every rank.
        group: Process group over which the vocabulary is sharded, in any split; None if this rank holds all of it. The forward
            pass then runs two all-reduces, of `[N]` and `[3, N]`, and the backward pass none. Logits are not exchanged. The
            result is the same on every rank.
        vocab_start: Id of this rank's first vocabulary entry.
        temperature: Divisor of the logits.
        supports: Support of each token, which must contain its label. The softmax is then over the support only, and logits
            outside of it affect nothing and get zero gradient. Dense masks exist for one chunk of tokens at a time.
    """
    assert logits_NV.ndim == 2, f"logits must be [N, V], got {tuple(logits_NV.shape)}"
    assert labels_N.shape == logits_NV.shape[:1], f"labels must be [{logits_NV.shape[0]}], got {tuple(labels_N.shape)}"
    logprobs_N, entropy_N = _LogprobsAndEntropy.apply(logits_NV, labels_N, group, vocab_start, temperature, supports)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        group: dist.ProcessGroup | None,
        vocab_start: int,
        temperature: float,
        supports: TokenSupports | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        max_N = _largest(logits_NV, supports, vocab_start).to(dtype) / temperature
        if group is not None:
            dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)

        local_N, owned_N = _local_labels(labels_N, vocab_start, logits_NV.shape[-1])
        label_logits_N = logits_NV.gather(-1, local_N[:, None])[:, 0].to(dtype) / temperature - max_N
        # Per token: sum of exp(x), sum of exp(x) * x, and x at the label, where x = logits / temperature - max.
        sums_3N = max_N.new_empty(3, len(max_N))
        sums_3N[2] = torch.where(owned_N, label_logits_N, 0.0)
        for rows in _chunks(logits_NV):
            shifted_CV = _shifted(logits_NV[rows], max_N[rows], temperature)
            exp_CV = _exp(shifted_CV, rows, supports, vocab_start)
            sums_3N[0, rows] = exp_CV.sum(-1)
            sums_3N[1, rows] = exp_CV.mul_(shifted_CV).sum(-1)
        if group is not None:
            dist.all_reduce(sums_3N, group=group)

        sum_exp_N, sum_exp_x_N, label_N = sums_3N
        log_sum_N = sum_exp_N.log()
        entropy_N = log_sum_N - sum_exp_x_N / sum_exp_N
        ctx.save_for_backward(logits_NV, labels_N, max_N + log_sum_N, entropy_N)
        ctx.vocab_start, ctx.temperature, ctx.supports = vocab_start, temperature, supports
        ctx.set_materialize_grads(False)
        return label_N - log_sum_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        """Compute the gradient with respect to the logits x.

        With p = softmax(x / T) and its entropy H, the gradient of entry v is
        ((1[v = label] - p_v) * grad_logprobs - p_v * (log p_v + H) * grad_entropy) / T.
        """
        logits_NV, labels_N, log_z_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None, None, None, None
        local_N, owned_N = _local_labels(labels_N, ctx.vocab_start, logits_NV.shape[-1])
        grad_N = torch.zeros_like(log_z_N) if grad_logprobs_N is None else grad_logprobs_N / ctx.temperature
        unused_N = grad_N == 0
        if grad_entropy_N is not None:
            grad_entropy_N = grad_entropy_N / ctx.temperature
            unused_N &= grad_entropy_N == 0

        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            logp_CV = _shifted(logits_NV[rows], log_z_N[rows], ctx.temperature)
            grad_CV = _exp(logp_CV, rows, ctx.supports, ctx.vocab_start)
            if grad_entropy_N is None:
                grad_CV.mul_(-grad_N[rows, None])
            else:
                inner_CV = logp_CV.add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None]).add_(grad_N[rows, None])
                grad_CV.mul_(inner_CV.neg_())
            grad_CV.scatter_add_(-1, local_N[rows, None], torch.where(owned_N, grad_N, 0.0)[rows, None])
            grad_logits_NV[rows] = _zero_rows_(grad_CV, unused_N[rows])
        return grad_logits_NV, None, None, None, None, None


def _largest(logits_NV: Tensor, supports: TokenSupports | None, vocab_start: int) -> Tensor:
    """Return the largest logit in each token's support on this rank, `[N]`; -inf if the support has no entry on this rank."""
    if supports is None:
        return logits_NV.amax(-1)
    max_N = logits_NV.new_empty(len(logits_NV))
    for rows in _chunks(logits_NV):
        logits_CV = logits_NV[rows]
        if supports.limits_any(rows):
            logits_CV = logits_CV.masked_fill(supports.outside(rows, vocab_start, logits_NV.shape[-1]), -torch.inf)
        max_N[rows] = logits_CV.amax(-1)
    return max_N


def _exp(values_CV: Tensor, rows: slice, supports: TokenSupports | None, vocab_start: int) -> Tensor:
    """Return exp(values), with 0 outside the supports. Also zero the values there in place, so that products are not NaN."""
    if supports is None or not supports.limits_any(rows):
        return values_CV.exp()
    outside_CV = supports.outside(rows, vocab_start, values_CV.shape[-1])
    # Fill with 0 before exp instead of -inf: on a CPU, exp takes five times longer where it underflows.
    return values_CV.masked_fill_(outside_CV, 0.0).exp().masked_fill_(outside_CV, 0.0)


def _local_labels(labels_N: Tensor, vocab_start: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label on this rank, and True where this rank holds the label; other columns are arbitrary."""
    column_N = labels_N - vocab_start
    return column_N.clamp(0, vocab_size - 1), (column_N >= 0) & (column_N < vocab_size)


def _shifted(logits_CV: Tensor, shift_C: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature - shift as a new tensor, in the dtype of `shift_C`."""
    scaled_CV = logits_CV.to(shift_C.dtype)
    if temperature != 1.0:
        scaled_CV = scaled_CV / temperature
    # In place, if this is a copy already: on a CPU, another new tensor would take three times as long.
    return scaled_CV.sub_(shift_C[:, None]) if scaled_CV is not logits_CV else scaled_CV - shift_C[:, None]


def _zero_rows_(values_CV: Tensor, is_zero_C: Tensor) -> Tensor:
    """Set some rows to 0 in place, also where they are not finite: multiplied by 0, NaN stays NaN."""
    if values_CV.device.type == "cpu":  # where filling all rows with a mask takes longer than the softmax
        return values_CV.index_fill_(0, is_zero_C.nonzero()[:, 0], 0.0)
    return values_CV.masked_fill_(is_zero_C[:, None], 0.0)  # without waiting for the device


def _chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield slices of rows with at most `CHUNK_ELEMENTS` logits each, but at least one row."""
    num_rows, vocab_size = logits_NV.shape
    step = max(CHUNK_ELEMENTS.get(logits_NV.device.type, CHUNK_ELEMENTS_ELSEWHERE) // vocab_size, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


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

    With the teacher's distribution p, the policy's q, and m = beta p + (1 - beta) q:

    - `forward_kl` is KL(p, q),
    - `reverse_kl` is KL(q, p),
    - `jsd` is beta KL(p, m) + (1 - beta) KL(q, m), the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649).

    The gradient with respect to the logits of q needs no distribution but that of its own token: for an entry v, it is
    q_v - p_v, q_v (log(q_v / p_v) - KL(q, p)), and (1 - beta) q_v (log(q_v / m_v) - KL(q, m)).

    If only the K most likely entries of p are known, `forward_kl` is the divergence of the distributions over these entries and
    one more, the rest, which has the probabilities p_r = 1 - sum p_k and q_r = 1 - sum q_k:

        sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

    This is exact for that coarser distribution and a lower bound of KL(p, q), equal to it if p and q agree on the proportions
    within the rest. Its gradient is q_k - p_k at the known entries, and q_v (1 - p_r / q_r) at the others.

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
        for rows in _chunks(logits_NV):
            logq_CV = _shifted(logits_NV[rows], log_z_N[rows], temperature)
            logp_CV = _shifted(teacher.logits_MV[index_N[rows]], teacher_log_z_N[rows], temperature)
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
        """Compute the gradient with respect to the policy's logits; see `divergence`."""
        logits_NV, log_z_N, logits_MV, index_N, teacher_log_z_N, kl_N = ctx.saved_tensors
        has_teacher_N, index_N = index_N >= 0, index_N.clamp(min=0)
        unused_N = ~has_teacher_N | (grad_N == 0)
        grad_N = grad_N / ctx.temperature
        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            logq_CV = _shifted(logits_NV[rows], log_z_N[rows], ctx.temperature)
            logp_CV = _shifted(logits_MV[index_N[rows]], teacher_log_z_N[rows], ctx.temperature)
            if ctx.name == "forward_kl":
                slope_CV = logq_CV.exp_().sub_(logp_CV.exp_())
            elif ctx.name == "reverse_kl":
                slope_CV = logq_CV.exp() * (logq_CV - logp_CV - kl_N[rows, None])
            else:
                logm_CV = _log_mixture(logp_CV, logq_CV, ctx.beta)
                slope_CV = (1 - ctx.beta) * logq_CV.exp() * (logq_CV - logm_CV - kl_N[rows, None])
            grad_logits_NV[rows] = _zero_rows_(slope_CV.mul_(grad_N[rows, None]), unused_N[rows])
        return grad_logits_NV, None, None, None


class _PartialKL(torch.autograd.Function):
    """KL(p, q) over the known entries of p and the rest; see `divergence`."""

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
        for rows in _chunks(logits_NV):
            logq_CV = F.pad(_shifted(logits_NV[rows], log_z_N[rows], temperature), (0, 1))
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
        """Compute the gradient with respect to the policy's logits; see `divergence`."""
        logits_NV, log_z_N, column_NK, p_NK, ratio_N, has_teacher_N = ctx.saved_tensors
        unused_N = ~has_teacher_N | (grad_N == 0)
        grad_N = grad_N / ctx.temperature
        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            q_CV = F.pad(_shifted(logits_NV[rows], log_z_N[rows], ctx.temperature).exp_(), (0, 1))
            known_CK = q_CV.gather(1, column_NK[rows]) - p_NK[rows]
            slope_CV = q_CV.mul_(1.0 - ratio_N[rows, None]).scatter_(1, column_NK[rows], known_CK)[:, :-1]
            grad_logits_NV[rows] = _zero_rows_(slope_CV * grad_N[rows, None], unused_N[rows])
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
    for rows in _chunks(logits_NV):
        sum_N[rows] = _shifted(logits_NV[rows], max_N[rows], temperature).exp_().sum(-1)
    if group is not None:
        dist.all_reduce(sum_N, group=group)
    return max_N + sum_N.log()
