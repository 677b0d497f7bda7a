"""Clients of the trainer and the buffer, with fake actors whose replies the tests control."""

import asyncio
import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.endpoints import FakeEndpoint
from titanrl.carriers.rewards import RolloutError
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import AdamParams, LossSums, OptimUpdate
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.generators import BufferClient
from titanrl.launch.supervision import Supervisor
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.replay.groups import StarvationError

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)
PASSES = [MicroBatch(rows=()), MicroBatch(rows=())]


def buffer_client(starvation_timeout_s: float, **endpoints: Any) -> BufferClient:
    actor = SimpleNamespace(**{name: FakeEndpoint(reply) for name, reply in endpoints.items()})
    return BufferClient(actor, Supervisor(), TimeoutsConfig(), starvation_timeout_s, groups_per_step=8)


async def test_late_batch_can_be_awaited_again() -> None:
    calls, sent = [], asyncio.Event()

    async def take_batch(num_groups: int) -> str:
        calls.append(num_groups)
        await sent.wait()
        return "batch"

    async def why_starved(num_groups: int, waited_s: float) -> str:
        return f"no batch of {num_groups} in {waited_s:g} s"

    buffer = buffer_client(0.05, take_batch=take_batch, why_starved=why_starved)
    with pytest.raises(StarvationError, match=r"no batch of 8 in 0\.05 s"):
        await buffer.take_batch()
    sent.set()
    assert await buffer.take_batch() == "batch"
    assert calls == [8], "a second request would lose one of the batches"


async def test_deadline_of_a_prefetched_batch_starts_with_the_wait() -> None:
    sent = asyncio.Event()

    async def take_batch(num_groups: int) -> str:
        await sent.wait()
        return "batch"

    buffer = buffer_client(0.5, take_batch=take_batch)
    buffer.prefetch()
    await asyncio.sleep(0.6)  # an evaluation, say
    sent.set()
    assert await buffer.take_batch() == "batch"


async def test_take_batch_raises_the_error_of_a_prefetched_request() -> None:
    async def take_batch(num_groups: int) -> str:
        raise RolloutError("no prompts")

    buffer = buffer_client(1.0, take_batch=take_batch)
    buffer.prefetch()
    await asyncio.sleep(0)
    with pytest.raises(RolloutError, match="no prompts"):
        await buffer.take_batch()


class Ranks:
    """Two fake trainer ranks that record the order of their requests."""

    def __init__(self, error: Exception | None = None) -> None:
        self.requests: list[str] = []
        self.error = error
        self.forward_backward = FakeEndpoint(*(partial(self._forward_backward, rank) for rank in range(2)))
        self.optim_step = FakeEndpoint(*(partial(self._optim_step, rank) for rank in range(2)))

    async def _forward_backward(self, rank: int, *_: Any) -> LossSums:
        self.requests += ["forward_backward"] * (rank == 0)
        if self.error is not None:
            raise self.error
        return LossSums(sums={"loss": 1.0}, maxima={"ratio": rank})

    async def _optim_step(self, rank: int, params: AdamParams, completes: bool) -> OptimUpdate:
        self.requests += ["optim_step"] * (rank == 0)
        return OptimUpdate(version=1, grad_norm=2.0, skipped=False, busy_s=rank + 1.0)


async def test_optimizer_step_follows_the_passes_and_waits_for_the_push() -> None:
    ranks, pushed = Ranks(), asyncio.Event()
    trainer = TrainerMesh(ranks, Supervisor(), TimeoutsConfig())

    async def push() -> None:
        await pushed.wait()

    passes, stepping = trainer.forward_backward(PASSES), trainer.optim_step(ADAM, after=push)
    losses = await passes
    assert (losses.sums, losses.maxima) == ({"loss": 4.0}, {"ratio": 1})
    assert ranks.requests == ["forward_backward", "forward_backward"]
    pushed.set()
    assert await stepping == OptimUpdate(version=1, grad_norm=2.0, skipped=False, busy_s=1.5)
    assert ranks.requests[-1] == "optim_step"


async def test_failed_pass_quietly_cancels_queued_optimizer_step() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    ranks = Ranks(ValueError("broken"))
    trainer = TrainerMesh(ranks, Supervisor(), TimeoutsConfig())

    async def never() -> None:
        await asyncio.Event().wait()

    passes, stepping = trainer.forward_backward(PASSES), trainer.optim_step(ADAM, after=never)
    with pytest.raises(ValueError, match="broken"):
        await passes
    await asyncio.wait({stepping})
    assert stepping.cancelled()
    assert "optim_step" not in ranks.requests
    gc.collect()
    assert complaints == []
