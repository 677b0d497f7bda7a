"""Sequence packing: pack sequences into rows of fixed length, and balance the rows over data-parallel ranks.

Shape suffix: S sequences.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from titanrl.carriers.types import IntArray

LINEAR_POSITIONS = 12 * 1024
"""Context length at which causal attention costs a token as many FLOPs as its matrix products: 12 d for hidden size d.

Per layer and token, matrix products take 24 d^2 FLOPs, and causal attention takes 2 d FLOPs per position of the context. The
value is for a hidden size of 1024."""


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack sequences into rows of at most `row_tokens` tokens with best-fit decreasing. Ties are broken by index.

    Return the rows as lists of indices into `lengths`. Their number is at most 11/9 of the optimum, plus one. Raise
    `ValueError` if a sequence is longer than a row.
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


@dataclass(slots=True)
class _SharingRow:
    """A row with sequences of the group that is being packed."""

    row: int
    free: int
    last: int
    """The group's last sequence in the row."""
    num_shared: int
    """Number of first tokens that the next sequence of the group shares with it."""


def pack_sharing(
    lengths_S: IntArray, groups_S: IntArray, num_shared_S: IntArray, row_tokens: int
) -> tuple[list[list[int]], IntArray]:
    """Pack sequences like `pack`, but store common prefixes within a group only once per row.

    The sequences of a group come in an order in which each has its first `num_shared` tokens in common with the one before it,
    and with an earlier one the least of these numbers between the two. Return the rows, and the number of tokens of each
    sequence that earlier ones of its row store. In a row, the sequences of a group are adjacent and in this order. A sequence
    shares less than all tokens of the one before it.

    Groups are packed in order of decreasing total length. Each sequence goes where it adds the fewest tokens to a row of its
    group that has space for them, otherwise into the fullest row with space for all of its tokens. `groups_S` are small
    integers from 0. Raise `ValueError` if a sequence is longer than a row.
    """
    _check_fit(lengths_S, row_tokens)
    totals_S = np.bincount(groups_S, weights=lengths_S)[groups_S]
    order_S = np.lexsort((groups_S, -totals_S))
    order, lengths, num_shared = order_S.tolist(), lengths_S[order_S].tolist(), num_shared_S[order_S].tolist()
    directly_S = np.minimum(num_shared_S[order_S], np.append(0, lengths_S[order_S][:-1] - 1))  # after the one before
    added = np.cumsum(lengths_S[order_S] - directly_S).tolist()  # inclusive prefix sums of the unshared tokens
    ends = (np.flatnonzero(np.diff(groups_S[order_S])) + 1).tolist()
    stored_S = np.zeros_like(lengths_S)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that fits is the best fit
    for first, last in pairwise([0, *ends, len(order)]):
        own: list[_SharingRow] = []
        placed = first
        while placed < last:
            length = lengths[placed]
            fits = []
            for each in own:
                each.num_shared = min(each.num_shared, num_shared[placed])
                shared = min(each.num_shared, lengths[each.last] - 1)
                if length - shared <= each.free:
                    fits.append((-shared, each.free, each.row, each))
            if fits:
                shared, _, _, place = min(fits)
                stored_S[order[placed]] = -shared
                place.free, stop = place.free - length - shared, placed + 1
            else:
                fit = bisect_left(open_rows, (length, -1))
                free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
                if row == len(rows):
                    rows.append([])
                # Fill the first row of a group in one step with all sequences that would be added to it one by one.
                stop = placed + 1 if own else bisect_right(added, added[placed] + free - length, placed, last)
                stored_S[order_S[placed + 1 : stop]] = directly_S[placed + 1 : stop]
                place = _SharingRow(row, free - length - added[stop - 1] + added[placed], stop - 1, row_tokens)
                own.append(place)
            rows[place.row] += order[placed:stop]
            place.last, place.num_shared = stop - 1, row_tokens
            placed = stop
        for each in own:
            insort(open_rows, (each.free, each.row))
    return rows, stored_S


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
