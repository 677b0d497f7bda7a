"""Routing of generation calls, with replicas that only count."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from titanrl.rollout.pool import GeneratorPool
from titanrl.types import GenerationRequest, SamplingParams


class Replica:
    """Stands for a generator actor: answers with its name, and notes the size of each message."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error
        self.messages: list[int] = []
        self.generate = self

    async def call_one(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        self.messages.append(len(requests))
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return [(self.name, request.token_ids) for request in requests]


def requests(*prompts: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=None)
    return [GenerationRequest(token_ids=(prompt,), sampling=sampling) for prompt in prompts]


def test_calls_of_one_tick_are_one_message_and_answers_go_back_to_their_callers() -> None:
    async def scenario() -> None:
        replica = Replica("a")
        pool = GeneratorPool([replica])
        first, second = await asyncio.gather(pool.generate(requests(1, 2)), pool.generate(requests(3)))
        assert replica.messages == [3]
        assert first == [("a", (1,)), ("a", (2,))]
        assert second == [("a", (3,))]

    asyncio.run(scenario())


def test_groups_go_to_the_replica_with_the_least_work() -> None:
    async def scenario() -> None:
        replicas = [Replica("a"), Replica("b")]
        pool = GeneratorPool(replicas)
        await asyncio.gather(*(pool.generate(requests(group, group)) for group in range(4)))
        assert [sum(replica.messages) for replica in replicas] == [4, 4]

    asyncio.run(scenario())


def test_an_error_of_a_replica_reaches_every_caller_of_the_message() -> None:
    async def scenario() -> None:
        pool = GeneratorPool([Replica("a", error=RuntimeError("engine gone"))])
        results = await asyncio.gather(pool.generate(requests(1)), pool.generate(requests(2)), return_exceptions=True)
        assert [str(result) for result in results] == ["engine gone", "engine gone"]
        with pytest.raises(RuntimeError, match="engine gone"):
            await pool.generate(requests(3))

    asyncio.run(scenario())
