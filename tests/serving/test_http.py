"""Hostile clients of the endpoint: wrong keys, large and unfinished requests, too many calls, disconnects."""

import asyncio
import concurrent.futures
import http.client
import json
import socket
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.serving.policies import Scripted
from tests.serving.servers import Server, serving, until
from titanrl.serving import http as endpoint
from titanrl.serving.app import App, Limits
from titanrl.serving.calls import Callers

ASKED = {"messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


def app_of(policy: Scripted, limits: Limits | None = None) -> App:
    return App(callers_of(policy).find, ["policy"], limits)


def callers_of(policy: Scripted) -> Callers:
    callers = Callers()
    callers.open(policy, "key")
    return callers


def raw_request(body: bytes, length: int | None = None) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "KEY"}, {"authorization": "Basic key"}]
)
def test_wrong_key_is_refused_before_the_body_is_read(headers: dict[str, str]) -> None:
    policy = Scripted()
    with serving(app_of(policy)) as server:
        response = httpx.post(server.url + PATH, json=ASKED, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(server.url + PATH, json=ASKED, headers={"x-api-key": "key"}).status_code == 200
    assert len(policy.calls) == 1


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_body_is_refused_without_reading_it_whole(is_chunked: bool) -> None:
    with serving(app_of(Scripted())) as server:
        body = b"a" * (20 << 20)
        content = iter([body[:65536]] * 320) if is_chunked else body
        response = server.http().post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert server.http().post(PATH, json=ASKED).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff{}",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\u0000"}]}',
    ],
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with serving(app_of(Scripted())) as server:
        response = server.http().post(PATH, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("body")


def test_web_page_cannot_send_a_request_unasked() -> None:
    with serving(App(lambda key: Scripted(), ["policy"], hosts={"127.0.0.1"})) as server:
        content = json.dumps(ASKED)
        assert server.http().post(PATH, content=content, headers={"content-type": "text/plain"}).status_code == 415
        rebound = {"host": f"evil.example:{server.port}", "content-type": "application/json"}
        assert server.http().post(PATH, content=content, headers=rebound).status_code == 403
        assert server.http().post(PATH, json=ASKED).status_code == 200


def test_200_calls_at_once_are_answered_or_refused_with_429() -> None:
    gate = asyncio.Event()
    policy = Scripted(pause=lambda: gate)
    every = httpx.Limits(max_connections=None)
    with (
        serving(app_of(policy, Limits(max_calls=50, max_calls_per_key=50))) as server,
        httpx.Client(headers={"authorization": "Bearer key"}, timeout=60, limits=every) as client,
    ):

        def ask(_: int) -> int:
            response = client.post(server.url + PATH, json=ASKED)
            assert response.status_code == 200 or response.headers["retry-after"] == "1"
            return response.status_code

        with concurrent.futures.ThreadPoolExecutor(200) as pool:
            asked = [pool.submit(ask, index) for index in range(200)]
            until(lambda: sum(each.done() for each in asked) == 150, 60)
            server.loop.call_soon_threadsafe(gate.set)
            assert Counter(each.result() for each in asked) == {200: 50, 429: 150}
        assert server.http().post(PATH, json=ASKED).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
def test_disconnect_cancels_the_generation(stream: bool, half: bool) -> None:
    never = asyncio.Event()
    policy = Scripted(pause=lambda: never)
    with serving(app_of(policy)) as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(raw_request(json.dumps(ASKED | {"stream": stream}).encode()))
        until(lambda: len(policy.calls) == 1)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        if half:
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        until(lambda: policy.num_cancelled == 1)
        until(lambda: running(server) == 0)
        client.close()


def running(server: Server) -> float | None:
    return server.app.registry.get_sample_value("titanrl_calls_running")


def test_slow_body_and_slow_call_have_deadlines() -> None:
    never = asyncio.Event()
    policy = Scripted(pause=lambda: never)
    limited = serving(app_of(policy, Limits(body_s=0.2)))
    with limited as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw_request(b"{", length=99))
        assert client.recv(100).startswith(b"HTTP/1.1 408")
    with serving(app_of(policy, Limits(call_s=0.2))) as server:
        response = server.http().post(PATH, json=ASKED)
        assert response.status_code == 504
        assert policy.num_cancelled == 1


