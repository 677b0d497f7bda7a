"""Slices of vLLM's fused parameters against hand-computed rows."""

import pytest
import torch

from titanrl.config.shapes import ModelShape
from titanrl.generator.native import part_rows, share_of, vocab_rows

SHAPE = ModelShape(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, vocab_size=112,
    max_positions=512,
)  # fmt: skip


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 128)), ("k", (128, 192)), ("v", (192, 256)), ("up", (384, 768))])
def test_rows_of_a_projection_in_a_fused_parameter(part: str, rows: tuple[int, int]) -> None:
    assert (part_rows(SHAPE)[part].start, part_rows(SHAPE)[part].stop) == rows


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 64)), ("k", (64, 96)), ("v", (96, 128)), ("up", (192, 384))])
def test_rows_of_a_projection_on_one_of_two_ranks(part: str, rows: tuple[int, int]) -> None:
    assert (part_rows(SHAPE, tp=2)[part].start, part_rows(SHAPE, tp=2)[part].stop) == rows


def test_shard_is_a_slice_of_one_dimension() -> None:
    part = share_of(torch.zeros(6, 4), dim=1, rank=2, tp=3)
    assert (part.shape, part.offset) == ((6, 12), (0, 8))


# vLLM pads 112 tokens to 128: the first of two ranks has 64 of them, the second 48 and the padding.
@pytest.mark.parametrize(
    ("num_rows", "rank", "num_real", "start"), [(128, 0, 112, 0), (64, 0, 64, 0), (64, 1, 48, 64), (16, 7, 0, 112)]
)
def test_rows_of_an_embedding_exclude_its_padding(num_rows: int, rank: int, num_real: int, start: int) -> None:
    part = vocab_rows(torch.zeros(num_rows, 8), 112, rank)
    assert (part.shape, part.offset, len(part.local)) == ((112, 8), (start, 0), num_real)
