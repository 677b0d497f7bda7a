"""Rows of the storage shards of a shared buffer: which one holds an item, and who reads or writes it.

A row is reused only after everyone who may access it has said so, or has ended. A writer whose lease expired can therefore
finish its copy without harm, and a reader never sees a row that another writer overwrites.

Shape suffixes: B rows or numbers of a call.
"""

import itertools

import numpy as np
import numpy.typing as npt

from titanrl.replay.batches import ReplayClosedError
from titanrl.replay.trees import Integers

NONE = -1


def rows_per_shard(capacity: int, num_shards: int, spare: int) -> int:
    """Return the rows of a shard, if `spare` rows can be written or read beside those of a full buffer."""
    return -(-capacity // num_shards) + -(-spare // num_shards)


class Rows:
    """Assignment of rows to items. Row r lies in shard `r // per_shard`. The caller holds a lock."""

    def __init__(self, capacity: int, num_shards: int, spare: int) -> None:
        """Start with free rows."""
        self.per_shard = rows_per_shard(capacity, num_shards, spare)
        self._capacity = capacity
        self._num_shards = num_shards
        num_rows = num_shards * self.per_shard
        self._row_of = np.full(capacity, NONE)  # by slot
        self._has_slot = np.zeros(num_rows, np.bool_)
        self._pins = np.zeros(num_rows, np.int64)  # writers and readers of each row
        self._numbers = np.full(num_rows, NONE)  # reservations being written
        self._writers = np.full(num_rows, NONE)  # their sessions
        # The last row of a list is used next, so that a buffer touches few pages.
        self._free = [
            list(range((shard + 1) * self.per_shard - 1, shard * self.per_shard - 1, -1)) for shard in range(num_shards)
        ]
        self._tickets: dict[int, tuple[int, Integers]] = {}
        self._ticket_numbers = itertools.count()
        self._ended: set[int] = set()

    def __getitem__(self, slots_B: Integers) -> Integers:
        """Return the rows of slots."""
        return self._row_of[slots_B]

    def num_missing(self, numbers_B: Integers) -> int:
        """Return how many rows reservations of these sequence numbers lack."""
        old_B = self._row_of[numbers_B % self._capacity]
        old_B = old_B[old_B >= 0]
        reclaimed = np.bincount(old_B[self._pins[old_B] == 0] // self.per_shard, minlength=self._num_shards)
        needed = np.bincount(numbers_B % self._num_shards, minlength=self._num_shards)
        free = np.array([len(rows) for rows in self._free])
        return int(np.maximum(needed - free - reclaimed, 0).sum())

    def assign(self, session: int, numbers_B: Integers) -> Integers:
        """Give rows to the reservations of a session, in place of the previous rows of their slots."""
        self.check(session)
        slots_B = numbers_B % self._capacity
        self.unlink(slots_B)
        shards_B = numbers_B % self._num_shards
        rows_B = np.empty_like(numbers_B)
        for shard, free in enumerate(self._free):
            places = np.flatnonzero(shards_B == shard)
            if len(places):
                rows_B[places] = free[-len(places) :]
                del free[-len(places) :]
        self._row_of[slots_B] = rows_B
        self._has_slot[rows_B] = True
        self._pins[rows_B] = 1
        self._numbers[rows_B] = numbers_B
        self._writers[rows_B] = session
        return rows_B

    def unlink(self, slots_B: Integers) -> None:
        """Take the rows of slots away; a row that is being read or written becomes free afterwards."""
        rows_B = self._row_of[slots_B]
        rows_B = rows_B[rows_B >= 0]
        self._row_of[slots_B] = NONE
        self._has_slot[rows_B] = False
        self._recycle(rows_B)

    def is_written_by(self, numbers_B: Integers, rows_B: Integers) -> npt.NDArray[np.bool_]:
        """Mark rows that belong to these reservations and whose writers have not finished."""
        is_written: npt.NDArray[np.bool_] = self._numbers[rows_B] == numbers_B
        return is_written

    def end_writes(self, rows_B: Integers) -> None:
        """Note that their writers have finished."""
        self._numbers[rows_B] = self._writers[rows_B] = NONE
        self._pins[rows_B] -= 1
        self._recycle(rows_B)

    def pin(self, session: int, rows_B: Integers) -> int:
        """Keep rows unchanged until `unpin`. Return a ticket."""
        self.check(session)
        rows_B = np.unique(rows_B)
        self._pins[rows_B] += 1
        ticket = next(self._ticket_numbers)
        self._tickets[ticket] = (session, rows_B)
        return ticket

    def unpin(self, ticket: int) -> None:
        """Return a ticket; one that was returned before has no effect."""
        if ticket in self._tickets:
            _, rows_B = self._tickets.pop(ticket)
            self._pins[rows_B] -= 1
            self._recycle(rows_B)

    def written_by(self, session: int) -> Integers:
        """Return the rows that a session has not finished to write."""
        return np.flatnonzero(self._writers == session)

    def numbers(self, rows_B: Integers) -> Integers:
        """Return the reservations that are written into rows."""
        return self._numbers[rows_B]

    def end_session(self, session: int) -> None:
        """Free what a session read or wrote; it has ended."""
        self._ended.add(session)
        self.end_writes(self.written_by(session))
        for ticket in [ticket for ticket, (owner, _) in self._tickets.items() if owner == session]:
            self.unpin(ticket)

    def describe(self) -> str:
        """Return who holds rows, for messages."""
        num_written = int(np.count_nonzero(self._numbers >= 0))
        num_read = len({int(row) for _, rows in self._tickets.values() for row in rows})
        return f"writers hold {num_written} rows, readers {num_read}"

    def _recycle(self, rows_B: Integers) -> None:
        for row in rows_B[(self._pins[rows_B] == 0) & ~self._has_slot[rows_B]].tolist():
            self._free[row // self.per_shard].append(row)

    def check(self, session: int) -> None:
        """Refuse a session that has ended."""
        if session in self._ended:
            raise ReplayClosedError("the client has ended.")
