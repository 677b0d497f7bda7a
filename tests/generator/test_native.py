"""Where the trainer's tensors lie in vLLM's fused parameters, by hand."""

import pytest
import torch

from titanrl.generator.native import part_rows, share_of, vocab_rows

CONFIG = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 128)), ("k", (128, 192)), ("v", (192, 256)), ("up", (384, 768))])
def test_rows_of_fused_parameters(part: str, rows: tuple[int, int]) -> None:
    assert (part_rows(CONFIG)[part].start, part_rows(CONFIG)[part].stop) == rows


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 64)), ("k", (64, 96)), ("v", (96, 128)), ("up", (192, 384))])
def test_rows_of_the_half_that_one_of_two_ranks_has(part: str, rows: tuple[int, int]) -> None:
    assert (part_rows(CONFIG, tp=2)[part].start, part_rows(CONFIG, tp=2)[part].stop) == rows


def test_a_share_is_cut_along_one_dimension() -> None:
    part = share_of(torch.zeros(6, 4), dim=1, rank=2, tp=3)
    assert (part.shape, part.offset) == ((6, 12), (0, 8))


# 112 tokens are padded to 128 and shared: 64 on the first of two ranks, 48 real ones on the second.
@pytest.mark.parametrize(
    ("num_rows", "rank", "num_real", "start"), [(128, 0, 112, 0), (64, 0, 64, 0), (64, 1, 48, 64), (16, 7, 0, 112)]
)
def test_rows_of_an_embedding_without_its_padding(num_rows: int, rank: int, num_real: int, start: int) -> None:
    part = vocab_rows(torch.zeros(num_rows, 8), 112, rank)
    assert (part.shape, part.offset, len(part.local)) == ((112, 8), (start, 0), num_real)
