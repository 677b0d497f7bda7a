"""A model's tensors are looked at without a new state dict, yet a tensor that was replaced or moved is noticed."""

import asyncio
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.weights.processes import MemoryStore
from titanrl.weights.layout import local_part
from titanrl.weights.manifest import Commit
from titanrl.weights.publish import WeightPublisher
from titanrl.weights.pull import WeightReader
from titanrl.weights.state import LiveState, Whereabouts


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layers.register_buffer("kept", torch.ones(2))
    layers.register_buffer("scratch", torch.ones(2), persistent=False)
    return layers


def test_the_tensors_are_the_models_own_and_are_listed_once() -> None:
    module = model()
    live = LiveState(module)
    tensors = live.tensors()
    assert list(tensors) == list(module.state_dict())
    assert tensors["0.weight"] is module.get_parameter("0.weight")
    with torch.no_grad():
        module.get_parameter("0.weight").fill_(7)
    assert live.tensors() is tensors


def test_a_parameter_or_buffer_that_took_anothers_place_is_found() -> None:
    module = model()
    live = LiveState(module)
    before = live.tensors()
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()}, assign=True)
    after = live.tensors()
    assert after["1.bias"] is module.get_parameter("1.bias")
    assert after["kept"] is module.get_buffer("kept")
    assert after["1.bias"] is not before["1.bias"]


def test_the_same_names_in_the_same_memory_are_the_same_whereabouts() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    whereabouts = Whereabouts(state)
    assert whereabouts.are_those_of(dict(state))
    assert not whereabouts.are_those_of({"a": state["a"]})
    assert not whereabouts.are_those_of({"a": state["a"], "c": state["b"]})
    assert not whereabouts.are_those_of({"a": state["a"], "b": state["b"].clone()})
    state["b"].data = torch.zeros(3)  # the same object, elsewhere
    assert not whereabouts.are_those_of(state)


def test_what_a_rank_holds_of_a_dtensor_is_what_to_local_returns(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        value = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        assert local_part(value).data_ptr() == value.to_local().data_ptr()
        whereabouts = Whereabouts({"w": value})
        assert whereabouts.are_those_of({"w": value})
        value._local_tensor = torch.zeros(4)  # as FSDP2 does when it is given other memory
        assert not whereabouts.are_those_of({"w": value})
    finally:
        dist.destroy_process_group()


def test_weights_that_moved_are_published_from_where_they_are_now() -> None:
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
