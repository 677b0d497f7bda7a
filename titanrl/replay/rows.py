"""Row allocation for the storage shards of a shared buffer, which tracks the item, writer and readers of each row.

A row is reused only after every session that may access it has released it or ended. A writer whose lease expired can therefore
finish its copy safely, and a reader never sees a row that another writer overwrites.

Shape suffixes: B rows or numbers of a call.
"""

import itertools

import numpy as np
import numpy.typing as npt

from titanrl.replay.batches import ReplayClosedError
from titanrl.replay.trees import Integers

NONE = -1


def rows_per_shard(capacity: int, num_shards: int, spare: int) -> int:
    """Return the number of rows per shard for a full buffer and `spare` additional rows being written or read."""
    return -(-capacity // num_shards) + -(-spare // num_shards)


class Rows:
    """Assignment of rows to items. Row r is in shard `r // per_shard`. The caller must hold a lock."""

    def __init__(self, capacity: int, num_shards: int, spare: int) -> None:
        """Create the rows, all of them free."""
        self.per_shard = rows_per_shard(capacity, num_shards, spare)
        self._capacity = capacity
        self._num_shards = num_shards
        num_rows = num_shards * self.per_shard
        self._row_of = np.full(capacity, NONE)  # by slot
        self._has_slot = np.zeros(num_rows, np.bool_)
        self._pins = np.zeros(num_rows, np.int64)  # writers and readers of each row
        self._numbers = np.full(num_rows, NONE)  # reservations being written
        self._writers = np.full(num_rows, NONE)  # their sessions
        # Each list is a stack, so that a buffer touches few pages.
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
        """Return the number of rows that are missing to reserve these sequence numbers."""
        old_B = self._row_of[numbers_B % self._capacity]
        old_B = old_B[old_B >= 0]
        reclaimed = np.bincount(old_B[self._pins[old_B] == 0] // self.per_shard, minlength=self._num_shards)
        needed = np.bincount(numbers_B % self._num_shards, minlength=self._num_shards)
        free = np.array([len(rows) for rows in self._free])
        return int(np.maximum(needed - free - reclaimed, 0).sum())

    def assign(self, session: int, numbers_B: Integers) -> Integers:
        """Assign rows to the reservations of a session, replacing the previous rows of their slots."""
        self.check(session)
        slots_B = numbers_B % self._capacity
        self.unlink(slots_B)
        shards_B = numbers_B % self._num_shards
        rows_B = np.empty_like(numbers_B)
        for shard, free in enumerate(self._free):
            positions = np.flatnonzero(shards_B == shard)
            if len(positions):
                rows_B[positions] = free[-len(positions) :]
                del free[-len(positions) :]
        self._row_of[slots_B] = rows_B
        self._has_slot[rows_B] = True
        self._pins[rows_B] = 1
        self._numbers[rows_B] = numbers_B
        self._writers[rows_B] = session
        return rows_B

    def unlink(self, slots_B: Integers) -> None:
        """Detach the rows of slots. A row that is being read or written becomes free afterwards."""
        rows_B = self._row_of[slots_B]
        rows_B = rows_B[rows_B >= 0]
        self._row_of[slots_B] = NONE
        self._has_slot[rows_B] = False
        self._recycle(rows_B)

    def is_written_by(self, numbers_B: Integers, rows_B: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask of rows that belong to these reservations and whose writers have not finished."""
        is_written: npt.NDArray[np.bool_] = self._numbers[rows_B] == numbers_B
        return is_written

    def end_writes(self, rows_B: Integers) -> None:
        """Record that the writers of rows have finished."""
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
        """Release a ticket. Releasing it again has no effect."""
        if ticket in self._tickets:
            _, rows_B = self._tickets.pop(ticket)
            self._pins[rows_B] -= 1
            self._recycle(rows_B)

    def written_by(self, session: int) -> Integers:
        """Return the rows that a session has not finished writing."""
        return np.flatnonzero(self._writers == session)

    def numbers(self, rows_B: Integers) -> Integers:
        """Return the sequence numbers of the reservations being written into rows."""
        return self._numbers[rows_B]

    def end_session(self, session: int) -> None:
        """End a session and release the rows that it was reading or writing."""
        self._ended.add(session)
        self.end_writes(self.written_by(session))
        for ticket in [ticket for ticket, (owner, _) in self._tickets.items() if owner == session]:
            self.unpin(ticket)

    def describe(self) -> str:
        """Return how many rows writers and readers hold, for messages."""
        num_written = int(np.count_nonzero(self._numbers >= 0))
        num_read = len({int(row) for _, rows in self._tickets.values() for row in rows})
        return f"writers hold {num_written} rows, readers {num_read}"

    def _recycle(self, rows_B: Integers) -> None:
        for row in rows_B[(self._pins[rows_B] == 0) & ~self._has_slot[rows_B]].tolist():
            self._free[row // self.per_shard].append(row)

    def check(self, session: int) -> None:
        """Refuse a session that has ended."""
        if session in self._ended:
            raise ReplayClosedError("the session of this client has ended.")
