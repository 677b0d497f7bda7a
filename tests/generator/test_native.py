"""Where the trainer's tensors lie in vLLM's fused parameters, by hand."""

import pytest

from titanrl.generator.native import part_rows


@pytest.mark.parametrize(("part", "rows"), [("q", (0, 128)), ("k", (128, 192)), ("v", (192, 256)), ("up", (384, 768))])
def test_rows_of_fused_parameters(part: str, rows: tuple[int, int]) -> None:
    config = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
    assert (part_rows(config)[part].start, part_rows(config)[part].stop) == rows
