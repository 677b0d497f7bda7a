"""Writers and readers in separate processes, and an in-memory store for tests without torchstore."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from titanrl.config.sections import TransportName
from titanrl.processes.actors import Actor, current_rank, endpoint
from titanrl.processes.machine import HOST_FOLDER
from titanrl.weights.layout import PartOf
from titanrl.weights.records import Commit, RdmaHandle, WeightManifest, WeightMismatchError, overwritten
from titanrl.weights.store import WeightStore
from titanrl.weights.transport import HostTransport, WeightPublisher, WeightReader


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
    """Publish versions without waiting for readers; every element equals the version. Pause once until a message arrives."""

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
    """A trainer rank that publishes given state dicts."""

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
    """A generator rank that pulls into given tensors and returns them."""

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


@dataclass(frozen=True, slots=True)
class Pulled:
    """Result of a pull by one rank."""

    tensor: torch.Tensor
    """Weights of the rank."""
    num_received: int
    """Bytes that the rank has received for its host."""
    error: str = ""
    """Error message of a refused pull."""


class HostReader(Actor):
    """A generator rank that holds half of the rows of one tensor."""

    def __init__(self, reader: WeightReader, shape: tuple[int, int]) -> None:
        self._reader = reader
        half = shape[0] // 2
        rows = torch.zeros(half, shape[1], dtype=torch.bfloat16)
        self._part = PartOf(rows, shape, (current_rank().rank % 2 * half, 0))

    @endpoint
    async def pull(self, commit: Commit) -> Pulled:
        error = ""
        try:
            (await self._reader.fetch(commit)).copy_into({"w": self._part})
        except WeightMismatchError as refused:
            error = str(refused)
        return Pulled(self._part.local, self._reader.take_received(), error)


class Wire:
    """Fake network for `HostTransport` that sends its process id to a socket and reads the bytes from the socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.num_received = 0

    async def read(self, manifest: WeightManifest, handle: RdmaHandle, buffer: torch.Tensor) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(f"{os.getpid()} {manifest.version}\n".encode())
        for place in range(manifest.num_bytes):
            try:
                (byte,) = await reader.readexactly(1)
            except asyncio.IncompleteReadError:
                raise overwritten(manifest, 0, manifest.sequence) from None
            buffer[place] = byte
            self.num_received += 1
        writer.close()


def read_from_wire(pipe: Connection, folder: str, transport: HostTransport) -> None:
    """Fetch each manifest that arrives; reply with its bytes or the error, and with the total bytes received here."""
    os.environ[HOST_FOLDER] = folder

    async def run() -> None:
        while (manifest := await asyncio.to_thread(pipe.recv)) is not None:
            try:
                payload = await transport.fetch(manifest, manifest.handles[0])
                payload.check(manifest)
                reply = bytes(payload.data.tolist())
            except WeightMismatchError as error:
                reply = str(error)
            pipe.send((reply, transport.num_received))
        transport.close()

    asyncio.run(run())
