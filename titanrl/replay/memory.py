"""Groups that were trained on and may be drawn again: which are kept, and which of them join the next batch.

Group i has a leaf p_i^alpha in a tree. The groups of a batch are drawn one after another, each in proportion to its leaf among
those that are left, so no group is in a batch twice. The importance weight of a group is (N P_i)^-beta divided by the largest
such weight of the groups that could be drawn, as in prioritized experience replay (arXiv:1511.05952), where P_i is the
probability of the first draw.

The order of the draws depends on the order of the groups alone, and not on the storage shards that hold their tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanrl.replay.trees import Floats, PriorityTree
from titanrl.tables import PackedRecord
from titanrl.types import GroupHandle

EPS = 1e-6
"""Addend of priorities, so that a group with priority 0 can be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of a memory; `ReplayConfig` describes those with the same name."""

    capacity: int
    num_replayed: int
    """Groups to draw for a batch."""
    alpha: float
    max_uses: int | None
    max_age: int
    by_recency: bool
    """True if the priority is 1 / (1 + age) at the time of the draw, whatever priority a group was stored with."""
    seed: int


@dataclass(slots=True, kw_only=True)
class Stored:
    """A group of the memory."""

    handle: GroupHandle
    """Location of its tokens."""
    record: PackedRecord
    min_version: int
    """Oldest policy version among its sampled tokens."""
    priority: float
    num_uses: int = 1
    """Batches that contained it."""


class ReplayMemory:
    """The stored groups, oldest first."""

    def __init__(self, settings: ReplaySettings) -> None:
        """Start empty."""
        self._settings = settings
        self._groups: dict[int, Stored] = {}  # by slot
        self._in_use: Counter[int] = Counter()  # slots of groups in batches that are not released
        self._lost: set[int] = set()  # slots of such groups whose tokens are gone
        self._rng = np.random.default_rng(settings.seed)
        self.num_evicted = 0
        """Groups that were removed because a newer one needed their place."""

    @property
    def capacity(self) -> int:
        """Largest number of groups."""
        return self._settings.capacity

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, handle: GroupHandle) -> bool:
        stored = self._groups.get(handle.slot)
        return stored is not None and stored.handle == handle

    def draw(self, version: int, beta: float) -> list[PackedRecord]:
        """Draw the replayed groups of a batch; fewer if fewer are eligible. Each record has its importance weight.

        Args:
            version: Version of the weights that the batch will train.
            beta: Exponent of the importance weights.
        """
        settings = self._settings
        oldest, most_uses = version - settings.max_age, settings.max_uses or np.inf
        eligible = [
            group
            for slot, group in self._groups.items()
            if group.min_version >= oldest and group.num_uses < most_uses and slot not in self._lost
        ]
        if not eligible:
            return []
        tree = PriorityTree(len(eligible))
        tree[:] = leaves = self._leaves(eligible, version)
        weights = (leaves / leaves.min()) ** -beta
        drawn = []
        for _ in range(min(settings.num_replayed, len(eligible))):
            index = int(tree.find(self._rng.random(1) * tree.total)[0])
            tree[np.array([index])] = 0.0
            group = eligible[index]
            group.num_uses += 1
            self._in_use[group.handle.slot] += 1
            drawn.append(group.record.with_weight(float(weights[index])))
        return drawn

    def release(self, handle: GroupHandle, priority: float | None) -> None:
        """End the use of a drawn group by a batch; store its new priority, if there is one."""
        assert self._in_use[handle.slot] > 0, "group released that no batch contains"
        self._in_use[handle.slot] -= 1
        if priority is not None:
            self._groups[handle.slot].priority = priority

    def add(self, groups: Iterable[Stored]) -> list[GroupHandle]:
        """Store groups, and return those that had to leave, oldest first. Groups of batches that are not released stay."""
        self._groups |= {group.handle.slot: group for group in groups}
        gone = [slot for slot in self._lost if not self._in_use[slot]]
        self._lost.difference_update(gone)
        lost = [self._groups.pop(slot).handle for slot in gone]
        excess = len(self._groups) - self._settings.capacity
        leaving = [group.handle for slot, group in self._groups.items() if not self._in_use[slot]][: max(excess, 0)]
        for handle in leaving:
            del self._groups[handle.slot]
        self.num_evicted += len(leaving)
        return [*lost, *leaving]

    def lose_shard(self, shard: int) -> list[GroupHandle]:
        """Forget the groups whose tokens a shard held; return them. Those of unreleased batches leave with a later `add`."""
        self._lost |= {slot for slot, group in self._groups.items() if group.handle.shard == shard}
        return self.add(())

    def begin_use(self, handles: Iterable[GroupHandle]) -> None:
        """Note that batches which are not released contain groups, as after a resume; ignore handles of other groups."""
        self._in_use.update(handle.slot for handle in handles if handle in self)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the next draws."""
        kept = [group for slot, group in self._groups.items() if slot not in self._lost]
        return {"groups": kept, "rng": self._rng.bit_generator.state, "num_evicted": self.num_evicted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by what `state_dict` returned, with at most `capacity` groups."""
        self._groups = {group.handle.slot: group for group in state["groups"]}
        assert len(self._groups) <= self.capacity, "more groups than fit"
        self._in_use.clear()
        self._lost.clear()
        self._rng.bit_generator.state, self.num_evicted = state["rng"], state["num_evicted"]

    def _leaves(self, groups: Sequence[Stored], version: int) -> Floats:
        if self._settings.by_recency:
            priorities = 1.0 / (1.0 + version - np.array([group.min_version for group in groups], np.float64))
        else:
            priorities = np.abs(np.array([group.priority for group in groups], np.float64))
        leaves: Floats = (priorities + EPS) ** self._settings.alpha
        return leaves
