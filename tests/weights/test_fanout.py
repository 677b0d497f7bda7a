"""Fan-out within a host: one process receives and the others map; if the receiver dies, another process takes over."""

import asyncio
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import fork, prepare_templates
from tests.shared_memory import abandoned
from tests.trainer.ranks import FORKED
from tests.weights.processes import HostReader, Pulled, Wire, Writer, read_from_wire
from tests.workers import Looped
from titanrl.config import load_config
from titanrl.hosts.kinds import EmulatedHosts
from titanrl.launch.assembly import Fleet, start_hosts
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Supervisor
from titanrl.processes.temporary import private_folder
from titanrl.processes.variables import worker_environment
from titanrl.weights.records import ArenaHandle, Commit, RdmaHandle, WeightManifest
from titanrl.weights.store import IMPORTS, spawn_store
from titanrl.weights.transport import HostTransport, WeightReader

TIMEOUT_S = 60


# Hosts on a network that the test controls


class Link:
    """Remote end of the readers' network: accepts transfers one at a time and sends bytes chosen by the test."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)

    def accept(self) -> tuple[socket.socket, int, int]:
        """Wait for a transfer; return its connection, the id of the receiving process, and the version."""
        connection, _ = self._listener.accept()
        pid, version = connection.makefile().readline().split()
        return connection, int(pid), int(version)

    def has_another(self) -> bool:
        """Return whether another transfer was requested."""
        self._listener.settimeout(0)
        try:
            self._listener.accept()
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            self._listener.settimeout(TIMEOUT_S)

    def close(self) -> None:
        self._listener.close()


class Ranks:
    """Processes on emulated hosts that fetch from the link."""

    def __init__(self, folder: Path, num_hosts: int, num_ranks: int) -> None:
        self.link = Link(f"{folder}/link")
        transport = HostTransport(Wire(f"{folder}/link"))
        hosts = [folder / str(host) for host in range(num_hosts)]
        for host in hosts:
            host.mkdir()
        pipes = [FORKED.Pipe() for _ in range(num_hosts * num_ranks)]
        self.pipes: list[Connection] = [ours for ours, _ in pipes]
        self.processes = [
            FORKED.Process(
                target=read_from_wire, args=(theirs, str(hosts[rank // num_ranks]), pickle.loads(pickle.dumps(transport)))
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def number(self, pid: int) -> int:
        """Return the rank with this process id."""
        return [process.pid for process in self.processes].index(pid)

    def fetch(self, version: int, ranks: "list[int] | range") -> None:
        """Request a version on the given ranks."""
        manifest = WeightManifest(version, 0, "layout", 4, None, 2, (RdmaHandle(None, None, 4),))
        for rank in ranks:
            self.pipes[rank].send(manifest)

    def reply(self, rank: int) -> tuple[bytes | str, int]:
        """Return the bytes or the error of a rank's last fetch, and the total bytes that the rank received."""
        assert self.pipes[rank].poll(TIMEOUT_S), f"rank {rank} does not reply"
        reply: tuple[bytes | str, int] = self.pipes[rank].recv()
        return reply


@contextmanager
def running_ranks(num_ranks: int, num_hosts: int = 1) -> Iterator[Ranks]:
    folder = private_folder()
    ranks = Ranks(folder.path, num_hosts, num_ranks)
    try:
        yield ranks
        for process, pipe in zip(ranks.processes, ranks.pipes, strict=True):
            if process.is_alive():
                pipe.send(None)
                process.join(TIMEOUT_S)
                assert process.exitcode == 0
    finally:
        for process in ranks.processes:
            process.kill()
        ranks.link.close()
        folder.delete()


def test_one_rank_receives_and_all_get_the_exact_bytes() -> None:
    with running_ranks(3) as ranks:
        for version in (1, 2, 3, 5):
            ranks.fetch(version, range(3))
            connection, pid, requested = ranks.link.accept()
            assert requested == version
            connection.sendall(bytes([version, 7, 8, 9]))
            replies = [ranks.reply(rank) for rank in range(3)]
            assert [content for content, _ in replies] == [bytes([version, 7, 8, 9])] * 3
            assert not ranks.link.has_another()
            assert sum(received for _, received in replies) == replies[ranks.number(pid)][1] > 0, "the same rank every time"
        ranks.fetch(3, [1])  # one of the last two versions is still there
        assert ranks.reply(1)[0] == bytes([3, 7, 8, 9])
        assert not ranks.link.has_another()


