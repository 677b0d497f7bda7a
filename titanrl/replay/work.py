"""A work list shared by several writers. Each index is committed once, even if writers die."""

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from titanrl.replay.trees import Integers


class WorkList:
    """Indices from 0, each of which is available, reserved, or committed. The caller must hold a lock."""

    def __init__(self, num_items: int) -> None:
        """Create a list in which all indices are available."""
        self._num_items = num_items
        self._next = 0
        self._returned: list[int] = []  # a heap of indices whose reservation ended without a commit
        self._reserved: dict[int, int] = {}  # by sequence number of the reservation

    @property
    def num_available(self) -> int:
        """Indices that can be reserved."""
        return len(self._returned) + self._num_items - self._next

    @property
    def num_reserved(self) -> int:
        """Indices that writers have reserved."""
        return len(self._reserved)

    def take(self, numbers: Integers) -> Integers:
        """Assign one index to each reservation, returned indices first, in ascending order."""
        indices = []
        for number in numbers.tolist():
            if self._returned:
                index = heapq.heappop(self._returned)
            else:
                index, self._next = self._next, self._next + 1
            self._reserved[number] = index
            indices.append(index)
        return np.array(indices, np.int64)

    def finish(self, numbers: Integers) -> None:
        """Record that reservations were committed."""
        for number in numbers.tolist():
            self._reserved.pop(number, None)

    def recover(self, is_open: Callable[[Integers], npt.NDArray[np.bool_]]) -> None:
        """Make the indices of reservations that are no longer open available again."""
        numbers = np.fromiter(self._reserved, np.int64, len(self._reserved))
        for number in numbers[~is_open(numbers)].tolist():
            heapq.heappush(self._returned, self._reserved.pop(number))

    def state(self) -> dict[str, object]:
        """Return the remaining work. Reserved indices count as available."""
        return {"next": self._next, "returned": sorted([*self._returned, *self._reserved.values()])}

    def load(self, next_index: int, returned: list[int]) -> None:
        """Replace the remaining work."""
        self._next, self._returned, self._reserved = next_index, returned, {}  # a sorted list is a heap
