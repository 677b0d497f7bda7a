"""A prioritized replay buffer shared by several processes, on one or several hosts, without actors.

One process owns the metadata. Clients copy payload directly into and out of memory-mapped files. See `titanrl.replay.owner` for
sessions, operations and the protection of rows.
"""

import contextlib
import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from titanrl.replay.batches import (
    Columns,
    Integers,
    Layout,
    ReplayBatch,
    ReplayClosedError,
    ReplayOptions,
    ReplayStats,
    create_file,
    file_size,
    layout_of,
    map_file,
    single,
    template,
)
from titanrl.replay.owner import Address, Link, OwnerSettings, Server, Shard, ShardLocation, remove, shard_folder
from titanrl.replay.prioritized import ReplayIndex

REPLY_S = 30.0
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """Indices from the work list, and the reservations for their items.

    Example: `Work(indices=[4, 5], handles=[17, 18])`
    """

    indices: Integers
    """Indices in the list, `[B]`; empty when all work is done."""
    handles: Integers
    """Handles to commit, `[B]`."""


class SharedReplay:
    """A buffer for several processes. It can be pickled to them. All methods can be called from several threads.

    The buffer ends when the process that created it calls `close` or exits. Use it as a context manager.

    Example:
        with SharedReplay(10_000, {"obs": np.zeros(8, np.float32), "reward": 0.0}, alpha=0.6) as replay:
            replay.put({"obs": np.ones(8, np.float32), "reward": 1.0})
            batch = replay.sample(32)
    """

    def __init__(
        self,
        capacity: int,
        example: Any,
        *,
        shards: int | Sequence[Shard] = 1,
        folder: str | None = None,
        spare: int | None = None,
        num_work: int = 0,
        address: Address | None = None,
        reply_s: float = REPLY_S,
        **options: Unpack[ReplayOptions],
    ) -> None:
        """Start the process that owns the buffer.

        Args:
            capacity: Number of slots.
            example: Example item. All items must have the keys, shapes and types of its arrays, tensors and numbers.
            shards: Number of files for the rows, or a description of each shard if they are on several hosts.
            folder: Folder for the files, which are allocated in full at the start; by default shared memory. A disk may have
                more space.
            spare: Rows for items that are being written or copied while the buffer is full; by default capacity / 4 + 256.
            num_work: Length of the work list for `take_work`.
            address: Interface and port, if clients run on other hosts; by default a Unix socket.
            reply_s: Maximum time for a reply of the owner, in addition to the timeout of a call.
            **options: See `ReplayOptions`.
        """
        if isinstance(shards, int):
            default = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
            shards = [Shard(folder or default, socket.gethostname())] * shards
        spare = capacity // 4 + 256 if spare is None else spare
        if not shards or spare < 1 or capacity < 1 or num_work < 0:
            raise ValueError(
                f"capacity, shards, spare, num_work: out of range (got {capacity}, {len(shards)}, {spare}, {num_work}). "
                "Use at least 1 slot, shard and spare row, and no negative length."
            )
        ReplayIndex(1, **options)  # raises in this process if an option is invalid
        layout = layout_of(example)
        rows_per_shard = -(-capacity // len(shards)) + -(-spare // len(shards))
        settings = OwnerSettings(
            capacity=capacity,
            options=options,
            layout=pickle.dumps(layout),
            shard_bytes=file_size(layout, rows_per_shard),
            rows_per_shard=rows_per_shard,
            spare=spare,
            num_work=num_work,
            shards=tuple(shards),
            host=socket.gethostname(),
            address=address,
            key=secrets.token_bytes(32),
        )
        self._process: subprocess.Popen[bytes] | None
        self._process, address, self._folders = _start(settings)
        self._creator = os.getpid()
        self._connect(address, settings.key, settings.host, reply_s)

    def _connect(self, address: Address, key: bytes, host: str, reply_s: float) -> None:
        self._description = (address, key, host, reply_s)
        self._link = Link(address, key, "replay buffer", reply_s)
        self._storage: Storage | None = None
        self._reserved: tuple[str, set[int]] = ("", set())  # a session, and the handles of its reservations

    def __getstate__(self) -> dict[str, Any]:
        return {"description": self._description}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._process = None
        self._connect(*state["description"])

    def __enter__(self) -> "SharedReplay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.stats().num_items

    @property
    def beta(self) -> float:
        """Exponent of importance weights at the current learner step."""
        return float(self._link.call("beta"))

    def on_host(self, host: str) -> "SharedReplay":
        """Return a client for processes on another host. It maps the shards there and calls the servers of the others."""
        client = SharedReplay.__new__(SharedReplay)
        address, key, _, reply_s = self._description
        client.__setstate__({"description": (address, key, host, reply_s)})
        return client

    def close(self) -> None:
        """Close the connections. In the process that created the buffer, also stop the buffer and remove its files."""
        self._link.close()
        if self._storage is not None:
            self._storage.close()
        if self._process is not None and self._creator == os.getpid():  # not in a forked process
            _stop(self._process)
            remove(self._folders)

    def put(self, item: Any, priority: float | None = None, version: int | None = None) -> int:
        """Write one item and return its handle."""
        return int(self.extend(single(item), None if priority is None else [priority], version)[0])

    def extend(
        self,
        payload: Any,
        priorities: npt.ArrayLike | None = None,
        versions: npt.ArrayLike | None = None,
        *,
        timeout_s: float = REPLY_S,
    ) -> Integers:
        """Write items like `PrioritizedReplay.extend`, at most as many as slots. Wait up to `timeout_s` for free rows."""
        num_items = self._shards().template.check(payload)
        if not num_items:
            return np.empty(0, np.int64)
        handles = self.reserve(num_items, timeout_s=timeout_s)
        self.commit(handles, payload, priorities, versions)
        return handles

    def reserve(self, num_items: int, *, lease_s: float | None = None, timeout_s: float = REPLY_S) -> Integers:
        """Reserve slots and return their handles. The oldest items are removed. A reserved item is sampled after its commit.

        Args:
            num_items: Number of slots.
            lease_s: Seconds after which an uncommitted reservation expires; a later commit is stale. With None, reservations
                end only with this process.
            timeout_s: Maximum wait for free rows.

        Raises:
            ReplayFullError: Too many rows are being written or copied.
        """
        handles: Integers = self._link.call("reserve", num_items, lease_s, timeout_s, wait_s=timeout_s)
        self._reservations().update(handles.tolist())
        return handles

    def take_work(self, limit: int, *, lease_s: float | None = None, timeout_s: float = REPLY_S) -> Work:
        """Reserve slots for up to `limit` of the next indices in the work list.

        If a writer dies or its lease expires, its indices are handed out again. An index is done once its handle was committed
        and the commit was not stale. While other writers hold all remaining indices, wait. If all are done, return no indices.
        Raise `EmptyReplayError` if other writers still held all remaining indices after `timeout_s`.
        """
        indices, handles = self._link.call("take_work", limit, lease_s, timeout_s, wait_s=timeout_s)
        self._reservations().update(handles.tolist())
        return Work(indices, handles)

    def commit(
        self,
        handles: npt.ArrayLike,
        payload: Any,
        priorities: npt.ArrayLike | None = None,
        versions: npt.ArrayLike | None = None,
    ) -> int:
        """Write the items of this process's reservations, so that they can be sampled. Return the number of stale handles, as
        `PrioritizedReplay.commit` does.
        """
        numbers = np.array(handles, np.int64).reshape(-1)
        reserved = self._reservations()
        if self._shards().template.check(payload) != len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ValueError(f"handles: must contain each item's handle once (got {len(numbers)} handles).")
        if unknown := [number for number in numbers.tolist() if number not in reserved]:
            raise ValueError(
                f"handles: not reserved by this process, or already committed (got {unknown[0]}). Commit where you reserve."
            )
        self._shards().write(numbers, payload)
        num_stale = self._link.call("commit", numbers, _array(priorities), _array(versions))
        reserved.difference_update(numbers.tolist())
        return int(num_stale)

    def release(self, handles: npt.ArrayLike) -> int:
        """Remove items and reservations. Return the number of handles that had already been removed or overwritten."""
        numbers = np.array(handles, np.int64).reshape(-1)
        self._reservations().difference_update(numbers.tolist())
        return int(self._link.call("release", numbers))

    def sample(self, batch_size: int, *, timeout_s: float = REPLY_S) -> ReplayBatch:
        """Draw items like `PrioritizedReplay.sample`."""
        shards = self._shards()
        drawn, ticket = self._link.call("draw", batch_size, timeout_s, wait_s=timeout_s)
        try:
            batch: ReplayBatch = replace(drawn, payload=shards.read(drawn.handles))
            return batch
        finally:
            self._link.send("done", ticket)

    def update_priorities(self, handles: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """Set priorities like `PrioritizedReplay.update_priorities`. Return the number of handles without an item."""
        return int(self._link.call("update_priorities", _array(handles), _array(priorities)))

    def set_step(self, step: int) -> None:
        """Set the learner step, which several learners may report; beta advances once."""
        self._link.call("set_step", step)

    def set_version(self, version: int) -> None:
        """Set the policy version like `PrioritizedReplay.set_version`."""
        self._link.call("set_version", version)

    def stats(self) -> ReplayStats:
        """Return the counters."""
        stats: ReplayStats = self._link.call("stats")
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that determines the next draws, and of the payload. `PrioritizedReplay` can load it."""
        shards = self._shards()
        state, ticket = self._link.call("snapshot")
        slots = np.flatnonzero(state["owners"] >= 0)
        try:
            items = shards.read(state["owners"][slots])
        finally:
            self._link.send("done", ticket)
        payload = Columns(len(state["owners"]))
        if len(slots):
            payload.write(slots, items, slice(None))
        return {**state, "payload": payload.state(len(state["owners"]))}

    def load_state_dict(self, state: Mapping[str, Any], *, timeout_s: float = REPLY_S) -> None:
        """Replace contents, settings, counters and the state of the random number generator. Open reservations end.

        Call this before other processes write, because earlier handles may refer to different items afterwards. Raise
        `ValueError` if the capacities differ, or another process wrote in the meantime.
        """
        metadata = {name: value for name, value in state.items() if name != "payload"}
        payload = Columns(len(state["owners"]))
        payload.load(state["payload"])
        if state["payload"]:
            self._shards().template.check(payload.all())
        numbers = self._link.call("restore", metadata, timeout_s, wait_s=timeout_s)
        if len(numbers):
            self._shards().write(numbers, payload.read(np.flatnonzero(state["owners"] >= 0)))
        self._link.call("finish_restore")

    def _shards(self) -> "Storage":
        if self._storage is None:
            _, key, host, reply_s = self._description
            settings = self._link.call("describe")
            locations = self._link.call("locations", host, reply_s, wait_s=reply_s)
            self._storage = Storage(settings, locations, host, key, reply_s)
        return self._storage

    def _reservations(self) -> set[int]:
        """Return the handles of this process's open reservations."""
        if self._reserved[0] != self._link.session:  # a forked process has no reservations
            self._reserved = (self._link.session, set())
        return self._reserved[1]


def serve_shard(replay: SharedReplay, shard: int, address: Address = ("127.0.0.1", 0)) -> None:
    """Serve a shard to clients on other hosts until the buffer is closed. Run this in a process on the shard's host.

    Args:
        replay: The buffer.
        shard: Number of the shard.
        address: Interface and port to listen on. The other hosts must reach the interface. Port 0 selects a free port.
    """
    owner = replay._link
    with contextlib.ExitStack() as folders, contextlib.suppress(ReplayClosedError):  # the buffer was closed before
        settings = owner.call("describe")
        if not 0 <= shard < len(settings.shards):
            raise ValueError(f"shard: no such shard (got {shard}). Use 0 to {len(settings.shards) - 1}.")
        path = Path(owner.call("path", shard))
        if settings.shards[shard].host != settings.host:
            folder = shard_folder(settings.shards[shard])
            folders.callback(remove, [folder])
            path = folder / f"{shard}"
            create_file(path, settings.shard_bytes)
        columns = map_file(path, pickle.loads(settings.layout), settings.rows_per_shard)

        def put(session: int, handles: Integers, payload: Any) -> None:
            """Write items for a client, except those that it may no longer write. Rows of the others stay pinned meanwhile."""
            is_held, ticket = owner.call("hold", handles)
            try:
                columns.write(settings.rows_of(handles[is_held]), payload, np.flatnonzero(is_held))
            finally:
                owner.send("done", ticket)

        def get(session: int, handles: Integers) -> Any:
            """Return copies of items for a client."""
            return columns.read(settings.rows_of(handles))

        server = Server(address, settings.key, {"get": get, "put": put})
        owner.call("register", shard, str(path), server.address)
        owner.wait_until_closed()


class Storage:
    """All shards, accessed by a client on one host. The item with sequence number n is in shard n % num_shards."""

    def __init__(
        self, settings: OwnerSettings, locations: Sequence[ShardLocation], host: str, key: bytes, reply_s: float
    ) -> None:
        """Map the shards of this host. Connect to the other shards on first use."""
        layout: Layout = pickle.loads(settings.layout)
        self.template = template(layout)
        """Columns without rows, for validating payloads."""
        self._rows_of = settings.rows_of
        self._shards: list[Columns | Link] = []
        for number, location in enumerate(locations):
            if location.host == host:
                self._shards.append(map_file(Path(location.path), layout, settings.rows_per_shard))
            else:
                assert location.address is not None, "the owner waits until every remote shard has an address"
                self._shards.append(Link(location.address, key, f"replay shard {number} on host {location.host}", reply_s))

    def read(self, handles: Integers) -> Any:
        """Return copies of items."""
        if len(self._shards) == 1:
            return self._read(self._shards[0], handles)
        found = Columns(len(handles))
        for shard, positions in self._by_shard(handles):
            found.write(positions, self._read(shard, handles[positions]), slice(None))
        return found.all()

    def write(self, handles: Integers, payload: Any) -> None:
        """Write the items of reservations."""
        for shard, positions in self._by_shard(handles):
            if isinstance(shard, Columns):
                part = slice(None) if len(positions) == len(handles) else positions  # slicing does not copy
                shard.write(self._rows_of(handles[positions]), payload, part)
            else:
                items = Columns(len(positions))
                items.write(slice(None), payload, positions)
                shard.call("put", handles[positions], items.all())

    def close(self) -> None:
        """Close the connections."""
        for shard in self._shards:
            if isinstance(shard, Link):
                shard.close()

    def _read(self, shard: Columns | Link, handles: Integers) -> Any:
        return shard.read(self._rows_of(handles)) if isinstance(shard, Columns) else shard.call("get", handles)

    def _by_shard(self, handles: Integers) -> list[tuple[Columns | Link, Integers]]:
        """Group items by shard: return each shard, and the positions of its items in `handles`."""
        numbers = handles % len(self._shards)
        return [(self._shards[number], np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]


def _start(settings: OwnerSettings) -> tuple["subprocess.Popen[bytes]", Address, list[Path]]:
    """Start the owner. Return its process, its address and the folders of its files.

    Raise `ValueError` if it cannot create the files or listen, and `ReplayClosedError` if it exits or is not ready in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", "from titanrl.replay.owner import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))},
        start_new_session=True,  # on a keyboard interrupt, this process decides when the owner stops
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(settings, process.stdin)
        process.stdin.flush()
        if not wait([process.stdout.fileno()], START_S):
            raise ReplayClosedError(
                f"replay buffer: its process is not ready after {START_S:g} s. The machine may be overloaded."
            )
        is_ready, value = pickle.load(process.stdout)
        if not is_ready:
            raise value
    except BaseException as error:  # even an interrupt must not leave the process running
        code = _stop(process)
        if isinstance(error, EOFError | BrokenPipeError):
            raise ReplayClosedError(f"replay buffer: its process exited with code {code}. See its output.") from None
        raise
    return process, *value


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """Stop a process and return its exit code. Kill it if it does not exit in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(b"\0", timeout=REPLY_S)
    process.kill()
    return process.wait()


def _array(values: npt.ArrayLike | None) -> npt.NDArray[Any] | None:
    """Convert values to numpy arrays, which the owner can unpickle without other libraries."""
    return None if values is None else np.asarray(values)
