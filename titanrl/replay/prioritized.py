"""A prioritized replay buffer for one process. See `titanrl.replay.index` for formulas, `titanrl.replay.shared` for sharing."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy.typing as npt

from titanrl.replay.batches import Integers, ReplayBatch, ReplayOptions, ReplayStats
from titanrl.replay.columns import Columns, single
from titanrl.replay.index import ReplayIndex


class PrioritizedReplay(ReplayIndex):
    """A replay buffer that overwrites its oldest items when full. All methods can be called from several threads."""

    def __init__(self, capacity: int, **options: Unpack[ReplayOptions]) -> None:
        """Create an empty buffer.

        Args:
            capacity: Number of slots.
            **options: See `ReplayOptions`.
        """
        super().__init__(capacity, **options)
        self._columns = Columns(capacity)

    def put(self, item: Any, priority: float | None = None, version: int | None = None) -> int:
        """Write one item: an array, a tensor, any object, or a dictionary of these. Return its handle."""
        return int(self.extend(single(item), None if priority is None else [priority], version)[0])

    def extend(self, payload: Any, priorities: npt.ArrayLike | None = None, versions: npt.ArrayLike | None = None) -> Integers:
        """Write items, overwriting the oldest ones, and return their handles.

        Args:
            payload: An array, a tensor or a list with one row per item, or a dictionary of these, nested to any depth.
            priorities: One per item; by default the highest priority so far.
            versions: Policy version that produced the items, one for all or one per item; by default the current version.
        """
        with self.changed:
            num_items = self._columns.check(payload)
            return self.append(num_items, priorities, versions, lambda slots, part: self._columns.write(slots, payload, part))

    def commit(
        self,
        handles: npt.ArrayLike,
        payload: Any,
        priorities: npt.ArrayLike | None = None,
        versions: npt.ArrayLike | None = None,
    ) -> int:
        """Write the items of reservations, so that they can be sampled.

        Returns:
            Number of stale handles: another writer has reserved the slot, the handle was released, or its lease expired. Their
            items are dropped.
        """
        with self.changed:
            numbers = self.checked_handles(handles)
            if self._columns.check(payload) != len(numbers):
                raise ValueError(f"handles: must contain each item's handle once (got {len(numbers)} handles).")
            is_open = self.complete(
                numbers, priorities, versions, lambda slots, part: self._columns.write(slots, payload, part)
            )
            return len(numbers) - int(is_open.sum())

    def sample(self, batch_size: int, *, timeout_s: float = 0.0) -> ReplayBatch:
        """Draw items with replacement, in proportion to their leaves.

        Args:
            batch_size: Number of items.
            timeout_s: Maximum wait until an item can be sampled.

        Raises:
            EmptyReplayError: No item could be sampled in time. The message says whether items are missing, too old, or have
                priority 0.
        """
        with self.changed:
            draw = self.draw(batch_size, timeout_s)
            payload = self._columns.read(draw.handles % self.capacity)
        return ReplayBatch(payload, draw.handles, draw.weights, draw.probabilities, draw.versions)

    def stats(self) -> ReplayStats:
        """Return the counters."""
        return self.counters(self._columns.num_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that determines the next draws, and of the payload."""
        with self.changed:
            state = super().state_dict()
            return {**state, "payload": self._columns.state(len(state["owners"]))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace contents, settings, counters and the state of the random number generator.

        Raises:
            ValueError: The capacities differ.
        """
        with self.changed:
            self.check_state(state)
            self._columns.load(state["payload"])
            super().load_state_dict(state)
