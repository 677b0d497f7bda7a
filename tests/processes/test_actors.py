"""Replies of actors: their order, and how many messages they need."""

import asyncio
import pickle
from typing import Any

from titanrl.processes.actors import PickledPort, ReplyPort


class Recorder:
    """A port that keeps its messages."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, Any]]] = []

    def send(self, message: list[tuple[int, Any]]) -> None:
        self.sent.append(message)


async def test_replies_of_a_tick_are_one_message_per_receiver_and_stay_in_order() -> None:
    one, other = Recorder(), Recorder()

    # The address of each request is a copy, as it comes with a message.
    for number in (1, 2, 1):
        ReplyPort(one, "one", number).send_soon(f"a{number}")
    ReplyPort(other, "other", 1).send_soon("b")
    assert not one.sent
    await asyncio.sleep(0)
    assert one.sent == [[(1, "a1"), (2, "a2"), (1, "a1")]]
    assert other.sent == [[(1, "b")]]
    ReplyPort(one, "one", 2).send_soon("c")
    ReplyPort(one, "one", 2).send("d")  # the result of the request, which is its last reply
    assert one.sent[1:] == [[(2, "c")], [(2, "d")]]
    await asyncio.sleep(0)
    assert len(one.sent) == 3


async def test_an_address_travels_without_pickling_its_port_again() -> None:
    port = Recorder()
    replies = ReplyPort(PickledPort(port), "one", 1)
    port.send = None  # type: ignore[assignment, method-assign]

    there = pickle.loads(pickle.dumps(replies))

    there.send("a")
    assert there.port.sent == [[(1, "a")]]