def test_another_rank_takes_over_when_the_receiver_dies_during_a_transfer() -> None:
    with running_ranks(3) as ranks:
        ranks.fetch(1, range(3))
        connection, victim, _ = ranks.link.accept()
        connection.sendall(bytes([1, 2]))
        os.kill(victim, signal.SIGKILL)
        connection, successor, _ = ranks.link.accept()
        assert successor != victim
        connection.sendall(bytes([1, 2, 3, 4]))
        alive = [rank for rank in range(3) if rank != ranks.number(victim)]
        assert [ranks.reply(rank)[0] for rank in alive] == [bytes([1, 2, 3, 4])] * 2
        assert not ranks.link.has_another()
        ranks.fetch(2, alive)
        connection, receiver, _ = ranks.link.accept()
        connection.sendall(bytes([5, 6, 7, 8]))
        assert receiver == successor
        assert [ranks.reply(rank)[0] for rank in alive] == [bytes([5, 6, 7, 8])] * 2


def test_receiver_death_after_a_transfer_costs_one_more_transfer() -> None:
    with running_ranks(2) as ranks:
        ranks.fetch(1, range(2))
        connection, victim, _ = ranks.link.accept()
        connection.sendall(bytes([1, 2, 3, 4]))
        for rank in range(2):
            ranks.reply(rank)
        os.kill(victim, signal.SIGKILL)
        ranks.processes[ranks.number(victim)].join(TIMEOUT_S)
        other = 1 - ranks.number(victim)
        ranks.fetch(1, [other])
        connection, receiver, _ = ranks.link.accept()
        assert ranks.number(receiver) == other
        connection.sendall(bytes([1, 2, 3, 4]))
        assert ranks.reply(other) == (bytes([1, 2, 3, 4]), 4)


def test_failed_transfer_raises_and_the_next_request_retries_it() -> None:
    with running_ranks(2) as ranks:
        for _ in range(2):
            ranks.fetch(1, [0])
            connection, _, _ = ranks.link.accept()
            connection.sendall(bytes([1, 2]))
            connection.close()
            assert "version 1 of rank 0 was overwritten while it was read" in str(ranks.reply(0)[0])
        ranks.fetch(1, [1])  # asks the first
        connection, pid, _ = ranks.link.accept()
        assert ranks.number(pid) == 0
        connection.close()
        assert "version 1 of rank 0 was overwritten while it was read" in str(ranks.reply(1)[0])
        ranks.fetch(1, range(2))
        connection, _, _ = ranks.link.accept()
        connection.sendall(bytes([1, 2, 3, 4]))
        assert [ranks.reply(rank)[0] for rank in range(2)] == [bytes([1, 2, 3, 4])] * 2


