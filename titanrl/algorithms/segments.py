"""Sums over the sequences of packed rows.

Shape suffix: N tokens. `sequence_N` holds the id of each token's sequence: any int64 numbers from 0 to N - 1. A sequence is
whole: all its tokens are in one call. Masked tokens count nowhere, whatever stands there.
"""

import torch
from torch import Tensor


def segment_sum(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Sum over each token's sequence, at every token of it, `[N]`."""
    counted_N = torch.where(mask, values_N, 0.0)
    return torch.zeros_like(counted_N).index_add(0, sequence_N, counted_N)[sequence_N]


def segment_mean(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Mean over each token's sequence, at every token of it; 0 for a sequence without counted tokens, `[N]`."""
    counts_N = segment_sum(torch.ones_like(values_N), sequence_N, mask=mask)
    return segment_sum(values_N, sequence_N, mask=mask) / counts_N.clamp(min=1.0)


def segment_any(flags_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Whether any counted token of each token's sequence is flagged, `[N]`."""
    return segment_sum(flags_N.to(torch.float32), sequence_N, mask=mask) > 0


def segment_first(sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """True at the first counted token of each sequence, so that a sum over it counts sequences, `[N]`."""
    return mask & (_first_places(sequence_N, mask)[sequence_N] == _places(sequence_N))


def segment_to_go(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Sum over each token and the later ones of its sequence, whose tokens must stand side by side and in order, `[N]`.

    Works in fp64, so that what stands before a sequence in its row leaves no trace in the result.
    """
    exact_N = torch.where(mask, values_N, 0.0).double()
    before_N = exact_N.cumsum(0) - exact_N
    start_N = _first_places(sequence_N, torch.ones_like(mask))[sequence_N]
    to_go_N = segment_sum(exact_N, sequence_N, mask=mask) - (before_N - before_N[start_N])
    return to_go_N.to(values_N.dtype)


def _places(sequence_N: Tensor) -> Tensor:
    return torch.arange(len(sequence_N), device=sequence_N.device)


def _first_places(sequence_N: Tensor, mask: Tensor) -> Tensor:
    """Place of the first counted token of each sequence, by sequence id; N where there is none, `[N]`."""
    places_N = _places(sequence_N)
    none_N = torch.full_like(places_N, len(places_N))
    return none_N.scatter_reduce(0, sequence_N, torch.where(mask, places_N, none_N), "amin")
