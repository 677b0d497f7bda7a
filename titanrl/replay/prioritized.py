"""A prioritized replay buffer for one process, and its index, without payload, that `titanrl.replay.shared` shares.

Prioritized experience replay (Schaul et al., 2016, arXiv:1511.05952) with exact probabilities and unique handles. Item i has a
leaf (|p_i| + eps)^alpha in a tree. It is drawn with probability P_i = leaf_i / sum of leaves, and its importance weight is
(N P_i)^-beta divided by the largest such weight of the buffer, which is (leaf_i / smallest leaf)^-beta.

Every item has a 64-bit sequence number, its handle. Its slot is this number modulo the capacity. Each slot stores the number of
its item, so a priority update that arrives after the item was overwritten has no effect.

Shape suffixes: B leaves of a call, F children of a node, N leaves of the tree.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from titanrl.base.arguments import check_count, check_number, shown
from titanrl.replay.batches import Columns, EmptyReplayError, Floats, Integers, ReplayBatch, ReplayOptions, ReplayStats, single

FANOUT = 16
"""Children of an inner node: a power of two."""
MAX_ROOT = 1 << 12
"""Maximum number of children of the root. A draw after an update sums all of them again."""
MAX_OUTDATED = 1 << 16
"""Maximum number of inner nodes waiting to be recomputed."""
SHIFT = FANOUT.bit_length() - 1

Nodes = Integers | slice
NO_ITEM = -1
ANY_VERSION = int(np.iinfo(np.int64).min)
_ALPHA_FIX = "Use a finite number of at least 0."
Store = Callable[[Integers | slice, Integers | slice], None]
"""Function that writes the payload of slots. Its second argument selects the items from the caller's payload."""

logger = logging.getLogger(__name__)


