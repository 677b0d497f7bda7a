"""Replies of actors: their order, and how many messages they need."""

import asyncio
import pickle
from typing import Any

from titanrl.processes.actors import ReplyPort


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
        ReplyPort(one, b"", "one", number).send_soon(f"a{number}")
    ReplyPort(other, b"", "other", 1).send_soon("b")
    assert not one.sent
    await asyncio.sleep(0)
    assert one.sent == [[(1, "a1"), (2, "a2"), (1, "a1")]]
    assert other.sent == [[(1, "b")]]
    ReplyPort(one, b"", "one", 2).send_soon("c")
    ReplyPort(one, b"", "one", 2).send("d")  # the result of the request, which is its last reply
    assert one.sent[1:] == [[(2, "c")], [(2, "d")]]
    await asyncio.sleep(0)
    assert len(one.sent) == 3


async def test_an_address_travels_without_pickling_its_port_for_each_request() -> None:
    here = ReplyPort(lambda: "cannot be pickled", pickle.dumps(Recorder()), "one", 1)

    there = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(here))))  # it may be sent on

    there.send("a")
    assert there.port.sent == [[(1, "a")]]
