"""An HTTP server with scripted replies, for clients of endpoints that fail."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = tuple[int, str] | None
"""Status and body; None sends no reply until the test ends."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, self.headers.get("Authorization"), request))
        reply: Reply = server.reply(request, len(server.asked))
        if reply is None:
            server.ended.wait(30.0)
            self.close_connection = True
            return
        status, body = reply
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


class ReplyingServer(http.server.ThreadingHTTPServer):
    """A local server; `reply` maps the body and the number of a request to its reply."""

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.ended = threading.Event()
        self.reply = reply


@contextmanager
def replying(reply: Callable[[dict[str, Any], int], Reply]) -> Iterator[ReplyingServer]:
    """Serve in a thread."""
    with ReplyingServer(reply) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()
