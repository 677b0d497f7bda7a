"""Replacement of parts during a run, with real processes."""

import asyncio
import ctypes
import os
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanrl.config.sections import FaultsConfig, TimeoutsConfig
from titanrl.launch.assembly import Fleet, local_host, wait_for_stopped_processes
from titanrl.launch.generators import GeneratorMeshes, RolloutMesh
from titanrl.launch.supervision import Pace, Part, PartDiedError, SharedContext, Supervisor, Watchdog
from titanrl.processes.actors import Actor, concurrent_endpoint
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.weights.records import WeightMismatchError


class Clerk(Actor):
    """Actor that replies, waits indefinitely, or blocks its event loop."""

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def block(self) -> None:
        ctypes.PyDLL(None).pause()  # keeps the interpreter's lock

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return."""


class Office:
    """One part, and the callbacks that its owner received."""

    def __init__(self, folder: Path, faults: FaultsConfig, dies_while_starting: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.dies_while_starting = dies_while_starting
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.probing: Callable[[Part], Awaitable[object]] = lambda part: part.actors.probe.call_one()
        self.supervisor = Supervisor(self.record, Watchdog(faults, folder))
        self.fleet = Fleet(folder, self.supervisor)
        shared = SharedContext(
            supervisor=self.supervisor, retire=self.fleet.retire, respawns=Respawns(faults), warn=self.told.append, start_s=60.0
        )
        self.part = Part("clerk_0", shared, self.spawn, self)

    def record(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    async def spawn(self, part: Part) -> Any:
        return self.fleet.spawn(part.role, local_host(), 1, {}, ()).spawn("clerk", Clerk)

    async def bring_up(self, part: Part) -> None:
        await self.may_start.wait()
        pid = await part.ask("clerk_0.start", lambda clerk: clerk.pid.call_one(), 30)
        if self.dies_while_starting:
            self.dies_while_starting -= 1
            os.kill(pid, signal.SIGKILL)
            await part.ask("clerk_0.hang", lambda clerk: clerk.hang.call_one(), 30)
        self.told.append("up")

    async def on_lost(self, part: Part) -> None:
        self.told.append("lost")

    def probe(self, part: Part) -> Awaitable[object]:
        return self.probing(part)

    async def pid(self) -> int:
        return int(await self.part.until_done("clerk_0.pid", lambda clerk: clerk.pid.call_one(), 30))


def in_office(
    folder: Path, scenario: Callable[[Office], Coroutine[Any, Any, None]], dies_while_starting: int = 0, **faults: Any
) -> Office:
    (folder / "logs").mkdir()
    wait_for_stopped_processes()

    async def run() -> Office:
        office = Office(folder, FaultsConfig(**faults), dies_while_starting)
        try:
            await office.part.spawn()
            await office.part.start()
            await asyncio.wait_for(scenario(office), 90)
        finally:
            office.supervisor.expect_deaths()
            await office.part.close()
            await office.fleet.stop(20)
        return office

    return asyncio.run(run())


def test_request_is_resent_to_the_replacement_until_the_limit_ends_the_run(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        first = await office.pid()
        hanging = asyncio.create_task(office.part.ask("clerk_0.hang", lambda clerk: clerk.hang.call_one(), 60))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(PartDiedError, match=rf"clerk_0_0 \(process {first}\) exited .while waiting for: clerk_0.hang"):
            await hanging
        assert not office.part.is_up
        assert await office.pid() not in (0, first)
        assert office.part.num_lives == 2
        await asyncio.sleep(0.2)
        os.kill(await office.pid(), signal.SIGKILL)
        with pytest.raises(
            RespawnLimitError, match=r"clerk_0 ended after 1 replacements within 600 s \(clerk_0 1 times; got 1\)"
        ):
            await office.pid()

    office = in_office(tmp_path, scenario, max_respawns=1)
    assert office.told[:3] == ["up", "lost", "up"]
    assert re.search(r"clerk_0_0 \(process \d+\) exited; replaced after .* s \(1 of 1 replacements\)", office.told[3])
    assert [event["kind"] for event in office.events] == ["fault", "respawn", "fault"]
    assert office.events[1]["part"] == "clerk_0"
    assert 0 < office.events[1]["seconds"] < 60


def test_part_that_dies_while_it_starts_is_replaced_again(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        assert await office.pid() > 0

    office = in_office(tmp_path, scenario, dies_while_starting=2)
    assert office.told[:3] == ["lost", "lost", "up"]
    assert [event["kind"] for event in office.events] == ["fault", "fault", "respawn"]


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "silent"])
def test_part_that_hangs_is_replaced(tmp_path: Path, stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.launch.supervision.PROBE_S", 2.0)

    async def scenario(office: Office) -> None:
        for _ in range(4):
            first = await office.pid()
        if stop:
            os.kill(first, signal.SIGSTOP)
            while await office.pid() == first:  # it may answer until all of its threads have seen the signal
                pass
        else:
            blocked = asyncio.create_task(office.part.ask("clerk_0.block", lambda clerk: clerk.block.call_one(), 60))
            await asyncio.sleep(0.5)
        assert await office.pid() != first
        if not stop:
            with pytest.raises(PartDiedError):
                await blocked

    office = in_office(tmp_path, scenario, min_stall_s=1.0)
    assert [event["kind"] for event in office.events] == ["stall", "fault", "respawn"]
    expected = "was stopped by a signal" if stop else "no reply to 'clerk_0.pid'"
    assert expected in office.events[1]["cause"]


def test_replacement_is_not_killed_because_its_predecessor_hung(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        for _ in range(4):
            first = await office.pid()

        async def probe() -> None:
            os.kill(first, signal.SIGKILL)
            while await office.pid() == first:
                pass
            probed.set()
            raise TimeoutError

        probed = asyncio.Event()
        office.probing = lambda part: probe()
        work = asyncio.create_task(office.supervisor.ask("clerk.work", asyncio.Event().wait(), 60, Pace(kind="clerk_0.pid")))
        await probed.wait()
        second = await office.pid()
        await asyncio.sleep(0.5)
        assert not work.done()
        assert await office.pid() == second
        work.cancel()

    office = in_office(tmp_path, scenario, min_stall_s=2.0)
    assert [event["kind"] for event in office.events] == ["stall", "fault", "respawn"]


def test_wait_for_a_replacement_is_not_a_stall(tmp_path: Path) -> None:
    async def scenario(office: Office) -> None:
        for _ in range(4):
            first = await office.pid()
        office.may_start.clear()
        os.kill(first, signal.SIGKILL)
        while office.part.is_up:
            await asyncio.sleep(0.05)
        work = asyncio.sleep(2.5, "done")
        assert await office.supervisor.ask("clerk.work", work, 60, Pace(kind="clerk_0.pid")) == "done"
        office.may_start.set()
        assert await office.pid() != first

    office = in_office(tmp_path, scenario, min_stall_s=0.5)
    assert [event["kind"] for event in office.events] == ["fault", "respawn"]


async def test_started_worker_is_connected_to_trainer_and_replicas() -> None:
    """After a restart, a replica may be replaced between the spawn of a worker and its start."""
    told: list[tuple[int, Any]] = []
    announced: list[tuple[int, Any]] = []
    actor = SimpleNamespace(
        start=SimpleNamespace(call_one=lambda: None),
        use_generators=SimpleNamespace(call_one=lambda leaders: told.extend(enumerate(leaders))),
    )

    async def ask(name: str, call: Callable[[Any], Any], timeout_s: float) -> None:
        call(SimpleNamespace(worker=actor, shard="shard"))

    mesh = object.__new__(RolloutMesh)
    mesh.timeouts, mesh._is_running, mesh._changed = TimeoutsConfig(), False, None
    mesh._generators = SimpleNamespace(parts=[1, 2], serving=("new", None))  # type: ignore[assignment]
    mesh._trainer = SimpleNamespace(use_shard=lambda *shard: announced.append(shard))  # type: ignore[assignment]
    part: Any = SimpleNamespace(role="rollout_0", ask=ask, mark_started=lambda: None)
    mesh.parts = [SimpleNamespace(), part]  # type: ignore[list-item]
    await mesh.bring_up(part)
    assert announced == [(1, "shard")]
    assert told == [(0, "new"), (1, None)]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_replica_serves_only_with_the_newest_weights_and_the_held_adapters(is_deleted: bool) -> None:
    """While a replacement starts, a version is published and an adapter is dropped, before or after its bytes were read."""
    told: list[Any] = []
    meshes = GeneratorMeshes({}, SimpleNamespace(supervisor=None), TimeoutsConfig())  # type: ignore[arg-type]

    async def ask(name: str, call: Callable[[Any], Any], timeout_s: float) -> None:
        told.append(name)
        if name == "g.hold_adapter":
            meshes._newest = 8
            meshes._held.clear()
            if is_deleted:
                raise WeightMismatchError("not in the store")

    async def catch_up(replica: int) -> None:
        told.append(meshes._newest)
        meshes._pulled[replica] = meshes._newest

    async def listen(replica: int, leader: Any) -> None:
        told.append(leader)

    actors = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 1), leader="leader")
    part: Any = SimpleNamespace(role="g", ask=ask, actors=actors, mark_started=lambda: None, is_started=True)
    meshes.parts, meshes._pulled, meshes._newest, meshes._held = [part], [-1], 7, {1: SimpleNamespace(number=1)}  # type: ignore[dict-item]
    meshes.catch_up = catch_up
    meshes.listeners.append(listen)
    await meshes.bring_up(part)
    assert told == ["g.start", 7, "g.hold_adapter", 8, *([] if is_deleted else ["g.drop_adapter"]), "leader"]
