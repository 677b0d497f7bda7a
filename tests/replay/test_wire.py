"""Remote calls: errors, sessions, unread replies, and the bytes that the owner of a buffer receives."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl.replay import ReplayClosedError, SharedReplay
from titanrl.replay.wire import Connection, Link, Server

KEY = b"secret"


class Verbs:
    """A server whose `wait` blocks until `go` is set."""

    def __init__(self, address: Any) -> None:
        self.go, self.lost, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.seen: list[Any] = []
        verbs = {"add": lambda session, a, b: a + b, "wait": self.wait, "note": lambda session, value: self.seen.append(value)}
        self.server = Server(address, KEY, verbs, on_end=self.end, on_lost=self.lose)

    def wait(self, session: int) -> str:
        self.go.wait(20)
        return "late"

    def end(self, session: int) -> None:
        self.seen.append(("end", session))
        self.ended.set()

    def lose(self, session: int, verb: str, reply: Any) -> None:
        self.seen.append((verb, reply))
        self.lost.set()


@pytest.fixture(params=["unix", "tcp"])
def verbs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Verbs:
    if request.param == "tcp":
        return Verbs(("127.0.0.1", 0))
    return Verbs(str(Path(tmp_path_factory.mktemp("s")) / "s"))


@pytest.fixture
def link(verbs: Verbs) -> Iterator[Link]:
    opened = Link(verbs.server.address, KEY, "server", 20.0)
    yield opened
    opened.close()


def test_call_returns_the_reply_or_raises_its_exception(link: Link) -> None:
    assert link.call("add", 1, 2) == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        link.call("add", 1, "2")
    with pytest.raises(KeyError, match="unknown"):
        link.call("unknown")
    assert link.call("add", np.ones(3), 1).tolist() == [2.0] * 3


def test_message_without_reply_arrives_before_the_next_call(link: Link, verbs: Verbs) -> None:
    link.send("note", 1)
    link.call("add", 1, 2)
    assert verbs.seen == [1]


def test_unread_reply_is_reported(verbs: Verbs) -> None:
    link = Link(verbs.server.address, KEY, "server", 0.3)
    with pytest.raises(ReplayClosedError, match=r"server does not respond: no reply after 0\.3 s"):
        link.call("wait")
    verbs.go.set()
    assert verbs.lost.wait(20)
    assert verbs.seen == [("wait", "late")]
    assert link.call("add", 1, 2) == 3  # the session continues
    link.close()


def test_session_ends_when_its_client_closes(link: Link, verbs: Verbs) -> None:
    link.call("add", 1, 2)
    link.close()
    assert verbs.ended.wait(20)
    assert ("end", 0) in verbs.seen
    with pytest.raises(ReplayClosedError, match="this client was closed"):
        link.call("add", 1, 2)


def test_client_with_another_key_is_refused(verbs: Verbs) -> None:
    with pytest.raises(ReplayClosedError, match="it uses a different key"):
        Link(verbs.server.address, b"guess", "server", 20.0).call("add", 1, 2)
    assert verbs.seen == []


def test_error_names_a_server_that_does_not_exist() -> None:
    with pytest.raises(ReplayClosedError, match=r"server does not respond: .*No such file"):
        Link("/tmp/no-such-folder/s", KEY, "server", 1.0).call("add", 1, 2)


def test_owner_sees_less_than_two_kilobytes_per_item(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send, receive = Connection.send_bytes, Connection.recv_bytes
    with SharedReplay(8, {"x": np.zeros(2**18, np.float32)}, spare=8) as replay:
        replay.put({"x": np.ones(2**18, np.float32)})
        monkeypatch.setattr(Connection, "send_bytes", lambda self, data: (sent.append(len(data)), send(self, data))[1])
        monkeypatch.setattr(Connection, "recv_bytes", lambda self, *limit: counted(sent, receive(self, *limit)))
        for _ in range(20):
            replay.put({"x": np.ones(2**18, np.float32)})
            batch = replay.sample(1)
            replay.update_priorities(batch.handles, [1.0])
    assert 100 < sum(sent) / 20 < 2000


def counted(sizes: list[int], data: bytes) -> bytes:
    sizes.append(len(data))
    return data
