"""Packing of sequences into rows of a fixed number of tokens, and of rows onto data-parallel ranks.

Shape suffix: S sequences.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from titanrl.types import IntArray

LINEAR_POSITIONS = 12 * 1024
"""The matrix products of one token cost as much as attention over 12 * hidden_size positions (24 d^2 against 2 d FLOPs per
layer, causal); taken at the hidden size of Qwen3-0.6B."""


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Put each sequence into a row of at most `row_tokens` tokens: best-fit decreasing, ties by index.

    Returns the rows as lists of indices into `lengths`. Uses at most 11/9 of the fewest possible rows, plus one.

    Raises ValueError if a sequence is longer than a row.
    """
    lengths_S = np.asarray(lengths, np.int64)
    _check_fit(lengths_S, row_tokens)
    by_length = np.argsort(-lengths_S, kind="stable")
    firsts = np.flatnonzero(np.diff(lengths_S[by_length], prepend=row_tokens + 1))
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens still free, row), sorted: the first that fits is the best fit
    for first, last in pairwise([*firsts.tolist(), len(by_length)]):
        length, equal = lengths[by_length[first]], by_length[first:last].tolist()
        placed = 0
        while placed < len(equal):  # the best fit of one is that of the next of equal length, until the row is full
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
    """`pack`, where a sequence takes `num_shared` tokens less right behind another one of its group.

    Groups go in by falling total, sequences of a group by falling length: into the fullest row of the group's own that holds
    what a sequence adds, else into the fullest row that holds all of it. A group's sequences stand side by side.

    Args:
        lengths_S: tokens of each sequence.
        groups_S: the group of each, from 0 on.
        num_shared_S: tokens at its start that all sequences of its group have in common.
        row_tokens: tokens of a row.

    Raises ValueError if a sequence is longer than a row.
    """
    _check_fit(lengths_S, row_tokens)
    totals_S = np.bincount(groups_S, weights=lengths_S)[groups_S]
    order_S = np.lexsort((-lengths_S, groups_S, -totals_S))
    order, lengths, num_shared = order_S.tolist(), lengths_S[order_S].tolist(), num_shared_S[order_S].tolist()
    added = np.cumsum((lengths_S - num_shared_S)[order_S]).tolist()  # up to and with each, behind one of its group
    ends = (np.flatnonzero(np.diff(groups_S[order_S])) + 1).tolist()
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens still free, row), sorted: the first that fits is the best fit
    for first, last in pairwise([0, *ends, len(order)]):
        own: list[tuple[int, int]] = []  # those of them that hold a sequence of the group
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
                # Into the group's first row goes at once what would go there one by one.
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
        raise ValueError(f"sequence {index} has {lengths_S[index]} tokens, which do not fit a row of row_tokens={row_tokens}")


def row_costs(lengths_S: IntArray, num_shared_S: IntArray, rows: Sequence[Sequence[int]]) -> list[int]:
    """Relative compute of rows of packed sequences: attention is quadratic in each sequence, all the rest linear.

    Args:
        lengths_S: tokens of each sequence.
        num_shared_S: those of them that another sequence of the row has computed.
        rows: places of the sequences of each row, at least one.
    """
    if not rows:
        return []
    costs_S = (lengths_S - num_shared_S).astype(np.int64) * (lengths_S + LINEAR_POSITIONS)
    in_rows = costs_S[np.fromiter(chain.from_iterable(rows), np.int64)]
    costs: list[int] = np.add.reduceat(in_rows, np.cumsum([0, *map(len, rows[:-1])])).tolist()
    return costs


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Share rows of the given costs among ranks; returns the row indices of each rank.

    Rows are dealt in rounds of falling cost, one row per rank and round, the costliest to the rank with the least so far.
    So the number of rows differs by at most 1 between ranks, the total cost by no more than one row's, and rows of one
    round, which run at the same time, cost about the same.
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
