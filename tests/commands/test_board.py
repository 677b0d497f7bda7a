"""The server of `titanrl board`: who gets the data, what it answers, and how soon it tells of changes."""

import asyncio
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.foreign import ROOT_ONLY, as_nobody, shared_folder
from tests.metrics.test_report import completion, group
from tests.processes.test_stacks import waiting
from tests.recorded import record_group
from tests.run.test_explanation import written
from tests.serving.servers import Server, serving
from titanrl.base.control import listen
from titanrl.commands.runs import board, explained
from titanrl.serving.runs import REQUESTS, ROUTES, Board

KEY = "a-key-of-the-board"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        run.joinpath("config.yaml").write_text(f"name: {name}\nnum_steps: 3\nrate: {rate}\n")
        lines = [{"step": step, "time": 1e9 + step, "reward/mean": step * rate} for step in (1, 2)]
        run.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        record_group(run, group(1, 0, completion("twelve", 1.0), completion("nine", 0.0)))
    return tmp_path / "runs"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    board = Board(folder, KEY, explained)
    with serving(board) as server:
        yield server
        board.close()


def ask(server: Server, path: str, key: str = KEY, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    given = {"authorization": f"Bearer {key}", **(headers or {})}
    return httpx.post(f"{server.url}/api/{path}", headers=given, json=body, timeout=20)


def test_page_needs_no_key_and_contains_no_data(server: Server) -> None:
    for path, kind in (("/", "text/html"), ("/board.css", "text/css"), ("/board.js", "text/javascript")):
        reply = httpx.get(server.url + path)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
        rules = reply.headers["content-security-policy"]
        assert rules.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in rules
        assert KEY not in reply.text


@pytest.mark.parametrize("path", [*ROUTES, *REQUESTS, "changes", "nothing"])
def test_data_need_the_key(server: Server, path: str) -> None:
    for key in ("", "wrong", KEY[:-1], KEY + "x"):
        reply = ask(server, path, key="", headers={"x-api-key": key, "authorization": ""}, run="a")
        assert reply.status_code == 401
        assert "twelve" not in reply.text
    assert httpx.get(f"{server.url}/api/{path}?key={KEY}", cookies={"board": KEY}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),  # a name that was made to resolve to this machine
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),  # a server of another user on this machine
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
def test_page_of_another_origin_gets_nothing(server: Server, headers: dict[str, str], status: int) -> None:
    assert ask(server, "runs", headers=headers).status_code == status
    assert ask(server, "runs", headers={"origin": server.url}).status_code == 200


def test_routes_answer_with_json(server: Server) -> None:
    listed = ask(server, "runs").json()
    assert [(run["name"], run["step"], run["num_steps"]) for run in listed["runs"]] == [("a", 2, 3), ("b", 2, 3)]
    assert ask(server, "run", run="a").json()["step"] == 2
    assert ask(server, "charts", run="b", name=["reward/mean"]).json()["curves"]["reward/mean"]["mean"] == [0.2, 0.4]
    found = ask(server, "search", run="a", text="TWELVE", reward_from="0.5").json()
    assert (found["completions"], found["groups"][0]["index"]) == (1, 0)
    assert ask(server, "search", run="a", part="answer", part_from=2).json()["completions"] == 0
    whole = ask(server, "group", run="a", index=0, version=1).json()
    assert whole["completions"][0]["text"] == "twelve"
    assert ask(server, "group", run="a", index=5).json() is None
    compared = ask(server, "compare", run=["a", "b"]).json()
    assert compared["tables"][0]["rows"] == [["rate", "0.1", "0.2"]]
    for path in ("evaluations", "timeline", "events", "config"):
        assert ask(server, path, run="a").status_code == 200
    assert ask(server, "answers", run="a", set="sums", index=0).json()["versions"] == []


def test_tokens_are_explained_with_the_code_of_the_trainer(server: Server, folder: Path) -> None:
    written(folder / "explained", "algorithm.preset=grpo")
    (segment,) = ask(server, "explain", run="explained", step=3, index=17).json()["segments"]
    assert segment["columns"]["clip"] == ["high", "", "", "high"]
    assert sum(segment["columns"]["share"]) == pytest.approx(1.0)
    refused = ask(server, "explain", run="explained", step=4, index=17)
    assert (refused.status_code, "no loss of group 17 is recorded" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("run", {"run": "c"}, 404, "there is no run 'c'"),
        ("run", {"run": "../runs/a"}, 404, "there is no run"),
        ("run", {"run": "/etc"}, 404, "there is no run"),
        ("search", {"run": "a", "reward_from": "much"}, 400, "reward_from"),
        ("search", {"run": "a", "kind": "secrets"}, 400, "kind"),
        ("run", {"run": "a", "other": 1}, 400, "other"),
        ("compare", {"run": ["a", "a"]}, 400, "is given twice"),
        ("nothing", {}, 404, "path: must be"),
    ],
)
def test_wrong_requests_are_refused(server: Server, path: str, body: dict[str, Any], status: int, problem: str) -> None:
    reply = ask(server, path, **body)
    assert reply.status_code == status
    assert problem in reply.json()["error"]


def test_run_is_steered_through_its_socket(server: Server, folder: Path) -> None:
    asked: list[Any] = []

    def answer(request: Any) -> dict[str, Any]:
        asked.append(request)
        if request["action"] == "set":
            raise ValueError("rate: must be positive (got -1)")
        return {"step": 2, "state": "paused", "text": "paused after step 2", "keys": {"rate": 0.1}}

    refused = ask(server, "steer", run="a", action="pause")
    assert (refused.status_code, "no run answers here" in refused.json()["error"]) == (409, True)
    control = server.run(listen(folder / "a", answer))
    try:
        assert ask(server, "steer", run="a", action="pause").json()["state"] == "paused"
        wrong = ask(server, "steer", run="a", action="set", values={"rate": -1})
        assert (wrong.status_code, wrong.json()["error"]) == (409, "rate: must be positive (got -1)")
        assert ask(server, "steer", run="a", action="kill").status_code == 400
    finally:
        server.loop.call_soon_threadsafe(control.close)
    assert [(each["action"], each["values"]) for each in asked] == [("pause", {}), ("set", {"rate": -1})]


