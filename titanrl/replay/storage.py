"""Client access to the rows of a shared buffer: mapped files on the same host, servers of the shards on other hosts."""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.replay.columns import Columns
from titanrl.replay.layouts import Layout, create_file, map_file
from titanrl.replay.owner import ShardLocation, shard_folder
from titanrl.replay.trees import Integers
from titanrl.replay.wire import Address, Link, Server


class Storage:
    """All shards, accessed by a client on one host. Row r is in shard `r // rows_per_shard`."""

    def __init__(
        self, layout: Layout, rows_per_shard: int, locations: Sequence[ShardLocation], host: str, key: bytes, reply_s: float
    ) -> None:
        """Map the shards of this host. Connect to the other shards on first use."""
        self._rows_per_shard = rows_per_shard
        self._shards: list[Columns | Link] = [
            map_file(Path(location.path), layout, rows_per_shard)
            if location.host == host
            else Link(_address(location), key, f"replay shard {number} on host {location.host}", reply_s)
            for number, location in enumerate(locations)
        ]

    def read(self, rows: Integers) -> Any:
        """Return a copy of rows."""
        if len(self._shards) == 1:
            return self._read(0, rows)
        found = Columns(len(rows))
        for number, positions in self._by_shard(rows):
            found.write(positions, self._read(number, rows[positions] - number * self._rows_per_shard), slice(None))
        return found.all()

    def write(self, handles: Integers, rows: Integers, payload: Any) -> None:
        """Write the items of reservations."""
        for number, positions in self._by_shard(rows):
            shard = self._shards[number]
            if isinstance(shard, Columns):
                part = slice(None) if len(positions) == len(rows) else positions  # slicing does not copy
                shard.write(rows[positions] - number * self._rows_per_shard, payload, part)
            else:
                items = Columns(len(positions))
                items.write(slice(None), payload, positions)
                shard.call("put", handles[positions], rows[positions], items.all())

    def close(self) -> None:
        """Close the connections."""
        for shard in self._shards:
            if isinstance(shard, Link):
                shard.close()

    def _read(self, number: int, rows: Integers) -> Any:
        shard = self._shards[number]
        return shard.read(rows) if isinstance(shard, Columns) else shard.call("get", rows)

    def _by_shard(self, rows: Integers) -> list[tuple[int, Integers]]:
        """Group rows by shard: return each shard's number and the positions of its rows in `rows`."""
        shards = rows // self._rows_per_shard
        return [(number, np.flatnonzero(shards == number)) for number in np.unique(shards).tolist()]


class ShardServer:
    """Server for the rows of one shard. The rows stay pinned at the owner while this process writes them for a client."""

    def __init__(self, owner: Link, columns: Columns, first_row: int) -> None:
        """Serve a mapped file whose first row has the buffer-wide number `first_row`."""
        self._owner, self._columns, self._first_row = owner, columns, first_row

    def get(self, session: int, rows: Integers) -> Any:
        """Return a copy of rows, numbered from the start of the shard."""
        return self._columns.read(rows)

    def put(self, session: int, handles: Integers, rows: Integers, payload: Any) -> None:
        """Write items on behalf of a client, except to rows that the client may no longer write."""
        is_held, ticket = self._owner.call("hold", handles, rows)
        try:
            self._columns.write(rows[is_held] - self._first_row, payload, np.flatnonzero(is_held))
        finally:
            self._owner.send("done", ticket)


def serve(owner: Link, shard: int, address: Address) -> None:
    """Serve a shard until the owner of the buffer exits."""
    settings, rows_per_shard = owner.call("describe")
    if not 0 <= shard < len(settings.shards):
        raise ValueError(f"shard: no such shard (got {shard}). Use 0 to {len(settings.shards) - 1}.")
    layout: Layout = pickle.loads(settings.layout)
    folder = None
    try:
        path = Path(owner.call("path", shard))
        if settings.shards[shard].host != settings.host:
            folder = shard_folder(settings.shards[shard])
            path = folder / f"{shard}"
            create_file(path, settings.shard_bytes)
        rows = ShardServer(owner, map_file(path, layout, rows_per_shard), shard * rows_per_shard)
        server = Server(address, settings.key, {"get": rows.get, "put": rows.put})
        owner.call("register", shard, str(path), server.address)
        owner.wait_until_closed()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _address(location: ShardLocation) -> Address:
    assert location.address is not None, "the owner waits until every remote shard has an address"
    return location.address
