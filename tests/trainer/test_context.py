"""The columns of rows that a context-parallel rank computes, by hand."""

from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from tests.trainer.test_collate import PAYLOAD, plan
from titanrl.algorithms.logprobs import token_supports
from titanrl.carriers.supports import supports_of
from titanrl.trainer.collate import collate
from titanrl.trainer.model import ContextGroup, head_tail


def group(rank: int, size: int) -> ContextGroup:
    return ContextGroup(group=None, rank=rank, size=size)  # type: ignore[arg-type]


def test_ranks_divide_the_columns_and_have_equal_numbers_of_earlier_ones() -> None:
    parts = [head_tail(24, rank, 3) for rank in range(3)]
    assert parts[0] == (slice(0, 4), slice(20, 24))
    assert parts[2] == (slice(8, 12), slice(12, 16))
    columns = [[column for part in own for column in range(24)[part]] for own in parts]
    assert sorted(chain.from_iterable(columns)) == list(range(24))
    assert len({sum(own) for own in columns}) == 1


def test_order_has_own_queries_and_keys_by_rank() -> None:
    queries, keys = group(1, 2).order(8, torch.device("cpu"))
    assert queries.tolist() == [2, 3, 4, 5]
    assert keys.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_targets_and_supports_of_a_rank_are_those_of_its_columns() -> None:
    rows = collate([(plan(0, 4, 2.0, 0.5), plan(1, 3, -1.0, 0.25)), (plan(1, 3, 1.0, 1.0),)], PAYLOAD, 8)
    supports = supports_of([np.array([token], np.int32) for token in range(16)], 112)
    rows = replace(rows, supports=token_supports([(0, supports)], 16))
    part = group(0, 2).cut(rows)
    assert part.tokens_BL.tolist() == [[5, 6, 1, 0], [8, 9, 0, 0]]
    assert part.positions_BL.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4]]
    # Position 6 is the last token of a sequence, so it predicts nothing.
    assert part.targets_BL.tolist() == [[6, 7, 0, 0], [9, 1, 0, 0]]
    assert part.mask_BL.tolist() == [[False, True, False, False], [True, False, False, False]]
    inside_NV = ~part.supports.outside(slice(0, 8), 0, 112)
    assert inside_NV.nonzero().tolist() == [[index, token] for index, token in enumerate([0, 1, 6, 7, 8, 9, 14, 15])]
