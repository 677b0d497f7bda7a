"""Calls to the owner of a buffer, the bytes that it receives, and its rows and lists of work."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl.replay import ReplayClosedError, Shard, SharedReplay
from titanrl.replay.owner import Connection, Link, Owner, OwnerSettings, Rows, Server, WorkList

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


@pytest.fixture(params=["unix", "127.0.0.1", "::1"])
def verbs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Verbs:
    if request.param == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    if request.param != "unix":
        return Verbs((request.param, 0))
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


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def next_free(rows: Rows, first: int, count: int, within: int) -> list[int] | None:
    found = rows.next_free(first, count, within)
    return None if found is None else found.tolist()


def test_rows_in_use_are_skipped() -> None:
    rows = Rows(6)
    assert next_free(rows, 0, 4, 4) == [0, 1, 2, 3]
    rows.assign(0, numbers(0, 1, 2, 3))
    assert next_free(rows, 4, 2, 4) == [4, 5]
    assert next_free(rows, 4, 3, 4) is None
    rows.end_writes(numbers(0, 2, 3))
    assert next_free(rows, 4, 3, 4) == [4, 5, 6]  # rows 4, 5 and 0
    assert next_free(rows, 6, 3, 4) == [6, 8, 9]  # without row 1
    assert next_free(rows, 6, 4, 4) == [8, 9, 10, 11]  # 6 would be overwritten by 10
    assert next_free(rows, 6, 5, 6) == [6, 8, 9, 10, 11]


def test_row_is_reused_after_its_writer_and_its_readers_have_finished() -> None:
    rows = Rows(3)
    rows.assign(0, numbers(0, 1))
    rows.end_writes(numbers(0, 1))
    ticket = rows.pin(1, numbers(0, 0))
    rows.assign(0, numbers(2))
    rows.end_writes(numbers(2))
    assert next_free(rows, 3, 1, 2) == [4]
    assert rows.are_free(numbers(3, 4, 5)).tolist() == [False, True, True]
    rows.unpin(ticket)
    rows.unpin(ticket)  # no effect
    assert next_free(rows, 3, 1, 2) == [3]


def test_reservation_is_written_by_its_session_until_it_ends() -> None:
    rows = Rows(2)
    rows.assign(0, numbers(0))
    rows.assign(1, numbers(1))
    assert rows.are_written(numbers(0, 1)).tolist() == [True, True]
    assert rows.are_written(numbers(0, 1, 2), 0).tolist() == [True, False, False]
    assert next_free(rows, 2, 1, 1) is None
    assert rows.end_session(0).tolist() == [0]
    assert next_free(rows, 2, 1, 1) == [2]
    with pytest.raises(ReplayClosedError):
        rows.assign(0, numbers(2))


def test_ending_a_session_frees_its_rows() -> None:
    rows = Rows(8)
    rows.assign(7, numbers(0, 1, 2, 3))
    rows.end_writes(numbers(0, 1))
    rows.pin(7, numbers(0, 1))
    rows.assign(8, numbers(4, 5, 6, 7))
    assert next_free(rows, 8, 1, 4) is None
    assert rows.describe() == "writers hold 6 rows, readers 2"
    assert rows.end_session(7).tolist() == [2, 3]
    assert next_free(rows, 8, 4, 4) == [8, 9, 10, 11]
    assert rows.describe() == "writers hold 4 rows, readers 0"


def test_work_of_ended_reservations_is_handed_out_first() -> None:
    work = WorkList(5)
    assert work.take(numbers(10, 11, 12)).tolist() == [0, 1, 2]
    work.finish(numbers(11))
    work.recover(lambda open_numbers: open_numbers == 12)
    assert (work.num_available, len(work.reserved)) == (3, 1)
    assert work.take(numbers(13, 14)).tolist() == [0, 3]
    assert work.state() == {"next": 4, "returned": [0, 2, 3]}
    restored = WorkList(5)
    restored.load(4, [0, 2, 3])
    assert restored.take(numbers(1, 2, 3, 4)).tolist() == [0, 2, 3, 4]


def test_unread_reply_is_undone() -> None:
    shards = (Shard("/dev/shm", "elsewhere"),)
    owner = Owner(
        OwnerSettings(
            capacity=4,
            options={},
            layout=b"",
            shard_bytes=0,
            rows_per_shard=6,
            spare=2,
            num_work=3,
            shards=shards,
            host="here",
            address=None,
            key=b"",
        )
    )
    owner.undo(0, "take_work", owner.take_work(0, 2, None, 0.0))
    indices, handles = owner.take_work(0, 3, None, 0.0)
    assert (indices.tolist(), handles.tolist()) == ([0, 1, 2], [2, 3, 4])
    assert owner.commit(0, handles, None, None) == 0
    owner.undo(0, "draw", owner.draw(0, 8, 0.0))
    owner.undo(0, "reserve", owner.reserve(0, 2, None, 0.0))
    assert owner._rows.describe() == "writers hold 0 rows, readers 0"
    assert owner.verbs()["stats"](0).num_expired == 4
