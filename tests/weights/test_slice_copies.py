"""The plan of slice copies, against numpy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanrl.weights.manifest import Box, ByteLayout, Piece, ShardEntry, WeightMismatchError, make_layout, whole
from titanrl.weights.slice_copies import Target, plan_copies

FLOAT = "torch.float32"


def layouts(name: str, shape: tuple[int, ...], boxes: list[Box], dtype: str = FLOAT) -> list[ByteLayout]:
    """One rank per box."""
    return [make_layout(rank, (ShardEntry(name, dtype, shape, box, 0),), box.numel * 4) for rank, box in enumerate(boxes)]


def block(shape: tuple[int, ...], box: Box, dtype: str = FLOAT) -> Target:
    """Somebody wants one block of a tensor and holds nothing else."""
    return Target(shape, dtype, (Piece(box, whole(box.shape)),))


def everything(shape: tuple[int, ...], dtype: str = FLOAT) -> Target:
    return block(shape, whole(shape), dtype)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[Box], Box]:
    """A matrix cut at random rows and columns, and a random block of it that somebody wants."""
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


def test_a_missing_and_an_extra_tensor_are_both_named() -> None:
    published = layouts("old.weight", (2,), [Box((0,), (2,))])
    with pytest.raises(WeightMismatchError, match=r"not published: \['new.weight'\].*not wanted: \['old.weight'\]"):
        plan_copies(published, {"new.weight": everything((2,))})


@pytest.mark.parametrize("target", [everything((3,)), everything((2,), "torch.bfloat16")])
def test_another_shape_or_type_is_named(target: Target) -> None:
    with pytest.raises(WeightMismatchError, match=r"w: published as torch.float32\[2\], wanted as"):
        plan_copies(layouts("w", (2,), [Box((0,), (2,))]), {"w": target})


def test_a_hole_in_the_published_boxes_is_found() -> None:
    with pytest.raises(WeightMismatchError, match="w: only 3 of 4 elements"):
        plan_copies(layouts("w", (4,), [Box((0,), (1,)), Box((2,), (2,))]), {"w": everything((4,))})


def test_an_overlap_of_published_boxes_is_found() -> None:
    with pytest.raises(WeightMismatchError, match="w: published twice"):
        plan_copies(layouts("w", (4,), [Box((0,), (3,)), Box((2,), (2,))]), {"w": everything((4,))})


def test_a_scalar_is_a_block_too() -> None:
    (copy,) = plan_copies(layouts("scale", (), [Box((), ())]), {"scale": everything(())})
    assert (copy.source, copy.destination) == ((), ())
    with pytest.raises(WeightMismatchError, match="scale: published twice"):
        plan_copies(layouts("scale", (), [Box((), ())] * 2), {"scale": everything(())})


def test_equal_layouts_have_equal_ids_and_others_do_not() -> None:
    (one,), (same,), (moved,) = (layouts("w", (4,), [Box((start,), (2,))]) for start in (0, 0, 2))
    assert one.layout_id == same.layout_id != moved.layout_id
