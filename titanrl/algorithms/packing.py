"""Sequence packing: pack sequences into rows of fixed length, and balance the rows over data-parallel ranks.

Shape suffix: S sequences.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from titanrl.carriers.types import IntArray

LINEAR_POSITIONS = 12 * 1024
"""Context length at which causal attention costs a token as many FLOPs as its matrix products: 12 d for hidden size d.

Per layer and token, matrix products take 24 d^2 FLOPs, and causal attention takes 2 d FLOPs per position of the context. The
value is for a hidden size of 1024."""


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack sequences into rows of at most `row_tokens` tokens with best-fit decreasing. Ties are broken by index.

    Return the rows as lists of indices into `lengths`. Their number is at most 11/9 of the optimum, plus one.

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
        while placed < len(equal):  # the best fit of sequences of equal length is the same row until it is full
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
    """Pack sequences like `pack`, but store the common prefix of a group only once per row.

    A sequence that directly follows another one of its group takes `num_shared` fewer tokens. Groups are packed in order of
    decreasing total length, and the sequences of a group in order of decreasing length. Each sequence goes into the fullest row
    of its group that has space for its unshared tokens, otherwise into the fullest row with space for all of its tokens. The
    sequences of a group are adjacent in a row. `groups_S` are small integers from 0.

    Raises:
        ValueError: A sequence is longer than a row.
    """
    _check_fit(lengths_S, row_tokens)
    totals_S = np.bincount(groups_S, weights=lengths_S)[groups_S]
    order_S = np.lexsort((-lengths_S, groups_S, -totals_S))
    order, lengths, num_shared = order_S.tolist(), lengths_S[order_S].tolist(), num_shared_S[order_S].tolist()
    added = np.cumsum((lengths_S - num_shared_S)[order_S]).tolist()  # inclusive prefix sums of the unshared tokens
    ends = (np.flatnonzero(np.diff(groups_S[order_S])) + 1).tolist()
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that fits is the best fit
    for first, last in pairwise([0, *ends, len(order)]):
        group_rows: list[tuple[int, int]] = []  # (free tokens, row) of the rows with a sequence of this group, sorted
        placed = first
        while placed < last:
            length = lengths[placed]
            shared = num_shared[placed]
            fit = bisect_left(group_rows, (length - shared, -1))
            if fit < len(group_rows):
                free, row = group_rows.pop(fit)
                taken, stop = length - shared, placed + 1
            else:
                fit = bisect_left(open_rows, (length, -1))
                free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
                if row == len(rows):
                    rows.append([])
                # Fill the first row of a group in one step with all sequences that would be added to it one by one.
                stop = placed + 1 if group_rows else bisect_right(added, added[placed] + free - length, placed, last)
                taken = length + added[stop - 1] - added[placed]
            rows[row] += order[placed:stop]
            insort(group_rows, (free - taken, row))
            placed = stop
        for entry in group_rows:
            insort(open_rows, entry)
    return rows


def _check_fit(lengths_S: IntArray, row_tokens: int) -> None:
    too_long = np.flatnonzero(lengths_S > row_tokens)
    if len(too_long):
        index = int(too_long[0])
        fix = f"Set trainer.row_tokens to at least {lengths_S[index]}."
        raise ValueError(f"trainer.row_tokens: sequence {index} has {lengths_S[index]} tokens (got {row_tokens}). {fix}")


def row_costs(lengths_S: IntArray, num_shared_S: IntArray, rows: Sequence[Sequence[int]]) -> list[int]:
    """Estimate the relative compute cost of each row: attention is quadratic in sequence length, everything else linear.

    `num_shared_S` is the number of tokens of each sequence that an earlier sequence of its row stores. `rows` are the indices
    of the sequences of each row, at least one per row.
    """
    if not rows:
        return []
    costs_S = (lengths_S - num_shared_S).astype(np.int64) * (lengths_S + LINEAR_POSITIONS)
    in_rows = costs_S[np.fromiter(chain.from_iterable(rows), np.int64)]
    costs: list[int] = np.add.reduceat(in_rows, np.cumsum([0, *map(len, rows[:-1])])).tolist()
    return costs


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Distribute rows over ranks by cost; return the row indices of each rank.

    Rows are assigned in rounds, in order of decreasing cost. Each round gives every rank one row, and the most expensive row of
    the round goes to the rank with the lowest total. Ranks therefore differ by at most one row, and their totals by at most the
    cost of one row. Rows of one round run at the same time and have similar costs.
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
