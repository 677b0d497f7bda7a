"""The optimizer steps of one batch: in each epoch its groups are shuffled and dealt to mini-batches.

Shape suffixes: P groups, N rollouts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from titanrl.tables import BatchPlan, DoubleArray, MicroBatch, RecordTable
from titanrl.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The optimizer steps on one batch. Every epoch contains every sequence that has a gradient once."""

    updates: tuple[BatchPlan, ...]
    """Plan of each optimizer step, in order; never empty."""
    num_in_first_epoch: int
    """Optimizer steps of the first epoch."""
    advantages_N: DoubleArray = field(compare=False)
    """Advantage of every rollout of the batch, with the groups in prompt order."""

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
        """Tokens of all packed rows of all optimizer steps."""
        return sum(plan.num_placed for plan in self.updates)

    @property
    def packing_efficiency(self) -> float:
        """Share of the positions of all rows that hold a token."""
        if len(self.updates) == 1:
            return self.updates[0].packing_efficiency
        return self.num_placed / sum(plan.num_placed / plan.packing_efficiency for plan in self.updates)


def plan_step(
    records: RecordTable, plan: Callable[..., BatchPlan], *, epochs: int, num_minibatches: int, seed: Sequence[int]
) -> StepPlan:
    """Plan the optimizer steps on a batch; the order of its groups does not matter.

    Advantages compare the rollouts of the whole batch. Loss weights are those of each optimizer step. A mini-batch without any
    gradient takes no optimizer step, because momentum alone would move the weights.

    Args:
        records: Groups of the batch.
        plan: `plan_batch` with its options; it also gets the advantages of a mini-batch as `advantages_N`.
        epochs: Number of passes over the batch.
        num_minibatches: Mini-batches per epoch. Their numbers of groups differ by one at most.
        seed: Seed of the order of the groups; each epoch has an order of its own.
    """
    ordered = records.by_index()
    whole = plan(ordered)
    if num_minibatches == 1 or not whole.num_placed:
        num_updates = epochs if whole.num_placed else 1
        return StepPlan(updates=(whole,) * num_updates, num_in_first_epoch=1, advantages_N=whole.advantages_N)
    by_epoch = [
        [
            plan(ordered.take(groups_P), **_advantages(whole, ordered, groups_P))
            for groups_P in minibatches(len(ordered), num_minibatches, (*seed, epoch))
        ]
        for epoch in range(epochs)
    ]
    trained = [[update for update in updates if update.num_placed] for updates in by_epoch]
    return StepPlan(
        updates=tuple(chain.from_iterable(trained)), num_in_first_epoch=len(trained[0]), advantages_N=whole.advantages_N
    )


def _advantages(whole: BatchPlan, ordered: RecordTable, groups_P: IntArray) -> dict[str, Any]:
    """Return the advantages of some groups of a planned batch, as arguments of `plan_batch`."""
    is_chosen_N = np.isin(ordered.group_of, groups_P)
    own: dict[str, Any] = {"advantages_N": whole.advantages_N[is_chosen_N]}
    if whole.spans is not None:
        own["spans"] = whole.spans.take(np.flatnonzero(is_chosen_N[ordered.rollout_of]))
    return own


def minibatches(num_groups: int, num_minibatches: int, seed: Sequence[int]) -> Iterator[IntArray]:
    """Yield the groups of each mini-batch of an epoch, ascending; none of them is empty."""
    order = np.random.default_rng(seed).permutation(num_groups)
    for groups_P in np.array_split(order, min(num_minibatches, num_groups)):
        yield np.sort(groups_P)
