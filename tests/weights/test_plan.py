"""The plan of slice copies, against numpy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.weights.manifest import Box, ShardEntry, WeightManifest, WeightMismatchError
from titanrl.weights.plan import Target, plan_copies

FLOAT = "torch.float32"


def manifests(name: str, shape: tuple[int, ...], boxes: list[Box], dtype: str = FLOAT) -> list[WeightManifest]:
    """One rank per box."""
    return [
        WeightManifest(1, rank, (ShardEntry(name, dtype, shape, box, 0),), box.numel * 4, 0, None, 0)
        for rank, box in enumerate(boxes)
    ]


def whole(shape: tuple[int, ...], dtype: str = FLOAT) -> Target:
    return Target(shape, dtype, Box((0,) * len(shape), shape))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[Box], Box]:
    """A matrix cut at random rows and columns, and a random block of it that somebody wants."""
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = [Box((r0, c0), (r1 - r0, c1 - c0)) for r0, r1 in spans[0] for c0, c1 in spans[1]]
    low = [draw(st.integers(0, size - 1)) for size in shape]
    block = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, low, strict=True))
    return shape, boxes, Box(tuple(low), block)


@given(tilings())
def test_copies_rebuild_any_block_from_any_tiling(case: tuple[tuple[int, int], list[Box], Box]) -> None:
    shape, boxes, wanted = case
    value = np.arange(np.prod(shape)).reshape(shape)
    shards = [value[box.slices_within(Box((0, 0), shape))] for box in boxes]
    target = np.full(wanted.shape, -1)
    for copy in plan_copies(manifests("w", shape, boxes), {"w": Target(shape, FLOAT, wanted)}):
        target[copy.destination] = shards[copy.rank][copy.source]
    np.testing.assert_array_equal(target, value[wanted.slices_within(Box((0, 0), shape))])


def test_a_missing_and_an_extra_tensor_are_both_named() -> None:
    published = manifests("old.weight", (2,), [Box((0,), (2,))])
    with pytest.raises(WeightMismatchError, match=r"not published: \['new.weight'\].*not wanted: \['old.weight'\]"):
        plan_copies(published, {"new.weight": whole((2,))})


@pytest.mark.parametrize("target", [whole((3,)), whole((2,), "torch.bfloat16")])
def test_another_shape_or_type_is_named(target: Target) -> None:
    with pytest.raises(WeightMismatchError, match=r"w: published as torch.float32\[2\], wanted as"):
        plan_copies(manifests("w", (2,), [Box((0,), (2,))]), {"w": target})


def test_a_hole_in_the_published_boxes_is_found() -> None:
    with pytest.raises(WeightMismatchError, match="w: only 3 of 4 elements"):
        plan_copies(manifests("w", (4,), [Box((0,), (1,)), Box((2,), (2,))]), {"w": whole((4,))})


def test_an_overlap_of_published_boxes_is_found() -> None:
    with pytest.raises(WeightMismatchError, match="w: published twice"):
        plan_copies(manifests("w", (4,), [Box((0,), (3,)), Box((2,), (2,))]), {"w": whole((4,))})
