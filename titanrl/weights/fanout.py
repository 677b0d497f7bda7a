"""Fan-out inside a host: one generator rank receives the bytes of trainer ranks on other hosts, and all ranks map them.

The first rank that needs bytes becomes the host's receiver: it reads them by RDMA into arenas of its own. The others ask it on
a socket in the host's folder and map its arenas, as they map those of a trainer rank on their host. It also receives versions
that only one of them asks for, such as a replacement that catches up.

A receiver serves for one term. When it ends, in the middle of a transfer too, its connections break, and the next term begins
with the rank that is the first to put its listening socket under the name of the term. Names of terms stay until the folder is
deleted. So a name always leads to a process that listens or has ended, and no two ranks receive at the same time.

The arena of the oldest version is reused. No rank reads it, because all pulls of a run hold leases of `WeightSync`, which keeps
only the last two versions readable. A reader without a lease notices by the sequence number, as with arenas of trainer ranks.
"""

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from titanrl.actors import portable
from titanrl.host import HOST_FOLDER
from titanrl.weights.arena import Arena, MappedArena, OwnerEndedError
from titanrl.weights.manifest import VERSIONS_HELD, ArenaHandle, RdmaHandle, TransportHandle, WeightManifest
from titanrl.weights.transport import Payload, RdmaTransport

_SIZE = struct.Struct("Q")
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes of a trainer rank in an arena of this host."""

    handle: ArenaHandle
    """The arena, which the host's receiver owns."""
    sequence: int
    """Sequence number of the arena while it holds the bytes."""


class Network(Protocol):
    """A way to bytes of other hosts."""

    @property
    def num_received(self) -> int:
        """Bytes that this process has read."""

    async def read(self, manifest: WeightManifest, handle: RdmaHandle, buffer: torch.Tensor) -> None:
        """Read the bytes into a buffer of the registered size.

        Raises:
            WeightMismatchError: the writer has overwritten the bytes.
        """


class Receiver:
    """Copies of the last versions, received once however many processes ask for them."""

    def __init__(self, network: Network) -> None:
        """Start without copies, and read from a network."""
        self._network = network
        self._copies: defaultdict[int, dict[int, tuple[Arena, asyncio.Task[HostCopy]]]] = defaultdict(dict)
        """By trainer rank and version."""

    async def receive(self, manifest: WeightManifest) -> HostCopy:
        """Return the copy of a trainer rank's bytes, after receiving them unless they are here or on their way.

        Raises:
            WeightMismatchError: the writer has overwritten the bytes.
        """
        copies = self._copies[manifest.rank]
        if manifest.version not in copies:
            arena = self._unused(copies, manifest.num_bytes)
            receiving = asyncio.create_task(self._read(manifest, arena), name=f"receive v{manifest.version}")
            copies[manifest.version] = arena, receiving
        return await asyncio.shield(copies[manifest.version][1])  # others may wait for it, too

    def close(self) -> None:
        """Release the arenas; processes that have mapped them keep their mappings."""
        for arena, receiving in (copy for copies in self._copies.values() for copy in copies.values()):
            receiving.cancel()
            arena.close()
        self._copies.clear()

    async def _read(self, manifest: WeightManifest, arena: Arena) -> HostCopy:
        handle = next(handle for handle in manifest.handles if isinstance(handle, RdmaHandle))
        try:
            with arena.writing():
                await self._network.read(manifest, handle, arena.storage)
        except Exception:  # of any kind: the arena is not used again, because bytes may still arrive in it
            if self._copies[manifest.rank].pop(manifest.version, None) is not None:
                arena.close()
            raise
        return HostCopy(arena.handle, arena.sequence)

    @staticmethod
    def _unused(copies: "dict[int, tuple[Arena, asyncio.Task[HostCopy]]]", num_bytes: int) -> Arena:
        """Return an arena for one more version: that of the oldest version if there are enough."""
        if len(copies) >= VERSIONS_HELD:
            arena, receiving = copies.pop(min(copies))
            if receiving.done() and arena.handle.num_bytes == num_bytes:
                return arena
            receiving.cancel()
            arena.close()
        return Arena(num_bytes)


