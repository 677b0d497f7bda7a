"""Sessions of Tinker's clients: order of requests, futures, ends of sessions, and the weights that samplers share."""

import asyncio
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tinker_hosts import NumberHost
from titanrl.serving.calls import Refused
from titanrl.serving.tinker_sessions import (
    OVERHEAD,
    Answer,
    Checkpoints,
    Future,
    Futures,
    ModelSpec,
    NewModel,
    OpenModel,
    OpenSession,
    Order,
    Sessions,
    TinkerLimits,
    Unordered,
    Weights,
    json_answer,
)


def test_items_come_in_the_order_of_their_ids() -> None:
    rng = random.Random(1)
    for _ in range(50):
        order, ids, found = Order[int](), list(range(1, 12)), list[int]()
        rng.shuffle(ids)
        for each in ids:
            order.add(each, each)
            while (item := order.take()) is not None:
                found.append(item)
        assert found == list(range(1, 12))


def test_used_id_is_late() -> None:
    order = Order[str]()
    order.add(1, "a")
    for is_taken in (False, True):
        with pytest.raises(Unordered, match="1 has already been used"):
            order.add(1, "b")
        assert is_taken or order.take() == "a"
    with pytest.raises(Unordered, match="seq_id: must be at most"):
        order.add(10**9, "c")


def test_missing_items_can_be_given_up() -> None:
    order = Order[str]()
    order.add(4, "d")
    order.add(6, "f")
    assert order.has_gap
    assert order.take() is None
    assert order.skip() == (1, 3)
    assert order.take() == "d"
    with pytest.raises(Unordered):
        order.add(2, "b")
    order.clear()
    assert not len(order)
    assert not order.has_gap


def opened(futures: Futures, size: int = 10, owner: str = "ann") -> Future:
    return futures.open(owner, "session", size)


def answer(size: int) -> Answer:
    return Answer(b"x" * size, b"k")


async def test_waiting_ends_with_the_result_or_in_time() -> None:
    futures = Futures(1 << 20, 10, 1 << 20)
    future = opened(futures)
    assert await future.wait(0.0) is None
    waiting = asyncio.create_task(future.wait(10.0))
    await asyncio.sleep(0)
    futures.resolve(future, answer(3))
    assert await waiting == answer(3)
    assert await futures.find(future.request_id, "ann").wait(0.0) == answer(3)  # again


def test_result_of_another_user_does_not_exist() -> None:
    futures = Futures(1 << 20, 10, 1 << 20)
    future = opened(futures)
    for request_id, owner in ((future.request_id, "bob"), ("future_0", "ann")):
        with pytest.raises(Refused, match="no such request") as raised:
            futures.find(request_id, owner)
        assert raised.value.status == 404


def test_only_results_that_were_read_are_dropped_for_memory() -> None:
    futures, dropped = Futures(3 * (100 + OVERHEAD), 100, 1 << 20), list[str]()
    first, second, third = (futures.open("ann", "s", 100, lambda name=name: dropped.append(name)) for name in "abc")  # type: ignore[misc]
    for future in (first, second, third):
        futures.resolve(future, answer(100))
    with pytest.raises(Refused, match="bytes in all") as raised:
        opened(futures)
    assert raised.value.status == 429
    futures.read(second)
    fourth = opened(futures, 100)
    assert dropped == ["b"]
    assert futures.find(first.request_id, "ann").answer == answer(100)
    futures.resolve(fourth, answer(5000))  # a result is kept, even if it is larger than the request
    assert futures.find(fourth.request_id, "ann").answer == answer(5000)
    futures.drop_group("s")
    assert dropped == ["b", "a", "c"]
    futures.drop_group("session")
    assert (len(futures), futures.num_bytes) == (0, 0)


def test_user_can_have_only_so_many_open_requests() -> None:
    futures = Futures(1 << 20, 2, 1 << 20)
    first, _ = opened(futures), opened(futures)
    with pytest.raises(Refused, match="at most 2 requests"):
        opened(futures)
    opened(futures, owner="bob")
    futures.resolve(first, answer(1))
    futures.read(first)
    opened(futures)


