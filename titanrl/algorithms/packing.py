"""Packing of sequences into rows of a fixed number of tokens, and of rows onto data-parallel ranks.

Shape suffix: S sequences.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from titanrl.types import IntArray

LINEAR_POSITIONS = 12 * 1024
"""Positions whose attention costs as much as the matrix products of one token: 12 * hidden_size, from 24 d^2 against 2 d FLOPs
per layer (causal), with a hidden size of 1024."""


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Put each sequence into a row of at most `row_tokens` tokens: best-fit decreasing, ties by index.

    Returns:
        The rows as lists of indices into `lengths`: at most 11/9 of the fewest possible rows, plus one.

    Raises:
        ValueError: A sequence is longer than a row.
    """
    lengths_S = np.asarray(lengths, np.int64)
    _check_fit(lengths_S, row_tokens)
    by_length = np.argsort(-lengths_S, kind="stable")
    firsts = np.flatnonzero(np.diff(lengths_S[by_length], prepend=row_tokens + 1))
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that fits is the best fit
    for first, last in pairwise([*firsts.tolist(), len(by_length)]):
        length, equal = lengths[by_length[first]], by_length[first:last].tolist()
        placed = 0
        while placed < len(equal):  # sequences of equal length have the same best fit until that row is full
            fit = bisect_left(open_rows, (length, -1))
            free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
            if row == len(rows):
                rows.append([])
            count = min(free // length, len(equal) - placed)
            rows[row] += equal[placed : placed + count]
            placed += count
            insort(open_rows, (free - count * length, row))
    return rows


def pack_sharing(lengths_S: IntArray, groups_S: IntArray, num_shared_S: IntArray, row_tokens: int) -> list[list[int]]:
    """Pack as `pack` does, but count `num_shared` tokens less for a sequence directly after another one of its group.

    Groups are placed by decreasing total, the sequences of a group by decreasing length. Each goes into the fullest row of its
    group that has space for its added tokens, else into the fullest row with space for all its tokens. The sequences of a group
    are adjacent in a row.

    Args:
        lengths_S: Tokens of each sequence.
        groups_S: Group of each sequence, from 0.
        num_shared_S: Tokens at the start of each sequence that all sequences of its group have in common.
        row_tokens: Tokens of a row.

    Raises:
        ValueError: A sequence is longer than a row.
    """
    _check_fit(lengths_S, row_tokens)
    totals_S = np.bincount(groups_S, weights=lengths_S)[groups_S]
    order_S = np.lexsort((-lengths_S, groups_S, -totals_S))
    order, lengths, num_shared = order_S.tolist(), lengths_S[order_S].tolist(), num_shared_S[order_S].tolist()
    added = np.cumsum((lengths_S - num_shared_S)[order_S]).tolist()  # inclusive sums of the tokens without shared ones
    ends = (np.flatnonzero(np.diff(groups_S[order_S])) + 1).tolist()
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that fits is the best fit
    for first, last in pairwise([0, *ends, len(order)]):
        own: list[tuple[int, int]] = []  # rows with a sequence of this group
        placed = first
        while placed < last:
            length = lengths[placed]
            shared = num_shared[placed]
            fit = bisect_left(own, (length - shared, -1))
            if fit < len(own):
                free, row = own.pop(fit)
                taken, stop = length - shared, placed + 1
            else:
                fit = bisect_left(open_rows, (length, -1))
                free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
                if row == len(rows):
                    rows.append([])
                # The first row of a group is filled at once with the sequences that would follow one by one.
                stop = placed + 1 if own else bisect_right(added, added[placed] + free - length, placed, last)
                taken = length + added[stop - 1] - added[placed]
            rows[row] += order[placed:stop]
            insort(own, (free - taken, row))
            placed = stop
        for entry in own:
            insort(open_rows, entry)
    return rows


def _check_fit(lengths_S: IntArray, row_tokens: int) -> None:
    too_long = np.flatnonzero(lengths_S > row_tokens)
    if len(too_long):
        index = int(too_long[0])
        fix = f"Set trainer.row_tokens to at least {lengths_S[index]}."
        raise ValueError(f"trainer.row_tokens: sequence {index} has {lengths_S[index]} tokens (got {row_tokens}). {fix}")


def row_costs(lengths_S: IntArray, num_shared_S: IntArray, rows: Sequence[Sequence[int]]) -> list[int]:
    """Estimate the compute of each row: attention is quadratic in each sequence, everything else linear.

    Args:
        lengths_S: Tokens of each sequence.
        num_shared_S: Tokens of each sequence that an earlier sequence of the row holds.
        rows: Indices of the sequences of each row, at least one per row.
    """
    if not rows:
        return []
    costs_S = (lengths_S - num_shared_S).astype(np.int64) * (lengths_S + LINEAR_POSITIONS)
    in_rows = costs_S[np.fromiter(chain.from_iterable(rows), np.int64)]
    costs: list[int] = np.add.reduceat(in_rows, np.cumsum([0, *map(len, rows[:-1])])).tolist()
    return costs


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Distribute rows of the given costs over ranks; return the row indices of each rank.

    Each round gives one row to every rank, in order of decreasing cost; the most expensive row goes to the rank with the lowest
    total. So ranks differ by at most one row, and by at most the cost of one row. Rows of one round run at the same time and
    have about the same cost.
    """
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    if num_ranks == 1:
        return [by_cost]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(by_cost), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, row in zip(least_first, by_cost[start : start + num_ranks], strict=False):
            ranks[rank].append(row)
            totals[rank] += costs[row]
    return ranks
