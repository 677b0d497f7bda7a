"""Leases of pods, over loopback; the program of a pod is tested in `test_hosts.py`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from titanrl.hosts.kubernetes.leases import KubernetesError, Lost, Pod, PodLeases, tcp
from titanrl.hosts.leases import ENDING

POD = Pod(rank=1, name="trainers-1", ip="127.0.0.1")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[tuple[PodLeases, asyncio.Queue[Lost]]]:
    """Serve like a pod; return the controller's leases."""
    lost: asyncio.Queue[Lost] = asyncio.Queue()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    leases = PodLeases("secret", server.sockets[0].getsockname()[1], "run@desk", lost.put_nowait)
    try:
        yield leases, lost
    finally:
        leases.close()
        server.close()


def replying(text: str, *later: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"secret service-1 run@desk\n"
        writer.write(text.encode())
        for message in later:
            writer.write(message)
        await writer.drain()
        if later:
            writer.close()
        else:
            await reader.read()

    return answer


def test_lost_pod_is_reported_with_its_host_name() -> None:
    async def work() -> None:
        async with served(replying("serving host-1\n", b"")) as (leases, lost):
            await leases.hold(POD, "service-1")
            assert await asyncio.wait_for(lost.get(), 10) == Lost(pod=POD, host="host-1", was_told=False)
            assert leases.lost == {1}

    asyncio.run(work())


def test_terminated_pod_reports_it() -> None:
    async def work() -> None:
        async with served(replying("serving host-1\n", ENDING)) as (leases, lost):
            await leases.hold(POD, "service-1")
            assert (await asyncio.wait_for(lost.get(), 10)).was_told

    asyncio.run(work())


def test_closed_leases_report_nothing() -> None:
    async def work() -> None:
        async with served(replying("serving host-1\n")) as (leases, lost):
            await leases.hold(POD, "service-1")
            leases.close()
            await asyncio.sleep(0.1)
            assert lost.empty()
            assert not leases.lost

    asyncio.run(work())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("busy other@desk\n", r"serves another run \(got other@desk\)"),
        ("", "refused this run"),
        ("GET /\n", "refused this run"),
    ],
)
def test_pod_that_refuses_raises(reply: str, message: str) -> None:
    async def work() -> None:
        async with served(replying(reply, b"")) as (leases, _):
            with pytest.raises(KubernetesError, match=message):
                await leases.hold(POD, "service-1")

    asyncio.run(work())


def test_unreachable_pod_raises() -> None:
    async def work() -> None:
        leases = PodLeases("secret", 1, "run@desk", lambda lost: None)
        with pytest.raises(KubernetesError, match=r"cannot reach port 1 of pod trainers-1 at 127\.0\.0\.1"):
            await leases.hold(POD, "service-1")

    asyncio.run(work())


def test_addresses_of_both_families_use_monarchs_notation() -> None:
    assert tcp("10.0.0.7", 26600) == "tcp://10.0.0.7:26600"
    assert tcp("fd00::7", 26600) == "tcp://[fd00::7]:26600"
