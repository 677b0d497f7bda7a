"""Indices of a list of work that several writers share: each is committed once, even if writers die."""

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from titanrl.replay.trees import Integers


class WorkList:
    """Indices from 0, each of them not given out yet, reserved, or committed. The caller holds a lock."""

    def __init__(self, num_items: int) -> None:
        """Start with all indices."""
        self._num_items = num_items
        self._next = 0
        self._returned: list[int] = []  # a heap of indices whose reservation ended without a commit
        self._reserved: dict[int, int] = {}  # by sequence number of the reservation

    @property
    def num_available(self) -> int:
        """Indices that can be given out."""
        return len(self._returned) + self._num_items - self._next

    @property
    def num_reserved(self) -> int:
        """Indices that writers work on."""
        return len(self._reserved)

    def take(self, numbers: Integers) -> Integers:
        """Give one index to each reservation, the smallest first."""
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
        """Note that reservations were committed."""
        for number in numbers.tolist():
            self._reserved.pop(number, None)

    def recover(self, is_open: Callable[[Integers], npt.NDArray[np.bool_]]) -> None:
        """Take back the indices of reservations that are no longer open."""
        numbers = np.fromiter(self._reserved, np.int64, len(self._reserved))
        for number in numbers[~is_open(numbers)].tolist():
            heapq.heappush(self._returned, self._reserved.pop(number))

    def state(self) -> dict[str, object]:
        """Return what is left to do; reserved indices are to be done again."""
        return {"next": self._next, "returned": sorted([*self._returned, *self._reserved.values()])}

    def load(self, next_index: int, returned: list[int]) -> None:
        """Replace what is left to do."""
        self._next, self._returned, self._reserved = next_index, returned, {}  # a sorted list is a heap