def test_unread_results_of_a_user_leave_memory_for_others() -> None:
    futures = Futures(1 << 20, 100, 2 * (100 + OVERHEAD))
    first, second = opened(futures, 100), opened(futures, 100)
    with pytest.raises(Refused, match="of a user may have 2248 bytes") as raised:
        opened(futures, 0)
    assert raised.value.status == 429
    opened(futures, 100, owner="bob")
    futures.resolve(first, answer(400))  # larger than the request: accepted, but no further request is
    futures.read(second)
    with pytest.raises(Refused, match="bytes"):
        opened(futures, 0)
    futures.read(first)
    opened(futures, 100)


NEW = NewModel(spec=ModelSpec(rank=0), user_metadata={})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def sessions_of(host: NumberHost, **limits: Any) -> Sessions:
    return Sessions(host, Checkpoints(host.folder), TinkerLimits(**limits))


def create(sessions: Sessions, session: OpenSession, number: int = 0) -> Future:
    return sessions.create(session, number, 0, lambda: NEW, {})


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_session_can_end_while_it_waits_for_a_place(tmp_path: Path, num_waiting: int) -> None:
    async def end() -> None:
        host = NumberHost(tmp_path, max_models=1)
        sessions = sessions_of(host, silent_s=0.1)
        await create(sessions, sessions.add("ann", {}, None)).wait(5)
        waiting = [sessions.add("bob", {}, None) for _ in range(num_waiting)]
        for session in waiting:
            create(sessions, session)
        await asyncio.sleep(0)  # they find no place
        for session in waiting:
            sessions.end(session)
        await sessions.close()
        assert host.models == []

    run(end())


def test_models_of_a_session_are_limited(tmp_path: Path) -> None:
    async def flood() -> None:
        sessions = sessions_of(NumberHost(tmp_path), max_models=2)
        session = sessions.add("ann", {}, None)
        futures = [create(sessions, session, number) for number in range(2)]
        with pytest.raises(Refused, match="2 models") as raised:
            create(sessions, session, 2)
        assert raised.value.status == 429
        assert [create(sessions, session, number) for number in range(2)] == futures  # repeated
        await sessions.close()

    run(flood())


def test_weights_of_a_path_are_opened_once_and_freed_with_their_last_session(tmp_path: Path) -> None:
    async def share() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host)
        num_opened, paths = 0, [f"tinker://a:train:{number}/sampler_weights/x" for number in range(3)]

        async def opening() -> Any:
            nonlocal num_opened
            num_opened += 1
            await asyncio.sleep(0.01)
            return await host.base()

        users = [sessions.add(name, {}, None) for name in ("ann", "bob")]
        samplers = [
            sessions.add_sampler(session, number, path, sessions.loaded.setdefault(path, Weights(opening)))
            for session in users
            for number, path in enumerate(paths)
        ]
        await asyncio.gather(*(each.weights.sampler() for each in samplers * 2))
        assert (num_opened, host.num_samplers) == (3, 3)
        sessions.end(users[0])
        await asyncio.sleep(0.01)
        assert host.num_samplers == 3
        users += [sessions.add("cleo", {}, None)]
        sessions.add_sampler(users[2], 0, None, Weights(host.base))  # never used
        for session in users:
            sessions.end(session)
        await sessions.close()
        assert (host.num_samplers, sessions.loaded) == (0, {})

    run(share())


def test_later_requests_do_not_extend_the_wait_for_a_missing_one(tmp_path: Path) -> None:
    async def arrive() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host, gap_s=0.3)
        session = sessions.add("ann", {}, None)
        await create(sessions, session).wait(5)
        (model,) = session.models.values()

        async def done(model: OpenModel) -> Answer:
            return json_answer({})

        first = sessions.submit(model, 2, 0, b"2", done)  # 1 never arrives
        for seq_id in range(3, 100):
            sessions.submit(model, seq_id, 0, b"", done)
            if await first.wait(0.1) is not None:
                break
        assert seq_id < 50
        await sessions.close()

    run(arrive())


def test_model_is_freed_if_its_session_ends_when_the_wait_for_a_missing_request_does(tmp_path: Path) -> None:
    async def end() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host, gap_s=0.1)
        session = sessions.add("ann", {}, None)
        await create(sessions, session).wait(5)
        (model,) = session.models.values()

        async def done() -> Answer:
            return json_answer({})

        sessions.submit(model, 2, 0, b"2", lambda _: done())  # 1 never arrives
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, sessions.end, session)
        time.sleep(0.2)
        await asyncio.sleep(0.01)  # both times are over when the event loop continues
        await sessions.close()
        assert host.models == []

    run(end())
