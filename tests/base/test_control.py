"""The socket of a run: who can use it, stale and missing sockets, and requests that are no requests."""

import asyncio
import json
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.foreign import ROOT_ONLY, as_nobody, nobody_listens, shared_folder
from titanrl.base.control import MAX_BYTES, SOCKET, Answer, SteeringError, listen, steer


def echo(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if request["action"] == "pause":
        raise ValueError("pause: not now (got never). Wait.")
    return {"got": dict(request)}


def asked(run_dir: Path, *requests: tuple[Any, Mapping[str, Any]], answer: Answer = echo) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        control = await listen(run_dir, answer)
        try:
            return [await steer(run_dir, action, values) for action, values in requests]
        finally:
            control.close()

    return asyncio.run(ask())


def test_socket_is_private_and_answers_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    run_dir = tmp_path.joinpath("x" * 200, "y" * 200)
    run_dir.mkdir(parents=True)

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"mode": stat.S_IMODE((run_dir / SOCKET).stat().st_mode)}

    os.umask(before := os.umask(0))
    assert before != 0, "this test would prove nothing"
    assert asked(run_dir, ("status", {}), answer=answer) == [{"mode": 0o600}]
    assert os.listdir(run_dir) == []
    assert asked(run_dir, ("set", {"a.b": [1, None]})) == [{"got": {"action": "set", "values": {"a.b": [1, None]}}}]


def test_socket_of_a_killed_run_is_replaced_and_a_missing_one_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SteeringError, match="no run answers here, because the directory has no socket"):
        asyncio.run(steer(tmp_path, "status"))
    with pytest.raises(SteeringError, match="no run answers here"):
        asyncio.run(steer(tmp_path / "nowhere", "status"))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / SOCKET))
    with pytest.raises(SteeringError, match="refuses connections"):
        asyncio.run(steer(tmp_path, "status"))
    assert len(asked(tmp_path, ("status", {}))) == 1


def test_refusal_reaches_the_client_as_an_error(tmp_path: Path) -> None:
    with pytest.raises(SteeringError, match=r"^pause: not now \(got never\). Wait.$"):
        asked(tmp_path, ("pause", {}))
    with pytest.raises(SteeringError, match="must not be longer than 65,536 bytes"):
        asked(tmp_path, ("set", {"name": "x" * MAX_BYTES}))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\n", "one JSON object on one line"),
        (b"[" * 60_000 + b"\n", "one JSON object on one line"),
        (b"\xff\n", "one JSON object on one line"),
        (b"[1]\n", r"a request is a JSON object \(got list\)"),
        (b"x" * (2 * MAX_BYTES), None),
    ],
)
async def test_other_requests_are_refused_and_the_next_one_is_answered(
    tmp_path: Path, line: bytes, problem: str | None
) -> None:
    control = await listen(tmp_path, echo)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
    writer.write(line)
    try:
        reply = await reader.read()
    except ConnectionResetError:  # closed with unread bytes
        reply = b""
    writer.close()
    assert (await steer(tmp_path, "status"))["got"]["action"] == "status"
    control.close()
    if problem is None:
        assert reply == b""
    else:
        assert re.search(problem, json.loads(reply)["error"])


@ROOT_ONLY
def test_another_user_gets_no_answer_and_none_is_taken_from_it() -> None:
    with shared_folder() as folder:

        def connect() -> bytes:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(str(folder / SOCKET))
                    client.sendall(b'{"action": "status"}\n')
                    return client.recv(100) or b"nothing"
                except PermissionError:
                    return b"denied"
                except OSError:
                    return b"nothing"

        async def serve() -> list[bytes]:
            control, replies = await listen(folder, echo), []
            for mode in (None, 0o666):  # as if the file's mode did not protect it
                if mode is not None:
                    (folder / SOCKET).chmod(mode)
                with as_nobody(connect) as answered:
                    replies.append(await asyncio.to_thread(answered.read))
            control.close()
            return replies

        assert asyncio.run(serve()) == [b"denied", b"nothing"]
        with nobody_listens(folder / SOCKET) as received:
            with pytest.raises(SteeringError, match="belongs to another user"):
                asyncio.run(steer(folder, "set", {"algorithm.learning_rate": 1.0}))
            assert received.read() == b"got:"
