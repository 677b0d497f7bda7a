"""Planned slice copies compared with numpy slicing."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanrl.weights.manifest import Box, ByteLayout, Piece, ShardEntry, WeightMismatchError, make_layout, whole
from titanrl.weights.slice_copies import Target, plan_copies

FLOAT = "torch.float32"


def layouts(name: str, shape: tuple[int, ...], boxes: list[Box], dtype: str = FLOAT) -> list[ByteLayout]:
    """Build layouts with one rank per box."""
    return [make_layout(rank, (ShardEntry(name, dtype, shape, box, 0),), box.numel * 4) for rank, box in enumerate(boxes)]


def block(shape: tuple[int, ...], box: Box, dtype: str = FLOAT) -> Target:
    """Build a target that holds one block of a tensor."""
    return Target(shape, dtype, (Piece(box, whole(box.shape)),))


def everything(shape: tuple[int, ...], dtype: str = FLOAT) -> Target:
    return block(shape, whole(shape), dtype)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[Box], Box]:
    """Draw a matrix split at random rows and columns, and a random block of it."""
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = [Box((r0, c0), (r1 - r0, c1 - c0)) for r0, r1 in spans[0] for c0, c1 in spans[1]]
    low = [draw(st.integers(0, size - 1)) for size in shape]
    size = tuple(draw(st.integers(1, length - start)) for length, start in zip(shape, low, strict=True))
    return shape, boxes, Box(tuple(low), size)


@settings(deadline=None)  # the machine may be busy
@given(tilings())
def test_copies_rebuild_any_block_from_any_tiling(case: tuple[tuple[int, int], list[Box], Box]) -> None:
    shape, boxes, wanted = case
    value = np.arange(np.prod(shape)).reshape(shape)
    shards = [value[box.slices_within(whole(shape))] for box in boxes]
    target = np.full(wanted.shape, -1)
    for copy in plan_copies(layouts("w", shape, boxes), {"w": block(shape, wanted)}):
        target[copy.destination] = shards[copy.rank][copy.source]
    np.testing.assert_array_equal(target, value[wanted.slices_within(whole(shape))])


def test_missing_and_unexpected_tensors_are_named() -> None:
    published = layouts("old.weight", (2,), [Box((0,), (2,))])
    with pytest.raises(WeightMismatchError, match=r"not published: \['new.weight'\].*not expected: \['old.weight'\]"):
        plan_copies(published, {"new.weight": everything((2,))})


@pytest.mark.parametrize("target", [everything((3,)), everything((2,), "torch.bfloat16")])
def test_tensor_of_another_shape_or_dtype_is_named(target: Target) -> None:
    with pytest.raises(WeightMismatchError, match=r"w: published as torch.float32\[2\], expected as"):
        plan_copies(layouts("w", (2,), [Box((0,), (2,))]), {"w": target})


def test_missing_elements_are_refused() -> None:
    with pytest.raises(WeightMismatchError, match="w: only 3 of 4 elements"):
        plan_copies(layouts("w", (4,), [Box((0,), (1,)), Box((2,), (2,))]), {"w": everything((4,))})


def test_overlapping_boxes_are_refused() -> None:
    with pytest.raises(WeightMismatchError, match="w: published twice"):
        plan_copies(layouts("w", (4,), [Box((0,), (3,)), Box((2,), (2,))]), {"w": everything((4,))})


def test_scalar_is_copied_and_must_be_published_once() -> None:
    (copy,) = plan_copies(layouts("scale", (), [Box((), ())]), {"scale": everything(())})
    assert (copy.source, copy.destination) == ((), ())
    with pytest.raises(WeightMismatchError, match="scale: published twice"):
        plan_copies(layouts("scale", (), [Box((), ())] * 2), {"scale": everything(())})


def test_layout_ids_are_equal_only_for_equal_layouts() -> None:
    (one,), (same,), (moved,) = (layouts("w", (4,), [Box((start,), (2,))]) for start in (0, 0, 2))
    assert one.layout_id == same.layout_id != moved.layout_id


def test_empty_targets_need_no_published_box() -> None:
    published = layouts("w", (2,), [Box((0,), (2,))])
    copies = plan_copies(published, {"w": everything((2,)), "empty": Target((0, 3), FLOAT, ())})
    assert [copy.name for copy in copies] == ["w"]
    with pytest.raises(WeightMismatchError, match=r"w: published as torch.float32\[2\], expected as torch.float32\[0\]"):
        plan_copies(published, {"w": Target((0,), FLOAT, ())})
