"""Rewards that call a judge over the network, trusted and confined, with a real HTTP server."""

import asyncio
import http.server
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.processes.processes import needs_confinement
from tests.rollout.scored import right, score_with, values
from titanrl.carriers.rewards import Reward

pytestmark = needs_confinement


class _Judge(http.server.BaseHTTPRequestHandler):
    """A judge that grades a completion by its length."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(request)  # type: ignore[attr-defined]
        body = json.dumps({"grade": len(request["completion"]) / 10}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[http.server.ThreadingHTTPServer]:
    """A local HTTP server; `asked` contains the requests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asking(port: int) -> Callable[[str, Mapping[str, Any]], float]:
    def grade(completion: str, entry: Mapping[str, Any]) -> float:
        body = json.dumps({"question": entry["question"], "completion": completion}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", body) as reply:
            return float(json.load(reply)["grade"])

    return grade


def asking_async(port: int) -> Callable[..., Any]:
    async def grade(completion: str, entry: Mapping[str, Any]) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"question": entry["question"], "completion": completion})
        writer.write(f"POST / HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        reply = await reader.read()
        writer.close()
        return float(json.loads(reply.partition(b"\r\n\r\n")[2])["grade"])

    return grade


@pytest.mark.parametrize("make", [asking, asking_async])
def test_trusted_reward_can_call_a_judge_over_http(
    make: Callable[[int], Callable[..., Any]], judge: http.server.ThreadingHTTPServer
) -> None:
    scores = score_with(right=right, judge=Reward(make(judge.server_port), weight=2.0, trusted=True))
    assert [scored.parts["judge"] for scored in scores] == [0.1, 0.4]
    assert values(scores) == [1.0 + 2 * 0.1, 2 * 0.4]
    asked = judge.asked  # type: ignore[attr-defined]
    assert sorted(request["completion"] for request in asked) == ["4", "five"]


REMEDY = "set data.rewards.judge.trusted to true if it does not execute model output"


def swallowing(port: int) -> Callable[..., float]:
    ask = asking(port)

    def grade(completion: str, entry: Mapping[str, Any]) -> float:
        try:
            return ask(completion, entry)
        except OSError:
            return 0.0

    return grade


@pytest.mark.parametrize(
    ("make", "needs"), [(asking, "the network"), (asking_async, "an event loop"), (swallowing, "the network")]
)
def test_confined_reward_with_network_access_fails_and_names_the_remedy(
    make: Callable[[int], Callable[..., Any]], needs: str, judge: http.server.ThreadingHTTPServer
) -> None:
    for scored in score_with(judge=make(judge.server_port)):
        assert scored.reward is None
        assert f"the reward needs {needs}, which the sandbox denies; {REMEDY}" in scored.error
    assert judge.asked == []  # type: ignore[attr-defined]


def test_other_denials_name_the_remedy_and_ordinary_errors_do_not() -> None:
    def reads(completion: str, entry: Mapping[str, Any]) -> float:
        return len(Path("/etc/passwd").read_text())

    def threads(completion: str, entry: Mapping[str, Any]) -> float:
        thread = threading.Thread(target=print)
        thread.start()
        return 1.0

    def fails(completion: str, entry: Mapping[str, Any]) -> float:
        raise RuntimeError("no such word")

    errors = [s.error for reward in (reads, threads, fails) for s in score_with(judge=reward)[:1]]
    assert [REMEDY in error for error in errors] == [True, True, False]
    assert errors[2] == "judge: RuntimeError: no such word (test_scoring_network.py:118)"
