"""Order of push, pull, slot release and deletion, also with failures and slow replicas."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titanrl.launch.generators import ReaderLeases, WeightSync
from titanrl.weights.records import Commit, StoreHandle, WeightManifest, rank_key


class World:
    """Fake store, trainer rank and generators that log every call."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.log: list[str] = []
        self.values: dict[str, Any] = {}
        self.pulls: list[Callable[[Commit], Coroutine[Any, Any, int]]] = [self.pull] * num_replicas
        self.sync = WeightSync(
            self.delete,
            push=self.push,
            expect=self.expect,
            pulls=[lambda commit, place=place: self.pulls[place](commit) for place in range(num_replicas)],  # type: ignore[misc]
        )

    async def delete(self, key: str) -> None:
        del self.values[key]
        self.log.append(f"delete {key}")

    async def push(self, version: int) -> Sequence[WeightManifest]:
        self.log.append(f"push {version}")
        key = rank_key("run", version, 0)
        self.values[key] = b""
        return [WeightManifest(version, 0, "layout", 4, None, 0, (StoreHandle(key),))]

    async def expect(self, version: int) -> None:
        self.log.append(f"expect {version}")

    async def pull(self, commit: Commit) -> int:
        self.log.append(f"pull {commit.version}")
        return 3

    async def free(self) -> None:
        self.log.append("free")

    async def publish(self, version: int) -> None:
        self.sync.publish(version, then=self.free)
        await self.sync.ready()


async def test_version_is_pushed_pulled_and_freed_in_order() -> None:
    world = World()
    await world.publish(1)
    assert world.log == ["push 1", "pull 1", "free"]
    assert world.sync.take_metrics()["sync/bytes"] == 4


async def test_received_bytes_of_all_pulls_are_added_once() -> None:
    world = World(num_replicas=2)
    await world.publish(1)
    assert world.sync.take_metrics()["sync/network_bytes"] == 6
    await world.sync.catch_up(0)
    await world.publish(2)
    assert world.sync.take_metrics()["sync/network_bytes"] == 9, "the replacement of replica 0 received bytes, too"


async def test_bytes_of_a_version_that_was_not_reported_are_added_to_the_next() -> None:
    world = World()
    await world.publish(1)
    await world.publish(2)
    assert world.sync.take_metrics()["sync/network_bytes"] == 6


async def test_base_of_adapters_counts_and_is_deleted_only_when_it_changes() -> None:
    world, sizes = World(), []
    for version, base in enumerate((0, 0, 0, 1, 1, 1)):

        async def push(version: int, base: int = base) -> Sequence[WeightManifest]:
            world.values[f"base {base}"] = b""
            (manifest,) = await World.push(world, version)
            return [replace(manifest, base=WeightManifest(base, 0, "base", 100, None, 0, (StoreHandle(f"base {base}"),)))]

        world.sync._push = push
        await world.publish(version)
        sizes.append(world.sync.take_metrics()["sync/bytes"])
        assert ("base 0" in world.values) == (version < 4), "version 2, with this base, is held until 4 is published"
    assert [entry for entry in world.log if entry.startswith("delete base")] == ["delete base 0"]
    assert sizes == [104, 4, 4, 104, 4, 4]


async def test_base_is_not_deleted_while_a_version_to_overwrite_is_read() -> None:
    world = World()
    may_pull, may_read = asyncio.Event(), asyncio.Event()

    async def push(version: int) -> Sequence[WeightManifest]:
        base = version // 2  # versions 0 and 1 have one base, 2 and 3 another
        world.values[key := f"base {base}"] = b""
        (manifest,) = await World.push(world, version)
        return [replace(manifest, base=WeightManifest(base, 0, "base", 100, None, 0, (StoreHandle(key),)))]

    async def slow(commit: Commit) -> int:
        await may_pull.wait()
        return 3

    async def read(commit: Commit) -> int:
        await may_read.wait()
        return 3

    world.sync._push = push
    for version in (0, 1):
        await world.publish(version)
    world.pulls[0] = slow
    reader = asyncio.create_task(world.sync.pull_held(1, read))
    for version in (2, 3):  # 3 overwrites 1, which is read, while 2 is pulled
        world.sync.publish(version, then=world.free)
        if version == 2:
            await world.sync.pushed()
    await asyncio.sleep(0)
    may_pull.set()
    while not any(entry.startswith("delete") for entry in world.log):
        await asyncio.sleep(0)  # version 2 has been pulled, and 0 is deleted
    for _ in range(10):
        await asyncio.sleep(0)
    assert "base 0" in world.values, "version 1 is still read"
    may_read.set()
    assert await reader
    await world.sync.ready()
    assert "base 0" not in world.values
    assert [entry for entry in world.log if entry.startswith("delete base")] == ["delete base 0"]


async def test_version_without_generators_frees_slots_immediately() -> None:
    world = World(num_replicas=0)
    await world.publish(1)
    await world.publish(2)
    assert world.log == ["push 1", "free", "push 2", "free"]
    assert world.sync.take_metrics() == {}


async def test_bytes_of_old_versions_are_deleted_last() -> None:
    world = World()
    for version in (1, 2, 3):
        await world.publish(version)
    assert sorted(world.values) == ["run/v2/rank0", "run/v3/rank0"]
    assert world.log[-2:] == ["free", "delete run/v1/rank0"]