class HostTransport:
    """RDMA that crosses the network once per host. It can be pickled before its first use."""

    def __init__(self, network: Network | None = None) -> None:
        """Receive nothing yet. Copies of this object, pickled to the processes of a host, share what one of them receives.

        Args:
            network: way to bytes of other hosts; RDMA by default.
        """
        self._name = secrets.token_hex(4)
        self._network = network or RdmaTransport()
        self._term = 0
        self._receiver: Receiver | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    @property
    def num_received(self) -> int:
        """Bytes that this process has received for its host."""
        return self._network.num_received

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is an RDMA handle, and the host has a folder."""
        return isinstance(handle, RdmaHandle) and HOST_FOLDER in os.environ

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Map the host's copy of the bytes; if the receiver ends, ask its successor, or become it.

        Raises:
            WeightMismatchError: the writer has overwritten the bytes.
        """
        while True:
            receiver = self._lead()
            if receiver is not None:
                return self._payload(await receiver.receive(manifest))
            try:
                reply = await self._ask(manifest)
                if isinstance(reply, HostCopy):
                    return self._payload(reply)
            except (ConnectionError, EOFError, OwnerEndedError):
                self._term += 1
            else:
                raise reply

    def close(self) -> None:
        """Stop receiving; the transport must not be used any more. Ranks that still need bytes choose another receiver."""
        if self._serving is not None:
            self._serving.add_done_callback(lambda serving: serving.result().close())
        if self._receiver is not None:
            self._receiver.close()
        self._mapped.clear()

    @property
    def _path(self) -> Path:
        return Path(os.environ[HOST_FOLDER], f"weights-{self._name}.{self._term}")

    def _lead(self) -> Receiver | None:
        """Return this process's receiver if it is the host's receiver, or becomes it now."""
        if self._receiver is None:
            listener = _listen(self._path)
            if listener is not None:
                self._receiver = Receiver(self._network)
                self._serving = asyncio.create_task(asyncio.start_unix_server(self._serve, sock=listener))
        return self._receiver

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request of another process of this host."""
        assert self._receiver is not None, "the server starts after the receiver"
        with contextlib.suppress(ConnectionError, EOFError):  # that process has ended
            manifest = await _receive(reader)
            try:
                reply: HostCopy | Exception = await self._receiver.receive(manifest)
            except Exception as error:  # of any kind: for the process that asked
                reply = portable(error)
            await _send(writer, reply)
        writer.close()

    async def _ask(self, manifest: WeightManifest) -> HostCopy | Exception:
        """Return the reply of the receiver, in another process.

        Raises:
            ConnectionError, EOFError: The receiver has ended.
        """
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            await _send(writer, manifest)
            reply: HostCopy | Exception = await _receive(reader)
            return reply
        finally:
            writer.close()

    def _payload(self, copy: HostCopy) -> Payload:
        if any(handle.pid != copy.handle.pid for handle in self._mapped):
            self._mapped.clear()  # of a receiver that has ended
        if copy.handle not in self._mapped:
            self._mapped[copy.handle] = MappedArena(copy.handle)
        mapped = self._mapped[copy.handle]
        return Payload(mapped.data, mapped, copy.sequence)


def _listen(path: Path) -> socket.socket | None:
    """Return a socket that listens at a path; None if the path exists. A socket at the path has listened from the start."""
    listener, unseen = socket.socket(socket.AF_UNIX), path.with_name(f"{path.name}.{os.getpid()}")
    listener.bind(str(unseen))
    listener.listen(_BACKLOG)
    try:
        path.hardlink_to(unseen)
    except FileExistsError:
        listener.close()
        return None
    finally:
        unseen.unlink()
    listener.setblocking(False)
    return listener


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message)
    writer.write(_SIZE.pack(len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    """Return a message. Only processes of this user can have sent it.

    Raises:
        EOFError: The sender has ended.
    """
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))
