"""Packing of sequences into rows of a fixed number of tokens, and of rows onto data-parallel ranks."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import repeat

LINEAR_POSITIONS = 12 * 1024
"""The matrix products of one token cost as much as attention over 12 * hidden_size positions (24 d^2 against 2 d FLOPs per
layer, causal); taken at the hidden size of Qwen3-0.6B."""


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Put each sequence into a row of at most `row_tokens` tokens: best-fit decreasing, ties by index.

    Returns the rows as lists of indices into `lengths`. Uses at most 11/9 of the fewest possible rows, plus one.

    Raises ValueError if a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens still free, row), sorted: the first that fits is the best fit
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(f"sequence {index} has {length} tokens, which do not fit a row of row_tokens={row_tokens}")
        fit = bisect_left(open_rows, (length, -1))
        free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(open_rows, (free - length, row))
    return rows


def pack_sharing(lengths: Sequence[int], groups: Sequence[int], num_shared: Sequence[int], row_tokens: int) -> list[list[int]]:
    """`pack`, where a sequence takes `num_shared` tokens less in a row that holds another one of its group.

    Groups go in by falling total, sequences of a group by falling length: into the fullest row of the group's own that holds
    what a sequence adds, else into the fullest row that holds all of it. A group's sequences stand side by side.

    Args:
        lengths: tokens of each sequence.
        groups: the group of each.
        num_shared: tokens at its start that all sequences of its group have in common.
        row_tokens: tokens of a row.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        members[groups[index]].append(index)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens still free, row), sorted
    for group in sorted(members, key=lambda group: (-sum(lengths[i] for i in members[group]), group)):
        own: list[tuple[int, int]] = []  # those of them that hold a sequence of the group
        for index in members[group]:
            added = lengths[index] - num_shared[index]
            fit = bisect_left(own, (added, -1))
            if fit < len(own):
                free, row = own.pop(fit)
            else:
                added = lengths[index]
                if added > row_tokens:
                    raise ValueError(f"sequence {index} has {added} tokens, which do not fit a row of row_tokens={row_tokens}")
                fit = bisect_left(open_rows, (added, -1))
                free, row = open_rows.pop(fit) if fit < len(open_rows) else (row_tokens, len(rows))
                if row == len(rows):
                    rows.append([])
            rows[row].append(index)
            insort(own, (free - added, row))
        for entry in own:
            insort(open_rows, entry)
    return rows


def row_cost(lengths: Iterable[int], num_shared: Iterable[int] = repeat(0)) -> int:
    """Relative compute of a row of packed sequences: attention is quadratic in each sequence, all the rest linear."""
    return sum((length - shared) * (length + LINEAR_POSITIONS) for length, shared in zip(lengths, num_shared, strict=False))


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Share rows of the given costs among ranks; returns the row indices of each rank.

    Rows are dealt in rounds of falling cost, one row per rank and round, the costliest to the rank with the least so far.
    So the number of rows differs by at most 1 between ranks, the total cost by no more than one row's, and rows of one
    round, which run at the same time, cost about the same.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for start in range(0, len(by_cost), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, row in zip(least_first, by_cost[start : start + num_ranks], strict=False):
            ranks[rank].append(row)
            totals[rank] += costs[row]
    return ranks
