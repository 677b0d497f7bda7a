"""Requests of the controller to a weight store that does not reply."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from titanrl.launch.supervision import ActorDiedError, DeadlineError, Supervisor
from titanrl.launch.watched_store import WatchedStore


class StoppedStore:
    """Never replies, like a process stopped by a signal."""

    async def put(self, key: str, value: object) -> None:
        await asyncio.Event().wait()

    async def delete(self, key: str) -> None:
        await asyncio.Event().wait()


REQUESTS: dict[str, Callable[[WatchedStore], Any]] = {
    "store.put": lambda store: store.put("key", 1),
    "store.delete": lambda store: store.delete("key"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_fails_with_the_run_and_at_its_deadline(name: str) -> None:
    stopped: Any = StoppedStore()

    async def scenario() -> None:
        supervisor = Supervisor()
        with pytest.raises(DeadlineError, match=f"no reply to '{name}' within 0.05 s"):
            await REQUESTS[name](WatchedStore(stopped, supervisor, 0.05))
        waiting = asyncio.create_task(REQUESTS[name](WatchedStore(stopped, supervisor, 60.0)))
        await asyncio.sleep(0)
        supervisor.fail(ActorDiedError("store was stopped", "store"))
        with pytest.raises(ActorDiedError, match=f"store was stopped .while waiting for: {name}"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())
