"""Requests of the controller to a weight store that does not reply."""

import asyncio
from typing import Any

import pytest

from titanrl.launch.assembly import delete_watched
from titanrl.launch.supervision import ActorDiedError, DeadlineError, Supervisor


class StoppedStore:
    """Never replies, like a process stopped by a signal."""

    async def delete(self, key: str) -> None:
        await asyncio.Event().wait()


async def test_request_fails_with_the_run_and_at_its_deadline() -> None:
    stopped: Any = StoppedStore()
    supervisor = Supervisor()
    with pytest.raises(DeadlineError, match=r"no reply to 'store.delete' within 0.05 s"):
        await delete_watched(stopped, supervisor, 0.05, "key")
    waiting = asyncio.create_task(delete_watched(stopped, supervisor, 60.0, "key"))
    await asyncio.sleep(0)
    supervisor.fail(ActorDiedError("store was stopped", "store"))
    with pytest.raises(ActorDiedError, match=r"store was stopped .while waiting for: store.delete"):
        await asyncio.wait_for(waiting, 5)
