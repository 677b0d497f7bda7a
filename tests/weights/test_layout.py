"""State dicts as boxes and bytes, with real DTensors on two ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titanrl.weights.layout import check_contiguous, entry_view, local_shards, num_packed_bytes, pack
from titanrl.weights.manifest import Box, Commit, WeightManifest
from titanrl.weights.publish import PulledWeights

VALUE = torch.arange(21.0).view(7, 3)


def publish_shards(rank: int, folder: str) -> None:
    """Two ranks: one tensor cut by rows (unevenly), one by columns, one replicated, one too small for both."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(VALUE, mesh, [Shard(0)]),
        "columns": distribute_tensor(VALUE, mesh, [Shard(1)]),
        "replica": distribute_tensor(VALUE, mesh, [Replicate()]),
        "tiny": distribute_tensor(torch.tensor([5.0]), mesh, [Shard(0)]),
        "plain": VALUE.clone(),
    }
    shards = list(local_shards(state, rank))
    data = torch.empty(num_packed_bytes(shards, torch.bfloat16), dtype=torch.uint8)
    entries = pack(shards, data, torch.bfloat16)
    torch.save((WeightManifest(3, rank, entries, data.numel(), 0, None, 0), data), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_shards_of_two_ranks_fill_whole_tensors_in_the_readers_dtype(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(publish_shards, (str(tmp_path),), nprocs=2)
    packed = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    pulled = PulledWeights(
        Commit(3, tuple(manifest for manifest, _ in packed)), {rank: packed[rank][1] for rank in range(2)}, {}
    )
    targets = {name: torch.zeros(7, 3, dtype=torch.bfloat16) for name in ("rows", "columns", "replica", "plain")}
    targets["tiny"] = torch.zeros(1, dtype=torch.bfloat16)
    pulled.copy_into(targets)
    for name in ("rows", "columns", "replica", "plain"):
        assert torch.equal(targets[name], VALUE.to(torch.bfloat16)), name
    assert targets["tiny"].item() == 5.0
    assert [entry.name for entry in packed[1][0].entries] == ["rows", "columns"], "rank 1 repeats what rank 0 publishes"


def test_tied_tensors_are_published_once() -> None:
    weight = torch.ones(2, 2)
    assert [shard.name for shard in local_shards({"embedding": weight, "head": weight}, 0)] == ["embedding"]


def test_bytes_are_cast_to_the_readers_dtype() -> None:
    shards = list(local_shards({"w": torch.tensor([1.0, 1.0 + 2**-10])}, 0))
    assert num_packed_bytes(shards, torch.bfloat16) == 4
    data = torch.empty(4, dtype=torch.uint8)
    pack(shards, data, torch.bfloat16)
    assert entry_view(data, 0, (2,), torch.bfloat16).tolist() == [1.0, 1.0]


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        value = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match="w: cannot publish a partial sum"):
            check_contiguous("w", value)
    finally:
        dist.destroy_process_group()


def test_boxes_intersect() -> None:
    assert Box((0, 0), (3, 3)).intersection(Box((2, 1), (4, 1))) == Box((2, 1), (1, 1))
    assert Box((0,), (2,)).intersection(Box((2,), (2,))) is None