class PriorityTree:
    """Nonnegative leaves with their total, their smallest positive value, and a search in their prefix sums.

    The tree has wide nodes with `FANOUT` children each; the root has up to `MAX_ROOT`. A few numpy calls then find or update
    hundreds of leaves at a time. Parents are always recomputed from their children, so rounding errors do not accumulate. They
    are recomputed lazily, when a sum is needed, so that several updates between two draws share the work.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sums_NF = [np.zeros((-(-capacity // FANOUT), FANOUT))]  # leaves first; the last level is the root
        while self._sums_NF[-1].size > MAX_ROOT:
            num_nodes = len(self._sums_NF[-1])
            self._sums_NF.append(np.zeros((-(-num_nodes // FANOUT), FANOUT)))
        self._minima_NF = [np.full(level.shape, np.inf) for level in self._sums_NF[1:]]  # of the inner nodes
        self._leaves = self._sums_NF[0].reshape(-1)[:capacity]
        self._outdated: list[Integers] = []  # inner nodes to be recomputed, with their parents
        self._num_outdated = 0
        self._prefix: Floats | None = None  # of the root, until the next update
        self._minimum: float | None = None

    def __getitem__(self, index_B: Integers | slice) -> Floats:
        return _select(self._leaves, index_B)

    def __setitem__(self, index_B: Integers | slice, values_B: Floats | float) -> None:
        """Set leaves. The last value of a repeated index wins."""
        self._leaves[index_B] = values_B
        self._prefix = self._minimum = None
        if isinstance(index_B, slice):
            self._recompute(_parents(slice(*index_B.indices(self._capacity))))
        elif self._minima_NF:
            self._outdated.append(index_B >> SHIFT)
            self._num_outdated += len(index_B)
            if self._num_outdated > MAX_OUTDATED:
                self._refresh()

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._root_prefix()[-1])

    @property
    def minimum(self) -> float:
        """Smallest positive leaf; infinity if all leaves are zero."""
        if self._minimum is None:
            self._refresh()
            self._minimum = float((self._minima_NF[-1] if self._minima_NF else _positive(self._leaves)).min())
        return self._minimum

    def find(self, sums_B: Floats) -> Integers:
        """Return, for each of `sums_B`, the first leaf whose inclusive prefix sum exceeds it.

        For a sum of `total` or more, this is the last positive leaf. A leaf of zero is never returned.
        """
        prefix = self._root_prefix()
        assert prefix[-1] > 0.0, "no leaf is positive"
        sums_B = np.minimum(sums_B, np.nextafter(prefix[-1], 0.0))
        nodes_B = prefix.searchsorted(sums_B, side="right")
        before_B = np.where(nodes_B > 0, prefix[nodes_B - 1], 0.0)
        for level_NF in self._sums_NF[-2::-1]:
            prefix_BF = level_NF.take(nodes_B, axis=0)
            np.add.accumulate(prefix_BF, axis=1, out=prefix_BF)
            # Rounding can raise a remaining sum to the sum of the node.
            sums_B = np.minimum(sums_B - before_B, np.nextafter(prefix_BF[:, -1], 0.0))
            children_B = (prefix_BF > sums_B[:, None]).argmax(axis=1)
            nodes_B = (nodes_B << SHIFT) + children_B
            if level_NF is not self._sums_NF[0]:
                before_B = np.where(children_B > 0, prefix_BF[np.arange(len(children_B)), children_B - 1], 0.0)
        return nodes_B

    def _refresh(self) -> None:
        if self._outdated:
            self._recompute(np.concatenate(self._outdated))
            self._outdated, self._num_outdated = [], 0

    def _recompute(self, nodes: Nodes) -> None:
        """Recompute inner nodes of the lowest level and all their ancestors."""
        for level, minima_NF in enumerate(self._minima_NF):
            children_BF = _select(self._sums_NF[level], nodes)
            self._sums_NF[level + 1].reshape(-1)[nodes] = np.add.reduce(children_BF, axis=1)
            smallest_BF = _select(self._minima_NF[level - 1], nodes) if level else _positive(children_BF)
            minima_NF.reshape(-1)[nodes] = np.minimum.reduce(smallest_BF, axis=1)
            nodes = _parents(nodes)

    def _root_prefix(self) -> Floats:
        if self._prefix is None:
            self._refresh()
            self._prefix = np.add.accumulate(self._sums_NF[-1].reshape(-1))
        return self._prefix


def _select(rows: Floats, index: Nodes) -> Floats:
    """Select rows. For index arrays, `take` is faster than indexing, because it copies entire rows."""
    return rows[index] if isinstance(index, slice) else rows.take(index, axis=0)


def _parents(nodes: Nodes) -> Nodes:
    if isinstance(nodes, slice):
        return slice(nodes.start >> SHIFT, ((nodes.stop - 1) >> SHIFT) + 1)
    return nodes >> SHIFT


def _positive(values: Floats) -> Floats:
    return np.where(values > 0.0, values, np.inf)


class ReplayIndex:
    """Slots of a buffer that overwrites its oldest items when full. All methods can be called from several threads."""

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta: float | tuple[float, float] = (0.4, 1.0),
        beta_steps: int = 100_000,
        eps: float = 1e-8,
        initial_priority: float = 1.0,
        max_staleness: int | None = None,
        seed: int | np.random.Generator = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty index. `ReplayOptions` describes the options; `clock` returns the time for leases in seconds."""
        check_count("capacity", capacity, "Use at least 1.")
        check_count("beta_steps", beta_steps, "Use at least 1.")
        check_number("eps", eps, "Use a finite number of at least 0.", least=0.0)
        check_number("initial_priority", initial_priority, "Use a finite number above 0.", above=0.0)
        if max_staleness is not None:
            check_count("max_staleness", max_staleness, "Use at least 0, or None.", least=0)
        check_number("alpha", alpha, _ALPHA_FIX, least=0.0)
        self.capacity = capacity
        self.changed = threading.Condition()
        """Lock for all metadata. It is notified when items become available or reservations end."""
        self._beta_ends = beta if isinstance(beta, tuple) else (beta, beta)
        for value in self._beta_ends:
            check_number("beta", value, "Use numbers of at least 0.", least=0.0)
        self._beta_steps = beta_steps
        self._eps = eps
        self._alpha = alpha
        self._max_staleness = max_staleness
        self._step = self._version = 0
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._max_priority = initial_priority
        self.next = 0
        """Sequence number of the next item."""
        self._owners = np.full(capacity, NO_ITEM)  # by slot: number of the item, or `_reserved(number)` before its commit
        self._priorities = np.zeros(capacity)
        self._versions = np.zeros(capacity, np.int64)
        self._tree = PriorityTree(capacity)
        self._leases: list[tuple[float, int, int]] = []  # a heap of deadlines, with first and last number plus 1
        self._num_items = 0
        self._counts = {"committed": 0, "sampled": 0, "stale_updates": 0, "stale_commits": 0, "expired": 0}

    def __len__(self) -> int:
        return self._num_items

    @property
    def alpha(self) -> float:
        """Exponent of priorities. Setting it recomputes every leaf from its priority."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        check_number("alpha", value, _ALPHA_FIX, least=0.0)
        with self.changed:
            self._alpha = value
            is_sampled = (self._owners >= 0) & (self._versions >= self._oldest_version)
            self._tree[:] = np.where(is_sampled, self._leaves(self._priorities), 0.0)

    @property
    def beta(self) -> float:
        """Exponent of importance weights at the current learner step."""
        first, last = self._beta_ends
        share = min(self._step / self._beta_steps, 1.0)
        return last if share == 1.0 else first + (last - first) * share

    @property
    def step(self) -> int:
        """Learner step, which determines beta."""
        return self._step

    def set_step(self, step: int) -> None:
        """Set the learner step. Several learners may report the same step; beta advances once."""
        check_count("step", step, "Use the number of optimizer steps.", least=0)
        self._step = step

    @property
    def version(self) -> int:
        """Newest policy version that was set."""
        return self._version

    def set_version(self, version: int) -> None:
        """Set the policy version. Items older than `max_staleness` allows are no longer sampled.

        A version older than the current one has no effect.
        """
        check_count("version", version, "Use the number of published versions.", least=0)
        with self.changed:
            before, self._version = self._oldest_version, max(version, self._version)
            if self._oldest_version > before:
                is_late = (self._owners >= 0) & (self._versions >= before) & (self._versions < self._oldest_version)
                self._tree[np.flatnonzero(is_late)] = 0.0

    def append(
        self, num_items: int, priorities: npt.ArrayLike | None, versions: npt.ArrayLike | None, store: Store
    ) -> Integers:
        """Store new items in the next slots and return their handles."""
        with self.changed:
            values = self._checked_priorities(priorities, num_items)
            ages = self._checked_versions(versions, num_items)
            first = self.next
            for slots, part in self._spans(num_items):
                store(slots, part)
                numbers = self._claim(slots)
                self._admit(slots, numbers, values[part], ages[part])
            self.changed.notify_all()
            return np.arange(first, self.next)

    def reserve(self, num_items: int, *, lease_s: float | None = None) -> Integers:
        """Reserve slots and return their handles. The oldest items are removed. A reserved item is sampled after its commit.

        Args:
            num_items: Number of slots.
            lease_s: Seconds after which an uncommitted reservation expires; a later commit is stale. None disables expiry.
        """
        self.check_count(num_items)
        if lease_s is not None:
            check_number("lease_s", lease_s, "Use a number of seconds above 0, or None.", above=0.0)
        with self.changed:
            first = self.next
            for slots, _ in self._spans(num_items):
                self._claim(slots)
                self._tree[slots] = 0.0
            if lease_s is not None:
                heapq.heappush(self._leases, (self._clock() + lease_s, first, self.next))
            return np.arange(first, self.next)

    def skip_to(self, number: int) -> None:
        """Give the next item this sequence number. Remove the oldest items like the items that would have had the others."""
        with self.changed:
            for slots, _ in self._spans(number - self.next):
                self._claim(slots)
                self._owners[slots] = NO_ITEM
                self._tree[slots] = 0.0

    def complete(
        self,
        handles: npt.ArrayLike,
        priorities: npt.ArrayLike | None,
        versions: npt.ArrayLike | None,
        store: Store,
        is_written: npt.NDArray[np.bool_] | bool = True,
    ) -> npt.NDArray[np.bool_]:
        """Store the items of reservations, so that they can be sampled. Return a mask of the reservations that were open.

        Args:
            handles: Sequence numbers without duplicates.
            priorities: One per item; by default the highest priority so far.
            versions: Policy version, one for all items or one per item; by default the current version.
            store: Function that writes the payload of the open slots.
            is_written: Mask of the handles to commit; the others are treated as stale.
        """
        with self.changed:
            self.expire()
            numbers = self.checked_handles(handles)
            values = self._checked_priorities(priorities, len(numbers))
            ages = self._checked_versions(versions, len(numbers))
            if len(np.unique(numbers)) != len(numbers):
                raise ValueError(f"handles: must contain each item's handle once (got {len(numbers)} handles).")
            is_open = self.is_open(numbers) & is_written
            positions = np.flatnonzero(is_open)
            if len(positions):
                slots = numbers[positions] % self.capacity
                store(slots, positions)
                self._admit(slots, numbers[positions], values[positions], ages[positions])
            self._counts["stale_commits"] += len(numbers) - len(positions)
            self.changed.notify_all()
            return is_open

    def release(self, handles: npt.ArrayLike) -> int:
        """Remove items and reservations. Return the number of handles that had already been removed or overwritten."""
        with self.changed:
            self.expire()
            numbers = np.unique(self.checked_handles(handles))
            slots = numbers % self.capacity
            slots = slots[(self._owners[slots] == numbers) | self.is_open(numbers)]
            self._num_items -= int(np.count_nonzero(self._owners[slots] >= 0))
            self._owners[slots] = NO_ITEM
            self._tree[slots] = 0.0
            self.changed.notify_all()
            return len(numbers) - len(slots)

    def end_leases(self, numbers: Integers) -> None:
        """Remove the reservations that are still open, and count them as expired."""
        with self.changed:
            numbers = numbers[self.is_open(numbers)]
            self._owners[numbers % self.capacity] = NO_ITEM
            self._counts["expired"] += len(numbers)
            self.changed.notify_all()

    def expire(self) -> None:
        """Remove reservations whose lease has expired."""
        while self._leases and self._leases[0][0] <= self._clock():
            _, first, end = heapq.heappop(self._leases)
            self.end_leases(np.arange(first, end))

    def next_expiry_s(self) -> float:
        """Return the seconds until the next lease can expire; infinity without leases."""
        return self._leases[0][0] - self._clock() if self._leases else np.inf

    def is_open(self, numbers: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask of the reservations that are neither committed nor removed."""
        is_open: npt.NDArray[np.bool_] = self._owners[numbers % self.capacity] == _reserved(numbers)
        return is_open

    def items(self) -> Integers:
        """Return the sequence numbers of all items."""
        return self._owners[self._owners >= 0]

    def draw(self, batch_size: int, timeout_s: float, read: Callable[[Integers], Any]) -> ReplayBatch:
        """Draw items as `PrioritizedReplay.sample` does. The payload of the batch is what `read` returns for their slots."""
        check_count("batch_size", batch_size, "Use at least 1.")
        check_number("timeout_s", timeout_s, "Use a number of seconds.")
        with self.changed:
            if not self._can_sample():
                if timeout_s > 0.0:
                    logger.info("sample waits up to %g s: %s", timeout_s, self._why_empty())
                if not self.changed.wait_for(self._can_sample, timeout_s):
                    raise EmptyReplayError(
                        f"sample: nothing to sample after {timeout_s:g} s: {self._why_empty()}. "
                        "Write items first, or pass a longer timeout_s."
                    )
            tree = self._tree
            slots = tree.find(self._rng.random(batch_size) * tree.total)
            leaves = tree[slots]
            weights = ((leaves / tree.minimum) ** -self.beta).astype(np.float32)
            self._counts["sampled"] += batch_size
            return ReplayBatch(read(slots), self._owners[slots], weights, leaves / tree.total, self._versions[slots])

    def draw_distinct(self, limit: int) -> tuple[Integers, Floats]:
        """Draw up to `limit` different items, one after another, each in proportion to its leaf among the remaining ones.

        Returns:
            Their handles, and their importance weights, in which P_i is the probability of the first draw. Items with priority
            0, which are hardly ever drawn, have weight 1, and do not reduce the weights of the others.
        """
        with self.changed:
            tree, leaves = self._tree, self._tree[:].copy()
            minimum = min(leaves[(self._priorities > 0.0) & (leaves > 0.0)].tolist(), default=tree.minimum)
            weights = (np.maximum(leaves, minimum) / minimum) ** -self.beta
            slots = []
            for uniform in self._rng.random(min(limit, int(np.count_nonzero(leaves)))):
                slots.append(int(tree.find(np.array([uniform * tree.total]))[0]))
                tree[np.array(slots[-1:])] = 0.0
            drawn = np.array(slots, np.int64)
            tree[drawn] = leaves[drawn]
            self._counts["sampled"] += len(drawn)
            return self._owners[drawn], weights[drawn]

    def update_priorities(self, handles: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """Set the priorities of items to the absolute values given. The last priority of a repeated handle wins.

        Returns:
            Number of handles whose item was overwritten or released. They have no effect.
        """
        with self.changed:
            numbers = self.checked_handles(handles)
            values = self._checked_priorities(priorities, len(numbers))
            slots = numbers % self.capacity
            is_current = self._owners[slots] == numbers
            num_stale = len(numbers) - int(np.count_nonzero(is_current))
            if num_stale:
                slots, values = slots[is_current], values[is_current]
                self._counts["stale_updates"] += num_stale
            if len(slots):
                self._set_priorities(slots, values)
                self.changed.notify_all()
            return num_stale

    def counters(self, num_bytes: int) -> ReplayStats:
        """Return the counters; `num_bytes` is the size of the payload."""
        with self.changed:
            self.expire()
            counts = {f"num_{name}": count for name, count in self._counts.items()}
            return ReplayStats(
                num_items=self._num_items, capacity=self.capacity, num_reserved=self.next, num_bytes=num_bytes, **counts
            )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that determines the next draws."""
        with self.changed:
            num_slots = min(self.next, self.capacity)
            return {
                "capacity": self.capacity,
                "alpha": self._alpha,
                "eps": self._eps,
                "beta": self._beta_ends,
                "beta_steps": self._beta_steps,
                "max_staleness": self._max_staleness,
                "step": self._step,
                "version": self._version,
                "max_priority": self._max_priority,
                "next": self.next,
                "counts": dict(self._counts),
                "rng": self._rng.bit_generator.state,
                "leases": [(deadline - self._clock(), first, end) for deadline, first, end in self._leases],
                "owners": self._owners[:num_slots].copy(),
                "priorities": self._priorities[:num_slots].copy(),
                "versions": self._versions[:num_slots].copy(),
                "leaves": self._tree[:num_slots].copy(),  # a power can differ in the last bit when computed again
            }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a saved state fits this buffer. Raise `ValueError` if the capacities differ."""
        given: object = state
        if not (isinstance(given, Mapping) and "capacity" in given):
            raise ValueError("state: not the state of a replay buffer. Use what state_dict() returned.")
        if (saved := state["capacity"]) != self.capacity:
            raise ValueError(f"capacity: invalid value (got {self.capacity}). Use {saved}, as in the saved buffer.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace metadata, settings, counters and the state of the random number generator."""
        with self.changed:
            num_slots = len(state["owners"])
            self._alpha, self._eps, self._beta_ends = state["alpha"], state["eps"], tuple(state["beta"])
            self._beta_steps, self._step = state["beta_steps"], state["step"]
            self._max_staleness, self._version = state["max_staleness"], state["version"]
            self._max_priority, self.next = state["max_priority"], state["next"]
            self._counts = dict(state["counts"])
            self._rng.bit_generator.state = state["rng"]
            self._leases = [(self._clock() + left_s, first, end) for left_s, first, end in state["leases"]]  # still a heap
            self._owners[:], self._priorities[:], self._versions[:] = NO_ITEM, 0.0, 0
            self._owners[:num_slots] = state["owners"]
            self._priorities[:num_slots] = state["priorities"]
            self._versions[:num_slots] = state["versions"]
            self._num_items = int(np.count_nonzero(self._owners >= 0))
            self._tree = PriorityTree(self.capacity)
            self._tree[:num_slots] = state["leaves"]
            self.changed.notify_all()

    def checked_handles(self, handles: npt.ArrayLike) -> Integers:
        """Return handles as an array. Raise `ValueError` if they are not handles of this buffer."""
        numbers = _as_array("handles", handles, np.int64, "Use handles returned by extend, reserve or sample.")
        if numbers.ndim != 1 or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.next):
            raise ValueError("handles: not handles of this buffer. Use handles returned by extend, reserve or sample.")
        return numbers

    def check_count(self, num_items: int) -> None:
        """Check the size of a reservation."""
        check_count("num_items", num_items, f"Use 1 to {self.capacity}.", most=self.capacity)

    @property
    def _oldest_version(self) -> int:
        return ANY_VERSION if self._max_staleness is None else self._version - self._max_staleness

    def _spans(self, num_items: int) -> Iterator[tuple[slice, slice]]:
        """Yield contiguous slots for the next items and the matching slice of the items; split where the slots wrap."""
        done = 0
        while done < num_items:
            slot = self.next % self.capacity
            count = min(num_items - done, self.capacity - slot)
            yield slice(slot, slot + count), slice(done, done + count)
            done += count

    def _claim(self, slots: slice) -> Integers:
        numbers = np.arange(self.next, self.next + slots.stop - slots.start)
        self._num_items -= int(np.count_nonzero(self._owners[slots] >= 0))
        self._owners[slots] = _reserved(numbers)
        self.next += len(numbers)
        return numbers

    def _admit(self, slots: Integers | slice, numbers: Integers, priorities: Floats, versions: Integers) -> None:
        self._owners[slots] = numbers
        self._versions[slots] = versions
        self._num_items += len(numbers)
        self._counts["committed"] += len(numbers)
        self._set_priorities(slots, priorities)

    def _set_priorities(self, slots: Integers | slice, priorities: Floats) -> None:
        self._priorities[slots] = priorities
        self._max_priority = max(self._max_priority, float(priorities.max()))
        leaves = self._leaves(priorities)
        if self._max_staleness is not None:
            leaves = np.where(self._versions[slots] >= self._oldest_version, leaves, 0.0)
        self._tree[slots] = leaves

    def _leaves(self, priorities: Floats) -> Floats:
        leaves: Floats = (priorities + self._eps) ** self._alpha
        return np.where(priorities + self._eps > 0.0, leaves, 0.0) if self._eps == 0.0 else leaves

    def _can_sample(self) -> bool:
        return self._tree.minimum < np.inf

    def _why_empty(self) -> str:
        if not self._num_items:
            return f"no item was committed ({int(np.count_nonzero(self._owners < NO_ITEM))} are reserved)"
        newest = int(self._versions[self._owners >= 0].max())
        if newest < self._oldest_version:
            return (
                f"all {self._num_items} items are too old (newest: version {newest}; current version {self._version}, "
                f"max_staleness {self._max_staleness})"
            )
        return "every priority is 0 and eps is 0"

    def _checked_priorities(self, priorities: npt.ArrayLike | None, count: int) -> Floats:
        if priorities is None:
            return np.full(count, self._max_priority)
        values: Floats = np.abs(_as_array("priorities", priorities, np.float64, "Use one number per item."))
        if values.shape != (count,):
            raise ValueError(f"priorities: must have one value per item (got shape {list(values.shape)} for {count} items).")
        if count and not values.max() < np.inf:
            raise ValueError("priorities: all values must be finite. Check the loss from which they are computed.")
        return values

    def _checked_versions(self, versions: npt.ArrayLike | None, count: int) -> Integers:
        given = self._version if versions is None else versions
        values = _as_array("versions", given, np.int64, "Use the policy version of the items, or one per item.")
        if values.shape not in {(), (count,)}:
            raise ValueError(f"versions: must be one value or one per item (got shape {list(values.shape)} for {count} items).")
        return np.broadcast_to(values, (count,))


class PrioritizedReplay(ReplayIndex):
    """A replay buffer that overwrites its oldest items when full. All methods can be called from several threads."""

    def __init__(self, capacity: int, **options: Unpack[ReplayOptions]) -> None:
        """Create an empty buffer of `capacity` slots. `ReplayOptions` describes the options."""
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
        return self.draw(batch_size, timeout_s, self._columns.read)

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

        Raise `ValueError` if the capacities differ.
        """
        with self.changed:
            self.check_state(state)
            self._columns.load(state["payload"])
            super().load_state_dict(state)


def _reserved(numbers: Integers) -> Integers:
    """Encode the owners of slots whose items are not committed, as numbers below `NO_ITEM`."""
    return NO_ITEM - 1 - numbers


def _as_array(key: str, values: npt.ArrayLike, dtype: type[Any], fix: str) -> npt.NDArray[Any]:
    """Return numbers as a new array. Raise `TypeError` if they are not numbers."""
    try:
        found = np.array(values)
    except ValueError:  # lists of different lengths
        found = np.array(None)
    if not np.issubdtype(found.dtype, np.number):
        raise TypeError(f"{key}: not numbers (got {shown(values)}). {fix}")
    return found.astype(dtype)
