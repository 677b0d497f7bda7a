"""Sums over the sequences of packed rows.

Shape suffix: N tokens. `sequence_N` holds the id of each token's sequence, an int64 from 0 to N - 1. All tokens of a sequence
are in one call. Masked tokens are ignored, whatever their value.
"""

import torch
from torch import Tensor


def segment_sum(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum over each token's sequence, repeated at every token of it, `[N]`."""
    counted_N = torch.where(mask, values_N, 0.0)
    return torch.zeros_like(counted_N).index_add(0, sequence_N, counted_N)[sequence_N]


def segment_mean(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the mean over each token's sequence, repeated at every token of it; 0 without counted tokens, `[N]`."""
    counts_N = segment_sum(torch.ones_like(values_N), sequence_N, mask=mask)
    return segment_sum(values_N, sequence_N, mask=mask) / counts_N.clamp(min=1.0)


def segment_any(flags_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return True at each token whose sequence has a flagged counted token, `[N]`."""
    return segment_sum(flags_N.to(torch.float32), sequence_N, mask=mask) > 0


def segment_first(sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return True at the first counted token of each sequence; the sum counts sequences, `[N]`."""
    return mask & (_first_places(sequence_N, mask)[sequence_N] == _places(sequence_N))


def segment_to_go(values_N: Tensor, sequence_N: Tensor, *, mask: Tensor) -> Tensor:
    """Return the sum over each token and the later ones of its sequence, `[N]`.

    The tokens of a sequence must be adjacent and in order. Sums are computed in fp64, so that rounding in
    earlier sequences of the row does not reach the result.
    """
    exact_N = torch.where(mask, values_N, 0.0).double()
    before_N = exact_N.cumsum(0) - exact_N
    start_N = _first_places(sequence_N, torch.ones_like(mask))[sequence_N]
    to_go_N = segment_sum(exact_N, sequence_N, mask=mask) - (before_N - before_N[start_N])
    return to_go_N.to(values_N.dtype)


def _places(sequence_N: Tensor) -> Tensor:
    return torch.arange(len(sequence_N), device=sequence_N.device)


def _first_places(sequence_N: Tensor, mask: Tensor) -> Tensor:
    """Return the index of the first counted token by sequence id; N for an id without one, `[N]`."""
    places_N = _places(sequence_N)
    none_N = torch.full_like(places_N, len(places_N))
    return none_N.scatter_reduce(0, sequence_N, torch.where(mask, places_N, none_N), "amin")