def test_head_of_a_request_has_a_deadline_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEAD_S", 0.3)
    with serving(app_of(Scripted())) as server:
        for sent in (b"", b"POST / HTTP/1.1\r\nA: "):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(sent)
                assert client.recv(100) == b""  # closed
        monkeypatch.undo()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nA: " + b"a" * 100_000)
            assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_second_head_of_a_connection_is_limited_and_headers_after_a_body_have_no_effect() -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n".encode()
    body = json.dumps(ASKED).encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nAuthorization: Bearer wrong\r\n\r\n" % (len(body), body)
    never = asyncio.Event()
    with serving(app_of(Scripted())) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + chunked)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    policy = Scripted(pause=lambda: never)
    with serving(app_of(policy)) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(raw_request(body))
        until(lambda: len(policy.calls) == 1)
        client.sendall(b"GET / HTTP/1.1\r\nA: ")
        client.sendall(b"a" * 1_000_000)  # while the first request waits for its response
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_kept_connection_serves_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEAD_S", 1.0)
    with serving(app_of(Scripted())) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port)
        for _ in range(2):
            client.request("GET", "/health")
            response = client.getresponse()
            assert (response.status, response.read()) == (200, b'{"status":"ok"}')
            time.sleep(1.1)  # longer than the limit for a head that has begun


def test_wish_for_another_protocol_is_ignored() -> None:
    # curl --http2 and the client of Java ask for HTTP/2 with each request.
    wish = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__", "x-api-key": "key"}
    json_type = {"content-type": "application/json"}
    with serving(app_of(Scripted())) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        body = json.dumps(ASKED).encode()
        for content in (body, body, iter([body[:9], body[9:]]), None, body):  # with a length, in chunks, without a body
            path = "/health" if content is None else PATH
            client.request("GET" if content is None else "POST", path, content, wish | json_type)
            response = client.getresponse()
            assert (response.status, bool(response.read())) == (200, True)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as whole:
            whole.sendall(raw_request(body).replace(b"Host: a", b"Host: a\r\nConnection: Upgrade\r\nUpgrade: h2c"))
            assert whole.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(endpoint.listen.__kwdefaults__, "max_connections", 2)
    with serving(app_of(Scripted())) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
        assert clients[2].recv(1) == b""  # closed
        clients[0].close()
        until(lambda: httpx_ok(server))


def test_connections_wait_while_the_endpoint_is_busy() -> None:
    async def connect() -> None:
        listener = await endpoint.listen(app_of(Scripted()), ("127.0.0.1", 0))
        address = "127.0.0.1", int(listener.url.rpartition(":")[2])
        clients = [socket.create_connection(address, timeout=5) for _ in range(300)]  # the event loop accepts none of them
        for client in clients:
            client.close()
        await listener.close()

    asyncio.run(connect())


def httpx_ok(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_unix_socket_needs_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o755)
    with pytest.raises(ValueError, match="only you may have access"), serving(app_of(Scripted()), folder / "s"):
        pass
    folder.chmod(0o700)
    with serving(app_of(Scripted()), folder / "s") as server:
        transport = httpx.HTTPTransport(uds=str(folder / "s"))
        with httpx.Client(transport=transport, base_url="http://policy", headers={"x-api-key": "key"}) as client:
            assert client.post(PATH, json=ASKED).status_code == 200
        assert server.url == f"unix:{folder}/s"
    assert not (folder / "s").exists()


def test_closing_refuses_late_calls() -> None:
    never = asyncio.Event()
    policy = Scripted(pause=lambda: never)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, serving(app_of(policy)) as server:
        asked = pool.submit(server.http().post, PATH, json=ASKED)
        until(lambda: len(policy.calls) == 1)
        server.run(server.listener.close(0.1))
        assert asked.result(10).status_code == 503
        assert policy.num_cancelled == 1
