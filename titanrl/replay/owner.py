"""The process that owns the metadata of a shared buffer, which `SharedReplay` starts, and the calls to it.

First the calls: `Server` and `Link` exchange pickled messages over sockets, with authentication by a shared key. Each client
process is a *session*. It has one connection that stays open and carries no calls, its anchor, and one connection for every
call in progress. A session ends when its anchor closes, and therefore immediately when its process dies. It does not end when a
call fails, because the caller may still be reading or writing rows. For the same reason there is no keep-alive.

Then the owner. It reads its settings from standard input, and exits after one more byte or when its parent process dies.
Payload never passes through it: it assigns and protects rows of memory-mapped files, and writers and readers copy them.
"""

import contextlib
import errno
import heapq
import itertools
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanrl.base.ownership import bind, is_own_peer
from titanrl.replay.batches import (
    EmptyReplayError,
    Integers,
    ReplayBatch,
    ReplayClosedError,
    ReplayFullError,
    ReplayOptions,
    create_file,
)
from titanrl.replay.prioritized import NO_ITEM, ReplayIndex

Address = str | tuple[str, int]
"""Path of a Unix socket, or interface and port."""
Verb = Callable[..., Any]
"""Function that takes a session number and the arguments of a call."""


class Server:
    """Server for remote calls, with one thread per connection."""

    def __init__(
        self,
        address: Address,
        key: bytes,
        verbs: Mapping[str, Verb],
        *,
        on_end: Callable[[int], None] = lambda session: None,
        on_lost: Callable[[int, str, Any], None] = lambda session, verb, reply: None,
    ) -> None:
        """Start listening. Port 0 selects a free port. Clients must know the key.

        `on_end` is called with the number of a session that ended. `on_lost` is called with session, verb and reply if the
        client closed the connection without reading the reply, and also for the last reply on every connection of a session
        that ends, before or after `on_end`. Raise `ValueError` if the address is not available.
        """
        self._key, self._verbs, self._on_end, self._on_lost = key, verbs, on_end, on_lost
        self._sessions: dict[str, int] = {}
        self._num_sessions = 0
        self._lock = threading.Lock()
        try:
            self._listener = bind(Path(address) if isinstance(address, str) else address)
        except OSError as error:
            raise ValueError(f"address: cannot listen (got {address}: {error.strerror}). Use another one.") from None
        self._listener.listen(128)
        self.address: Address = self._listener.getsockname()
        """Address with the actual port."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if client.family == socket.AF_UNIX and not is_own_peer(client):
                client.close()
                continue
            threading.Thread(target=self._serve, args=(_connection(client),), name="client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            kind, name = pickle.loads(connection.recv_bytes())
            if kind == "anchor":
                self._serve_anchor(connection, name)
            elif (session := self._sessions.get(name)) is not None:  # its anchor may close at any time
                self._serve_calls(connection, session)
        except (EOFError, OSError, AuthenticationError):  # the client has exited, or does not know the key
            pass
        finally:
            connection.close()

    def _serve_anchor(self, connection: Connection, name: str) -> None:
        """Keep a session open until its anchor closes."""
        with self._lock:
            session = self._sessions[name] = self._num_sessions
            self._num_sessions += 1
        try:
            connection.send_bytes(b"")
            connection.recv_bytes()  # returns when the connection closes: clients send nothing here
        finally:
            del self._sessions[name]
            self._on_end(session)

    def _serve_calls(self, connection: Connection, session: int) -> None:
        """Serve the calls on a connection. The next call shows that the client has read the previous reply."""
        last: tuple[str, Any] | None = None
        try:
            while True:
                verb, arguments, has_reply = pickle.loads(connection.recv_bytes())
                last = None
                reply: tuple[bool, Any]
                try:
                    reply = True, self._verbs[verb](session, *arguments)
                    last = (verb, reply[1])
                except Exception as error:  # the client raises it
                    reply = False, error
                if has_reply:
                    connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        finally:
            if last is not None:
                self._on_lost(session, *last)


class Link:
    """Connections of this process to a server. Several threads may call concurrently."""

    def __init__(self, address: Address, key: bytes, name: str, reply_s: float) -> None:
        """Store the address; the first call connects. Messages contain `name`. A reply may take `reply_s` seconds in addition
        to the time that its call may wait.
        """
        self._address, self._key, self._name, self._reply_s = address, key, name, reply_s
        self._start()
        LINKS.add(self)

    def _start(self) -> None:
        self.session = ""
        """Name of the session, once it has started. A forked process has its own."""
        self._anchor: Connection | None = None
        self._idle: list[Connection] = []
        self._broken: list[Connection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def call(self, verb: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Call a function of the server, which may wait for `wait_s` seconds; return its result or raise its exception.

        Raise `ReplayClosedError` if the server has exited, or does not respond.
        """
        return self._exchange((verb, arguments, True), wait_s)

    def send(self, verb: str, *arguments: Any) -> None:
        """Call a function of the server without waiting for a reply. Raise `ReplayClosedError` if the server has exited."""
        self._exchange((verb, arguments, False), None)

    def wait_until_closed(self) -> None:
        """Wait until the server exits."""
        self._open_anchor().poll(None)

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._is_closed = True
            for connection in (self._anchor, *self._idle, *self._broken):
                if connection is not None:
                    connection.close()
            self._anchor, self._idle, self._broken = None, [], []

    def after_fork(self) -> None:
        """Start a separate session in a forked process; the parent keeps its connections."""
        self._lock = threading.Lock()
        self.close()
        self._start()

    def _exchange(self, request: tuple[str, tuple[Any, ...], bool], wait_s: float | None) -> Any:
        try:
            connection = self._take()
            try:
                connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            except BaseException:  # even for an interrupt, keep it open: closing it would signal that the last reply was lost
                self._broken.append(connection)
                raise
            try:
                is_value, reply = (True, None) if wait_s is None else pickle.loads(self._receive(connection, wait_s))
            except BaseException:  # even for an interrupt, do not reuse it: the reply may still arrive
                connection.close()
                raise
        except (EOFError, OSError, AuthenticationError) as error:
            raise self._closed(error) from None
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)
        if not is_value:
            assert isinstance(reply, Exception)
            raise reply
        return reply

    def _take(self) -> Connection:
        self._open_anchor()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect("join")

    def _open_anchor(self) -> Connection:
        with self._lock:
            if self._is_closed:
                raise self._closed("this client was closed")
            if self._anchor is None:
                self.session = uuid.uuid4().hex
                anchor = self._connect("anchor")
                try:
                    self._receive(anchor, 0.0)
                except BaseException:  # including interrupts
                    anchor.close()
                    raise
                self._anchor = anchor
            return self._anchor

    def _connect(self, kind: str) -> Connection:
        ip = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        with socket.socket(socket.AF_UNIX if isinstance(self._address, str) else ip) as client:
            client.settimeout(self._reply_s)
            client.connect(self._address)
            if client.family == socket.AF_UNIX and not is_own_peer(client):
                raise PermissionError(errno.EACCES, "a process of another user listens there")
            client.setblocking(True)
            # A peer that hangs in the middle of a message must not block this process forever.
            limit = struct.pack("ll", int(self._reply_s), int(self._reply_s % 1 * 1e6))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection = _connection(client)
        try:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
            connection.send_bytes(pickle.dumps((kind, self.session)))
        except BaseException:  # including interrupts
            connection.close()
            raise
        return connection

    def _receive(self, connection: Connection, wait_s: float) -> bytes:
        if not connection.poll(wait_s + self._reply_s):
            raise TimeoutError(f"no reply after {wait_s + self._reply_s:g} s")
        return connection.recv_bytes()

    def _closed(self, error: Exception | str) -> ReplayClosedError:
        if isinstance(error, AuthenticationError):
            why = "it uses a different key"
        elif isinstance(error, BlockingIOError):
            why = f"no reply after {self._reply_s:g} s"
        else:
            why = str(error) or "it closed the connection"
        return ReplayClosedError(f"{self._name} does not respond: {why}. Check whether its process has exited, and restart it.")


