"""Sums over sequences against loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titanrl.algorithms.segments import segment_any, segment_first, segment_mean, segment_sum, segment_to_go

SEQUENCE = torch.tensor([0, 0, 0, 2, 2, 1])
MASK = torch.tensor([True, False, True, True, True, False])
VALUES = torch.tensor([1.0, float("nan"), 3.0, 10.0, 20.0, float("inf")])


def test_sums_and_means_by_hand() -> None:
    assert segment_sum(VALUES, SEQUENCE, mask=MASK).tolist() == [4.0, 4.0, 4.0, 30.0, 30.0, 0.0]
    assert segment_mean(VALUES, SEQUENCE, mask=MASK).tolist() == [2.0, 2.0, 2.0, 15.0, 15.0, 0.0]


def test_any_and_first_by_hand() -> None:
    assert segment_any(VALUES > 15, SEQUENCE, mask=MASK).tolist() == [False, False, False, True, True, False]
    assert segment_first(SEQUENCE, mask=MASK).tolist() == [True, False, False, True, False, False]


def test_to_go_by_hand() -> None:
    assert segment_to_go(VALUES, SEQUENCE, mask=MASK).tolist() == [4.0, 3.0, 3.0, 30.0, 20.0, 0.0]


def test_no_tokens_give_empty_results() -> None:
    none, no_ids, no_mask = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    for function in (segment_sum, segment_mean, segment_to_go):
        assert function(none, no_ids, mask=no_mask).shape == (0,)
    assert segment_first(no_ids, mask=no_mask).shape == (0,)


def test_to_go_ignores_earlier_sequences() -> None:
    values = torch.rand(40)
    alone = segment_to_go(values[20:], torch.zeros(20, dtype=torch.int64), mask=torch.ones(20, dtype=torch.bool))
    behind = torch.cat([torch.full((20,), 1e5), values[20:]])
    sequence = torch.arange(2).repeat_interleave(20)
    both = segment_to_go(behind, sequence, mask=torch.ones(40, dtype=torch.bool))
    torch.testing.assert_close(both[20:], alone, atol=1e-6, rtol=0)


def loop(values: Tensor, sequence: Tensor, mask: Tensor, start: int) -> float:
    return sum(values[s].item() for s in range(start, len(mask)) if sequence[s] == sequence[start] and mask[s])


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**20)), min_size=1, max_size=6))
def test_to_go_matches_loop(sequences: list[tuple[int, int]]) -> None:
    sequence = torch.cat([torch.full((length,), number) for number, (length, _) in enumerate(sequences)])
    generator = torch.Generator().manual_seed(sequences[0][1])
    values, mask = torch.randn(len(sequence), generator=generator), torch.rand(len(sequence), generator=generator) < 0.7
    expected = torch.tensor([loop(values, sequence, mask, t) for t in range(len(sequence))], dtype=torch.float32)
    torch.testing.assert_close(segment_to_go(values, sequence, mask=mask), expected, atol=1e-5, rtol=0)
