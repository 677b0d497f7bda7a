"""Objects that the episodes of an event loop share: one start, another after a failure, and the end."""

import asyncio

import pytest

from titanrl.environments.servers import close_shared, forget, shared


class Counted:
    """An object that counts its starts, the first of which fails after a wait."""

    num_starts = num_closed = 0

    @classmethod
    async def start(cls) -> "Counted":
        cls.num_starts += 1
        if cls.num_starts == 1:
            await asyncio.sleep(0.05)
            raise RuntimeError("the first start")
        return cls()

    async def close(self) -> None:
        type(self).num_closed += 1


async def test_a_failed_start_without_waiters_does_not_fail_the_next_use() -> None:
    class Server(Counted):
        pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shared("server", Server.start), 0.01)
    await asyncio.sleep(0.1)
    made = await shared("server", Server.start)
    assert await shared("server", Server.start) is made
    await close_shared()
    assert (Server.num_starts, Server.num_closed) == (2, 1)


async def test_a_replaced_object_is_not_closed_again() -> None:
    class Server(Counted):
        num_starts = 1

    first = await shared("server", Server.start)
    await forget("server", first)
    second = await shared("server", Server.start)
    await forget("server", first)
    assert await shared("server", Server.start) is second
    assert Server.num_closed == 1
    await close_shared()
