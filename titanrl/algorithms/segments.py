"""Segment reductions: reduce per-token values over each sequence of packed rows.

Shape suffix: N tokens. `sequence_N` is the id of each token's sequence, int64 in [0, N). A call must include all tokens of a
sequence. Values at masked tokens are ignored, including inf and NaN. All functions return `[N]`.
"""

import torch
from torch import Tensor


def segment_sum(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum over each token's sequence, broadcast to all tokens of the sequence."""
    masked_N = torch.where(mask, values_N, 0.0)
    return torch.zeros_like(masked_N).index_add(0, sequence_N, masked_N)[sequence_N]


def segment_mean(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the mean over each token's sequence, broadcast to all tokens of the sequence; 0 if all its tokens are masked."""
    counts_N = segment_sum(torch.ones_like(values_N), sequence_N, mask=mask)
    return segment_sum(values_N, sequence_N, mask=mask) / counts_N.clamp(min=1.0)


def segment_any(flags_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return True at all tokens of sequences that have an unmasked token with a True flag."""
    return segment_sum(flags_N.to(torch.float32), sequence_N, mask=mask) > 0


def segment_first(sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return True at the first unmasked token of each sequence. The sum is the number of sequences with such a token."""
    return mask & (_first_positions(sequence_N, mask)[sequence_N] == _positions(sequence_N))


def segment_to_go(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum over each token and all later tokens of its sequence, as in reward-to-go.

    The tokens of a sequence must be adjacent and in order. Sums are computed in fp64, because the cumulative sum over earlier
    sequences of the row would otherwise add rounding error.
    """
    exact_N = torch.where(mask, values_N, 0.0).double()
    before_N = exact_N.cumsum(0) - exact_N
    start_N = _first_positions(sequence_N, torch.ones_like(mask))[sequence_N]
    to_go_N = segment_sum(exact_N, sequence_N, mask=mask) - (before_N - before_N[start_N])
    return to_go_N.to(values_N.dtype)


def _positions(sequence_N: Tensor) -> Tensor:
    return torch.arange(len(sequence_N), device=sequence_N.device)


def _first_positions(sequence_N: Tensor, mask: Tensor) -> Tensor:
    """Return the position of the first unmasked token of each sequence id, `[N]`; N for an id without unmasked token."""
    positions_N = _positions(sequence_N)
    none_N = torch.full_like(positions_N, len(positions_N))
    return none_N.scatter_reduce(0, sequence_N, torch.where(mask, positions_N, none_N), "amin")
