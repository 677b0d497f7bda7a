"""Boxes and bytes of state dicts: random shardings compared with torch and numpy, and real DTensors on four ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.trainer.ranks import World
from tests.weights.processes import MemoryStore
from titanrl.weights.layout import (
    LiveState,
    PartOf,
    Target,
    TensorFingerprint,
    box_pieces,
    digest,
    dim_splits,
    entry_view,
    first_holders,
    held_indices,
    held_pieces,
    index_runs,
    local_part,
    plan_copies,
    plan_pack,
)
from titanrl.weights.records import Box, ByteLayout, Commit, Piece, ShardEntry, WeightMismatchError, make_layout, whole
from titanrl.weights.transport import Copies, CopyPlan, WeightPublisher, WeightReader

VALUE = torch.arange(21.0).view(7, 3)


# Random shardings, no processes


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """Draw a shape, a mesh, and one placement per mesh dimension: even or uneven shards, interleaved shards, or replicas."""
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(2, 4)),
    )
    return shape, mesh, tuple(draw(placement) for _ in mesh)


def pieces_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> tuple[Piece, ...]:
    indices = [held_indices(size, dim_splits(placements, mesh, coordinate, dim)) for dim, size in enumerate(shape)]
    return box_pieces([index_runs(dim) for dim in indices])


def local_array(value: np.ndarray, pieces: tuple[Piece, ...]) -> np.ndarray:
    """Return the local array of a rank that holds these pieces."""
    shape = tuple(
        max((piece.local.offset[dim] + piece.local.shape[dim] for piece in pieces), default=0) for dim in range(value.ndim)
    )
    local = np.full(shape, -1)
    for piece in pieces:
        local[piece.local.slices] = value[piece.box.slices]
    return local


@settings(deadline=None)  # the machine may be busy
@given(shardings(), shardings())
def test_any_sharding_can_be_rebuilt_from_any_other(
    source: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
    target: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = source
    value = np.arange(math.prod(shape)).reshape(shape)
    layouts: list[ByteLayout] = []
    locals_: list[np.ndarray] = []
    for rank, coordinate in enumerate(np.ndindex(mesh)):
        first = not any(isinstance(p, Replicate) and at for p, at in zip(placements, coordinate, strict=True))
        pieces = pieces_of(shape, mesh, placements, coordinate) if first else ()
        entries = tuple(ShardEntry("w", "int", shape, piece.box, number) for number, piece in enumerate(pieces))
        layouts.append(make_layout(rank, entries, 0))
        locals_.append(local_array(value, pieces))
    _, target_mesh, target_placements = target
    target_placements = tuple(p if isinstance(p, Replicate) or p.dim < len(shape) else Replicate() for p in target_placements)
    for coordinate in np.ndindex(target_mesh):
        wanted = pieces_of(shape, target_mesh, target_placements, coordinate)
        expected = local_array(value, wanted)
        filled = np.full(expected.shape, -1)
        for copy in plan_copies(layouts, {"w": Target(shape, "int", wanted)}):
            box = pieces_of(shape, mesh, placements, list(np.ndindex(mesh))[copy.rank])[copy.entry.byte_offset]
            filled[copy.destination] = locals_[copy.rank][box.local.slices][copy.source]
        np.testing.assert_array_equal(filled, expected)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_fsdp_over_tp_equals_chunking_twice(size: int, dp: int, tp: int) -> None:
    """FSDP2 splits the TP shard and describes the result as `(_StridedShard(0, tp), Shard(0))`."""
    placements = (_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0))
    for at_dp, at_tp in np.ndindex((dp, tp)):
        held = held_indices(size, dim_splits(placements, (dp, tp), (at_dp, at_tp), 0))
        after_tp = nth(torch.arange(size), tp, at_tp)
        assert (
            held.tolist()
            == nth(
                after_tp if tp > 1 else nth(torch.arange(size), dp, at_dp), dp if tp > 1 else tp, at_dp if tp > 1 else at_tp
            ).tolist()
        )


def nth(value: torch.Tensor, num_chunks: int, index: int) -> torch.Tensor:
    """Return a chunk of `torch.chunk`, or an empty one where torch returns fewer chunks."""
    parts = torch.chunk(value, num_chunks)
    return parts[index] if index < len(parts) and len(value) else value[:0]


def test_strided_shard_without_other_splits_has_several_boxes() -> None:
    held = held_indices(8, dim_splits([_StridedShard(0, split_factor=2)], [2], [1], 0))
    assert index_runs(held) == [(2, 2), (6, 2)]
    held = held_indices(8, dim_splits([Shard(0), _StridedShard(0, split_factor=2)], [2, 2], [1, 0], 0))
    assert index_runs(held) == [(4, 1), (6, 1)]


# Real DTensors


def publish_on_rank(folder: str) -> None:
    """Pack tensors of every placement and a model with FSDP2 over TP, in sizes that do not divide evenly."""
    rank = dist.get_rank()
    flat = init_device_mesh("cpu", (4,))
    state = {
        "rows": distribute_tensor(VALUE, flat, [Shard(0)]),
        "columns": distribute_tensor(VALUE, flat, [Shard(1)]),
        "interleaved": distribute_tensor(VALUE, flat, [_StridedShard(0, split_factor=2)], src_data_rank=None),
        "replica": distribute_tensor(VALUE, flat, [Replicate()]),
        "tiny": distribute_tensor(torch.tensor([5.0]), flat, [Shard(0)]),
        "plain": VALUE.clone(),
        "buffer": VALUE.clone(),
    }
    pack_to_file(state, rank, f"{folder}/kinds{rank}.pt")

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 10, bias=False), torch.nn.Linear(10, 5, bias=False), torch.nn.LayerNorm(5))
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/whole.pt")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    pack_to_file(model.state_dict(), rank, f"{folder}/model{rank}.pt")


def pack_to_file(state: dict[str, torch.Tensor], rank: int, path: str) -> None:
    plan = plan_pack(state, rank, torch.bfloat16, keep={"buffer"})
    data = torch.zeros(plan.layout.num_bytes, dtype=torch.uint8)
    Copies(plan.targets(data), plan.local_blocks(state)).run()
    torch.save((plan.layout, data), path)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, world: Callable[[int], World]) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    world(4).run(publish_on_rank, str(folder))
    return folder


def unpack(folder: Path, what: str, targets: dict[str, torch.Tensor]) -> list[ByteLayout]:
    ranks = [torch.load(folder / f"{what}{rank}.pt", weights_only=False) for rank in range(4)]
    layouts = [layout for layout, _ in ranks]
    CopyPlan(layouts, targets).run({rank: data for rank, (_, data) in enumerate(ranks)}, is_reused=False)
    return layouts


def test_shards_of_four_ranks_fill_the_full_tensors(packed: Path) -> None:
    names = ("rows", "columns", "interleaved", "replica", "plain")
    targets = {name: torch.zeros(7, 3, dtype=torch.bfloat16) for name in names}
    targets |= {"tiny": torch.zeros(1, dtype=torch.bfloat16), "buffer": torch.zeros(7, 3)}
    layouts = unpack(packed, "kinds", targets)
    for name in names:
        assert torch.equal(targets[name], VALUE.to(torch.bfloat16)), name
    assert targets["tiny"].item() == 5.0
    assert torch.equal(targets["buffer"], VALUE)
    # Interleaved, ranks hold rows 0 and 4, 1 and 5, 2 and 6, 3. There are three columns for four ranks.
    boxes = [[(entry.name, entry.box.offset) for entry in layout.entries] for layout in layouts]
    assert boxes[1] == [("rows", (2, 0)), ("columns", (0, 1)), ("interleaved", (1, 0)), ("interleaved", (5, 0))]
    assert boxes[3] == [("rows", (6, 0)), ("interleaved", (3, 0))]


def test_model_with_fsdp_over_tp_is_rebuilt_bit_for_bit(packed: Path) -> None:
    expected = torch.load(packed / "whole.pt")
    targets = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in expected.items()}
    unpack(packed, "model", targets)
    for name, value in expected.items():
        assert torch.equal(targets[name], value.to(torch.bfloat16)), name


def publish_without_first_rank(folder: str) -> None:
    """Pack a tensor that only the last two ranks have, next to one that all have."""
    rank = dist.get_rank()
    mesh, later = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [2, 3])
    state: dict[str, torch.Tensor] = {"all": distribute_tensor(VALUE.clone(), mesh, [Replicate()])}
    if rank >= 2:
        state |= {
            "later": distribute_tensor(VALUE.clone(), later, [Shard(0)]),
            "copies": distribute_tensor(VALUE.clone(), later, [Replicate()]),
        }
        state["plain"] = VALUE.clone()
    names: list[list[str]] = [[]] * 4
    dist.all_gather_object(names, list(state))
    plan = plan_pack(state, rank, torch.float32, first=first_holders(names))
    data = torch.zeros(plan.layout.num_bytes, dtype=torch.uint8)
    Copies(plan.targets(data), plan.local_blocks(state)).run()
    torch.save((plan.layout, data), f"{folder}/later{rank}.pt")


def test_tensors_that_the_first_rank_lacks_are_published(world: Callable[[int], World], tmp_path: Path) -> None:
    world(4).run(publish_without_first_rank, str(tmp_path))
    targets = {name: torch.zeros(7, 3) for name in ("all", "later", "copies", "plain")}
    layouts = unpack(tmp_path, "later", targets)
    assert all(torch.equal(value, VALUE) for value in targets.values())
    assert [[entry.name for entry in layout.entries] for layout in layouts] == [
        ["all"], [], ["later", "copies", "plain"], ["later"]
    ]  # fmt: skip


# One process


def test_tied_tensors_are_published_once() -> None:
    weight = torch.ones(2, 2)
    plan = plan_pack({"embedding": weight, "head": weight}, 0, torch.float32)
    assert [entry.name for entry in plan.layout.entries] == ["embedding"]


def test_square_matrix_and_its_transposed_view_are_not_tied() -> None:
    weight = torch.arange(4.0).view(2, 2)
    state = {"w": weight, "transposed": weight.T, "tied": weight}
    plan = plan_pack(state, 0, torch.float32)
    assert [entry.name for entry in plan.layout.entries] == ["w", "transposed"]
    data = torch.zeros(plan.layout.num_bytes, dtype=torch.uint8)
    Copies(plan.targets(data), plan.local_blocks(state)).run()
    assert entry_view(data, plan.layout.entries[1]).tolist() == [[0, 2], [1, 3]]


def test_values_are_cast_and_entries_are_aligned_to_cache_lines() -> None:
    state = {"w": torch.tensor([1.0, 1.0 + 2**-10]), "v": torch.ones(3)}
    plan = plan_pack(state, 0, torch.bfloat16)
    assert [entry.byte_offset for entry in plan.layout.entries] == [0, 64]
    data = torch.zeros(plan.layout.num_bytes, dtype=torch.uint8)
    Copies(plan.targets(data), plan.local_blocks(state)).run()
    assert entry_view(data, plan.layout.entries[0]).tolist() == [1.0, 1.0]


def test_partial_sums_and_wrong_local_shapes_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="w: partial sums cannot be published"):
            held_pieces("w", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        odd = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,))
        with pytest.raises(ValueError, match=r"w: the local shape must be \[3\] for placements .* \(got \[2\]\)"):
            held_pieces("w", odd)
    finally:
        dist.destroy_process_group()


def test_boxes_intersect() -> None:
    assert Box((0, 0), (3, 3)).intersection(Box((2, 1), (4, 1))) == Box((2, 1), (1, 1))
    assert Box((0,), (2,)).intersection(Box((2,), (2,))) is None
    assert whole((2, 3)).numel == 6


MIB = 1 << 20


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", [0, 77, MIB // 2, MIB + 12])
@pytest.mark.parametrize("size", [MIB + 13])
def test_full_digest_detects_any_changed_byte(size: int, place: int) -> None:
    data = some_bytes(size)
    before = digest(data, "full", 1)
    data[place] += 1
    assert digest(data, "full", 1) != before


def test_full_digest_detects_swapped_blocks() -> None:
    data = some_bytes(MIB)
    halves = torch.cat([data[MIB // 2 :], data[: MIB // 2]])
    assert digest(data, "full", 1) != digest(halves, "full", 1)


def test_sampled_digest_covers_every_page_once_in_64_versions() -> None:
    data = some_bytes(MIB)
    changed = data.clone()
    changed[5 * 4096 + 3] += 1
    seen = [version for version in range(64) if digest(data, "sampled", version) != digest(changed, "sampled", version)]
    assert seen == [5]


def test_sampled_digest_covers_every_byte_of_small_weights() -> None:
    data = some_bytes(100_000)
    changed = data.clone()
    changed[54_321] += 1
    assert digest(data, "sampled", 3) != digest(changed, "sampled", 3)


def test_digest_can_be_off_and_data_can_be_empty() -> None:
    assert digest(some_bytes(10), "off", 1) is None
    nothing = torch.empty(0, dtype=torch.uint8)
    assert digest(nothing, "full", 1) == digest(nothing, "full", 2)


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layers.register_buffer("kept", torch.ones(2))
    layers.register_buffer("scratch", torch.ones(2), persistent=False)
    return layers


def test_live_state_returns_the_models_own_tensors_once() -> None:
    module = model()
    live = LiveState(module)
    tensors = live.tensors()
    assert list(tensors) == list(module.state_dict())
    assert tensors["0.weight"] is module.get_parameter("0.weight")
    with torch.no_grad():
        module.get_parameter("0.weight").fill_(7)
    assert live.tensors() is tensors


def test_live_state_detects_replaced_tensors() -> None:
    module = model()
    live = LiveState(module)
    before = live.tensors()
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()}, assign=True)
    after = live.tensors()
    assert after["1.bias"] is module.get_parameter("1.bias")
    assert after["kept"] is module.get_buffer("kept")
    assert after["1.bias"] is not before["1.bias"]


def test_fingerprint_changes_with_names_tensors_and_memory() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    fingerprint = TensorFingerprint(state)
    assert fingerprint.matches(dict(state))
    assert not fingerprint.matches({"a": state["a"]})
    assert not fingerprint.matches({"a": state["a"], "c": state["b"]})
    assert not fingerprint.matches({"a": state["a"], "b": state["b"].clone()})
    state["b"].data = torch.zeros(3)  # the same object, elsewhere
    assert not fingerprint.matches(state)


def half_precision(weight: torch.Tensor) -> None:
    weight.data = weight.data.view(torch.float16)


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda weight: weight.resize_(4, 1), half_precision])
def test_fingerprint_changes_with_strides_shape_and_dtype_in_place(change: Callable[[torch.Tensor], object]) -> None:
    state = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    fingerprint = TensorFingerprint(state)
    address = state["w"].data_ptr()
    change(state["w"])
    assert state["w"].data_ptr() == address
    assert not fingerprint.matches(state)


def test_fingerprint_includes_the_block_of_a_part() -> None:
    part = PartOf(torch.ones(2), (4,), (0,))
    fingerprint = TensorFingerprint({"w": part})
    assert fingerprint.matches({"w": part})
    part.local.data = torch.zeros(2)
    assert not fingerprint.matches({"w": part})


def test_local_part_equals_to_local_and_is_fingerprinted(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        value = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        assert local_part(value).data_ptr() == value.to_local().data_ptr()
        fingerprint = TensorFingerprint({"w": value})
        assert fingerprint.matches({"w": value})
        value._local_tensor = torch.zeros(4)  # FSDP2 does this when it moves a parameter
        assert not fingerprint.matches({"w": value})
    finally:
        dist.destroy_process_group()


async def test_moved_weights_are_published_from_their_new_memory() -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.full((4,), 1.0)}, {"w": torch.zeros(4)}

    async def publish(version: int) -> list[float]:
        manifest = await publisher.publish(version, state)
        (await reader.fetch(Commit(version, (manifest,)))).copy_into(target)
        values: list[float] = target["w"].tolist()
        return values

    assert await publish(1) == [1.0] * 4
    state["w"].fill_(2)
    assert await publish(2) == [2.0] * 4
    state["w"].data = torch.full((4,), 3.0)
    assert await publish(3) == [3.0] * 4
    state["w"] = torch.full((4,), 4.0)
    assert await publish(4) == [4.0] * 4


async def test_weights_transposed_in_place_are_published_transposed() -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, {"w": torch.zeros(2, 2)}
    await publisher.publish(1, state)
    state["w"].t_()
    manifest = await publisher.publish(2, state)
    (await reader.fetch(Commit(2, (manifest,)))).copy_into(target)
    assert target["w"].tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize("numel", [1, 1000])
async def test_layout_of_another_size_is_refused_and_the_old_one_still_works(numel: int) -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.ones(100)}, {"w": torch.zeros(100)}
    await publisher.publish(1, state)
    with pytest.raises(ValueError, match=r"weights: the size of trainer rank 0's shards must stay 448 bytes during a run"):
        await publisher.publish(2, {"w": torch.ones(numel)})
    manifest = await publisher.publish(3, state)
    (await reader.fetch(Commit(3, (manifest,)))).copy_into(target)
    assert torch.equal(target["w"], state["w"])


FLOAT = "torch.float32"


def layouts(name: str, shape: tuple[int, ...], boxes: list[Box], dtype: str = FLOAT) -> list[ByteLayout]:
    """Build layouts with one rank per box."""
    return [make_layout(rank, (ShardEntry(name, dtype, shape, box, 0),), box.numel * 4) for rank, box in enumerate(boxes)]


def block(shape: tuple[int, ...], box: Box, dtype: str = FLOAT) -> Target:
    """Build a target that holds one block of a tensor."""
    return Target(shape, dtype, (Piece(box, whole(box.shape)),))


def everything(shape: tuple[int, ...], dtype: str = FLOAT) -> Target:
    return block(shape, whole(shape), dtype)


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
