"""Tools of MCP servers: state per episode, faults of servers, what the policy sees, and that no process is left."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from tests.environments.episodes import calls, episode, says
from tests.ports import free_port
from tests.processes.processes import wait_until_gone
from titanrl.base.endpoint import certificates
from titanrl.environments import Done, EnvironmentDied, EnvironmentFailure, Environments, EnvironmentTimeout, Observation
from titanrl.environments.mcp import MAX_REPLY_BYTES, MAX_TOOLS

SERVER = Path(__file__).parent / "mcp_server.py"


@asynccontextmanager
async def environments(
    mode: str = "plain", *given: object, mcp: str | None = None, **options: Any
) -> AsyncIterator[Environments]:
    server = {"mcp": mcp or " ".join(map(str, [sys.executable, SERVER, mode, *given])), **options}
    made = Environments("tools", {"tools": server})
    try:
        yield made
    finally:
        await made.close()


async def replies(made: Environments, *actions: str) -> list[str]:
    """Play an episode with one call per turn; return the texts of the results."""
    environment = made.make()
    try:
        await environment.reset(episode())
        texts = []
        for action in actions:
            observation = await environment.step(calls(("act", {"do": action})))
            assert isinstance(observation, Observation)
            texts.append(observation.messages[0]["content"])
        return texts
    finally:
        await environment.close()


async def reply(mode: str, action: str, **options: Any) -> str:
    async with environments(mode, **options) as made:
        return (await replies(made, action))[0]


async def test_tools_are_listed_into_schemas() -> None:
    async with environments() as made:
        observation = await made.make().reset(episode())
        (tool,) = observation.tools
        assert (tool.name, tool.description, tool.parameters["required"]) == ("act", "Act. 0", ["do"])


async def test_each_episode_has_a_server_with_its_own_state() -> None:
    async with environments() as made:
        results = await asyncio.gather(*(replies(made, "count", "count", "pid") for _ in range(3)))
    assert [result[:2] for result in results] == [["1", "2"]] * 3
    pids = {int(result[2]) for result in results}
    assert len(pids) == 3
    assert not wait_until_gone(pids, 10.0)


async def test_a_shared_server_serves_all_episodes() -> None:
    async with environments(shared=True) as made:
        results = await asyncio.gather(*(replies(made, "count", "pid") for _ in range(3)))
    assert len({result[0] for result in results}) == 3
    pids = {int(result[1]) for result in results}
    assert len(pids) == 1
    assert not wait_until_gone(pids, 10.0)


async def test_a_shared_server_that_died_is_replaced() -> None:
    async with environments(shared=True) as made:
        with pytest.raises(EnvironmentDied, match=r"exit code 3.*a bug"):
            await replies(made, "crash")
        assert await replies(made, "count") == ["1"]


async def test_an_episode_without_calls_starts_no_server(tmp_path: Path) -> None:
    path = tmp_path / "starts"
    async with environments("plain", path) as made:
        await made.start()
        environment = made.make()
        await environment.reset(episode())
        assert isinstance(await environment.step(says("no calls")), Done)
        await environment.close()
    assert path.read_text() == "x"  # the one that listed the tools


async def test_each_server_has_a_folder_that_is_deleted_with_it() -> None:
    # The server writes a letter per start into the file, and would list other tools if it found some.
    async with environments("plain", "{folder}/state") as made:
        assert await replies(made, "count") == ["1"]
        path = Path((await replies(made, "path"))[0])
        assert path.name == "state"
        assert not path.parent.exists()


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("image", "[image without text]"),
        ("structure", '{"a": 1}'),
        ("surrogate", "a\ufffdb\ufffd"),
        ("fail", "there is no page 7"),
        ("params", "unknown tool"),
        ("loud", "done"),
    ],
)
async def test_the_policy_sees_results_and_its_own_errors(action: str, text: str) -> None:
    assert await reply("plain", action) == text


async def test_errors_of_a_call_count_as_failed_calls() -> None:
    async with environments() as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "fail"}), ("act", {"do": "count"}), ("act", "{")))
        assert observation.metrics == {"tool_calls": 3.0, "failed_calls": 2.0, "malformed_calls": 1.0}
        await environment.close()


async def test_long_results_are_cut_for_the_policy() -> None:
    server = f"{sys.executable} {SERVER} plain"
    made = Environments("tools", {"tools": [{"mcp": server}], "max_result_chars": 5})
    assert (await replies(made, "fail"))[0] == "there... (13 more characters)"
    await made.close()


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("internal", EnvironmentFailure, "the error -32603: the disk is full"),
        ("nothing", EnvironmentFailure, "act must return content"),
        ("hang", EnvironmentTimeout, "tools/call took longer than 2 s"),
        ("crash", EnvironmentDied, r"the server ended \(exit code 3\); its output ends with: a bug"),
        ("garbage", EnvironmentFailure, "more than 1000 lines that are no message"),
        ("huge", EnvironmentFailure, f"a line of more than {MAX_REPLY_BYTES >> 20} MiB"),
    ],
)
async def test_failures_of_a_server_fail_the_episode(action: str, error: type[Exception], text: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=text):
        await reply("plain", action, timeout_s=2.0 if action == "hang" else 20.0)
    assert time.monotonic() - started < 100, "a server that hangs does so for minutes"


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [
        ("mute", EnvironmentTimeout, "initialize took longer than 2 s"),
        ("old", EnvironmentFailure, "speaks none of the versions 2025-11-25.*1999-01-01"),
        ("refuses", EnvironmentFailure, "the handshake with the error -32600: not today"),
        ("nameless", EnvironmentFailure, "a tool must have a name"),
        ("endless", EnvironmentFailure, f"more than {MAX_TOOLS} tools"),
    ],
)
async def test_a_server_that_cannot_be_used_fails_at_the_start(mode: str, error: type[Exception], text: str) -> None:
    async with environments(mode, timeout_s=2.0 if mode == "mute" else 20.0) as made:
        with pytest.raises(error, match=text):
            await made.start()


async def test_a_program_that_cannot_be_executed_fails_at_the_start(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/nowhere\n")
    program.chmod(0o755)
    async with environments(mcp=str(program)) as made:
        with pytest.raises(EnvironmentDied, match="No such file"):
            await made.start()


async def test_pages_of_tools_and_lines_that_are_no_message_are_accepted() -> None:
    async with environments("paged") as made:
        assert [tool.name for tool in (await made.make().reset(episode())).tools] == ["act", "second"]
    async with environments("paged", only=["second"]) as made:
        assert [tool.name for tool in (await made.make().reset(episode())).tools] == ["second"]
    async with environments("chatty") as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "count"})))
        assert observation.metrics["mcp_stray_lines"] == 1.0
        await environment.close()


async def test_an_unknown_name_in_only_fails_at_the_start() -> None:
    async with environments(only=["nothing"]) as made:
        with pytest.raises(EnvironmentFailure, match=r"only: the server has no such tool \(got 'nothing'\). Choose among act"):
            await made.start()


async def test_a_changed_listing_fails_the_episode(tmp_path: Path) -> None:
    async with environments("plain", tmp_path / "starts") as made:
        with pytest.raises(EnvironmentFailure, match="have changed since they were listed"):
            await replies(made, "count")


async def test_announced_changes_are_counted_and_requests_of_a_server_refused() -> None:
    async with environments() as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "change"}), ("act", {"do": "asks"})))
        assert isinstance(observation, Observation)
        pong, refusal = json.loads(observation.messages[1]["content"])
        assert pong == {"jsonrpc": "2.0", "id": "s1", "result": {}}
        assert refusal["error"] == {"code": -32601, "message": "this client does not support sampling/createMessage"}
        assert observation.metrics["mcp_changes"] == 1.0
        await environment.close()


async def test_servers_inherit_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    names = (await reply("plain", "variables")).split()
    assert "PATH" in names
    assert "SECRET_KEY" not in names


async def test_children_of_a_server_end_with_the_episode() -> None:
    assert not wait_until_gone({int(await reply("plain", "fork"))}, 10.0)


async def test_a_cancelled_call_leaves_no_process() -> None:
    async with environments() as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "pid"})))
        task = asyncio.create_task(environment.step(calls(("act", {"do": "hang"}))))
        await asyncio.wait([task], timeout=0.1)
        task.cancel()
        await asyncio.wait([task])
        await environment.close()
    assert not wait_until_gone({int(observation.messages[0]["content"])}, 10.0)  # type: ignore[union-attr]


async def test_a_close_that_is_cancelled_ends_the_server() -> None:
    async with environments() as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "pid"})))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(calls(("act", {"do": "hang"}))), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.close(), 0.1)
        assert not wait_until_gone({int(observation.messages[0]["content"])}, 10.0)  # type: ignore[union-attr]


async def test_servers_of_a_killed_process_end() -> None:
    program = f"""
