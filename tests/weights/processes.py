"""Writers and readers in separate processes, and an in-memory store for tests without torchstore."""

import asyncio
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from titanrl.actors import Actor, endpoint
from titanrl.config.choices import TransportName
from titanrl.weights.manifest import Commit, WeightManifest
from titanrl.weights.publish import WeightPublisher
from titanrl.weights.pull import WeightReader
from titanrl.weights.store import WeightStore


class MemoryStore:
    """A store within one process."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = dict(values or {})

    async def put(self, key: str, value: object) -> None:
        self.values[key] = value

    async def get(self, key: str) -> Any:
        return self.values[key]

    async def exists(self, key: str) -> bool:
        return key in self.values


def constant_state(value: float, num_tensors: int, numel: int) -> dict[str, torch.Tensor]:
    """Build tensors whose elements all have one value."""
    return {f"w{number}": torch.full((numel,), value) for number in range(num_tensors)}


def publish_versions(pipe: Connection, num_versions: int, pause_after: int, num_tensors: int, numel: int) -> None:
    """Publish versions without waiting for readers, each with its number in every element; pause once for a message."""

    async def run() -> None:
        store: Any = MemoryStore()
        publisher = WeightPublisher("run", 0, store, torch.float32, ["arena"])
        state = constant_state(0.0, num_tensors, numel)
        for version in range(1, num_versions + 1):
            for tensor in state.values():
                tensor.fill_(version)
            pipe.send((await publisher.publish(version, state), store.values))
            if version == pause_after:
                pipe.recv()

    asyncio.run(run())
    pipe.recv()


class Writer(Actor):
    """A trainer rank that publishes the given state dicts."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @endpoint
    async def publish(
        self, run: str, version: int, state: dict[str, torch.Tensor], keep: Sequence[str], transports: Sequence[TransportName]
    ) -> WeightManifest:
        self._publisher = WeightPublisher(run, 0, self._store, torch.bfloat16, transports)  # owns the arenas
        return await self._publisher.publish(version, state, keep)

    @endpoint
    async def publish_again(self, version: int, state: dict[str, torch.Tensor], keep: Sequence[str]) -> WeightManifest:
        return await self._publisher.publish(version, state, keep)


class Reader(Actor):
    """A generator rank that pulls into the given tensors and returns them."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    @endpoint
    async def pull(self, commit: Commit, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (await self._reader.fetch(commit)).copy_into(targets)
        return targets

    @endpoint
    async def fetch_two(self, first: Commit, second: Commit, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fetch two versions and pull the first of them; then check that a later fetch reuses a buffer."""
        fetched = [await self._reader.fetch(first), await self._reader.fetch(second)]
        fetched[0].copy_into(targets)
        buffers = {each.payloads[0].data.data_ptr() for each in fetched}
        fetched.clear()
        assert (await self._reader.fetch(second)).payloads[0].data.data_ptr() in buffers
        return targets
