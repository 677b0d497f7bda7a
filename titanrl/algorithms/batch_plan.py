"""Plan one optimizer step: assign each sequence a rank, a packed row, an advantage and a loss weight.

Shape suffixes: S planned sequences, M segments, N rollouts, P groups (prompts), T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from titanrl.algorithms.advantages import batch_advantages, decoupled_advantages
from titanrl.algorithms.contracts import GroupRewards, advantage_arguments
from titanrl.algorithms.credit import custom_advantages, spans_of, token_advantages, turn_advantages
from titanrl.algorithms.loss_weights import sequence_weights
from titanrl.algorithms.packing import balance, pack, pack_sharing, row_costs
from titanrl.carriers.tables import SEQUENCE, BatchPlan, DoubleArray, MicroBatch, RecordTable, RowTable, Spans, Table
from titanrl.carriers.types import BoolArray, IntArray
from titanrl.config.algorithm import AlgorithmConfig

T = TypeVar("T")
WeightOf = Callable[[str, int], float]
"""Function that maps a reward component and a task index to the component's weight in the summed reward."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskAdvantage:
    """Advantage estimator of a task. Two of them are equal if they compute the same advantages."""

    algorithm: AlgorithmConfig
    """Configuration with the name and options of the estimator."""
    custom: Callable[..., Sequence[Any]] | None = None
    """User-defined function; None selects the built-in estimator."""

    @property
    def _key(self) -> tuple[object, ...]:
        return self.algorithm.advantage, self.algorithm.std_ddof, self.algorithm.pass_k, id(self.custom)

    def __eq__(self, other: object) -> bool:
        """Return True if both compute the same advantages."""
        return isinstance(other, TaskAdvantage) and self._key == other._key

    def __hash__(self) -> int:
        """Return a hash that agrees with equality."""
        return hash(self._key)


def plan_batch(
    records: RecordTable,
    *,
    algorithm: AlgorithmConfig,
    constant_length: int,
    row_tokens: int,
    rows_per_microbatch: int,
    dp_size: int,
    share_prompts: bool = False,
    custom_advantage: Callable[..., Sequence[Any]] | None = None,
    weight_of: WeightOf = lambda part, task: 1.0,
    by_task: Sequence[TaskAdvantage] = (),
    advantages_N: DoubleArray | None = None,
    spans: Spans | None = None,
) -> BatchPlan:
    """Plan one optimizer step over all groups of `records`. The plan does not depend on the order of the groups.

    Loss weights are computed from the token and sequence counts of all records. Sequences with zero gradient are included in
    these counts, but not in the micro-batches. A sequence has zero gradient if it has no sampled token, or if its advantage is
    0 and no other term of the objective needs it. The importance weight of a replayed group multiplies the loss weights of its
    sequences. All ranks get the same number of micro-batches, at least one.

    Args:
        records: Groups of the step. A group without payload must have no gradient.
        algorithm: Advantage estimator, reduction and terms of the objective.
        constant_length: Divisor of `reduction: constant`, in tokens.
        row_tokens: Length of a row in tokens.
        rows_per_microbatch: Maximum number of rows in a rank's micro-batch.
        dp_size: Number of data-parallel ranks.
        share_prompts: Store the prompt of a group once per row, for all its sequences in that row, unless that takes more rows.
        custom_advantage: User-defined advantage; None selects the built-in one that `algorithm` names.
        weight_of: Weight of a reward component in the summed reward, see `WeightOf`.
        by_task: Estimators of the tasks of a mixture, by task index; they replace that of `algorithm`. Groups of tasks with
            equal estimators are standardized together.
        advantages_N: Advantages of all rollouts, with the groups in prompt order; None computes them from these groups.
        spans: Token advantages of all segments; None if all tokens of a rollout have the same advantage.

    Raises:
        ValueError: A sequence does not fit a row, the estimator rejects a reward, or it returns invalid advantages.
    """
    ordered = records.by_index()
    assert (ordered.groups["index"][:-1] < ordered.groups["index"][1:]).all(), "a group must not appear twice in a batch"
    if advantages_N is None:
        advantages_N, spans = _advantages(ordered, by_task or [TaskAdvantage(algorithm, custom_advantage)], weight_of)
    chosen_M, weights_N = _segments_with_gradient(ordered, algorithm, constant_length, advantages_N, spans)
    rollout_of_M = ordered.rollout_of
    sequences, prompts_S, prompt_lens_S = _sequences(ordered, chosen_M, advantages_N[rollout_of_M], weights_N[rollout_of_M])
    chosen_spans = None if spans is None else _with_spans(sequences, spans.take(np.flatnonzero(chosen_M)))
    rows = pack_sequences(sequences, prompts_S, prompt_lens_S if share_prompts else None, row_tokens)
    microbatches = _microbatches(sequences, chosen_spans, rows, rows_per_microbatch, dp_size)
    num_placed = int((sequences["length"] - sequences["num_shared"]).sum())
    # A rank without rows runs one empty row.
    num_rows = sum(max(len(rank), 1) for microbatch in microbatches for rank in microbatch.rows)
    return BatchPlan(
        microbatches=microbatches,
        advantages_N=advantages_N,
        num_placed=num_placed,
        packing_efficiency=num_placed / (num_rows * row_tokens),
        spans=spans,
    )