LINKS: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _reset_links() -> None:
    for link in LINKS:
        link.after_fork()


os.register_at_fork(after_in_child=_reset_links)


def _connection(client: socket.socket) -> Connection:
    if client.family != socket.AF_UNIX:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client.detach())


NONE = -1  # no reservation, or no session


class Rows:
    """Protection of the storage's rows. The caller must hold a lock.

    The item with handle n is in slot n % capacity of the index, and its payload in row n % num_rows. There are `spare` more
    rows than slots, so an item can be written while the one that it replaces is still read.

    A row is reused only after every session that may access it has released it or ended. A writer whose lease expired can
    therefore finish its copy safely, and a reader never sees a row that another writer overwrites.

    Shape suffixes: B items of a call.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._pins = np.zeros(num_rows, np.int64)  # writers and readers of each row
        self._handles = np.full(num_rows, NONE)  # reservations being written
        self._writers = np.full(num_rows, NONE)  # their sessions
        self._tickets: dict[int, tuple[int, Integers]] = {}
        self._ticket_numbers = itertools.count()
        self._ended: set[int] = set()

    def are_free(self, handles_B: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask of the handles whose rows are neither written nor read."""
        are_free: npt.NDArray[np.bool_] = self._pins[handles_B % self._num_rows] == 0
        return are_free

    def next_free(self, first: int, count: int, within: int) -> Integers | None:
        """Return the next `count` handles from `first` on with free rows, within a span of `within`.

        With the capacity as span, no two of them share a slot.
        """
        handles_B = np.arange(first, first + count)
        if self.are_free(handles_B).all():
            return handles_B
        handles_B = np.arange(first, first + self._num_rows)
        handles_B = handles_B[self.are_free(handles_B)]
        fits = handles_B[count - 1 :] < handles_B[: max(len(handles_B) - count + 1, 0)] + within
        return handles_B[fits.argmax() :][:count] if fits.any() else None

    def assign(self, session: int, handles_B: Integers) -> None:
        """Let a session write the rows of its reservations."""
        self.check(session)
        rows_B = handles_B % self._num_rows
        self._pins[rows_B] = 1
        self._handles[rows_B] = handles_B
        self._writers[rows_B] = session

    def are_written(self, handles_B: Integers, session: int | None = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the reservations that a session, or any one, has not finished writing."""
        rows_B = handles_B % self._num_rows
        are_written: npt.NDArray[np.bool_] = self._handles[rows_B] == handles_B
        return are_written if session is None else are_written & (self._writers[rows_B] == session)

    def end_writes(self, handles_B: Integers) -> None:
        """Record that the writers of reservations, all of them in `are_written`, have finished."""
        rows_B = handles_B % self._num_rows
        self._handles[rows_B] = self._writers[rows_B] = NONE
        self._pins[rows_B] -= 1

    def pin(self, session: int, handles_B: Integers) -> int:
        """Keep the rows of items unchanged until `unpin`. Return a ticket."""
        self.check(session)
        rows_B = np.unique(handles_B % self._num_rows)
        self._pins[rows_B] += 1
        ticket = next(self._ticket_numbers)
        self._tickets[ticket] = (session, rows_B)
        return ticket

    def unpin(self, ticket: int) -> None:
        """Release a ticket. Releasing it again has no effect."""
        if ticket in self._tickets:
            self._pins[self._tickets.pop(ticket)[1]] -= 1

    def end_session(self, session: int) -> Integers:
        """End a session and release the rows that it was reading or writing. Return the reservations that it was writing."""
        self._ended.add(session)
        handles_B: Integers = self._handles[self._writers == session]
        self.end_writes(handles_B)
        for ticket in [ticket for ticket, (owner, _) in self._tickets.items() if owner == session]:
            self.unpin(ticket)
        return handles_B

    def describe(self) -> str:
        """Return how many rows writers and readers hold, for messages."""
        num_written = int(np.count_nonzero(self._handles >= 0))
        num_read = len({int(row) for _, rows in self._tickets.values() for row in rows})
        return f"writers hold {num_written} rows, readers {num_read}"

    def check(self, session: int) -> None:
        """Refuse a session that has ended: one of its calls may still be running, and nothing would release what it gets."""
        if session in self._ended:
            raise ReplayClosedError("the session of this client has ended.")


class WorkList:
    """Indices from 0, each of which is available, reserved, or committed, even if writers die. The caller must hold a lock."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._next = 0
        self._returned: list[int] = []  # a heap of indices whose reservation ended without a commit
        self.reserved: dict[int, int] = {}
        """Indices that writers have reserved, by handle."""

    @property
    def num_available(self) -> int:
        """Indices that can be reserved."""
        return len(self._returned) + self._num_items - self._next

    def take(self, handles: Integers) -> Integers:
        """Assign one index to each reservation, returned indices first, in ascending order."""
        indices = []
        for handle in handles.tolist():
            if self._returned:
                index = heapq.heappop(self._returned)
            else:
                index, self._next = self._next, self._next + 1
            self.reserved[handle] = index
            indices.append(index)
        return np.array(indices, np.int64)

    def finish(self, handles: Integers) -> None:
        """Record that reservations were committed."""
        for handle in handles.tolist():
            self.reserved.pop(handle, None)

    def recover(self, is_open: Callable[[Integers], npt.NDArray[np.bool_]]) -> None:
        """Make the indices available again whose reservation ended without a commit: those that `is_open` maps to False."""
        handles = np.fromiter(self.reserved, np.int64, len(self.reserved))
        for handle in handles[~is_open(handles)].tolist():
            heapq.heappush(self._returned, self.reserved.pop(handle))

    def state(self) -> dict[str, object]:
        """Return the remaining work. Reserved indices count as available."""
        return {"next": self._next, "returned": sorted([*self._returned, *self.reserved.values()])}

    def load(self, next_index: int, returned: list[int]) -> None:
        """Replace the remaining work."""
        self._next, self._returned, self.reserved = next_index, returned, {}  # a sorted list is a heap


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of the rows, in a file on one host.

    Example: `Shard(folder="/dev/shm", host="node-1")`
    """

    folder: str
    """Folder for the file: shared memory, or a disk for buffers that are larger than memory."""
    host: str
    """Name of the host with the folder, as returned by `socket.gethostname`."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Location of a shard. Clients on its host map the file; other clients call its server."""

    host: str
    path: str
    """File on that host; empty until it is created."""
    address: Address | None
    """Address of the process that serves the shard; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """Settings of an owner process."""

    capacity: int
    options: ReplayOptions
    layout: bytes
    """Pickled layout of the columns. The owner does not read it."""
    shard_bytes: int
    rows_per_shard: int
    spare: int
    """Rows in addition to those of a full buffer."""
    num_work: int
    """Length of the work list."""
    shards: tuple[Shard, ...]
    """All shards. The owner creates the files of the shards on its host."""
    host: str
    address: Address | None
    """Address to listen on; None for a Unix socket."""
    key: bytes
    """Shared secret of owner and clients."""

    def rows_of(self, handles: Integers) -> Integers:
        """Return the row of each item in its shard, which is number `handle % num_shards`."""
        num_shards = len(self.shards)
        return handles % (self.rows_per_shard * num_shards) // num_shards


class Owner:
    """Operations of a shared buffer, called by clients. The first argument of each is the number of the calling session."""

    def __init__(self, settings: OwnerSettings) -> None:
        self._settings = settings
        self._index = ReplayIndex(settings.capacity, **settings.options)
        self._rows = Rows(settings.rows_per_shard * len(settings.shards))
        self._work = WorkList(settings.num_work)
        self._changed = self._index.changed
        self._restoring: Mapping[str, Any] | None = None
        self.folders: list[Path] = []
        """Folders of the files that this process created."""
        self._locations = [ShardLocation(shard.host, "", None) for shard in settings.shards]

    def verbs(self) -> dict[str, Verb]:
        """Return the functions that clients may call."""
        index, num_bytes = self._index, self._settings.shard_bytes * len(self._settings.shards)
        verbs = (
            *(self.describe, self.locations, self.register, self.reserve, self.take_work, self.commit, self.hold),
            *(self.draw, self.done, self.release, self.snapshot, self.restore, self.finish_restore),
        )
        return {
            **{verb.__name__: verb for verb in verbs},
            "path": lambda session, shard: self._locations[shard].path,
            "update_priorities": lambda session, handles, priorities: index.update_priorities(handles, priorities),
            "set_step": lambda session, step: index.set_step(step),
            "set_version": lambda session, version: index.set_version(version),
            "beta": lambda session: index.beta,
            "stats": lambda session: index.counters(num_bytes),
        }

    def create_files(self) -> None:
        """Create the files of the shards on this host, each in a new folder."""
        for number, shard in enumerate(self._settings.shards):
            if shard.host == self._settings.host:
                self.folders.append(shard_folder(shard))
                path = self.folders[-1] / f"{number}"
                create_file(path, self._settings.shard_bytes)
                self._locations[number] = ShardLocation(shard.host, str(path), None)

    def end_session(self, session: int) -> None:
        """Release everything that a client had reserved or was reading when its session ended."""
        with self._changed:
            self._index.end_leases(self._rows.end_session(session))
            self._changed.notify_all()

    def undo(self, session: int, verb: str, reply: Any) -> None:
        """Release what a call granted to a client that did not read the reply."""
        with self._changed:
            if verb in {"draw", "hold", "snapshot"}:
                self._rows.unpin(reply[-1])  # the ticket
            elif verb in {"reserve", "take_work", "restore"}:
                handles = reply[1] if verb == "take_work" else reply
                handles = handles[self._rows.are_written(handles, session)]
                self._index.end_leases(handles)
                self._rows.end_writes(handles)
            self._changed.notify_all()

    def describe(self, session: int) -> OwnerSettings:
        """Return the settings."""
        return self._settings

    def locations(self, session: int, host: str, timeout_s: float) -> list[ShardLocation]:
        """Wait until a client on a host can reach every shard; return the locations of the shards."""

        def missing() -> list[int]:
            return [
                number
                for number, location in enumerate(self._locations)
                if location.address is None and not (location.path and location.host == host)
            ]

        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), timeout_s):
                number = missing()[0]
                where = self._locations[number].host
                raise ReplayClosedError(
                    f"shard {number}: no process serves it to host {host} after {timeout_s:g} s (it is on host {where}). "
                    f"Run titanrl.replay.serve_shard(replay, {number}) on {where}."
                )
            return list(self._locations)

    def register(self, session: int, shard: int, path: str, address: Address) -> None:
        """Record the process that serves a shard."""
        with self._changed:
            location = self._locations[shard]
            if location.address is not None:
                raise ValueError(f"shard: already served, so its rows may be lost (got {shard}). Start a new buffer.")
            self._locations[shard] = ShardLocation(location.host, path, address)
            self._changed.notify_all()

    def reserve(self, session: int, num_items: int, lease_s: float | None, timeout_s: float) -> Integers:
        """Wait until enough rows are free, then reserve slots."""
        self._index.check_count(num_items)
        with self._changed:
            if not self._changed.wait_for(lambda: self._next_free(num_items) is not None, timeout_s):
                raise self._full(num_items, timeout_s)
            return self._reserve(session, num_items, lease_s)

    def take_work(self, session: int, limit: int, lease_s: float | None, timeout_s: float) -> tuple[Integers, Integers]:
        """Reserve slots for the next indices of the work list; return empty arrays if all are committed."""
        self._index.check_count(limit)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._index.expire()
                self._work.recover(self._index.is_open)
                count = min(limit, self._work.num_available)
                if count and self._next_free(count) is not None:
                    handles = self._reserve(session, count, lease_s)
                    return self._work.take(handles), handles
                if not count and not len(self._work.reserved):
                    return (np.empty(0, np.int64),) * 2
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    if count:
                        raise self._full(count, timeout_s)
                    raise EmptyReplayError(
                        f"take_work: all remaining work is reserved by others after {timeout_s:g} s "
                        f"({len(self._work.reserved)} items). Pass a longer timeout_s, or a lease_s to every writer."
                    )
                self._changed.wait(min(left_s, self._index.next_expiry_s()))

    def commit(self, session: int, handles: Integers, priorities: npt.ArrayLike | None, versions: npt.ArrayLike | None) -> int:
        """Make written rows available. Return the number of stale handles."""
        with self._changed:
            are_written = self._rows.are_written(handles, session)
            is_open = self._index.complete(handles, priorities, versions, lambda slots, part: None, are_written)
            self._rows.end_writes(handles[are_written])
            self._work.finish(handles[is_open])
            return len(handles) - int(is_open.sum())

    def hold(self, session: int, handles: Integers) -> tuple[npt.NDArray[np.bool_], int]:
        """Pin rows for a shard server that writes on behalf of a client. Return a mask of valid handles, and a ticket."""
        with self._changed:
            are_written = self._rows.are_written(handles)
            return are_written, self._rows.pin(session, handles[are_written])

    def draw(self, session: int, batch_size: int, timeout_s: float) -> tuple[ReplayBatch, int]:
        """Draw items without their payload, and pin their rows until `done`."""
        with self._changed:
            batch = self._index.draw(batch_size, timeout_s, lambda slots: None)
            return batch, self._rows.pin(session, batch.handles)

    def done(self, session: int, ticket: int) -> None:
        """Release a ticket after its rows were copied."""
        with self._changed:
            self._rows.unpin(ticket)
            self._changed.notify_all()

    def release(self, session: int, handles: Integers) -> int:
        """Remove items and reservations; the client no longer writes its own ones."""
        with self._changed:
            num_stale = self._index.release(handles)
            handles = np.unique(handles)
            self._rows.end_writes(handles[self._rows.are_written(handles, session)])
            self._changed.notify_all()
            return num_stale

    def snapshot(self, session: int) -> tuple[dict[str, Any], int]:
        """Return the metadata, and pin the rows of all items until `done`."""
        with self._changed:
            self._index.expire()
            self._work.recover(self._index.is_open)
            ticket = self._rows.pin(session, self._index.items())
            return {**self._index.state_dict(), "work": self._work.state()}, ticket

    def restore(self, session: int, state: Mapping[str, Any], timeout_s: float) -> Integers:
        """Clear the buffer, and let the client write the items of a saved state. Return their handles."""
        self._index.check_state(state)
        handles: Integers = state["owners"][state["owners"] >= 0]
        nothing = {name: state[name][:0] for name in ("owners", "priorities", "versions", "leaves")}
        with self._changed:
            self._index.load_state_dict({**state, **nothing, "leases": []})
            if not self._changed.wait_for(lambda: self._rows.are_free(handles).all(), timeout_s):
                raise self._full(len(handles), timeout_s)
            self._rows.assign(session, handles)
            self._restoring = state
            return handles

    def finish_restore(self, session: int) -> None:
        """Make the items of a saved state available, after their rows were written."""
        assert self._restoring is not None, "finish_restore() called before restore()"
        with self._changed:
            state, self._restoring = self._restoring, None
            # Drop open reservations, whose owners are below NO_ITEM: their writers belong to an earlier buffer.
            owners = np.maximum(state["owners"], NO_ITEM)
            self._rows.end_writes(owners[owners >= 0])
            if self._index.next != state["next"]:
                raise ValueError("load_state_dict: another client wrote in the meantime. Load before other clients start.")
            self._index.load_state_dict({**state, "owners": owners, "leases": []})
            if work := state.get("work"):
                self._work.load(work["next"], work["returned"])
            self._changed.notify_all()

    def _reserve(self, session: int, num_items: int, lease_s: float | None) -> Integers:
        self._rows.check(session)
        handles = self._next_free(num_items)
        assert handles is not None, "the caller has waited for free rows"
        for run in np.split(handles, np.flatnonzero(np.diff(handles) > 1) + 1):  # between runs, rows are still in use
            self._index.skip_to(int(run[0]))
            self._index.reserve(len(run), lease_s=lease_s)
        self._rows.assign(session, handles)
        return handles

    def _next_free(self, num_items: int) -> Integers | None:
        return self._rows.next_free(self._index.next, num_items, self._settings.capacity)

    def _full(self, num_items: int, waited_s: float) -> ReplayFullError:
        return ReplayFullError(
            f"spare: no rows for {num_items} items after {waited_s:g} s (got {self._settings.spare}; {self._rows.describe()}). "
            "Commit or release reservations, or use a larger spare."
        )


def shard_folder(shard: Shard) -> Path:
    """Create a folder for a shard's file that only this user can access."""
    Path(shard.folder).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="titanrl-replay-", dir=shard.folder))


def remove(folders: Iterable[Path]) -> None:
    """Remove folders and their files."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Serve a buffer until standard input has another byte or closes. Send address and folders, or an error, to the parent."""
    settings: OwnerSettings = pickle.load(sys.stdin.buffer)
    folder = Path(tempfile.mkdtemp(prefix="titanrl-replay-"))
    owner = Owner(settings)
    try:
        owner.create_files()
        address = settings.address or str(folder / "socket")
        server = Server(address, settings.key, owner.verbs(), on_end=owner.end_session, on_lost=owner.undo)
        _reply(True, (server.address, [folder, *owner.folders]))
        sys.stdin.buffer.read(1)
    except (OSError, ValueError) as error:
        _reply(False, error)
    finally:
        remove([folder, *owner.folders])


def _reply(is_ready: bool, value: tuple[Address, list[Path]] | Exception) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent has exited
        pickle.dump((is_ready, value), sys.stdout.buffer)
        sys.stdout.buffer.flush()
