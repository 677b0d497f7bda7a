"""Fan-out within a host: one generator rank receives the bytes of trainer ranks on other hosts, and all ranks map them.

The first rank that needs bytes becomes the host's receiver and reads them by RDMA into its own arenas. The other ranks request
them over a socket in the host's folder, and map the receiver's arenas like those of a trainer rank on their host. The receiver
also fetches versions that only one rank requests, such as a replacement that catches up.

A receiver serves for one term. When it exits, even during a transfer, its connections break. The next term starts with the
first rank that links its listening socket to the term's name. These names stay until the folder is deleted. Therefore a name
always refers to a process that is listening or has exited, and no two ranks receive at the same time.

The arena of the oldest version is reused. No rank is reading it, because all pulls of a run hold leases of `WeightSync`, which
keeps only the last two versions readable. A reader without a lease detects the reuse by the sequence number, as with arenas of
trainer ranks.
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

from titanrl.base.ownership import is_own_peer
from titanrl.processes.machine import HOST_FOLDER
from titanrl.weights.records import VERSIONS_HELD, ArenaHandle, RdmaHandle, TransportHandle, WeightManifest
from titanrl.weights.transport import Arena, MappedArena, OwnerExitedError, Payload, RdmaTransport

_SIZE = struct.Struct("Q")
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A trainer rank's bytes in an arena on this host."""

    handle: ArenaHandle
    """The arena, which the host's receiver owns."""
    sequence: int
    """Sequence number of the arena while it holds the bytes."""


class Network(Protocol):
    """Interface for reading bytes from other hosts."""

    @property
    def num_received(self) -> int:
        """Bytes that this process has read."""

    async def read(self, manifest: WeightManifest, handle: RdmaHandle, buffer: torch.Tensor) -> None:
        """Read the bytes into a buffer of the registered size; raise `WeightMismatchError` if they were overwritten."""


class Receiver:
    """Cache of the last versions, each received once for any number of requesting processes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._copies: defaultdict[int, dict[int, tuple[Arena, asyncio.Task[HostCopy]]]] = defaultdict(dict)
        """By trainer rank and version."""

    async def receive(self, manifest: WeightManifest) -> HostCopy:
        """Return the copy of a trainer rank's bytes. Receive them first, unless they have arrived or are being received."""
        copies = self._copies[manifest.rank]
        if manifest.version not in copies:
            arena = self._unused(copies, manifest.num_bytes)
            receiving = asyncio.create_task(self._read(manifest, arena), name=f"receive v{manifest.version}")
            copies[manifest.version] = arena, receiving
        return await asyncio.shield(copies[manifest.version][1])  # other callers may wait for it

    def close(self) -> None:
        """Cancel running receptions and close the arenas. Mappings in other processes stay valid."""
        for arena, receiving in (copy for copies in self._copies.values() for copy in copies.values()):
            receiving.cancel()
            arena.close()
        self._copies.clear()

    async def _read(self, manifest: WeightManifest, arena: Arena) -> HostCopy:
        handle = next(handle for handle in manifest.handles if isinstance(handle, RdmaHandle))
        try:
            with arena.writing():
                await self._network.read(manifest, handle, arena.storage)
        except Exception:  # after any error, do not reuse the arena, because bytes may still arrive in it
            if self._copies[manifest.rank].pop(manifest.version, None) is not None:
                arena.close()
            raise
        return HostCopy(arena.handle, arena.sequence)

    @staticmethod
    def _unused(copies: "dict[int, tuple[Arena, asyncio.Task[HostCopy]]]", num_bytes: int) -> Arena:
        """Return an arena for another version. Reuse the oldest version's arena once `VERSIONS_HELD` exist."""
        if len(copies) >= VERSIONS_HELD:
            arena, receiving = copies.pop(min(copies))
            if receiving.done() and arena.handle.num_bytes == num_bytes:
                return arena
            receiving.cancel()
            arena.close()
        return Arena(num_bytes)


