"""A prioritized replay buffer for one process. See `titanrl.replay.index` for formulas, `titanrl.replay.shared` for sharing."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy.typing as npt

from titanrl.replay.batches import ReplayBatch, ReplayOptions, ReplayStats
from titanrl.replay.columns import Columns, single
from titanrl.replay.index import ReplayIndex
from titanrl.replay.trees import Integers


class PrioritizedReplay:
    """A replay buffer that overwrites its oldest items when full. All methods can be called from several threads."""

    def __init__(self, capacity: int, **options: Unpack[ReplayOptions]) -> None:
        """Create an empty buffer.

        Args:
            capacity: Number of slots.
            **options: See `ReplayOptions`.
        """
        self._index = ReplayIndex(capacity, **options)
        self._columns = Columns(capacity)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def alpha(self) -> float:
        """Exponent of priorities. Setting it recomputes every leaf from its priority."""
        return self._index.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._index.alpha = value

    @property
    def beta(self) -> float:
        """Exponent of importance weights at the current learner step."""
        return self._index.beta

    @property
    def step(self) -> int:
        """Learner step, which determines beta."""
        return self._index.step

    def set_step(self, step: int) -> None:
        """Set the learner step. Several learners may report the same step; beta advances once."""
        self._index.set_step(step)

    @property
    def version(self) -> int:
        """Newest policy version that was set."""
        return self._index.version

    def set_version(self, version: int) -> None:
        """Set the policy version. Items older than `max_staleness` allows are no longer sampled.

        A version older than the current one has no effect.
        """
        self._index.set_version(version)

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
        with self._index.changed:
            num_items = self._columns.check(payload)
            return self._index.append(
                num_items, priorities, versions, lambda slots, part: self._columns.write(slots, payload, part)
            )

    def reserve(self, num_items: int, *, lease_s: float | None = None) -> Integers:
        """Reserve slots and return their handles. The oldest items are removed. A reserved item is sampled after its commit.

        Args:
            num_items: Number of slots.
            lease_s: Seconds after which an uncommitted reservation expires; a later commit is stale. None disables expiry.
        """
        return self._index.reserve(num_items, lease_s)

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
        with self._index.changed:
            numbers = self._index.checked_handles(handles)
            if self._columns.check(payload) != len(numbers):
                raise ValueError(f"handles: must contain each item's handle once (got {len(numbers)} handles).")
            is_open = self._index.commit(
                numbers, priorities, versions, lambda slots, part: self._columns.write(slots, payload, part)
            )
            return len(numbers) - int(is_open.sum())

    def release(self, handles: npt.ArrayLike) -> int:
        """Remove items and reservations. Return the number of handles that had already been removed or overwritten."""
        return self._index.release(handles)

    def sample(self, batch_size: int, *, timeout_s: float = 0.0) -> ReplayBatch:
        """Draw items with replacement, in proportion to their leaves.

        Args:
            batch_size: Number of items.
            timeout_s: Maximum wait until an item can be sampled.

        Raises:
            EmptyReplayError: No item could be sampled in time. The message says whether items are missing, too old, or have
                priority 0.
        """
        with self._index.changed:
            draw = self._index.draw(batch_size, timeout_s)
            payload = self._columns.read(draw.handles % self._index.capacity)
        return ReplayBatch(payload, draw.handles, draw.weights, draw.probabilities, draw.versions)

    def update_priorities(self, handles: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """Set the priorities of items to the absolute values given. The last priority of a repeated handle wins.

        Returns:
            Number of handles whose item was overwritten or released. They have no effect.
        """
        return self._index.update_priorities(handles, priorities)

    def stats(self) -> ReplayStats:
        """Return the counters."""
        return self._index.stats(self._columns.num_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that determines the next draws, and of the payload."""
        with self._index.changed:
            state = self._index.state_dict()
            return {**state, "payload": self._columns.state(len(state["owners"]))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace contents, settings, counters and the state of the random number generator.

        Raises:
            ValueError: The capacities differ.
        """
        with self._index.changed:
            self._index.check_state(state)
            self._columns.load(state["payload"])
            self._index.load_state_dict(state)