def test_stacks_of_the_processes_are_shown(server: Server, folder: Path) -> None:
    refused = ask(server, "stacks", run="a")
    assert (refused.status_code, "no process of the run on this host" in refused.json()["error"]) == (409, True)
    (folder / "a/logs").mkdir()
    with waiting(folder / "a/logs/trainer_0.log") as trainer:
        text = ask(server, "stacks", run="a").json()["text"]
    assert f"== trainer_0 (process {trainer}), alive" in text
    assert "waits_for_input" in text


def test_page_hears_of_a_step_within_two_seconds(server: Server, folder: Path) -> None:
    board = server.app
    assert isinstance(board, Board)
    ask(server, "runs")
    watching = asyncio.run_coroutine_threadsafe(board.watch(), server.loop)
    heard: list[tuple[float, str]] = []

    def listen() -> None:
        with httpx.stream("GET", f"{server.url}/api/changes", headers={"x-api-key": KEY}, timeout=60) as stream:
            opened.set()
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    heard.append((time.monotonic(), line))
                    return

    opened = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    assert opened.wait(60)
    deadline, written = time.monotonic() + 60, 0.0
    while not heard and time.monotonic() < deadline:  # the watch may begin after the first line
        written = time.monotonic()
        with (folder / "b" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.9}) + "\n")
        thread.join(2)
    assert heard
    assert heard[0][0] - written < 2
    assert json.loads(heard[0][1].removeprefix("data: ")) == {"runs": ["b"]}
    assert ask(server, "run", run="b").json()["step"] == 3
    board.close()
    watching.result(10)


def test_stream_of_changes_ends_with_the_server(folder: Path) -> None:
    with (
        serving(Board(folder, KEY, explained)) as server,
        httpx.stream("GET", f"{server.url}/api/changes", headers={"x-api-key": KEY}, timeout=20) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == ": open"
        server.run(server.listener.close(0.1))
        assert list(lines) == [""]  # whole, where a connection that breaks off raises


@ROOT_ONLY
def test_folder_of_another_user_does_not_end_the_watch() -> None:
    for name in ("platform", "anyio.to_thread", "anyio._backends._asyncio", "watchfiles"):
        importlib.import_module(name)  # the other user cannot

    async def warnings(folder: Path) -> bytes:
        board, found = Board(folder, KEY, explained), list[str]()
        asyncio.get_running_loop().call_later(0.5, board.close)
        await board.watch(found.append)
        return json.dumps(found).encode()

    with shared_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        with as_nobody(lambda: asyncio.run(warnings(folder))) as found:
            assert found.read() == b"[]"


def test_name_that_is_not_utf8_ends_only_the_notice_of_changes(folder: Path) -> None:
    with board_command(folder) as (process, url, key):
        odd = folder / "a" / os.fsdecode(b"\xff.jsonl")
        for _ in range(100):  # the watch begins after the address was printed
            odd.touch()
            if select.select([process.stderr], [], [], 0.2)[0]:
                break
            odd.unlink()
        assert process.stderr.readline().startswith("warning: changes are not noticed any more, reload the page to see them (")
        assert httpx.post(f"{url}/api/runs", json={}, headers={"x-api-key": key}).status_code == 200


@contextmanager
def board_command(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    """Yield a running `titanrl board`, its address and its key."""
    command = [sys.executable, "-m", "titanrl.commands", "board", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=os.environ, **pipes) as process:
        url, _, key = process.stdout.readline().split(" at ")[1].strip().partition("/#key=")
        yield process, url, key
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_command_prints_an_address_with_a_key_and_ends_on_a_signal(folder: Path) -> None:
    with board_command(folder) as (_, url, key):
        assert url.startswith("http://127.0.0.1:")
        assert len(key) >= 43  # 32 random bytes
        assert httpx.post(f"{url}/api/runs", json={}, headers={"x-api-key": key}).status_code == 200


@ROOT_ONLY
def test_another_user_gets_no_data_no_action_and_no_key(folder: Path) -> None:
    with board_command(folder) as (process, url, key):
        address, proc = httpx.URL(url), Path("/proc", str(process.pid))

        def look() -> bytes:
            found = b""
            for path in ("runs", "steer", "stacks"):
                with socket.create_connection((address.host, address.port), 20) as client:
                    client.sendall(f"POST /api/{path} HTTP/1.0\r\nHost: {address.netloc.decode()}\r\n\r\n".encode())
                    found += client.recv(1 << 16)
            for name in ("cmdline", "environ", "mem", "fd/1"):  # where a program may leave a secret
                with suppress(PermissionError):
                    found += name.encode() + b"=" + (proc / name).read_bytes()
            return found

        with as_nobody(look) as stream:
            found = stream.read()
    assert found.count(b" 401 ") == 3
    assert b"cmdline=" in found
    assert b"environ=" not in found
    assert key.encode() not in found
    assert b"twelve" not in found


@pytest.mark.parametrize(
    ("arguments", "problem"), [(["missing"], "FOLDER: it does not exist"), (["--port", "99999"], "--port: must be")]
)
def test_wrong_arguments_are_refused(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        board(arguments)
    assert problem in capsys.readouterr().err
