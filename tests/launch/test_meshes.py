"""The controller's side of calls, with actors that answer when the test says so."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.meshes import BufferClient
from titanrl.launch.supervision import Supervisor
from titanrl.replay.buffer import RolloutError, StarvationError


def call_one(answer: Any) -> Any:
    """An endpoint whose calls are answered by a function."""
    return SimpleNamespace(call_one=answer)


def test_a_batch_that_did_not_come_in_time_can_be_waited_for_again() -> None:
    async def scenario() -> None:
        calls, sent = [], asyncio.Event()

        async def take_batch(num_groups: int) -> str:
            calls.append(num_groups)
            await sent.wait()
            return "batch"

        async def why_starved(num_groups: int, waited_s: float) -> str:
            return f"no batch of {num_groups} in {waited_s:g} s"

        actor = SimpleNamespace(take_batch=call_one(take_batch), why_starved=call_one(why_starved))
        buffer = BufferClient(actor, Supervisor(), TimeoutsConfig(), starvation_timeout_s=0.05)
        asked = buffer.ask_for_batch(8)
        with pytest.raises(StarvationError, match=r"no batch of 8 in 0\.05 s"):
            await buffer.take_batch(8, asked)
        sent.set()
        assert await buffer.take_batch(8, asked) == "batch"
        assert calls == [8], "asked twice, one of the batches would be lost"

    asyncio.run(scenario())


def test_the_clock_of_a_batch_runs_only_while_somebody_waits_for_it() -> None:
    async def scenario() -> None:
        sent = asyncio.Event()

        async def take_batch(num_groups: int) -> str:
            await sent.wait()
            return "batch"

        actor = SimpleNamespace(take_batch=call_one(take_batch))
        buffer = BufferClient(actor, Supervisor(), TimeoutsConfig(), starvation_timeout_s=0.5)
        asked = buffer.ask_for_batch(8)
        await asyncio.sleep(0.6)  # an evaluation, say
        sent.set()
        assert await buffer.take_batch(8, asked) == "batch"

    asyncio.run(scenario())


def test_a_worker_that_failed_meanwhile_is_heard_of_where_the_batch_is_awaited() -> None:
    async def scenario() -> None:
        async def take_batch(num_groups: int) -> str:
            raise RolloutError("no prompts")

        buffer = BufferClient(
            SimpleNamespace(take_batch=call_one(take_batch)), Supervisor(), TimeoutsConfig(), starvation_timeout_s=1.0
        )
        asked = buffer.ask_for_batch(8)
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="no prompts"):
            await buffer.take_batch(8, asked)

    asyncio.run(scenario())