def test_hosts_receive_concurrently() -> None:
    with running_ranks(2, num_hosts=2) as ranks:
        ranks.fetch(1, range(4))
        transfers = [ranks.link.accept() for _ in range(2)]  # both, before a byte of one has arrived
        assert {ranks.number(pid) // 2 for _, pid, _ in transfers} == {0, 1}
        for connection, _, _ in transfers:
            connection.sendall(bytes([1, 2, 3, 4]))
        assert [ranks.reply(rank)[0] for rank in range(4)] == [bytes([1, 2, 3, 4])] * 4
        assert not ranks.link.has_another()


# Two emulated hosts, with Monarch's network

NUM_HOSTS, NUM_RANKS = 2, 4
HOSTS = {"trainers": 1, "generators": NUM_HOSTS}
SHAPE = (256, 128)
NUM_BYTES = 2 * 256 * 128


def weights(version: int) -> torch.Tensor:
    """Return the weights of a version: integers that bfloat16 represents exactly."""
    return torch.arange(256 * 128, dtype=torch.float32).view(SHAPE) % 251 - version


class World(Looped):
    """A trainer rank on one emulated host, and readers on two others."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(asyncio.Runner())
        self._log_dir = log_dir
        self._hosts = EmulatedHosts(HOSTS)

    async def start(self) -> None:
        self._supervisor = Supervisor()
        self._fleet, self._emulated = (Fleet(self._log_dir, self._supervisor, own_children=own) for own in (True, False))
        prepare_templates(self._fleet, load_config("configs/quickstart.yaml"), Roles(trainer=False, generators=False))
        self.store = await spawn_store(await fork(self._fleet, "store", worker_environment(), *IMPORTS))
        hosts = await start_hosts(self._hosts, HOSTS)
        writer = await self._fork("writer", hosts["trainers"], 1)
        self._readers = await self._fork("readers", hosts["generators"], NUM_RANKS)
        self.writer: Any = writer.spawn("writer", Writer, self.store)
        self._num_readers = 0
        await self.writer.publish.call_one("run", 0, {"w": weights(0)}, [], ("arena", "rdma"))

    async def _fork(self, role: str, hosts: Any, num_procs: int) -> Any:
        imports, template = (*IMPORTS, "tests.weights.processes"), await self._fleet.template("store")
        return self._emulated.spawn(role, hosts, num_procs, worker_environment(), imports, template)

    async def publish(self, version: int) -> Commit:
        return Commit(version, (await self.writer.publish_again.call_one(version, {"w": weights(version)}, []),))

    def readers(self) -> Any:
        """Return new readers; each holds the upper or the lower half of the rows."""
        self._num_readers += 1
        return self._readers.spawn(f"readers_{self._num_readers}", HostReader, WeightReader("run", self.store, "full"), SHAPE)

    def stop(self) -> None:
        async def stop_processes() -> None:
            self._supervisor.expect_deaths()
            await asyncio.gather(self._fleet.stop(20), self._emulated.stop(20))
            await self._hosts.kill()

        self.do(stop_processes())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[World]:
    before = abandoned()
    world = World(tmp_path_factory.mktemp("logs"))
    world.do(world.start())
    yield world
    world.stop()
    assert abandoned() <= before


async def pull(readers: Any, commit: Commit) -> list[Pulled]:
    """Pull on all ranks concurrently; return their replies, host by host."""
    return [reply for _, reply in (await readers.pull.call(commit)).items()]


def assert_exact(pulled: list[Pulled], version: int) -> None:
    """Check that each rank has its rows of a version."""
    for rank, reply in enumerate(pulled):
        assert reply.error == ""
        half = SHAPE[0] // 2
        assert torch.equal(reply.tensor, weights(version)[rank % 2 * half :][:half].to(torch.bfloat16)), f"rank {rank}"


def received(pulled: list[Pulled]) -> list[int]:
    """Return the bytes that each host has received."""
    return [sum(reply.num_received for reply in pulled[first : first + NUM_RANKS]) for first in (0, NUM_RANKS)]


async def test_eight_ranks_on_two_hosts_receive_each_version_twice(world: World) -> None:
    readers = world.readers()
    for version in (1, 2, 3, 5):
        commit = await world.publish(version)
        assert [type(handle) for handle in commit.manifests[0].handles] == [ArenaHandle, RdmaHandle]
        pulled = await pull(readers, commit)
        assert len(pulled) == NUM_HOSTS * NUM_RANKS
        assert_exact(pulled, version)
        assert received(pulled) == [NUM_BYTES, NUM_BYTES], "each host receives the version once"
        again = await pull(readers, commit)
        assert_exact(again, version)
        assert received(again) == [0, 0]


async def test_older_version_can_be_pulled_after_the_newer_one(world: World) -> None:
    readers = world.readers()
    first, second = await world.publish(20), await world.publish(21)
    for commit in (second, first, second, first):
        assert_exact(await pull(readers, commit), commit.version)


async def test_overwritten_version_is_refused_by_every_rank(world: World) -> None:
    readers = world.readers()
    commit = await world.publish(30)
    for version in (31, 32):
        await world.publish(version)
    pulled = await pull(readers, commit)
    assert all("version 30 of rank 0 was overwritten while it was read" in reply.error for reply in pulled)
    assert_exact(await pull(readers, await world.publish(33)), 33)
