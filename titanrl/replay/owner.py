"""The process that owns the metadata of a shared buffer. `SharedReplay` starts it.

It reads its settings from standard input, and exits after one more byte or when its parent process dies. Payload never passes
through the owner: it assigns and protects rows of memory-mapped files, and writers and readers copy them.
"""

import contextlib
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanrl.replay.batches import Draw, EmptyReplayError, ReplayClosedError, ReplayFullError, ReplayOptions, ReplayStats
from titanrl.replay.index import NO_ITEM, ReplayIndex
from titanrl.replay.layouts import create_file
from titanrl.replay.rows import Rows
from titanrl.replay.trees import Integers
from titanrl.replay.wire import Address, Server, Verb
from titanrl.replay.work import WorkList


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
    """Name of the host."""
    path: str
    """File on that host; empty until it is created."""
    address: Address | None
    """Address of the process that serves the shard; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """Settings of an owner process."""

    capacity: int
    """Number of slots."""
    options: ReplayOptions
    """Options of the index."""
    layout: bytes
    """Pickled layout of the columns. The owner does not read it."""
    shard_bytes: int
    """Size of each shard's file in bytes."""
    spare: int
    """Rows in addition to those of a full buffer."""
    num_work: int
    """Length of the work list."""
    shards: tuple[Shard, ...]
    """All shards. The owner creates the files of the shards on its host."""
    host: str
    """Name of the owner's host."""
    address: Address | None
    """Address to listen on; None for a Unix socket."""
    key: bytes
    """Shared secret of owner and clients."""


