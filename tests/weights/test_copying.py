"""Copies with a cast in the same pass; on a device when there is one."""

import asyncio
from typing import Any

import pytest
import torch

from tests.weights.processes import MemoryStore
from titanrl.weights.copying import CopyOut, copy_in, one_thread
from titanrl.weights.manifest import Commit
from titanrl.weights.publish import WeightPublisher
from titanrl.weights.pull import WeightReader


def test_a_copy_casts_and_takes_blocks_of_any_stride() -> None:
    source = torch.arange(12.0).view(3, 4)
    target = torch.zeros(2, 2, dtype=torch.bfloat16)
    asyncio.run(CopyOut().copy([target], [source[1:, ::2]]))
    assert target.tolist() == [[4, 6], [8, 10]]
    copy_in([], [])


def test_the_number_of_threads_is_put_back_even_after_a_failure() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with one_thread():
            raise RuntimeError(f"broken with {torch.get_num_threads()} thread")

    with pytest.raises(RuntimeError, match="broken with 1 thread"):
        fail()
    assert torch.get_num_threads() == before


@pytest.mark.gpu
def test_weights_on_a_gpu_are_published_beside_its_work_and_pulled_into_another_model() -> None:
    device = torch.device("cuda")
    state = {"w": torch.randn(4096, 4096, device=device), "odd": torch.randn(129, 7, device=device)}
    store: Any = MemoryStore()
    publisher = WeightPublisher("run", 0, store, torch.bfloat16, ["arena"], "full")
    reader = WeightReader("run", store, "full")
    targets = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in state.items()}

    async def scenario(version: int) -> None:
        for value in state.values():
            value.mul_(1.5)  # still running when the copy is asked for
        manifest = await publisher.publish(version, state)
        expected = {name: value.to(torch.bfloat16) for name, value in state.items()}
        for value in state.values():
            value.zero_().add_(version)  # may change as soon as publish has returned
        (await reader.fetch(Commit(version, (manifest,)))).copy_into(targets)
        assert all(torch.equal(targets[name], expected[name]) for name in state)

    for version in range(4):
        asyncio.run(scenario(version))
