"""Rows of a shared buffer as its clients reach them: mapped files on their host, and servers of the shards on other hosts."""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.replay.columns import Columns
from titanrl.replay.layouts import Layout, create_file, map_file
from titanrl.replay.owner import Place, shard_folder
from titanrl.replay.trees import Integers
from titanrl.replay.wire import Address, Link, Server


class Storage:
    """All shards, as a client on one host sees them. Row r lies in shard `r // rows_per_shard`."""

    def __init__(
        self, layout: Layout, rows_per_shard: int, places: Sequence[Place], host: str, key: bytes, reply_s: float
    ) -> None:
        """Map the shards of this host; connect to the others at the first use."""
        self._rows_per_shard = rows_per_shard
        self._shards: list[Columns | Link] = [
            map_file(Path(place.path), layout, rows_per_shard)
            if place.host == host
            else Link(_address(place), key, f"replay shard {number} on host {place.host}", reply_s)
            for number, place in enumerate(places)
        ]

    def read(self, rows: Integers) -> Any:
        """Return a copy of rows."""
        if len(self._shards) == 1:
            return self._read(0, rows)
        found = Columns(len(rows))
        for number, places in self._parts(rows):
            found.write(places, self._read(number, rows[places] - number * self._rows_per_shard), slice(None))
        return found.all()

    def write(self, handles: Integers, rows: Integers, payload: Any) -> None:
        """Write the items of reservations."""
        for number, places in self._parts(rows):
            shard = self._shards[number]
            if isinstance(shard, Columns):
                part = slice(None) if len(places) == len(rows) else places  # a slice is not copied
                shard.write(rows[places] - number * self._rows_per_shard, payload, part)
            else:
                items = Columns(len(places))
                items.write(slice(None), payload, places)
                shard.call("put", handles[places], rows[places], items.all())

    def close(self) -> None:
        """Close the connections."""
        for shard in self._shards:
            if isinstance(shard, Link):
                shard.close()

    def _read(self, number: int, rows: Integers) -> Any:
        shard = self._shards[number]
        return shard.read(rows) if isinstance(shard, Columns) else shard.call("get", rows)

    def _parts(self, rows: Integers) -> list[tuple[int, Integers]]:
        """Return the shards of rows, each with the places of its rows."""
        shards = rows // self._rows_per_shard
        return [(number, np.flatnonzero(shards == number)) for number in np.unique(shards).tolist()]


class ShardServer:
    """Gives and takes the rows of one shard. The owner's rows of a writer stay protected while this process writes them."""

    def __init__(self, owner: Link, columns: Columns, first_row: int) -> None:
        """Serve a mapped file whose first row has the number `first_row`."""
        self._owner, self._columns, self._first_row = owner, columns, first_row

    def get(self, session: int, rows: Integers) -> Any:
        """Return a copy of rows, counted from the first one of the shard."""
        return self._columns.read(rows)

    def put(self, session: int, handles: Integers, rows: Integers, payload: Any) -> None:
        """Write items for their writer, except those that it no longer may write."""
        is_held, ticket = self._owner.call("hold", handles, rows)
        try:
            self._columns.write(rows[is_held] - self._first_row, payload, np.flatnonzero(is_held))
        finally:
            self._owner.send("done", ticket)


def serve(owner: Link, shard: int, address: Address) -> None:
    """Serve a shard until the owner of the buffer ends."""
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


def _address(place: Place) -> Address:
    assert place.address is not None, "the owner waits for it"
    return place.address