import asyncio, os, signal
from tests.environments.episodes import calls, episode
from titanrl.environments import Environments
async def main():
    environment = Environments("tools", {{"tools": {{"mcp": "{sys.executable} {SERVER} plain"}}}}).make()
    await environment.reset(episode())
    observation = await environment.step(calls(("act", {{"do": "pid"}})))
    print(observation.messages[0]["content"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert not wait_until_gone({int(output)}, 10.0)


def test_a_missing_program_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"no such program on this machine \(got 'nowhere'\). Install it"):
        Environments("tools", {"tools": {"mcp": "nowhere --fast"}})
    with pytest.raises(ValueError, match=r"must hold the key, but it is not set \(got 'NO_KEY'\)"):
        Environments("tools", {"tools": {"mcp": "http://127.0.0.1:1/mcp", "key_variable": "NO_KEY"}})


# Streamable HTTP


@asynccontextmanager
async def http_server(as_events: bool = False) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a tool that counts calls per session; yield the URL and the headers of all requests."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    seen: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    answers: asyncio.Queue[Any] = asyncio.Queue()

    async def ask(number: int) -> AsyncIterator[str]:
        for asked, method in (
            ("s1", "ping"),
            ("s2", "sampling/createMessage"),
            (None, "ping"),
            (None, "notifications/message"),
        ):
            yield f"data: {json.dumps({'jsonrpc': '2.0', 'id': asked, 'method': method})}\n\n"
        text = json.dumps(sorted([await answers.get(), await answers.get()], key=lambda each: str(each["id"])))
        result = {"content": [{"type": "text", "text": text}]}
        yield f"data: {json.dumps({'jsonrpc': '2.0', 'id': number, 'result': result})}\n\n"

    async def answer(request: Request) -> Response:
        seen.append({"method": request.method, **request.headers})
        session = request.headers.get("mcp-session-id", "")
        if request.method == "DELETE":
            del counts[session]
            return Response(status_code=200)
        if request.headers.get("authorization") == "Bearer wrong":
            return Response("go away", status_code=401)
        message = await request.json()
        number, headers = message.get("id"), {}
        if "method" not in message:
            await answers.put(message)
        if number is None or "method" not in message:
            return Response(status_code=202)
        value: Any = {"tools": [{"name": "act", "inputSchema": {"type": "object", "properties": {"do": {}}}}]}
        if message["method"] == "initialize":
            headers["mcp-session-id"] = f"session-{len(counts)}"
            counts[headers["mcp-session-id"]] = 0
            value = {"protocolVersion": "2025-03-26", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
        elif message["method"] == "tools/call":
            if session not in counts:
                return Response("no such session", status_code=404)
            counts[session] += 1
            match message["params"]["arguments"]["do"]:
                case "hang":
                    await asyncio.sleep(600)
                case "crash":
                    return Response("a bug", status_code=500)
                case "garbage":
                    return Response("garbage", media_type="application/json")
                case "huge":
                    return Response(b"x" * (MAX_REPLY_BYTES + 1), media_type="application/json")
                case "forget":
                    counts.clear()
                case "asks":
                    return StreamingResponse(ask(number), media_type="text/event-stream")
            value = {"content": [{"type": "text", "text": str(counts.get(session))}]}
        reply = {"jsonrpc": "2.0", "id": number, "result": value}
        if as_events:
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            text = f"event: message\r\ndata: {note}\r\n\r\nid: 1\r\ndata: {json.dumps(reply)}\r\n\r\n"
            return Response(text, media_type="text/event-stream", headers=headers)
        return JSONResponse(reply, headers=headers)

    app = Starlette(routes=[Route("/mcp", answer, methods=["POST", "DELETE"])])
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}/mcp", seen
    server.should_exit = True
    server.force_exit = True
    await serving


@pytest.mark.parametrize("as_events", [False, True])
async def test_each_episode_has_an_http_session(as_events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "right")
    reads = Mock(wraps=httpx.create_ssl_context)
    monkeypatch.setattr(httpx, "create_ssl_context", reads)
    certificates.cache_clear()
    async with http_server(as_events) as (url, seen), environments(mcp=url, key_variable="MCP_KEY") as made:
        await made.start()
        assert await replies(made, "count", "count") == ["1", "2"]
        assert await replies(made, "count") == ["1"]
        assert {request["authorization"] for request in seen} == {"Bearer right"}
        called = [request for request in seen if "mcp-protocol-version" in request]
        assert {request["mcp-protocol-version"] for request in called} == {"2025-03-26"}
        assert sum(request["method"] == "DELETE" for request in seen) == 3  # of the listing, too
    assert reads.call_count == 1, "reading certificates would delay each episode"


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("hang", EnvironmentTimeout, "tools/call took longer than 1 s"),
        ("crash", EnvironmentFailure, "HTTP status 500 .*a bug"),
        ("garbage", EnvironmentFailure, "did not reply to tools/call"),
        ("huge", EnvironmentFailure, "more than 4 MiB"),
    ],
)
async def test_failures_of_an_http_server_fail_the_episode(action: str, error: type[Exception], text: str) -> None:
    async with http_server() as (url, _), environments(mcp=url, timeout_s=1.0) as made:
        with pytest.raises(error, match=text):
            await replies(made, action)


