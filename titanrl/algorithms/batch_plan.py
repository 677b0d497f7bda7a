"""The plan of one optimizer step: the rank, row, advantage and loss weight of each sequence.

Shape suffix: S sequences.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from titanrl.algorithms.advantages import batch_advantages
from titanrl.algorithms.loss_weights import sequence_weights
from titanrl.algorithms.packing import balance, pack, pack_sharing, row_costs
from titanrl.config.sections import AlgorithmConfig
from titanrl.tables import SEQUENCE, BatchPlan, DoubleArray, MicroBatch, RecordTable, RowTable, Table
from titanrl.types import BoolArray, GroupRecord, IntArray

T = TypeVar("T")


def plan_batch(
    records: RecordTable,
    *,
    algorithm: AlgorithmConfig,
    constant_length: int,
    row_tokens: int,
    rows_per_microbatch: int,
    dp_size: int,
    share_prompts: bool = False,
) -> BatchPlan:
    """Plan one optimizer step over all groups of `records`; their order does not matter.

    Loss weights are computed from the counts of all records. Sequences with a gradient of zero are in these counts, but not in
    the micro-batches: those without a sampled token, and those without an advantage unless another term of the objective needs
    them. Each rank gets the same number of micro-batches, at least one.

    Args:
        records: Groups of the step. A group without payload must have no gradient.
        algorithm: Advantages, reduction and terms of the objective.
        constant_length: Tokens that `reduction: constant` divides by.
        row_tokens: Tokens of a row.
        rows_per_microbatch: Rows that a rank runs at once.
        dp_size: Data-parallel ranks.
        share_prompts: Store the prompt of a group once in each row with its sequences, unless that takes more rows.

    Raises:
        ValueError: A sequence does not fit a row, or `group_advantages` refuses a reward.
    """
    ordered = records.by_index()
    assert (np.diff(ordered.groups["index"]) > 0).all(), "a group must not be in a batch twice"
    sequences, groups_S, advantages_N = _sequences_with_gradient(ordered, algorithm, constant_length)
    prompt_lens_S = ordered.groups["prompt_len"][groups_S] if share_prompts else None
    rows = pack_sequences(sequences, groups_S, prompt_lens_S, row_tokens)
    microbatches = _microbatches(sequences, rows, rows_per_microbatch, dp_size)
    num_placed = int((sequences["length"] - sequences["num_shared"]).sum())
    # A rank without rows runs an empty one.
    num_rows = sum(max(len(rank), 1) for microbatch in microbatches for rank in microbatch.rows)
    return BatchPlan(
        microbatches=microbatches,
        advantages_N=advantages_N,
        num_placed=num_placed,
        packing_efficiency=num_placed / (num_rows * row_tokens),
    )


def plan_demonstrations(
    record: GroupRecord, *, row_tokens: int, rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Plan a batch of demonstrations, with the same weight for every trained token (`token_mean`)."""
    table = RecordTable.of([record])
    weights = sequence_weights("token_mean", num_sampled=table.num_sampled, prompt_of=table.group_of, constant_length=1)
    sequences, groups_S = _sequences(table, np.ones(len(weights), np.bool_), np.zeros(len(weights)), weights)
    rows = pack_sequences(sequences, groups_S, None, row_tokens)
    return _microbatches(sequences, rows, rows_per_microbatch, dp_size)


def pack_sequences(sequences: Table, groups_S: IntArray, prompt_lens_S: IntArray | None, row_tokens: int) -> list[list[int]]:
    """Return the indices of each row's sequences, and set `num_shared` in the table.

    With prompt lengths the sequences of a group share its prompt, unless that takes more rows. The last token of the prompt is
    never shared, because it predicts the first token of each completion.
    """
    lengths_S: IntArray = sequences["length"]
    apart = pack(lengths_S.tolist(), row_tokens)
    if prompt_lens_S is None:
        return apart
    num_shared_S = np.maximum(prompt_lens_S - 1, 0)
    together = pack_sharing(lengths_S, groups_S, num_shared_S, row_tokens)
    if len(apart) < len(together):
        return apart
    order = np.fromiter(chain.from_iterable(together), np.int64, len(lengths_S))
    follows = np.diff(groups_S[order], prepend=-1) == 0
    follows[np.cumsum([0, *map(len, together)])[:-1]] = False  # the first sequence of a row
    sequences["num_shared"][order[follows]] = num_shared_S[order[follows]]
    return together


def _sequences_with_gradient(
    records: RecordTable, algorithm: AlgorithmConfig, constant_length: int
) -> tuple[Table, IntArray, DoubleArray]:
    """Return the sequences that have a gradient, the index of each one's group, and the advantages of all rollouts."""
    ends = np.cumsum(records.groups["num_rollouts"]).tolist()
    by_group = batch_advantages(
        _by_group(records.rewards.tolist(), ends),
        _by_group(records.num_sampled.tolist(), ends),
        algorithm.advantage,
        std_ddof=algorithm.std_ddof,
        pass_k=algorithm.pass_k,
    )
    advantages = np.fromiter(chain.from_iterable(by_group), np.float64, len(records.rewards))
    weights = sequence_weights(
        algorithm.reduction,
        num_sampled=records.num_sampled,
        prompt_of=records.group_of,
        constant_length=constant_length,
    )
    has_gradient = (weights != 0.0) & ((advantages != 0.0) | algorithm.runs_without_advantage)
    return *_sequences(records, has_gradient, advantages, weights), advantages


def _by_group(values: list[T], ends: list[int]) -> list[list[T]]:
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _sequences(
    records: RecordTable, chosen: BoolArray, advantages: DoubleArray, weights: DoubleArray
) -> tuple[Table, IntArray]:
    """Plan the chosen rollouts, in their order, and return the index of each one's group."""
    group_of = records.group_of[chosen]
    groups = records.groups[group_of]
    without = np.unique(groups["index"][groups["has_payload"] == 0])
    assert not len(without), f"groups {without} have a gradient but no payload"
    sequences = np.zeros(len(group_of), SEQUENCE)
    sequences["handle"] = groups["handle"]
    sequences["rollout"] = np.flatnonzero(chosen) - records.starts[group_of]
    sequences["length"] = records.lengths[chosen]
    sequences["advantage"], sequences["weight"] = advantages[chosen], weights[chosen]
    return sequences, group_of


def _microbatches(
    sequences: Table, rows: Sequence[Sequence[int]], rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Balance the rows over ranks and cut each rank's share; ranks with fewer rows get empty micro-batches."""
    costs = row_costs(sequences["length"], sequences["num_shared"], rows)
    ranks = [[rows[i] for i in indices] for indices in balance(costs, dp_size)]
    num_microbatches = max(1, math.ceil(max(len(rank) for rank in ranks) / rows_per_microbatch))
    starts = [i * rows_per_microbatch for i in range(num_microbatches)]
    return tuple(
        MicroBatch(rows=tuple(_row_table(sequences, rank[start : start + rows_per_microbatch]) for rank in ranks))
        for start in starts
    )


def _row_table(sequences: Table, rows: Sequence[Sequence[int]]) -> RowTable:
    """Return the table of some rows, given as indices into `sequences`."""
    places = np.fromiter(chain.from_iterable(rows), np.int64)
    return RowTable(sequences[places], np.cumsum([len(row) for row in rows], dtype=np.int64))