def pack_sequences(sequences: Table, prompts_S: IntArray, prompt_lens_S: IntArray | None, row_tokens: int) -> list[list[int]]:
    """Pack sequences into rows, set `num_shared` in the table, and return the sequence indices of each row.

    With prompt lengths, sequences that have the same prompt share it, unless that takes more rows. The last token of the prompt
    is never shared, because it predicts the first token of each completion.

    Args:
        sequences: Table of the sequences, which is modified.
        prompts_S: Prompt id of each sequence, a small integer from 0.
        prompt_lens_S: Number of prompt tokens of each sequence; None shares no prompts.
        row_tokens: Length of a row in tokens.
    """
    lengths_S: IntArray = sequences["length"]
    if prompt_lens_S is None:
        return pack(lengths_S.tolist(), row_tokens)
    num_shared_S = np.maximum(prompt_lens_S - 1, 0)
    rows = pack_sharing(lengths_S, prompts_S, num_shared_S, row_tokens)
    could_save_rows = len(rows) > -(-int(lengths_S.sum()) // row_tokens)  # fewer rows could not hold all unshared tokens
    if could_save_rows and len(unshared_rows := pack(lengths_S.tolist(), row_tokens)) < len(rows):
        return unshared_rows
    order = np.fromiter(chain.from_iterable(rows), np.int64, len(lengths_S))
    shares = np.zeros(len(order), np.bool_)
    shares[1:] = prompts_S[order[1:]] == prompts_S[order[:-1]]
    shares[np.cumsum([0, *map(len, rows)])[:-1]] = False  # the first sequence of a row stores the prompt
    sequences["num_shared"][order[shares]] = num_shared_S[order[shares]]
    return rows


def _advantages(
    records: RecordTable, by_task: Sequence[TaskAdvantage], weight_of: WeightOf
) -> tuple[DoubleArray, Spans | None]:
    """Return the advantages of all rollouts, `[N]`, and the token advantages if they differ within a rollout.

    Groups of tasks with equal estimators are processed together.
    """
    first, *others = dict.fromkeys(by_task)
    if not others:
        return _advantages_by(first, records, weight_of)
    advantages_N, values_T = np.zeros(len(records.rewards)), np.zeros(int(records.num_sampled.sum()))
    group_of_T = np.repeat(records.group_of[records.rollout_of], records.num_sampled)
    has_spans = False
    for method in (first, *others):
        tasks = [task for task, estimator in enumerate(by_task) if estimator == method]
        chosen_P = np.isin(records.tasks, tasks)
        if chosen_P.any():
            subset = records.take(np.flatnonzero(chosen_P))
            own_N, spans = _advantages_by(method, subset, weight_of)
            advantages_N[chosen_P[records.group_of]] = own_N
            if spans is None:
                values_T[chosen_P[group_of_T]] = np.repeat(own_N[subset.rollout_of], subset.num_sampled)
            else:
                values_T[chosen_P[group_of_T]] = np.repeat(spans.table["advantage"], spans.table["num_tokens"])
                has_spans = True
    if not has_spans:
        return advantages_N, None
    return advantages_N, spans_of(values_T, np.ones(len(values_T), np.int64), records.num_sampled, records)[1]


def _advantages_by(method: TaskAdvantage, records: RecordTable, weight_of: WeightOf) -> tuple[DoubleArray, Spans | None]:
    """Return the advantages of all rollouts with one estimator, `[N]`, and the token advantages if they differ in a rollout."""
    algorithm, custom_advantage = method.algorithm, method.custom
    if custom_advantage is not None:
        bound = partial(custom_advantage, **advantage_arguments(custom_advantage, algorithm))
        return custom_advantages(bound, list(group_rewards(records, weight_of)), algorithm.advantage, records)
    if algorithm.credit == "turn":
        groups, options = list(group_rewards(records, weight_of)), {"std_ddof": algorithm.std_ddof}
        turns = turn_advantages(groups, algorithm.advantage, discount=algorithm.turn_discount, **options)
        values = np.fromiter(chain.from_iterable(chain.from_iterable(turns)), np.float64)
        return spans_of(values, records.turns.num_sampled, records.turns.num_turns, records)
    if algorithm.credit == "token":
        discount, ddof = algorithm.token_discount, algorithm.std_ddof
        values = token_advantages(records, algorithm.advantage, discount=discount, std_ddof=ddof)
        return spans_of(values, np.ones(len(values), np.int64), records.num_sampled, records)
    if algorithm.advantage_traits.compares_parts:
        by_group = decoupled_advantages(group_rewards(records, weight_of), std_ddof=algorithm.std_ddof)
    else:
        ends = np.cumsum(records.groups["num_rollouts"]).tolist()
        is_standardized = algorithm.advantage_traits.is_standardized
        by_group = batch_advantages(
            _by_group(records.rewards.tolist(), ends),
            _by_group(records.num_sampled_by_rollout.tolist(), ends) if is_standardized else (),
            algorithm.advantage,
            std_ddof=algorithm.std_ddof,
            pass_k=algorithm.pass_k,
        )
    return np.fromiter(chain.from_iterable(by_group), np.float64, len(records.rewards)), None


def _segments_with_gradient(
    records: RecordTable, algorithm: AlgorithmConfig, constant_length: int, advantages: DoubleArray, spans: Spans | None
) -> tuple[BoolArray, DoubleArray]:
    """Return a mask of the segments with nonzero gradient, `[M]`, and the loss weights of all rollouts, `[N]`."""
    weights = sequence_weights(
        algorithm.reduction,
        num_sampled=records.num_sampled_by_rollout,
        prompt_of=records.group_of,
        constant_length=constant_length,
    )
    weights = weights * records.groups["weight"][records.group_of]
    rollout_of = records.rollout_of
    if spans is None:
        has_advantage = (advantages != 0.0)[rollout_of]
    else:
        has_advantage = np.bincount(spans.segment_of, spans.table["advantage"] != 0.0, len(rollout_of)) > 0.0
    has_gradient = (weights != 0.0)[rollout_of] & (has_advantage | algorithm.runs_without_advantage)
    return has_gradient & (records.num_sampled > 0), weights


def _with_spans(sequences: Table, spans: Spans) -> Spans:
    """Store the advantage of each sequence with a single span in the table; return the spans of all other sequences."""
    is_equal = spans.num_spans == 1
    sequences["advantage"][is_equal] = spans.take(np.flatnonzero(is_equal)).table["advantage"]
    sequences["num_spans"] = np.where(is_equal, 0, spans.num_spans)
    return Spans(table=spans.take(np.flatnonzero(~is_equal)).table, num_spans=sequences["num_spans"].astype(np.int64))


def group_rewards(records: RecordTable, weight_of: WeightOf = lambda part, task: 1.0) -> Iterator[GroupRewards]:
    """Yield the rewards of each group, without reward components that all of its rollouts lack."""
    tasks = records.tasks.tolist()
    weights = {(part, task): weight_of(part, task) for task in set(tasks) for part in records.reward_parts}
    ends = np.cumsum(records.groups["num_rollouts"]).tolist()
    indices, num_tokens = records.groups["index"].tolist(), records.num_sampled_by_rollout.tolist()
    turn_ends = np.cumsum(records.num_turns_by_rollout).tolist()
    turn_rewards = _by_group(records.turns.rewards.tolist(), turn_ends)
    turn_tokens = _by_group(records.turns.num_sampled.tolist(), turn_ends)
    token_rewards = _token_rewards(records)
    for index, task, start, end in zip(indices, tasks, [0, *ends], ends, strict=False):
        parts = {part: values[start:end].tolist() for part, values in records.reward_parts.items()}
        parts = {part: values for part, values in parts.items() if not all(map(math.isnan, values))}
        yield GroupRewards(
            rewards=records.rewards[start:end].tolist(),
            parts=parts,
            weights={part: weights[part, task] for part in parts},
            num_tokens=num_tokens[start:end],
            index=index,
            turn_rewards=turn_rewards[start:end],
            turn_tokens=turn_tokens[start:end],
            token_rewards=token_rewards[start:end],
        )


def _token_rewards(records: RecordTable) -> Sequence[Sequence[float]]:
    """Return the token rewards of each rollout by group; empty if the batch has no token rewards."""
    if records.known_tokens is None:
        return ()
    num_tokens = records.num_sampled_by_rollout
    return _by_group(records.known_tokens.by_token(num_tokens).tolist(), np.cumsum(num_tokens).tolist())


def _by_group(values: list[T], ends: list[int]) -> list[list[T]]:
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _sequences(
    records: RecordTable, chosen: BoolArray, advantages: DoubleArray, weights: DoubleArray
) -> tuple[Table, IntArray, IntArray]:
    """Return the table of the chosen segments, in order, with the prompt id and the number of prompt tokens of each.

    The first segments of all rollouts in a group begin with the same prompt and share its id. Each later segment gets a unique
    prompt id and a prompt length of 0.
    """
    segments = np.flatnonzero(chosen)
    group_of = records.group_of[records.rollout_of[segments]]
    groups = records.groups
    missing = group_of[groups["has_payload"][group_of] == 0]
    assert not len(missing), f"groups {np.unique(groups['index'][missing])} have a gradient but no payload"
    sequences = np.zeros(len(segments), SEQUENCE)
    sequences["handle"] = groups["handle"][group_of]
    sequences["rollout"] = records.rollout_of[segments] - records.starts[group_of]
    sequences["segment"] = segments - records.segment_starts[records.starts[group_of]]
    sequences["length"] = records.lengths[segments]
    sequences["advantage"], sequences["weight"] = advantages[segments], weights[segments]
    is_first = segments == records.segment_starts[records.rollout_of[segments]]
    prompts = np.where(is_first, group_of, len(records) + segments)
    return sequences, prompts, np.where(is_first, groups["prompt_len"][group_of], 0)


def _microbatches(
    sequences: Table, spans: Spans | None, rows: Sequence[Sequence[int]], rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Balance the rows over ranks and split each rank's rows into micro-batches, padded with empty ones to equal number."""
    costs = row_costs(sequences["length"], sequences["num_shared"], rows)
    ranks = [[rows[i] for i in indices] for indices in balance(costs, dp_size)]
    num_microbatches = max(1, math.ceil(max(len(rank) for rank in ranks) / rows_per_microbatch))
    starts = [i * rows_per_microbatch for i in range(num_microbatches)]
    return tuple(
        MicroBatch(rows=tuple(_row_table(sequences, spans, rank[start : start + rows_per_microbatch]) for rank in ranks))
        for start in starts
    )


def _row_table(sequences: Table, spans: Spans | None, rows: Sequence[Sequence[int]]) -> RowTable:
    """Return the table of rows that are given as indices into `sequences`."""
    indices = np.fromiter(chain.from_iterable(rows), np.int64)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    chosen = sequences[indices]
    return RowTable(chosen, ends) if spans is None else RowTable(chosen, ends, spans.take(indices).table)
