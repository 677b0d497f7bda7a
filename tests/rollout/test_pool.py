"""Routing of generation calls, with replicas that only count."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from monarch.actor import Port

from titanrl.rollout.pool import GeneratorPool
from titanrl.types import GenerationRequest, SamplingParams


class Replica:
    """Stands for a generator actor: answers with its name, and notes the size of each message."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error
        self.messages: list[int] = []
        self.generate = self

    async def call_one(self, groups: Sequence[Sequence[GenerationRequest]], answers: Port[Any]) -> None:
        self.messages.append(sum(map(len, groups)))
        await asyncio.sleep(0.01)
        for place in reversed(range(len(groups))):
            if self.error is not None and place == 0:
                raise self.error
            answers.send((place, [(self.name, request.token_ids) for request in groups[place]]))


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


def test_an_error_of_a_replica_reaches_every_caller_that_has_no_answer_yet() -> None:
    async def scenario() -> None:
        pool = GeneratorPool([Replica("a", error=RuntimeError("engine gone"))])
        first, second = await asyncio.gather(pool.generate(requests(1)), pool.generate(requests(2)), return_exceptions=True)
        assert str(first) == "engine gone"
        assert second == [("a", (2,))] or str(second) == "engine gone"
        with pytest.raises(RuntimeError, match="engine gone"):
            await pool.generate(requests(3))

    asyncio.run(scenario())
