"""Child processes, the limits of their replies, and the limit on replacements."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.processes.processes import descendants, wait_until_gone
from titanrl.config.sections import FaultsConfig
from titanrl.processes.children import Channel, Child, RespawnLimitError, Respawns


def test_limit_holds_within_the_window_and_names_what_died() -> None:
    clock = [0.0]
    respawns = Respawns(FaultsConfig(max_respawns=3, respawn_window_s=60.0), now=lambda: clock[0])
    for clock[0], part in ((0.0, "generator_0"), (10.0, "generator_0"), (50.0, "rollout_1")):
        respawns.add(part, "killed")
    with pytest.raises(
        RespawnLimitError, match=r"max_respawns: rollout_1 ended .*generator_0 2 times, rollout_1 1 times; got 3.*SIGKILL"
    ):
        respawns.add("rollout_1", "SIGKILL")
    clock[0] = 60.0  # the first one has left the window
    respawns.add("rollout_1", "killed")


def test_limit_of_zero_reports_only_the_cause() -> None:
    with pytest.raises(RespawnLimitError, match=r"^trainer rank 0 has ended$"):
        Respawns(FaultsConfig(max_respawns=0)).add("trainer", "trainer rank 0 has ended")


@asynccontextmanager
async def channels() -> AsyncIterator[tuple[Channel, socket.socket]]:
    """Yield a channel whose replies end with a line break, and the socket of its peer."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    channel = Channel(ours, lambda received: received.endswith(b"\n"))
    with theirs:
        yield channel, theirs
    channel.close()


async def test_request_larger_than_the_socket_buffer_is_sent_completely() -> None:
    request = bytes(range(256)) * (1 << 14)
    async with channels() as (channel, peer):
        reply = asyncio.create_task(channel.request(request, 30.0, 100))
        received, loop = b"", asyncio.get_running_loop()
        while len(received) < len(request):
            received += await loop.sock_recv(peer, 1 << 16)
        assert received == request
        await loop.sock_sendall(peer, b"one")
        await loop.sock_sendall(peer, b" reply\n")
        assert await reply == b"one reply\n"


@pytest.mark.parametrize("size", [1, 1 << 22])
async def test_request_ends_when_its_limit_its_peer_or_the_channel_ends(size: int) -> None:
    async with channels() as (channel, peer):
        assert await channel.request(bytes(size), 0.05, 100) is None
    async with channels() as (channel, peer):
        reply = asyncio.create_task(channel.request(bytes(size), 30.0, 100))
        await asyncio.sleep(0)
        peer.close()
        assert await reply == b""
        assert await channel.request(b"", 30.0, 100) == b""
    async with channels() as (channel, peer):
        reply = asyncio.create_task(channel.request(bytes(size), 30.0, 100))
        await asyncio.sleep(0)
        channel.close()
        assert await reply == b""
        assert peer.fileno() >= 0


@pytest.mark.parametrize("sent", [b"x" * 11, b"x" * 10 + b"\n", b"x" * (1 << 20)])
async def test_reply_longer_than_its_limit_closes_the_channel(sent: bytes) -> None:
    async with channels() as (channel, peer):
        with suppress(BlockingIOError):
            peer.send(sent)
        reply = await channel.request(b"request", 30.0, 10)
        assert reply is not None
        assert len(reply) <= 10
        assert channel.is_closed


async def test_bytes_without_a_request_are_bounded() -> None:
    async with channels() as (channel, peer):
        peer.send(b"a reply\n")
        assert await channel.request(b"request", 30.0, 100) == b"a reply\n"
        peer.send(b"x" * 1000)
        while not channel.is_closed:
            await asyncio.sleep(0)
        assert len(channel._received) <= 100


async def test_child_is_killed_with_its_group_and_its_exit_is_noticed() -> None:
    read, write = os.pipe()
    start = "import os, subprocess, time; subprocess.Popen(['sleep', '60'])"
    script = f"{start}; os.write(int(os.environ['PIPE']), b'+'); time.sleep(60)"
    exits: list[int] = []
    child = Child(
        [sys.executable, "-c", script],
        environment={**os.environ, "PIPE": str(write)},
        descriptors=[write],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        on_exit=lambda ended: exits.append(ended.exited.result()),
    )
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1) == b"+"
    family = descendants(child.pid)
    assert len(family) == 1
    assert not child.has_exited
    child.kill()
    assert await child.exited == -signal.SIGKILL
    assert exits == [-signal.SIGKILL]
    assert child.has_exited
    assert await asyncio.to_thread(wait_until_gone, family, 30.0) == set()
    child.kill()
    os.close(read)
