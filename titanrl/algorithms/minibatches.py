"""Plan the optimizer steps on one batch: each epoch shuffles the groups and splits them into mini-batches.

Shape suffixes: P groups, N rollouts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from titanrl.carriers.tables import BatchPlan, DoubleArray, MicroBatch, RecordTable
from titanrl.carriers.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Plan of all optimizer steps on one batch. Each epoch contains each sequence with a nonzero gradient exactly once."""

    updates: tuple[BatchPlan, ...]
    """Plans of the optimizer steps, in order; never empty."""
    num_in_first_epoch: int
    """Number of optimizer steps in the first epoch."""
    advantages_N: DoubleArray = field(compare=False)
    """Advantages of all rollouts of the batch, with the groups in prompt order."""

    @property
    def first_epoch(self) -> tuple[MicroBatch, ...]:
        """Micro-batches of the first epoch."""
        return tuple(chain.from_iterable(plan.microbatches for plan in self.updates[: self.num_in_first_epoch]))

    @property
    def microbatches(self) -> tuple[MicroBatch, ...]:
        """Micro-batches of all epochs."""
        return tuple(chain.from_iterable(plan.microbatches for plan in self.updates))

    @property
    def num_placed(self) -> int:
        """Number of tokens in the packed rows of all optimizer steps."""
        return sum(plan.num_placed for plan in self.updates)

    @property
    def packing_efficiency(self) -> float:
        """Fraction of row positions that hold a token, over all optimizer steps."""
        if len(self.updates) == 1:
            return self.updates[0].packing_efficiency
        return self.num_placed / sum(plan.num_placed / plan.packing_efficiency for plan in self.updates)


def plan_step(
    records: RecordTable, plan: Callable[..., BatchPlan], *, epochs: int, num_minibatches: int, seed: Sequence[int]
) -> StepPlan:
    """Plan the optimizer steps on a batch. The plan does not depend on the order of the groups.

    Advantages are computed once, over the complete batch. Loss weights are computed per optimizer step. A mini-batch without
    gradient takes no optimizer step, because otherwise momentum alone would change the weights.

    Args:
        records: Groups of the batch.
        plan: `plan_batch` with its options bound. For a mini-batch it is called with `advantages_N` and, if any, `spans`.
        epochs: Number of passes over the batch.
        num_minibatches: Number of mini-batches per epoch. Their numbers of groups differ by at most one.
        seed: Seed of the order of the groups, which differs between epochs.
    """
    ordered = records.by_index()
    full_batch = plan(ordered)
    if num_minibatches == 1 or not full_batch.num_placed:
        num_updates = epochs if full_batch.num_placed else 1
        return StepPlan(updates=(full_batch,) * num_updates, num_in_first_epoch=1, advantages_N=full_batch.advantages_N)
    by_epoch = [
        [
            plan(ordered.take(groups_P), **_advantages(full_batch, ordered, groups_P))
            for groups_P in minibatches(len(ordered), num_minibatches, (*seed, epoch))
        ]
        for epoch in range(epochs)
    ]
    trained = [[update for update in updates if update.num_placed] for updates in by_epoch]
    return StepPlan(
        updates=tuple(chain.from_iterable(trained)), num_in_first_epoch=len(trained[0]), advantages_N=full_batch.advantages_N
    )


def _advantages(full_batch: BatchPlan, ordered: RecordTable, groups_P: IntArray) -> dict[str, Any]:
    """Return the advantages of a mini-batch's groups, as keyword arguments of `plan_batch`."""
    is_chosen_N = np.isin(ordered.group_of, groups_P)
    arguments: dict[str, Any] = {"advantages_N": full_batch.advantages_N[is_chosen_N]}
    if full_batch.spans is not None:
        arguments["spans"] = full_batch.spans.take(np.flatnonzero(is_chosen_N[ordered.rollout_of]))
    return arguments


def minibatches(num_groups: int, num_minibatches: int, seed: Sequence[int]) -> Iterator[IntArray]:
    """Yield the sorted group indices of each mini-batch of an epoch. No mini-batch is empty."""
    order = np.random.default_rng(seed).permutation(num_groups)
    for groups_P in np.array_split(order, min(num_minibatches, num_groups)):
        yield np.sort(groups_P)
