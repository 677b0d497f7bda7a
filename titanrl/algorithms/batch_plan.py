"""The plan of one optimizer step: which sequence runs where, with which advantage and which loss weight.

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
    """Plan one optimizer step over all groups of `records`, in whatever order these arrived.

    Weights come from the counts of all records. Sequences whose gradient is zero (no sampled token, or no advantage where the
    objective asks for nothing else; so every group without payload) stay in these counts but out of the micro-batches. Each
    rank gets the same number of micro-batches, at least one. `constant_length` is what `reduction: constant` divides by, in
    tokens. With `share_prompts` the prompt of a group stands once in each row that holds its sequences, where that saves rows.

    Raises ValueError if a sequence does not fit a row, or a reward is not finite or not allowed.
    """
    ordered = records.by_index()
    assert (np.diff(ordered.groups["index"]) > 0).all(), "a group must not be in a batch twice"
    sequences, groups_S = _sequences_with_gradient(ordered, algorithm, constant_length)
    prompt_lens_S = ordered.groups["prompt_len"][groups_S] if share_prompts else None
    rows = pack_sequences(sequences, groups_S, prompt_lens_S, row_tokens)
    microbatches = _microbatches(sequences, rows, rows_per_microbatch, dp_size)
    num_placed = int((sequences["length"] - sequences["num_shared"]).sum())
    return BatchPlan(
        microbatches=microbatches,
        num_placed=num_placed,
        packing_efficiency=num_placed / (_num_rows_run(microbatches) * row_tokens),
    )


def plan_demonstrations(
    record: GroupRecord, *, row_tokens: int, rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Micro-batches of a batch of demonstrations, every trained token with the same weight (`token_mean`)."""
    table = RecordTable.of([record])
    weights = sequence_weights("token_mean", num_sampled=table.num_sampled, prompt_of=table.group_of, constant_length=1)
    sequences, groups_S = _sequences(table, np.ones(len(weights), np.bool_), np.zeros(len(weights)), weights)
    rows = pack_sequences(sequences, groups_S, None, row_tokens)
    return _microbatches(sequences, rows, rows_per_microbatch, dp_size)


def pack_sequences(sequences: Table, groups_S: IntArray, prompt_lens_S: IntArray | None, row_tokens: int) -> list[list[int]]:
    """Rows of the sequences, as places of them; notes in the table what each shares with the one before it in its row.

    Those of a group share its prompt where the lengths of prompts are given and that saves rows. The last token of the prompt
    is never shared: it predicts the first of each completion.
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
    follows[np.cumsum([0, *map(len, together)])[:-1]] = False  # the first of a row
    sequences["num_shared"][order[follows]] = num_shared_S[order[follows]]
    return together


def _sequences_with_gradient(records: RecordTable, algorithm: AlgorithmConfig, constant_length: int) -> tuple[Table, IntArray]:
    """The sequences that have a gradient, in order of group and rollout, and the place of each one's group."""
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
    return _sequences(records, has_gradient, advantages, weights)


def _by_group(values: list[T], ends: list[int]) -> list[list[T]]:
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _sequences(
    records: RecordTable, chosen: BoolArray, advantages: DoubleArray, weights: DoubleArray
) -> tuple[Table, IntArray]:
    """Plans of the chosen rollouts, in their order, and the place of each one's group."""
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
    """Balance the rows over ranks and cut each rank's share; a rank whose share ends early gets empty micro-batches."""
    costs = row_costs(sequences["length"], sequences["num_shared"], rows)
    ranks = [[rows[i] for i in indices] for indices in balance(costs, dp_size)]
    num_microbatches = max(1, math.ceil(max(len(rank) for rank in ranks) / rows_per_microbatch))
    starts = [i * rows_per_microbatch for i in range(num_microbatches)]
    return tuple(
        MicroBatch(rows=tuple(_row_table(sequences, rank[start : start + rows_per_microbatch]) for rank in ranks))
        for start in starts
    )


def _row_table(sequences: Table, rows: Sequence[Sequence[int]]) -> RowTable:
    """Rows, given as places in `sequences`, as columns."""
    places = np.fromiter(chain.from_iterable(rows), np.int64)
    return RowTable(sequences[places], np.cumsum([len(row) for row in rows], dtype=np.int64))


def _num_rows_run(microbatches: Sequence[MicroBatch]) -> int:
    """Rows that go through the model: a rank without rows still runs an empty one."""
    return sum(max(len(rank), 1) for microbatch in microbatches for rank in microbatch.rows)
