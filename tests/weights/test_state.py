"""Replaced, moved and reshaped tensors are detected without a new state dict."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.weights.processes import MemoryStore
from titanrl.weights.layout import PartOf, local_part
from titanrl.weights.manifest import Commit
from titanrl.weights.publish import WeightPublisher
from titanrl.weights.pull import WeightReader
from titanrl.weights.state import LiveState, TensorFingerprint


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


def test_moved_weights_are_published_from_their_new_memory() -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.full((4,), 1.0)}, {"w": torch.zeros(4)}

    async def publish(version: int) -> list[float]:
        manifest = await publisher.publish(version, state)
        (await reader.fetch(Commit(version, (manifest,)))).copy_into(target)
        values: list[float] = target["w"].tolist()
        return values

    async def scenario() -> None:
        assert await publish(1) == [1.0] * 4
        state["w"].fill_(2)
        assert await publish(2) == [2.0] * 4
        state["w"].data = torch.full((4,), 3.0)
        assert await publish(3) == [3.0] * 4
        state["w"] = torch.full((4,), 4.0)
        assert await publish(4) == [4.0] * 4

    asyncio.run(scenario())


def test_weights_transposed_in_place_are_published_transposed() -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, {"w": torch.zeros(2, 2)}

    async def scenario() -> None:
        await publisher.publish(1, state)
        state["w"].t_()
        manifest = await publisher.publish(2, state)
        (await reader.fetch(Commit(2, (manifest,)))).copy_into(target)

    asyncio.run(scenario())
    assert target["w"].tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize("numel", [1, 1000])
def test_layout_of_another_size_is_refused_and_the_old_one_still_works(numel: int) -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, target = {"w": torch.ones(100)}, {"w": torch.zeros(100)}

    async def scenario() -> None:
        await publisher.publish(1, state)
        with pytest.raises(ValueError, match=r"weights: the size of trainer rank 0's shards must stay 448 bytes during a run"):
            await publisher.publish(2, {"w": torch.ones(numel)})
        manifest = await publisher.publish(3, state)
        (await reader.fetch(Commit(3, (manifest,)))).copy_into(target)

    asyncio.run(scenario())
    assert torch.equal(target["w"], state["w"])
