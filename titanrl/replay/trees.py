"""`PriorityTree`: sums and minima over many leaves, for drawing in proportion to priorities.

The tree has wide nodes with `FANOUT` children each; the root has up to `MAX_ROOT`. A few numpy calls then find or update
hundreds of leaves at a time. Parents are always recomputed from their children, so rounding errors do not accumulate. They are
recomputed lazily, when a sum is needed, so that several updates between two draws share the work.

Shape suffixes: B leaves of a call, F children of a node, N leaves of the tree.
"""

import numpy as np
import numpy.typing as npt

FANOUT = 16
"""Children of an inner node: a power of two."""
MAX_ROOT = 1 << 12
"""Maximum number of children of the root. A draw after an update sums all of them again."""
MAX_OUTDATED = 1 << 16
"""Maximum number of inner nodes waiting to be recomputed."""
SHIFT = FANOUT.bit_length() - 1

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Nodes = Integers | slice


class PriorityTree:
    """Nonnegative leaves with their total, their smallest positive value, and a search in their prefix sums."""

    def __init__(self, capacity: int) -> None:
        """Create a tree of zeros."""
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
        """Return leaves."""
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
        """Recompute the nodes that updates have outdated."""
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
    """Replace zeros by infinity."""
    return np.where(values > 0.0, values, np.inf)
