"""The order in which a version reaches the generators, and the store it goes through."""

import asyncio
from typing import Any

import pytest

from titanrl.weights.manifest import Commit, WeightManifest, commit_key, rank_key
from titanrl.weights.sync import WeightSync


class MemoryStore:
    """Keys and values, and a note of every change."""

    def __init__(self, log: list[str]) -> None:
        self.values: dict[str, Any] = {}
        self.log = log

    async def put(self, key: str, value: object) -> None:
        self.values[key] = value
        self.log.append(f"put {key}")

    async def delete(self, key: str) -> None:
        del self.values[key]
        self.log.append(f"delete {key}")


def make_sync(log: list[str]) -> tuple[WeightSync, MemoryStore]:
    store = MemoryStore(log)

    async def push(version: int) -> list[WeightManifest]:
        await store.put(rank_key("run", version, 0), b"")
        return [WeightManifest(version, 0, (), 4, 0, None, 0)]

    async def pull(version: int) -> None:
        assert isinstance(store.values[commit_key("run", version)], Commit)
        log.append(f"pull {version}")

    return WeightSync("run", store, push, pull), store  # type: ignore[arg-type]


def test_a_version_is_committed_after_its_bytes_and_before_the_pull_and_slots_are_freed_last() -> None:
    async def scenario() -> None:
        log: list[str] = []
        sync, _ = make_sync(log)

        async def free_slots() -> None:
            log.append("free")

        sync.publish(1, then=free_slots)
        await sync.ready()
        assert log == ["put run/v1/rank0", "put run/v1/COMMIT", "pull 1", "free"]
        assert sync.take_metrics()["sync/bytes"] == 4

    asyncio.run(scenario())


def test_the_last_two_versions_are_kept_and_a_commit_record_goes_before_its_bytes() -> None:
    async def scenario() -> None:
        log: list[str] = []
        sync, store = make_sync(log)

        async def nothing() -> None: ...

        for version in (1, 2, 3):
            sync.publish(version, then=nothing)
            await sync.ready()
        assert sorted(store.values) == [f"run/v{v}/{part}" for v in (2, 3) for part in ("COMMIT", "rank0")]
        assert log[-2:] == ["delete run/v1/COMMIT", "delete run/v1/rank0"]

    asyncio.run(scenario())


def test_what_went_wrong_while_publishing_is_raised_where_it_is_awaited() -> None:
    async def scenario() -> None:
        sync, _ = make_sync([])

        async def fail() -> None:
            raise RuntimeError("buffer gone")

        sync.publish(1, then=fail)
        with pytest.raises(RuntimeError, match="buffer gone"):
            await sync.ready()

    asyncio.run(scenario())
