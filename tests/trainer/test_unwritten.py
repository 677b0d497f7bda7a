"""Marks of tensors that loading must overwrite."""

import pytest
import torch

from titanrl.trainer.unwritten import mark, unwritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_with_one_unwritten_element_is_named(dtype: torch.dtype) -> None:
    state = {name: torch.ones(3, 4, dtype=dtype) for name in ("b.weight", "a.weight")}
    mark(state)
    assert all(value.isnan().all() for value in state.values())
    assert unwritten(state) == ["a.weight", "b.weight"]
    state["a.weight"].zero_()
    state["b.weight"].view(-1)[:11] = 1.0
    assert unwritten(state) == ["b.weight"]
    state["b.weight"][2, 3] = float("nan")  # of a checkpoint whose weights have diverged
    assert unwritten(state) == []


def test_other_dtypes_and_empty_shards_are_ignored() -> None:
    state = {"count": torch.tensor(3), "shard": torch.empty(0, 4), "scalar": torch.tensor(1.0)}
    mark(state)
    assert state["count"] == 3
    assert unwritten(state) == ["scalar"]