async def test_slots_are_freed_while_a_slow_replica_still_pulls() -> None:
    world, go_on = World(num_replicas=2), asyncio.Event()

    async def slow(commit: Commit) -> int:
        await go_on.wait()
        world.log.append("slow pull ends")
        return 0

    world.pulls[1] = slow
    world.sync.publish(1, then=world.free)
    ready = asyncio.create_task(world.sync.ready())
    for _ in range(20):  # everything except the slow pull completes
        await asyncio.sleep(0)
    assert world.log[-1] == "free"
    assert "expect 1" in world.log, "slots were freed while the slow replica served old weights"
    assert not ready.done()
    go_on.set()
    await ready
    assert world.log[-2:] == ["free", "slow pull ends"]


async def test_slots_are_freed_in_version_order() -> None:
    world, go_on = World(), asyncio.Event()

    async def free_slowly() -> None:
        await go_on.wait()
        world.log.append("free 1")

    world.sync.publish(1, then=free_slowly)
    await world.sync.pushed()
    world.sync.publish(2, then=world.free)
    for _ in range(20):
        await asyncio.sleep(0)
    assert "pull 2" in world.log
    assert "free" not in world.log
    go_on.set()
    await world.sync.ready()
    assert [entry for entry in world.log if entry.startswith("free")] == ["free 1", "free"]


async def test_cancelled_wait_does_not_cancel_the_publication() -> None:
    world, go_on = World(), asyncio.Event()

    async def slow(commit: Commit) -> int:
        await go_on.wait()
        return 0

    world.pulls[0] = slow
    world.sync.publish(1, then=world.free)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.sync.ready(), timeout=0.01)
    go_on.set()
    await world.sync.ready()
    assert world.log[-1] == "free"


async def test_lease_ends_when_its_reader_raises() -> None:
    leases = ReaderLeases()
    with pytest.raises(RuntimeError, match="reader died"):
        async with leases.lease(1):
            raise RuntimeError("reader died")
    await asyncio.wait_for(leases.wait_unused(1), 1)


async def test_push_waits_only_for_readers_of_the_version_it_overwrites() -> None:
    world, go_on = World(), asyncio.Event()

    async def drain_first(commit: Commit) -> int:
        await go_on.wait()
        world.log.append(f"pull {commit.version}")
        return 0

    world.pulls[0] = drain_first
    for version in (1, 2):
        world.sync.publish(version, then=world.free)
        await world.sync.pushed()
    world.sync.publish(3, then=world.free)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.sync.pushed(), timeout=0.01)
    assert world.log == ["push 1", "push 2"], "version 3 overwrites version 1, which is still being read"
    go_on.set()
    await world.sync.ready()
    assert [line for line in world.log if line.startswith("pull")] == ["pull 1", "pull 2", "pull 3"]
    assert world.log.index("pull 1") < world.log.index("push 3")
    assert world.log.count("free") == 3
    assert sorted(world.values) == ["run/v2/rank0", "run/v3/rank0"]


async def test_failed_publication_ends_other_waits() -> None:
    world = World()

    async def fail(commit: Commit) -> int:
        raise RuntimeError("the generator is gone")

    async def later() -> str:
        await asyncio.sleep(0)
        return "a batch"

    assert await world.sync.unless_failed(later()) == "a batch"
    world.pulls[0] = fail
    world.sync.publish(1, then=world.free)
    await world.sync.pushed()
    with pytest.raises(RuntimeError, match="the generator is gone"):
        await world.sync.unless_failed(asyncio.Event().wait())
    with pytest.raises(RuntimeError, match="the generator is gone"):
        await world.sync.pushed()
    with pytest.raises(RuntimeError, match="the generator is gone"):
        world.sync.publish(2, then=world.free)
    assert "push 2" not in world.log


async def test_every_waiter_gets_the_error_of_a_publication() -> None:
    world = World()

    async def fail(commit: Commit) -> int:
        raise RuntimeError("the generator is gone")

    world.pulls[0] = fail
    world.sync.publish(1, then=world.free)
    waiting = await asyncio.gather(world.sync.ready(), world.sync.ready(), return_exceptions=True)
    assert [str(error) for error in waiting] == ["the generator is gone"] * 2
    assert "free" not in world.log


async def test_additional_reader_gets_the_error_of_the_push_that_it_waits_for() -> None:
    world = World()

    async def fail(version: int) -> list[WeightManifest]:
        raise RuntimeError("the trainer is gone")

    sync = WeightSync(world.delete, push=fail, expect=world.expect, pulls=[])
    sync.publish(1, then=world.free)
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        await sync.pull_held(1, world.pulls[0])


async def test_additional_reader_delays_only_the_push_that_overwrites_its_version() -> None:
    world, go_on = World(), asyncio.Event()

    async def slow(commit: Commit) -> int:
        await go_on.wait()
        world.log.append(f"further pull {commit.version}")
        return 5

    await world.publish(1)
    pulling = asyncio.create_task(world.sync.pull_held(1, slow))
    await asyncio.sleep(0)
    await world.publish(2)
    assert world.log.count("free") == 2
    world.sync.publish(3, then=world.free)
    for _ in range(10):
        await asyncio.sleep(0)
    assert "push 3" not in world.log
    go_on.set()
    assert await pulling
    await world.sync.ready()
    assert not await world.sync.pull_held(1, slow)
    assert world.log.index("further pull 1") < world.log.index("push 3")
