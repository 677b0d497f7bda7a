"""The command `titanrl chat` as a client of the endpoint, over a policy without an engine."""

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.serving.policies import Scripted
from tests.serving.servers import Server, serving, until
from titanrl.commands import serve
from titanrl.environments import Message
from titanrl.serving.app import App
from titanrl.serving.calls import Callers, Refused

KEY = "0123456789abcdef"
POLICY = Scripted()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    callers = Callers()
    callers.open(POLICY, KEY)
    with serving(App(lambda key: POLICY if key == "none" else callers.find(key), ["policy"])) as server:
        yield server


@pytest.fixture(autouse=True)
def without_replies() -> None:
    POLICY.replies.clear()
    POLICY.calls.clear()


def talk(monkeypatch: pytest.MonkeyPatch, url: str, lines: Sequence[str], *options: str) -> int:
    """Send lines to a policy; return the exit code."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    with pytest.raises(SystemExit) as ended:
        serve.chat([url, *options], prog="titanrl chat")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def asked() -> list[list[str]]:
    """Return the contents of the messages of each call."""
    return [[str(message["content"]) for message in call.messages or ()] for call in POLICY.calls]


def test_each_line_is_a_prompt_of_its_own(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, f"{server.url}/v1", ["añb", "", " cd "], "--temperature", "0.5") == 0
    assert capsys.readouterr().out == "bña\ndc\n"
    assert asked() == [["añb"], ["cd"]]
    assert {call.temperature for call in POLICY.calls} == {0.5}


def test_conversation_is_kept_until_a_new_one(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thought: Message = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    POLICY.replies += [{"role": "assistant", "content": "\x1b[2Jone"}, thought]
    talk(monkeypatch, server.url, ["a", "b", "c", "/new", "d"], "--conversation", "--system", "S")
    assert capsys.readouterr().out == "\ufffd[2Jone\nhm\n\nyes\nc\nd\n"  # a reply cannot control the terminal
    assert asked() == [
        ["S", "a"],
        ["S", "a", "\x1b[2Jone", "b"],
        ["S", "a", "\x1b[2Jone", "b", "yes", "c"],
        ["S", "d"],
    ]
    assert (POLICY.calls[2].messages or ())[4]["reasoning_content"] == "hm"


def test_system_prompt_is_that_of_the_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("name: run\nnum_steps: 3\ndata: {system_prompt: S}\n")
    monkeypatch.setattr(serve, "serving", lambda policy, overrides: nullcontext(server.url))
    assert talk(monkeypatch, str(tmp_path), ["ab"]) == 0
    assert talk(monkeypatch, str(tmp_path), ["ab"], "--system", "T") == 0
    assert asked() == [["S", "ab"], ["T", "ab"]]


def test_key_is_read_from_a_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    assert talk(monkeypatch, server.url, ["ab"], "--keys", str(keys)) == 0
    keys.write_text("another key of 16 characters".replace(" ", "_"))
    assert talk(monkeypatch, server.url, ["ab"], "--keys", str(keys)) == 1
    out, err = capsys.readouterr()
    assert out == "ba\n"
    assert err.startswith(f"error: {server.url}: the key is wrong or missing.")
    assert err.count("\n") == 1


def test_refused_message_leaves_the_session(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(POLICY, "_said", refuse_once(POLICY._said))
    assert talk(monkeypatch, server.url, ["ab", "cd"]) == 0
    assert capsys.readouterr() == ("dc\n", "error: messages: too long\n")


def refuse_once(said: object) -> object:
    def first(call: object) -> object:
        POLICY._said = said  # type: ignore[method-assign, assignment]
        raise Refused("messages: too\nlong")

    return first


def test_failure_within_a_reply_leaves_the_session(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    POLICY.replies.append({"role": "assistant", "content": "xyz", "fails": True})
    assert talk(monkeypatch, server.url, ["ab", "cd"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\ndc\n")
    assert err == "error: an internal error (RuntimeError). The log of the server has the details.\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "unix:/nowhere"])
def test_endpoint_that_cannot_be_reached_ends_the_command(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, url, ["ab"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {url}: ")


def test_reply_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def cut(scope: dict[str, Any], receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = {"choices": [{"delta": {"content": "half"}, "finish_reason": None}]}
        body = {"/v1/models": json.dumps({"data": [{"id": "policy"}]})}.get(scope["path"], f"data: {json.dumps(part)}\n\n")
        await send({"type": "http.response.body", "body": body.encode()})

    with serving(cut) as server:  # type: ignore[arg-type]
        assert talk(monkeypatch, server.url, ["ab"]) == 0
    assert capsys.readouterr() == ("half\n", "error: the reply ended before it was complete\n")


@pytest.mark.parametrize("proxy", ["HTTP_PROXY", "ALL_PROXY"])
def test_proxies_are_not_used_on_this_machine(
    proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(proxy, "socks5://127.0.0.1:9")
    assert talk(monkeypatch, "http://127.0.0.1:1", ["ab"]) == 1
    assert capsys.readouterr().err == "error: http://127.0.0.1:1: [Errno 111] Connection refused\n"
    assert talk(monkeypatch, "http://example.invalid", ["ab"]) == 1
    assert "socksio" in capsys.readouterr().err


def test_other_servers_are_no_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def page(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"<html>"})  # type: ignore[operator]

    with serving(page) as server:  # type: ignore[arg-type]
        assert talk(monkeypatch, server.url, ["ab"]) == 1
        assert "no policy is served there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["http://a", "num_steps=1"], "num_steps=1: overrides require a directory"),
        (["runs", "--keys", "keys"], "--keys: requires the URL of a served policy"),
    ],
)
def test_options_of_the_other_kind_are_refused(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.chat(arguments, prog="titanrl chat")
    assert problem in capsys.readouterr().err


def test_ctrl_c_cancels_the_reply_and_not_the_session() -> None:
    paused = asyncio.Event()
    policy = Scripted(pause=lambda: paused)
    with serving(App(lambda key: policy, ["policy"])) as server:
        command = subprocess.Popen(
            [sys.executable, "-m", "titanrl.commands", "chat", server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        command.stdin.write("abcd\n")
        command.stdin.flush()
        assert command.stdout.read(3) == "dcb"  # streamed while the policy waits
        command.send_signal(signal.SIGINT)
        until(lambda: policy.num_cancelled == 1)
        server.loop.call_soon_threadsafe(paused.set)
        out, err = command.communicate("efg\n", timeout=30)
        assert (command.returncode, out, err) == (0, "\ngfe\n", "cancelled\n")
