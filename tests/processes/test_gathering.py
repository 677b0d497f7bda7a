"""A function that runs on the combined inputs of all callers."""

import asyncio
from collections.abc import Mapping

import pytest

from titanrl.processes.actors import Gathering


def test_every_caller_gets_the_result_of_all_parts() -> None:
    seen: list[list[int]] = []

    async def run(parts: Mapping[int, str]) -> str:
        seen.append(list(parts))
        await asyncio.sleep(0)
        return "".join(parts.values())

    async def scenario() -> None:
        gathering = Gathering(run)
        for _ in range(2):  # a second round follows the first
            late = asyncio.create_task(gathering.add({3: "d", 1: "b"}, 4))
            await asyncio.sleep(0.01)
            assert not late.done()
            assert await asyncio.gather(gathering.add({2: "c"}, 4), gathering.add({0: "a"}, 4)) == ["abcd", "abcd"]
            assert await late == "abcd"

    asyncio.run(asyncio.wait_for(scenario(), 5))
    assert seen == [[0, 1, 2, 3]] * 2


def test_exception_reaches_every_caller_and_next_round_works() -> None:
    async def run(parts: Mapping[int, int]) -> int:
        if 0 in parts.values():
            raise KeyError("zero")
        return sum(parts.values())

    async def scenario() -> None:
        gathering = Gathering(run)
        results = await asyncio.gather(gathering.add({0: 0}, 2), gathering.add({1: 1}, 2), return_exceptions=True)
        assert [repr(result) for result in results] == ["KeyError('zero')"] * 2
        assert await asyncio.gather(gathering.add({0: 1}, 2), gathering.add({1: 1}, 2)) == [2, 2]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_cancelled_caller_does_not_withdraw_its_parts() -> None:
    async def run(parts: Mapping[int, int]) -> int:
        return sum(parts.values())

    async def scenario() -> None:
        gathering = Gathering(run)
        first = asyncio.create_task(gathering.add({0: 1}, 2))
        await asyncio.sleep(0)
        first.cancel()
        assert await gathering.add({1: 2}, 2) == 3
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_reset_fails_waiting_callers_and_cancels_function() -> None:
    async def run(parts: Mapping[int, str]) -> str:
        if "slow" in parts.values():
            await asyncio.Event().wait()
        return "".join(parts.values())

    async def scenario() -> None:
        gathering = Gathering(run)
        waiting = asyncio.create_task(gathering.add({0: "a"}, 2))
        await asyncio.sleep(0)
        gathering.reset(KeyError("a caller has ended"))
        running = asyncio.create_task(gathering.add({0: "slow"}, 1))
        await asyncio.sleep(0.01)
        gathering.reset(KeyError("a caller has ended"))
        for call in (waiting, running):
            with pytest.raises(KeyError, match="a caller has ended"):
                await call
        assert await asyncio.gather(gathering.add({0: "a"}, 2), gathering.add({1: "b"}, 2)) == ["ab", "ab"]

    asyncio.run(asyncio.wait_for(scenario(), 5))