class HostTransport:
    """RDMA transport that sends each rank's bytes over the network once per host. It can be pickled before its first use."""

    def __init__(self, network: Network | None = None, name: str | None = None) -> None:
        """Create a transport. Those of one name, or pickled from one, share the bytes that one process of a host receives."""
        self._name = name or secrets.token_hex(4)
        self._network = network or RdmaTransport()
        self._term = 0
        self._receiver: Receiver | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    @property
    def num_received(self) -> int:
        """Bytes that this process has received on behalf of its host."""
        return self._network.num_received

    def reaches(self, handle: TransportHandle) -> bool:
        """Return whether this is an RDMA handle and the host has a shared folder."""
        return isinstance(handle, RdmaHandle) and HOST_FOLDER in os.environ

    async def fetch(self, manifest: WeightManifest, handle: RdmaHandle) -> Payload:
        """Map the host's copy of the bytes. If the receiver exits, retry with its successor, or become the successor."""
        while True:
            receiver = self._lead()
            if receiver is not None:
                return self._payload(await receiver.receive(manifest))
            try:
                reply = await self._request(manifest)
                if isinstance(reply, HostCopy):
                    return self._payload(reply)
            except (ConnectionError, EOFError, OwnerExitedError):
                self._term += 1
            else:
                raise reply

    def close(self) -> None:
        """Stop receiving. This transport must not be used afterwards; ranks that still need bytes elect another receiver."""
        if self._serving is not None:
            self._serving.add_done_callback(lambda serving: serving.result().close())
        if self._receiver is not None:
            self._receiver.close()
        self._mapped.clear()

    @property
    def _path(self) -> Path:
        return Path(os.environ[HOST_FOLDER], f"weights-{self._name}.{self._term}")

    def _lead(self) -> Receiver | None:
        """Return the receiver if this process serves the host or can become its receiver now; otherwise None."""
        if self._receiver is None:
            listener = _listen(self._path)
            if listener is not None:
                self._receiver = Receiver(self._network)
                self._serving = asyncio.create_task(asyncio.start_unix_server(self._serve, sock=listener))
        return self._receiver

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request from another process on this host."""
        assert self._receiver is not None, "the server starts after the receiver"
        with contextlib.suppress(ConnectionError, EOFError):  # the other process has exited
            _check_peer(writer)
            manifest = await _receive(reader)
            try:
                reply: HostCopy | Exception = await self._receiver.receive(manifest)
            except Exception as error:  # the requesting process raises it
                from titanrl.processes.actors import portable  # imports Monarch, which a reader on the same host does not need

                reply = portable(error)
            await _send(writer, reply)
        writer.close()

    async def _request(self, manifest: WeightManifest) -> HostCopy | Exception:
        """Return the reply of the receiver, in another process; raise `ConnectionError` or `EOFError` if it has exited."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            _check_peer(writer)
            await _send(writer, manifest)
            reply: HostCopy | Exception = await _receive(reader)
            return reply
        finally:
            writer.close()

    def _payload(self, copy: HostCopy) -> Payload:
        if any(handle.pid != copy.handle.pid for handle in self._mapped):
            self._mapped.clear()  # they belong to a receiver that has exited
        if copy.handle not in self._mapped:
            self._mapped[copy.handle] = MappedArena(copy.handle)
        mapped = self._mapped[copy.handle]
        return Payload(mapped.data, mapped, copy.sequence)


def _listen(path: Path) -> socket.socket | None:
    """Return a socket that listens at a path; None if the path exists. The path appears only once the socket is listening."""
    listener, temporary = socket.socket(socket.AF_UNIX), path.with_name(f"{path.name}.{os.getpid()}")
    listener.bind(str(temporary))
    listener.listen(_BACKLOG)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        listener.close()
        return None
    finally:
        temporary.unlink()
    listener.setblocking(False)
    return listener


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Refuse a process of another user at the other end, because messages are unpickled."""
    if not is_own_peer(writer.get_extra_info("socket")):
        writer.close()
        raise ConnectionRefusedError("a process of another user is at the other end")


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message)
    writer.write(_SIZE.pack(len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    """Read a pickled message. Unpickling is safe: `_check_peer` has shown that a process of the same user sent it."""
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))
