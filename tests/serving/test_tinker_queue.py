"""The order of a model's requests, and the futures of their results."""

import asyncio
import random

import pytest

from titanrl.serving.calls import Refused
from titanrl.serving.tinker_queue import OVERHEAD, Answer, Future, Futures, Order, Unordered


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
    assert order.drain() == ["f"]
    assert not order.has_gap


def opened(futures: Futures, size: int = 10, owner: str = "ann") -> Future:
    return futures.open(owner, "session", size)


def answer(size: int) -> Answer:
    return Answer(b"x" * size, b"k")


def test_waiting_ends_with_the_result_or_in_time() -> None:
    async def run() -> None:
        futures = Futures(1 << 20, 10, 1 << 20)
        future = opened(futures)
        assert await future.wait(0.0) is None
        waiting = asyncio.create_task(future.wait(10.0))
        await asyncio.sleep(0)
        futures.resolve(future, answer(3))
        assert await waiting == answer(3)
        assert await futures.find(future.request_id, "ann").wait(0.0) == answer(3)  # again

    asyncio.run(run())


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
