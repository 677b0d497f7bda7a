"""Attention masks of packed rows."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from titanrl.models.decoder import PackedAttention, packed_block_mask, packed_mask


def test_token_attends_to_its_own_sequence_up_to_itself() -> None:
    mask = packed_mask(torch.tensor([[0, 1, 2, 0, 1]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_packed_attention_equals_attention_per_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, heads, 8, generator=generator) for heads in (4, 2, 2))
    attend = PackedAttention(PackedAttention.Config())
    packed = attend(q, k, v, attention_masks=packed_mask(torch.tensor([[0, 1, 2, 0, 1]])), enable_gqa=True)
    for part in (slice(0, 3), slice(3, 5)):
        positions = torch.arange(part.stop - part.start)[None]
        alone = attend(q[:, part], k[:, part], v[:, part], attention_masks=packed_mask(positions), enable_gqa=True)
        torch.testing.assert_close(packed[:, part], alone)


def test_sequence_with_a_shared_prefix_attends_to_the_prefix() -> None:
    # A sequence of 4 tokens, two sequences that share its first 2, an unrelated sequence, and padding.
    mask = packed_mask(torch.tensor([[0, 1, 2, 3, 2, 3, 2, 0, 1, 0]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]


def test_sequences_share_tokens_of_different_sequences() -> None:
    # Tokens a b c d, then a b C D, then a b C E, then a F, and another sequence.
    positions = torch.tensor([[0, 1, 2, 3, 2, 3, 3, 1, 0, 1]])
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 4, 6], [0, 7], [8], [8, 9]]
    mask = packed_mask(positions)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in mask] == seen


def test_mask_of_some_queries_and_ordered_keys_has_their_rows_and_columns(eager: None) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 2, 3, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]])
    order = (torch.tensor([0, 1, 6, 7]), torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]))
    mask = packed_mask(positions, order)
    assert torch.equal(mask, packed_mask(positions)[:, :, order[0]][..., order[1]])
    blocks = packed_block_mask(positions, 128, order)
    assert (blocks.seq_lengths, blocks.shape[0]) == ((4, 8), 2)
    places = torch.meshgrid(*(torch.arange(size) for size in (2, 1, 4, 8)), indexing="ij")
    assert torch.equal(blocks.mask_mod(*places), mask)


@pytest.fixture
def eager() -> Iterator[None]:
    """Build block masks without compiling, which takes seconds for each shape."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_mask_equals_the_dense_mask(eager: None) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 2, 3, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 5, 6]])
    q, k, v = torch.randn(3, 2, 4, 10, 8, generator=torch.Generator().manual_seed(0))
    block_mask = packed_block_mask(positions, 128)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=packed_mask(positions))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask), dense)
