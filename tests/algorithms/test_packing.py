import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.algorithms.packing import LINEAR_POSITIONS, balance, pack, pack_sharing, row_costs
from titanrl.rollout.group import num_equal


def test_error_names_sequence_longer_than_row() -> None:
    for place in (pack, lambda lengths, row_tokens: share(lengths, [0, 0], [2, 2], row_tokens)):
        with pytest.raises(ValueError, match=r"trainer\.row_tokens: sequence 1 has 11 tokens \(got 10\)"):
            place([3, 11], row_tokens=10)


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 200))
def test_every_sequence_is_packed_once_and_no_row_overflows(lengths: list[int], row_tokens: int) -> None:
    rows = pack(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= row_tokens for row in rows)
    # At most one row is no more than half full.
    assert len(rows) <= math.ceil(2 * sum(lengths) / row_tokens)


def best_fit_one_by_one(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Pack by the definition: longest first, ties by index, each into the first of the fullest rows with space."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [row_tokens - sum(lengths[i] for i in row) for row in rows]
        fitting = [(room, row) for row, room in enumerate(free) if room >= lengths[index]]
        if not fitting:
            rows.append([])
        rows[min(fitting)[1] if fitting else -1].append(index)
    return rows


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 70))
def test_batched_placement_of_equal_lengths_matches_best_fit(lengths: list[int], row_tokens: int) -> None:
    assert pack(lengths, row_tokens) == best_fit_one_by_one(lengths, row_tokens)


@pytest.mark.parametrize("num_sequences", [512, 10_000])
def test_long_tailed_lengths_pack_densely(num_sequences: int) -> None:
    lengths = np.random.default_rng(0).lognormal(mean=6.3, sigma=0.9, size=num_sequences).clip(16, 8192).astype(int).tolist()
    rows = pack(lengths, row_tokens=8192)
    assert sum(lengths) / (len(rows) * 8192) >= 0.97


def share(lengths: list[int], groups: list[int], num_shared: list[int], row_tokens: int) -> tuple[list[list[int]], list[int]]:
    rows, stored = pack_sharing(*(np.array(column, np.int64) for column in (lengths, groups, num_shared)), row_tokens)
    return rows, stored.tolist()


def test_group_shares_row_with_its_prompt() -> None:
    # Of group 0 (prompt 3) 8 opens a row of 20, 7 and 6 add 4 and 3; the rest of that row is too small for group 1.
    rows = [[0, 1, 3], [2]]
    assert share([8, 7, 9, 6], groups=[0, 0, 1, 0], num_shared=[0, 3, 0, 3], row_tokens=20) == (rows, [0, 3, 0, 3])


def test_group_in_second_row_stores_its_prompt_again() -> None:
    assert share([6, 6, 6], groups=[7, 7, 7], num_shared=[4, 4, 4], row_tokens=9) == ([[0, 1], [2]], [0, 4, 0])


def test_sequence_follows_the_one_with_which_it_shares_most() -> None:
    # 9 and 8 begin with 2 common tokens and take two rows; 7 shares 6 of its tokens with 8, but only 2 with 9.
    assert share([9, 8, 7], groups=[0, 0, 0], num_shared=[0, 2, 6], row_tokens=14) == ([[0], [1, 2]], [0, 0, 6])


def test_sequence_does_not_share_all_of_the_one_before() -> None:
    # Its first token would be at the position that continues the other one.
    assert share([3, 5], groups=[0, 0], num_shared=[0, 3], row_tokens=9) == ([[0, 1]], [0, 2])


@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=9), max_size=4),
    st.integers(7, 30),
)
def test_rows_hold_all_tokens_of_their_sequences(groups: list[list[list[int]]], row_tokens: int) -> None:
    tokens = [sequence for sequences in groups for sequence in sorted(sequences)]
    of = [group for group, sequences in enumerate(groups) for _ in sequences]
    common = [num_equal(*map(np.array, pair)) for pair in pairwise([[], *tokens])]
    rows, stored = share([len(sequence) for sequence in tokens], of, common, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(tokens)))
    for row in rows:
        assert sum(len(tokens[index]) - stored[index] for index in row) <= row_tokens
        last: dict[int, int] = {}  # last token at each position
        for index in row:
            assert [last[position] for position in range(stored[index])] == tokens[index][: stored[index]]
            last |= dict(enumerate(tokens[index]))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 40), min_size=1, max_size=9)), max_size=12),
    st.integers(61, 150),
)
def test_shared_prompts_count_once_per_row(groups: list[tuple[int, list[int]]], row_tokens: int) -> None:
    sequences = [(group, shared, length) for group, (shared, lengths) in enumerate(groups) for length in lengths]
    lengths, of, shared = [s + length for _, s, length in sequences], [g for g, _, _ in sequences], [s for _, s, _ in sequences]
    rows, _ = share(lengths, of, shared, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        in_order = [of[index] for index in row]
        blocks = [group for before, group in zip([None, *in_order], in_order, strict=False) if group != before]
        assert len(blocks) == len(set(blocks)), "a group's sequences must be adjacent"
        assert sum(lengths[index] - shared[index] for index in row) + sum(groups[group][0] for group in blocks) <= row_tokens


def test_row_cost_is_quadratic_in_sequences_not_in_row() -> None:
    lengths, nothing = np.array([5, 7, 3]), np.zeros(3, np.int64)
    assert row_costs(lengths, nothing, [[2, 0], [1]]) == [9 + 25 + 8 * LINEAR_POSITIONS, 49 + 7 * LINEAR_POSITIONS]
    assert row_costs(lengths, np.array([2, 0, 0]), [[2, 0]]) == [9 + 3 * 5 + 6 * LINEAR_POSITIONS]
    assert row_costs(nothing[:0], nothing[:0], []) == []


def test_most_expensive_row_goes_to_least_loaded_rank() -> None:
    # Round 1: 9, 8; round 2: 7 to the rank with 8, 2 to the one with 9; round 3: 1 to the rank with 11.
    assert balance([7, 9, 1, 8, 2], num_ranks=2) == [[1, 4, 2], [3, 0]]


@given(st.lists(st.integers(1, 1000), max_size=100), st.integers(1, 9))
def test_ranks_get_all_rows_evenly(costs: list[int], num_ranks: int) -> None:
    ranks = balance(costs, num_ranks)
    assert sorted(row for rank in ranks for row in rank) == list(range(len(costs)))
    counts = [len(rank) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    totals = [sum(costs[row] for row in rank) for rank in ranks]
    assert max(totals) - min(totals) <= max(costs, default=0)


def test_costs_of_full_rounds_are_nearly_equal() -> None:
    lengths = np.random.default_rng(1).lognormal(mean=6.3, sigma=0.9, size=4096).clip(16, 8192).astype(int).tolist()
    costs = row_costs(np.array(lengths), np.zeros(len(lengths), np.int64), pack(lengths, row_tokens=8192))
    costs = costs[: len(costs) // 8 * 8]
    totals = [sum(costs[row] for row in rank) for rank in balance(costs, num_ranks=8)]
    assert max(totals) / min(totals) < 1.01
