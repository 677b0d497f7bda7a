"""Replay memory: stores groups that were trained on, and draws some of them for the next batch.

A batch's groups are drawn without replacement from a `ReplayIndex` of the groups that are neither too old nor used too often.
The draws depend only on the order of the groups, not on the storage shards that hold their tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanrl.carriers.tables import PackedRecord
from titanrl.carriers.types import GroupHandle
from titanrl.config.sections import ReplayConfig
from titanrl.replay.prioritized import ReplayIndex

EPS = 1e-6
"""Term added to priorities, so that a group with priority 0 can be drawn."""


@dataclass(slots=True, kw_only=True)
class Stored:
    """A group in the memory."""

    handle: GroupHandle
    """Location of its tokens."""
    record: PackedRecord
    min_version: int
    """Oldest policy version among its sampled tokens."""
    priority: float
    num_uses: int = 1
    """Number of batches that contained it."""


class ReplayMemory:
    """Stored groups, oldest first."""

    def __init__(self, config: ReplayConfig, num_replayed: int, seed: int) -> None:
        """Create an empty memory, of which each batch draws up to `num_replayed` groups."""
        self._config, self._num_replayed = config, num_replayed
        self._groups: dict[int, Stored] = {}  # by slot
        self._in_use: Counter[int] = Counter()  # slots of groups in unreleased batches
        self._lost: set[int] = set()  # slots of such groups whose tokens are lost
        self._rng = np.random.default_rng(seed)
        self.num_evicted = 0
        """Groups that were removed to make room for newer ones."""

    @property
    def capacity(self) -> int:
        """Maximum number of groups."""
        return self._config.capacity

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, handle: GroupHandle) -> bool:
        stored = self._groups.get(handle.slot)
        return stored is not None and stored.handle == handle

    def draw(self, version: int, beta: float) -> list[PackedRecord]:
        """Draw up to `num_replayed` eligible groups for a batch that trains the weights of `version`.

        Each returned record has its importance weight, with the exponent `beta`.
        """
        config = self._config
        oldest, most_uses = version - config.max_age, config.max_uses or np.inf
        eligible = [
            group
            for slot, group in self._groups.items()
            if group.min_version >= oldest and group.num_uses < most_uses and slot not in self._lost
        ]
        if not eligible:
            return []
        if config.priority == "recency":  # of the time of the draw
            priorities = [1.0 / (1.0 + version - group.min_version) for group in eligible]
        else:
            priorities = [group.priority for group in eligible]
        index = ReplayIndex(len(eligible), alpha=config.alpha, beta=beta, eps=EPS, seed=self._rng)
        index.append(len(eligible), priorities, None, lambda slots, part: None)
        drawn = []
        for number, weight in zip(*(values.tolist() for values in index.draw_distinct(self._num_replayed)), strict=True):
            group = eligible[number]
            group.num_uses += 1
            self._in_use[group.handle.slot] += 1
            drawn.append(group.record.with_weight(weight))
        return drawn

    def release(self, handle: GroupHandle, priority: float | None) -> None:
        """Record that a batch no longer uses a drawn group; store the group's new priority, if given."""
        assert self._in_use[handle.slot] > 0, "a group was released that no batch contains"
        self._in_use[handle.slot] -= 1
        if priority is not None:
            self._groups[handle.slot].priority = priority

    def add(self, groups: Iterable[Stored]) -> list[GroupHandle]:
        """Store groups; return the removed groups: lost ones, then the oldest ones. Groups in unreleased batches stay."""
        self._groups |= {group.handle.slot: group for group in groups}
        gone = [slot for slot in self._lost if not self._in_use[slot]]
        self._lost.difference_update(gone)
        lost = [self._groups.pop(slot).handle for slot in gone]
        excess = len(self._groups) - self.capacity
        evicted = [group.handle for slot, group in self._groups.items() if not self._in_use[slot]][: max(excess, 0)]
        for handle in evicted:
            del self._groups[handle.slot]
        self.num_evicted += len(evicted)
        return [*lost, *evicted]

    def lose_shard(self, shard: int) -> list[GroupHandle]:
        """Remove the groups whose tokens a lost shard held; return them. A later `add` removes those in unreleased batches."""
        self._lost |= {slot for slot, group in self._groups.items() if group.handle.shard == shard}
        return self.add(())

    def begin_use(self, handles: Iterable[GroupHandle]) -> None:
        """Mark groups as used by unreleased batches, as after a resume. Ignore handles that are not in the memory."""
        self._in_use.update(handle.slot for handle in handles if handle in self)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that determines the next draws."""
        kept = [group for slot, group in self._groups.items() if slot not in self._lost]
        return {"groups": kept, "rng": self._rng.bit_generator.state, "num_evicted": self.num_evicted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents with a state from `state_dict` that has at most `capacity` groups."""
        self._groups = {group.handle.slot: group for group in state["groups"]}
        assert len(self._groups) <= self.capacity, "more groups than fit"
        self._in_use.clear()
        self._lost.clear()
        self._rng.bit_generator.state, self.num_evicted = state["rng"], state["num_evicted"]
