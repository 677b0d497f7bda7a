"""Who attends to whom in packed rows."""

import torch

from titanrl.models.attention import PackedAttention, packed_mask


def test_a_token_sees_its_own_sequence_up_to_itself() -> None:
    mask = packed_mask(torch.tensor([[0, 1, 2, 0, 1]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_packed_attention_equals_attention_over_each_sequence_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, heads, 8, generator=generator) for heads in (4, 2, 2))
    attend = PackedAttention(PackedAttention.Config())
    packed = attend(q, k, v, attention_masks=packed_mask(torch.tensor([[0, 1, 2, 0, 1]])), enable_gqa=True)
    for part in (slice(0, 3), slice(3, 5)):
        positions = torch.arange(part.stop - part.start)[None]
        alone = attend(q[:, part], k[:, part], v[:, part], attention_masks=packed_mask(positions), enable_gqa=True)
        torch.testing.assert_close(packed[:, part], alone)