class Owner:
    """Operations of a shared buffer, called by clients. The first argument of each is the number of the calling session."""

    def __init__(self, settings: OwnerSettings) -> None:
        """Create an empty buffer without files."""
        self._settings = settings
        self._index = ReplayIndex(settings.capacity, **settings.options)
        self._rows = Rows(settings.capacity, len(settings.shards), settings.spare)
        self._work = WorkList(settings.num_work)
        self._changed = self._index.changed
        self._restoring: tuple[Mapping[str, Any], Integers] | None = None
        self.folders: list[Path] = []
        """Folders of the files that this process created."""
        self._locations = [ShardLocation(shard.host, "", None) for shard in settings.shards]

    def verbs(self) -> dict[str, Verb]:
        """Return the functions that clients may call."""
        return {
            verb.__name__: verb
            for verb in (
                self.describe,
                self.path,
                self.locations,
                self.register,
                self.reserve,
                self.take_work,
                self.commit,
                self.hold,
                self.draw,
                self.done,
                self.release,
                self.update_priorities,
                self.set_step,
                self.set_version,
                self.stats,
                self.beta,
                self.snapshot,
                self.restore,
                self.restored,
            )
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
            rows = self._rows.written_by(session)
            self._end_reservations(self._rows.numbers(rows), rows)
            self._rows.end_session(session)
            self._changed.notify_all()

    def undo(self, session: int, verb: str, reply: Any) -> None:
        """Release what a call granted to a client that did not read the reply."""
        with self._changed:
            if verb in {"draw", "hold", "snapshot"}:
                self._rows.unpin(reply[-1])
            elif verb in {"reserve", "take_work", "restore"}:
                self._end_reservations(*reply[-2:])
            self._changed.notify_all()

    def describe(self, session: int) -> tuple[OwnerSettings, int]:
        """Return the settings and the number of rows per shard."""
        return self._settings, self._rows.per_shard

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

    def path(self, session: int, shard: int) -> str:
        """Return the path of a shard's file on this host."""
        return self._locations[shard].path

    def register(self, session: int, shard: int, path: str, address: Address) -> None:
        """Record the process that serves a shard."""
        with self._changed:
            location = self._locations[shard]
            if location.address is not None:
                raise ValueError(f"shard: already served, so its rows may be lost (got {shard}). Start a new buffer.")
            self._locations[shard] = ShardLocation(location.host, path, address)
            self._changed.notify_all()

    def reserve(self, session: int, num_items: int, lease_s: float | None, timeout_s: float) -> tuple[Integers, Integers]:
        """Wait until enough rows are free, then reserve slots and rows."""
        self._index.check_count(num_items)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_missing(num_items), timeout_s):
                raise self._full(num_items, timeout_s)
            return self._reserve(session, num_items, lease_s)

    def take_work(
        self, session: int, limit: int, lease_s: float | None, timeout_s: float
    ) -> tuple[Integers, Integers, Integers]:
        """Reserve slots for the next indices of the work list; return empty arrays if all are committed."""
        self._index.check_count(limit)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._index.expire()
                self._work.recover(self._index.is_open)
                count = min(limit, self._work.num_available)
                if count and not self._num_missing(count):
                    numbers, rows = self._reserve(session, count, lease_s)
                    return self._work.take(numbers), numbers, rows
                if not count and not self._work.num_reserved:
                    return (np.empty(0, np.int64),) * 3
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    if count:
                        raise self._full(count, timeout_s)
                    raise EmptyReplayError(
                        f"take_work: all remaining work is reserved by others after {timeout_s:g} s "
                        f"({self._work.num_reserved} items). Pass a longer timeout_s, or a lease_s to every writer."
                    )
                self._changed.wait(min(left_s, self._index.next_expiry_s()))

    def commit(
        self,
        session: int,
        handles: Integers,
        rows: Integers,
        priorities: npt.ArrayLike | None,
        versions: npt.ArrayLike | None,
    ) -> int:
        """Make written rows available. Return the number of stale handles."""
        with self._changed:
            is_written = self._rows.is_written_by(handles, rows)
            is_current = is_written & self._is_current(handles, rows)
            is_open = self._index.commit(handles, priorities, versions, lambda slots, part: None, is_current)
            self._rows.end_writes(rows[is_written])
            self._work.finish(handles[is_open])
            return len(handles) - int(is_open.sum())

    def hold(self, session: int, handles: Integers, rows: Integers) -> tuple[npt.NDArray[np.bool_], int]:
        """Pin rows for a shard server that writes on behalf of a client. Return a mask of valid rows, and a ticket."""
        with self._changed:
            is_written = self._rows.is_written_by(handles, rows)
            return is_written, self._rows.pin(session, rows[is_written])

    def draw(self, session: int, batch_size: int, timeout_s: float) -> tuple[Draw, Integers, int]:
        """Draw items and pin their rows until `done`."""
        with self._changed:
            draw = self._index.draw(batch_size, timeout_s)
            rows = self._rows[draw.handles % self._settings.capacity]
            return draw, rows, self._rows.pin(session, rows)

    def done(self, session: int, ticket: int) -> None:
        """Release a ticket after its rows were copied."""
        with self._changed:
            self._rows.unpin(ticket)
            self._changed.notify_all()

    def release(self, session: int, handles: Integers, rows: Integers) -> int:
        """Remove items and reservations. `rows` are the rows of the client's own reservations, and -1 for other handles."""
        with self._changed:
            num_stale = self._index.release(handles)
            handles, rows = handles[rows >= 0], rows[rows >= 0]
            self._rows.end_writes(np.unique(rows[self._rows.is_written_by(handles, rows)]))
            self._changed.notify_all()
            return num_stale

    def update_priorities(self, session: int, handles: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """Set priorities. Return the number of stale handles."""
        return self._index.update_priorities(handles, priorities)

    def set_step(self, session: int, step: int) -> None:
        """Set the learner step."""
        self._index.set_step(step)

    def set_version(self, session: int, version: int) -> None:
        """Set the policy version."""
        self._index.set_version(version)

    def beta(self, session: int) -> float:
        """Return the current exponent of importance weights."""
        return self._index.beta

    def stats(self, session: int) -> ReplayStats:
        """Return the counters."""
        return self._index.stats(self._settings.shard_bytes * len(self._settings.shards))

    def snapshot(self, session: int) -> tuple[dict[str, Any], Integers, int]:
        """Return the metadata and the rows of all items. Pin the rows until `done`."""
        with self._changed:
            self._index.expire()
            self._work.recover(self._index.is_open)
            rows = self._rows[self._index.items() % self._settings.capacity]
            return {**self._index.state_dict(), "work": self._work.state()}, rows, self._rows.pin(session, rows)

    def restore(self, session: int, state: Mapping[str, Any], timeout_s: float) -> tuple[Integers, Integers]:
        """Clear the buffer and reserve rows for the items of a saved state. Return their numbers and rows."""
        self._index.check_state(state)
        numbers = state["owners"][state["owners"] >= 0]
        nothing = {name: state[name][:0] for name in ("owners", "priorities", "versions", "leaves")}
        with self._changed:
            self._index.load_state_dict({**state, **nothing, "leases": []})
            self._rows.unlink(np.arange(self._settings.capacity))
            if not self._changed.wait_for(lambda: not self._rows.num_missing(numbers), timeout_s):
                raise self._full(len(numbers), timeout_s)
            rows = self._rows.assign(session, numbers)
            self._restoring = (state, rows)
            return numbers, rows

    def restored(self, session: int) -> None:
        """Make the items of a saved state available, after their rows were written."""
        assert self._restoring is not None, "restored() called before restore()"
        with self._changed:
            (state, rows), self._restoring = self._restoring, None
            # Drop open reservations: their writers belong to an earlier buffer.
            owners = np.maximum(state["owners"], NO_ITEM)
            numbers = owners[owners >= 0]
            self._rows.end_writes(rows)
            if not (self._rows[numbers % self._settings.capacity] == rows).all():
                raise ValueError("load_state_dict: another client wrote in the meantime. Load before other clients start.")
            self._index.load_state_dict({**state, "owners": owners, "leases": []})
            if work := state.get("work"):
                self._work.load(work["next"], work["returned"])
            self._changed.notify_all()

    def _reserve(self, session: int, num_items: int, lease_s: float | None) -> tuple[Integers, Integers]:
        self._rows.check(session)
        numbers = self._index.reserve(num_items, lease_s)
        return numbers, self._rows.assign(session, numbers)

    def _end_reservations(self, numbers: Integers, rows: Integers) -> None:
        is_written = self._rows.is_written_by(numbers, rows)
        self._index.end_leases(numbers[is_written & self._is_current(numbers, rows)])
        self._rows.end_writes(rows[is_written])

    def _is_current(self, numbers: Integers, rows: Integers) -> npt.NDArray[np.bool_]:
        """Mark rows that their slots still use. After `load_state_dict`, another writer may have reserved the same numbers."""
        is_current: npt.NDArray[np.bool_] = self._rows[numbers % self._settings.capacity] == rows
        return is_current

    def _num_missing(self, num_items: int) -> int:
        first = self._index.next
        return self._rows.num_missing(np.arange(first, first + num_items))

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
    """Serve a buffer until standard input has another byte or closes."""
    settings: OwnerSettings = pickle.load(sys.stdin.buffer)
    folder = Path(tempfile.mkdtemp(prefix="titanrl-replay-"))
    owner = Owner(settings)
    try:
        owner.create_files()
        address = settings.address or str(folder / "socket")
        server = Server(address, settings.key, owner.verbs(), on_end=owner.end_session, on_lost=owner.undo)
        reply(True, (server.address, [folder, *owner.folders]))
        sys.stdin.buffer.read(1)
        failure = None
    except (OSError, ValueError) as error:
        failure = error
    finally:
        remove([folder, *owner.folders])
    if failure is not None:
        reply(False, failure)


def reply(is_ready: bool, value: tuple[Address, list[Path]] | Exception) -> None:
    """Send the address and the folders, or the error, to the parent process, if it still runs."""
    with contextlib.suppress(BrokenPipeError):
        pickle.dump((is_ready, value), sys.stdout.buffer)
        sys.stdout.buffer.flush()