async def test_requests_of_an_http_server_are_refused() -> None:
    async with http_server() as (url, _), environments(mcp=url, timeout_s=5.0) as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("act", {"do": "asks"})))
        await environment.close()
        assert observation.metrics["mcp_stray_lines"] == 2.0  # all but the ping that can be answered
        pong, refusal = json.loads(str(observation.messages[0]["content"]))
        assert pong == {"jsonrpc": "2.0", "id": "s1", "result": {}}
        assert refusal["error"] == {"code": -32601, "message": "this client does not support sampling/createMessage"}


async def test_lost_sessions_wrong_keys_and_unreachable_servers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "wrong")
    async with http_server() as (url, _):
        async with environments(mcp=url) as made:
            with pytest.raises(EnvironmentFailure, match="HTTP status 404"):
                await replies(made, "forget", "count")
        async with environments(mcp=url, key_variable="MCP_KEY") as made:
            with pytest.raises(EnvironmentFailure, match=r"status 401.*Set key_variable"):
                await made.start()
    async with environments(mcp=f"http://127.0.0.1:{free_port()}/mcp") as made:
        with pytest.raises(EnvironmentDied, match="ConnectError"):
            await made.start()


async def test_a_run_of_the_policy_cannot_reach_other_methods() -> None:
    async with environments() as made:
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(calls(("prepare", {}), ("tools/list", {})))
        assert isinstance(observation, Observation)
        texts = {message["content"] for message in observation.messages}
        assert texts == {"There is no tool prepare. The tools are act.", "There is no tool tools/list. The tools are act."}
        await environment.close()
