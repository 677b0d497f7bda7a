"""torchstore and every transport between real processes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import fork, prepare_templates
from tests.weights.processes import Reader, Writer
from tests.workers import Looped
from titanrl.config import load_config
from titanrl.config.sections import TransportName
from titanrl.launch.assembly import Fleet
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Supervisor
from titanrl.processes.variables import worker_environment
from titanrl.weights.records import ArenaHandle, Commit, RdmaHandle, StoreHandle, rank_key
from titanrl.weights.store import IMPORTS, spawn_store
from titanrl.weights.transport import WeightReader

STATE = {"w": torch.randn(40, 30), "b": torch.randn(7), "scale": torch.tensor(0.3), "buffer": torch.randn(5)}
KEEP = ["buffer"]


def zeros() -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(value, dtype=value.dtype if name in KEEP else torch.bfloat16) for name, value in STATE.items()
    }


class World(Looped):
    """A store, a writer and a reader, each in a separate process."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(asyncio.Runner())
        self._log_dir = log_dir

    async def start(self) -> None:
        self._supervisor = Supervisor()
        self._fleet = Fleet(self._log_dir, self._supervisor)
        prepare_templates(self._fleet, load_config("configs/quickstart.yaml"), Roles(trainer=False, generators=False))
        store, writer, reader = [await self._fork(role) for role in ("store", "writer", "reader")]
        self.store = await spawn_store(store)
        self.writer = writer.spawn("writer", Writer, self.store)
        self.reader = reader.spawn("reader", Reader, WeightReader("run", self.store, "full"))

    async def _fork(self, role: str) -> Any:
        modules = (*IMPORTS, "tests.weights.processes")
        return await fork(self._fleet, "store", worker_environment(), *modules, role=role)

    async def publish(self, version: int, *transports: TransportName) -> Commit:
        return Commit(version, (await self.writer.publish.call_one("run", version, STATE, KEEP, transports),))

    async def pull(self, commit: Commit) -> dict[str, torch.Tensor]:
        pulled: dict[str, torch.Tensor] = await self.reader.pull.call_one(commit, zeros())
        return pulled

    async def stop(self) -> None:
        self._supervisor.expect_deaths()
        await self._fleet.stop(20)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("logs"))
    world.do(world.start())
    yield world
    world.do(world.stop())


def assert_is_state(pulled: dict[str, torch.Tensor]) -> None:
    for name, value in STATE.items():
        expected = value if name in KEEP else value.to(torch.bfloat16)
        assert torch.equal(pulled[name], expected), name


@pytest.mark.parametrize(
    ("transport", "handle", "version"), [("arena", ArenaHandle, 1), ("rdma", RdmaHandle, 2), ("store", StoreHandle, 3)]
)
def test_every_transport_delivers_cast_parameters_and_uncast_buffers(
    world: World, transport: TransportName, handle: type, version: int
) -> None:
    commit = world.do(world.publish(version, transport))
    assert [type(found) for found in commit.manifests[0].handles] == [handle]
    assert_is_state(world.do(world.pull(commit)))


async def test_reader_uses_the_first_transport_that_reaches_it(world: World) -> None:
    commit = await world.publish(4, "arena", "rdma")
    (manifest,) = commit.manifests
    arena, rdma = manifest.handles
    elsewhere = replace(arena, host="another")
    moved = Commit(4, (replace(manifest, handles=(elsewhere, rdma)),))
    with pytest.raises(Exception, match=r"no offered transport reaches this host .* \(got \['ArenaHandle'\]\)"):
        await world.pull(Commit(4, (replace(manifest, handles=(elsewhere,)),)))
    assert_is_state(await world.pull(moved))


async def test_rdma_read_of_an_overwritten_version_is_refused(world: World) -> None:
    commit = await world.publish(5, "rdma")
    for version in (6, 7):
        await world.writer.publish_again.call_one(version, STATE, KEEP)
    with pytest.raises(
        Exception, match=r"version 5 of rank 0 was overwritten while it was read \(sequence 4, published as 2\)"
    ):
        await world.pull(commit)


async def test_second_rdma_fetch_does_not_change_the_first(world: World) -> None:
    first = await world.publish(21, "rdma")
    changed = {name: value + 1 for name, value in STATE.items()}
    second = Commit(22, (await world.writer.publish_again.call_one(22, changed, KEEP),))
    pulled: dict[str, torch.Tensor] = await world.reader.fetch_two.call_one(first, second, zeros())
    assert_is_state(pulled)


async def test_store_keeps_objects_until_they_are_deleted(world: World) -> None:
    store = world.store
    await store.put("run/x", {"a": (1, 2)})
    assert await store.get("run/x") == {"a": (1, 2)}
    assert await store.exists("run/x")
    await store.delete("run/x")
    assert not await store.exists("run/x")
    with pytest.raises(KeyError, match="run/x"):
        await store.get("run/x")


async def test_damaged_and_deleted_bytes_are_refused(world: World) -> None:
    commit = await world.publish(11, "store")
    key = rank_key("run", 11, 0)
    damaged = (await world.store.get(key)).clone()
    damaged[3] += 1
    await world.store.delete(key)
    await world.store.put(key, damaged)
    with pytest.raises(Exception, match=r"version 11 of rank 0 does not match its published digest"):
        await world.pull(commit)
    await world.store.delete(key)
    with pytest.raises(Exception, match="run/v11/rank0 is not in the store"):
        await world.pull(commit)
