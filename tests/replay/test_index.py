"""Sums, minima and searches of the tree of priorities."""

import numpy as np
import pytest

from titanrl.replay.prioritized import MAX_ROOT, PriorityTree

SIZES = [1, 63, 64, 65, MAX_ROOT, MAX_ROOT + 1, 64 * MAX_ROOT + 5]


@pytest.mark.parametrize("size", SIZES)
def test_search_agrees_with_prefix_sums_of_integers(size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.integers(0, 4, size).astype(float)
    values[-1] = 1.0
    tree = PriorityTree(size)
    tree[:] = values
    prefix = np.cumsum(values)  # exact, because the sums are integers
    sums = np.concatenate((rng.random(500) * prefix[-1], prefix[:200], prefix[-200:] - 1.0, [0.0]))
    sums = sums[(sums >= 0) & (sums < prefix[-1])]
    assert tree.total == prefix[-1]
    assert (tree.find(sums) == prefix.searchsorted(sums, side="right")).all()


@pytest.mark.parametrize("size", SIZES)
def test_sum_at_or_above_the_total_finds_the_last_positive_leaf(size: int) -> None:
    tree = PriorityTree(size)
    tree[: size // 2 + 1] = 0.1
    assert tree.find(np.array([tree.total, 2 * tree.total])).tolist() == [size // 2] * 2


def test_leaf_with_value_zero_is_never_found() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(sigma=4, size=100_000) * (rng.random(100_000) < 0.3)
    tree = PriorityTree(len(values))
    tree[:] = values
    found = tree.find(rng.random(200_000) * tree.total)
    assert (values[found] > 0).all()


def test_last_value_of_a_repeated_index_wins() -> None:
    tree = PriorityTree(10)
    tree[np.array([3, 5, 3])] = np.array([1.0, 2.0, 4.0])
    assert tree[:6].tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 2.0]
    assert (tree.total, tree.minimum) == (6.0, 2.0)


def test_minimum_ignores_zeros() -> None:
    tree = PriorityTree(100_000)
    assert tree.minimum == np.inf
    tree[np.array([7, 99_999])] = np.array([0.5, 0.25])
    assert tree.minimum == 0.25
    tree[np.array([99_999])] = np.zeros(1)
    assert tree.minimum == 0.5


def test_updates_do_not_accumulate_rounding_errors() -> None:
    rng = np.random.default_rng(1)
    tree, fresh = PriorityTree(100_000), PriorityTree(100_000)
    for scale in (1e12, 1e-12, 1.0) * 30:
        tree[rng.integers(0, 100_000, 4096)] = rng.random(4096) * scale
    fresh[:] = tree[:]
    assert (tree.total, tree.minimum) == (fresh.total, fresh.minimum)
    tree[:] = 0.0
    assert tree.total == 0.0


@pytest.mark.parametrize("size", [100, MAX_ROOT + 1, 64 * MAX_ROOT + 5])
def test_updates_of_ranges_and_single_leaves_can_be_mixed(size: int) -> None:
    rng = np.random.default_rng(2)
    tree, fresh = PriorityTree(size), PriorityTree(size)
    for _ in range(20):
        tree[rng.integers(0, size, 50)] = rng.random(50)
        start = int(rng.integers(0, size))
        tree[start : start + 40] = rng.random(len(range(size)[start : start + 40])) * (rng.random() < 0.7)
    fresh[:] = tree[:]
    assert (tree.total, tree.minimum) == (fresh.total, fresh.minimum)
    sums = rng.random(500) * fresh.total
    assert (tree.find(sums) == fresh.find(sums)).all()
