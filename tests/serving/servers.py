"""An endpoint in a thread, for clients that block."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from titanrl.serving.http import Endpoint, Listener, listen

T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """A running endpoint."""

    app: Endpoint
    loop: asyncio.AbstractEventLoop
    listener: Listener

    @property
    def url(self) -> str:
        return self.listener.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the endpoint."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def client(self, key: str = "key") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key: str = "key") -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60, verify=False)


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until a condition holds, which another thread changes."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def serving(app: Endpoint, at: tuple[str, int] | Path = ("127.0.0.1", 0)) -> Iterator[Server]:
    """Serve an application while the body runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(listen(app, at), loop).result(60)
    try:
        yield Server(app, loop, listener)
    finally:
        asyncio.run_coroutine_threadsafe(listener.close(0.5), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
