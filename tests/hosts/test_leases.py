"""Leases of hosts, over loopback."""

import asyncio
import contextlib
from collections.abc import Coroutine

import pytest

from titanrl.hosts.holder import ENDING, Controller, Host, Leases, hold_lease


class Events:
    """Records the callbacks of the leases."""

    def __init__(self) -> None:
        self.lost: asyncio.Queue[Host] = asyncio.Queue()
        self.ending: asyncio.Queue[Host] = asyncio.Queue()


def host(rank: int) -> Host:
    return Host(rank=rank, node=f"n{rank}", name=f"n{rank}.cluster")


def run(work: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def opened(num_hosts: int) -> tuple[Leases, Events, Controller]:
    events = Events()
    leases = Leases(num_hosts, events.lost.put_nowait, events.ending.put_nowait)
    return leases, events, Controller(await leases.open("localhost"), leases.token)


def test_all_hosts_hold_their_leases_in_any_order() -> None:
    async def work() -> None:
        leases, _, controller = await opened(2)
        held = [await hold_lease(controller, host(1))]
        assert 0 in leases.missing
        held.append(await hold_lease(controller, host(0)))
        await leases.all_held()
        assert leases.hosts == {0: host(0), 1: host(1)}
        assert leases.missing == []
        leases.close()

    run(work())


def test_lost_host_is_reported() -> None:
    async def work() -> None:
        leases, events, controller = await opened(2)
        _, first = await hold_lease(controller, host(0))
        second = await hold_lease(controller, host(1))
        await leases.all_held()
        first.transport.abort()
        assert await events.lost.get() == host(0)
        assert leases.lost == {0}
        assert not second[1].is_closing()
        leases.close()

    run(work())


def test_host_with_a_malformed_line_is_lost() -> None:
    async def work() -> None:
        events = Events()

        def read(host: Host, line: bytes) -> None:
            line.decode("ascii")

        leases = Leases(1, events.lost.put_nowait, events.ending.put_nowait, read)
        _, writer = await hold_lease(Controller(await leases.open("localhost"), leases.token), host(0))
        await leases.all_held()
        writer.write(b"\xff\n")
        assert await events.lost.get() == host(0)
        leases.close()

    run(work())


def test_end_of_the_loop_loses_no_host() -> None:
    events, held = Events(), []

    async def work() -> None:
        leases = Leases(1, events.lost.put_nowait, events.ending.put_nowait)
        held.append(await hold_lease(Controller(await leases.open("localhost"), leases.token), host(0)))
        await leases.all_held()

    run(work())
    assert events.lost.empty()


def test_host_that_does_not_answer_leaves_no_connection() -> None:
    async def work() -> None:
        leases, *_ = await opened(1)
        ended = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"x" * 100_000)  # longer than a line may be
            with contextlib.suppress(ConnectionError):
                await reader.read()
            ended.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with pytest.raises(ValueError, match="limit"):
            await leases.reach(*server.sockets[0].getsockname(), "hello")
        await ended.wait()
        leases.close()
        with pytest.raises(ConnectionAbortedError, match="the leases are closed"):
            await leases.reach(*server.sockets[0].getsockname(), "hello")
        server.close()

    run(work())


def test_hosts_exit_with_their_controller() -> None:
    async def work() -> None:
        leases, events, controller = await opened(1)
        reader, _ = await hold_lease(controller, host(0))
        await leases.all_held()
        leases.close()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert events.lost.empty()

    run(work())


def test_signal_of_the_scheduler_reaches_the_controller() -> None:
    async def work() -> None:
        leases, events, controller = await opened(1)
        _, writer = await hold_lease(controller, host(0))
        await leases.all_held()
        writer.write(ENDING)
        assert await events.ending.get() == host(0)
        assert leases.lost == set()
        leases.close()

    run(work())


def test_strangers_get_no_lease() -> None:
    async def work() -> None:
        leases, _, controller = await opened(2)
        held = await hold_lease(controller, host(0))
        for greeting in (
            f"{'0' * 32} 1 n1 n1\n",  # another token
            f"{leases.token} 2 n2 n2\n",  # no such rank
            f"{leases.token} x n2 n2\n",
            f"{leases.token} 1\n",
            "GET / HTTP/1.1\r\n",
            f"{leases.token} 0 n9 n9\n",  # a rank that another host holds
        ):
            name, _, port = controller.address.rpartition(":")
            reader, writer = await asyncio.open_connection(name, int(port))
            writer.write(greeting.encode())
            assert await reader.read() == b""
        assert leases.hosts == {0: host(0)}
        assert not held[1].is_closing()
        leases.close()

    run(work())
