"""Plan the optimizer steps on a batch: assign each sequence a rank, a packed row and a loss weight.

The objective of one optimizer step is sum_it w_i * l_it over all sampled tokens t of all sequences i. Nothing else scales the
loss. The loss weights w_i are computed before the first micro-batch from the token and sequence counts of the complete step,
over all ranks. The gradient therefore depends neither on the split into micro-batches nor on the number of data-parallel ranks.
A mean of micro-batch means would depend on both.

Shape suffixes: S planned sequences, M segments, N rollouts, P groups (prompts), T tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from titanrl.algorithms.advantages import WeightOf, group_rewards
from titanrl.algorithms.contracts import Priority
from titanrl.algorithms.packing import balance, pack, pack_sharing, row_costs
from titanrl.carriers.tables import SEQUENCE, SPAN, BatchPlan, MicroBatch, RecordTable, RowTable, Spans, Table
from titanrl.carriers.types import BoolArray, DoubleArray, IntArray, MeasuredCorrection
from titanrl.config.algorithm import AlgorithmConfig, Reduction
from titanrl.config.sections import ReplayConfig


def plan_batch(
    records: RecordTable,
    *,
    algorithm: AlgorithmConfig,
    constant_length: int,
    row_tokens: int,
    rows_per_microbatch: int,
    dp_size: int,
    share_prompts: bool = False,
    advantages_N: DoubleArray,
    spans: Spans | None = None,
) -> BatchPlan:
    """Plan one optimizer step over all groups of `records`. The plan does not depend on the order of the groups.

    Loss weights are computed from the token and sequence counts of all records. Sequences with zero gradient are included in
    these counts, but not in the micro-batches. A sequence has zero gradient if it has no sampled token, or if its advantage is
    0 and no other term of the objective needs it. The importance weight of a replayed group multiplies the loss weights of its
    sequences. All ranks get the same number of micro-batches, at least one.

    Args:
        records: Groups of the step. A group without payload must have no gradient.
        algorithm: Reduction and terms of the objective.
        constant_length: Divisor of `reduction: constant`, in tokens.
        row_tokens: Length of a row in tokens.
        rows_per_microbatch: Maximum number of rows in a rank's micro-batch.
        dp_size: Number of data-parallel ranks.
        share_prompts: Store tokens with which several sequences of a group begin once per row, unless that takes more rows.
        advantages_N: Advantages of all rollouts, with the groups in prompt order.
        spans: Token advantages of all segments; None if all tokens of a rollout have the same advantage.

    Raises:
        ValueError: A sequence does not fit a row.
    """
    ordered = records.by_index()
    assert (ordered.groups["index"][:-1] < ordered.groups["index"][1:]).all(), "a group must not appear twice in a batch"
    chosen_M, weights_N = _segments_with_gradient(ordered, algorithm, constant_length, advantages_N, spans)
    rollout_of_M = ordered.rollout_of
    segments_S, num_shared_S = _sharing_order(ordered, chosen_M) if share_prompts else (np.flatnonzero(chosen_M), None)
    sequences = _sequences(ordered, segments_S, advantages_N[rollout_of_M], weights_N[rollout_of_M])
    if spans is not None:
        spans_S = spans.take(segments_S)
        is_equal = (spans_S.num_spans == 1) & (spans.table.dtype == SPAN)
        sequences["advantage"][is_equal] = spans_S.take(np.flatnonzero(is_equal)).table["advantage"]
        sequences["num_spans"] = np.where(is_equal, 0, spans_S.num_spans)
        # The table itself holds the advantage of a sequence with a single span.
        others = spans_S.take(np.flatnonzero(~is_equal)).table
        planned_spans = Spans(table=others, num_spans=sequences["num_spans"].astype(np.int64))
    rows = pack_sequences(sequences, ordered.group_of[rollout_of_M[segments_S]], num_shared_S, row_tokens)
    microbatches = _microbatches(sequences, None if spans is None else planned_spans, rows, rows_per_microbatch, dp_size)
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


def pack_sequences(sequences: Table, groups_S: IntArray, num_shared_S: IntArray | None, row_tokens: int) -> list[list[int]]:
    """Pack sequences into rows, set `num_shared` in the table, and return the sequence indices of each row.

    With `num_shared_S`, which `pack_sharing` describes, sequences of a group share tokens, unless that takes more rows.
    """
    lengths_S = sequences["length"].astype(np.int64)
    if num_shared_S is None:
        return pack(lengths_S.tolist(), row_tokens)
    rows, stored_S = pack_sharing(lengths_S, groups_S, num_shared_S, row_tokens)
    could_save_rows = len(rows) > -(-int(lengths_S.sum()) // row_tokens)  # fewer rows could not hold all unshared tokens
    if could_save_rows and len(unshared_rows := pack(lengths_S.tolist(), row_tokens)) < len(rows):
        return unshared_rows
    sequences["num_shared"] = stored_S
    return rows


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


def _sharing_order(records: RecordTable, chosen_M: BoolArray) -> tuple[IntArray, IntArray]:
    """Return the chosen segments in the order in which they share tokens, `[S]`, and how many each shares with the one before.

    The number is the least of the segment's own and those of the segments between the two that are not chosen.
    """
    prefixes_M, group_of_M = records.prefixes, records.group_of[records.rollout_of]
    order_M = np.lexsort((prefixes_M["place"], group_of_M))
    num_shared_M = np.where(np.diff(group_of_M[order_M], prepend=-1) == 0, prefixes_M["num_shared"][order_M], 0)
    kept_S = np.flatnonzero(chosen_M[order_M])
    if not len(kept_S):
        return kept_S, kept_S
    after_S = np.append(0, kept_S[:-1] + 1)  # index after the chosen segment before
    return order_M[kept_S], np.minimum.reduceat(num_shared_M[: kept_S[-1] + 1], after_S)


def _sequences(records: RecordTable, segments: IntArray, advantages: DoubleArray, weights: DoubleArray) -> Table:
    """Return the table of some segments, in the given order."""
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
    return sequences


def _microbatches(
    sequences: Table, spans: Spans | None, rows: Sequence[Sequence[int]], rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Balance the rows over ranks and split each rank's rows into micro-batches, padded with empty ones to equal number."""
    costs = row_costs(sequences["length"], sequences["num_shared"], rows)
    ranks = [[rows[i] for i in indices] for indices in balance(costs, dp_size)]
    num_microbatches = max(1, math.ceil(max(len(rank) for rank in ranks) / rows_per_microbatch))

    def table_of(rows: Sequence[Sequence[int]]) -> RowTable:
        indices = np.fromiter(chain.from_iterable(rows), np.int64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        chosen = sequences[indices]
        return RowTable(chosen, ends) if spans is None else RowTable(chosen, ends, spans.take(indices).table)

    starts = [i * rows_per_microbatch for i in range(num_microbatches)]
    return tuple(
        MicroBatch(rows=tuple(table_of(rank[start : start + rows_per_microbatch]) for rank in ranks)) for start in starts
    )


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

    Loss weights are computed per optimizer step. A mini-batch without gradient takes no optimizer step, because otherwise
    momentum alone would change the weights.

    `plan` is `plan_batch` with its options bound, including the advantages of the complete batch. For a mini-batch it is called
    with its part of `advantages_N` and, if any, `spans`. The numbers of groups of mini-batches differ by at most one. The order
    of the groups, by `seed`, differs between epochs.
    """
    ordered = records.by_index()
    full_batch = plan(ordered)
    if num_minibatches == 1 or not full_batch.num_placed:
        num_updates = epochs if full_batch.num_placed else 1
        return StepPlan(updates=(full_batch,) * num_updates, num_in_first_epoch=1, advantages_N=full_batch.advantages_N)

    def plan_of(groups_P: IntArray) -> BatchPlan:
        is_chosen_N = np.isin(ordered.group_of, groups_P)
        own: dict[str, Any] = {"advantages_N": full_batch.advantages_N[is_chosen_N]}
        if full_batch.spans is not None:
            own["spans"] = full_batch.spans.take(np.flatnonzero(is_chosen_N[ordered.rollout_of]))
        return plan(ordered.take(groups_P), **own)

    by_epoch = [
        [
            update
            for groups_P in minibatches(len(ordered), num_minibatches, (*seed, epoch))
            if (update := plan_of(groups_P)).num_placed
        ]
        for epoch in range(epochs)
    ]
    return StepPlan(
        updates=tuple(chain.from_iterable(by_epoch)), num_in_first_epoch=len(by_epoch[0]), advantages_N=full_batch.advantages_N
    )


def minibatches(num_groups: int, num_minibatches: int, seed: Sequence[int]) -> Iterator[IntArray]:
    """Yield the sorted group indices of each mini-batch of an epoch. No mini-batch is empty."""
    order = np.random.default_rng(seed).permutation(num_groups)
    for groups_P in np.array_split(order, min(num_minibatches, num_groups)):
        yield np.sort(groups_P)


def sequence_weights(
    reduction: Reduction, *, num_sampled: npt.ArrayLike, prompt_of: npt.ArrayLike, constant_length: int
) -> npt.NDArray[np.float64]:
    """Return the weight w_i of each sampled token of sequence i, for all sequences of an optimizer step, `[N]`.

    The step has n sampled tokens: n_i in sequence i, and n_p in all sequences of the prompt p of sequence i. N sequences and
    P prompts have at least one sampled token.

    - `sum`: 1
    - `token_mean`: 1 / n, as in DAPO (arXiv:2503.14476)
    - `sequence_mean`: 1 / (N * n_i), as in GRPO (arXiv:2402.03300)
    - `sequence_mean_token_sum`: 1 / N
    - `prompt_mean`: 1 / (P * n_p)
    - `constant`: 1 / (N * constant_length), as in Dr. GRPO (arXiv:2503.20783)

    A sequence without sampled tokens has weight 0 and is not counted in N.
    `prompt_of` are the ids of the sequences' prompts.
    """
    counts_N = np.asarray(num_sampled, np.int64)
    num_sequences = np.count_nonzero(counts_N)
    match reduction:
        case "sum":
            denominators_N = np.ones_like(counts_N)
        case "token_mean":
            denominators_N = np.full_like(counts_N, counts_N.sum())
        case "sequence_mean":
            denominators_N = num_sequences * counts_N
        case "sequence_mean_token_sum":
            denominators_N = np.full_like(counts_N, num_sequences)
        case "prompt_mean":
            _, prompt_N = np.unique(np.asarray(prompt_of), return_inverse=True)
            prompt_tokens_P = np.bincount(prompt_N, weights=counts_N).astype(np.int64)
            denominators_N = np.count_nonzero(prompt_tokens_P) * prompt_tokens_P[prompt_N]
        case "constant":
            denominators_N = np.full_like(counts_N, num_sequences * constant_length)
    return np.divide(1.0, denominators_N, out=np.zeros(len(counts_N)), where=counts_N > 0)


def mean_correction_weight(measured: Iterable[MeasuredCorrection]) -> float:
    """Return the mean correction weight of a step, over all micro-batches and ranks; 1 if there is no weight, or all are 0."""
    measured = list(measured)
    weight, num_weights = sum(each.weight for each in measured), sum(each.num_weights for each in measured)
    return weight / num_weights if weight and num_weights else 1.0


def without_rejected(
    microbatches: Sequence[MicroBatch], measured: Sequence[Sequence[MeasuredCorrection]], reduction: Reduction
) -> list[MicroBatch]:
    """Return micro-batches with the loss weights that the step would have without the tokens that the correction rejects.

    A rollout or prompt counts if one of its tokens is kept, in whichever segment, row, micro-batch and rank that is.
    `microbatches` are all those of an optimizer step, and `measured` the counts of every rank for each.
    """
    tables = [table for microbatch in microbatches for table in microbatch.rows]
    by_rank = [{each.dp_rank: each.counts for each in ranks} for ranks in measured]
    counts = [by_rank[i][rank] for i, microbatch in enumerate(microbatches) for rank in range(len(microbatch.rows))]
    counts_S2 = np.concatenate(counts).reshape(-1, 2).astype(np.float64)
    sequences = np.concatenate([table.sequences for table in tables])
    _, prompt_S = np.unique(sequences["handle"], return_inverse=True)
    keys_S2 = np.stack([prompt_S.reshape(-1), sequences["rollout"]], axis=1)
    rollouts_N2, rollout_S = np.unique(keys_S2, axis=0, return_inverse=True)
    rollout_S = rollout_S.reshape(-1)

    def weights(num_tokens_S: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        num_tokens_N = np.bincount(rollout_S, num_tokens_S, len(rollouts_N2))
        return sequence_weights(reduction, num_sampled=num_tokens_N, prompt_of=rollouts_N2[:, 0], constant_length=1)

    before_N, after_N = weights(counts_S2[:, 0]), weights(counts_S2[:, 1])
    scales_S = np.divide(after_N, before_N, out=np.zeros(len(before_N)), where=before_N > 0.0)[rollout_S]
    scaled, start = [], 0
    for table in tables:
        rows = table.sequences.copy()
        rows["weight"] *= scales_S[start : start + len(rows)]
        start += len(rows)
        scaled.append(replace(table, sequences=rows))
    ranks = iter(scaled)
    return [replace(microbatch, rows=tuple(next(ranks) for _ in microbatch.rows)) for microbatch in microbatches]


def next_entropy_coef(coef: float | None, entropy: float, algorithm: AlgorithmConfig) -> float:
    """Return the coefficient of the entropy bonus after a step whose policy had this entropy, in nats per token.

    It rises by `entropy_delta` below the target, falls above it, and is never negative (Skywork-OR1, arXiv:2505.22312). `coef`
    is None in the first step, which has `algorithm.entropy_coef`.
    """
    target = algorithm.entropy_target
    assert target is not None, "only a target changes the coefficient"
    sign = (entropy < target) - (entropy > target)
    return max((algorithm.entropy_coef if coef is None else coef) + sign * algorithm.entropy_delta, 0.0)


PRIORITIES: dict[str, Priority] = {
    "advantage": lambda group, advantages: float(np.abs(advantages).mean()),
    "variance": lambda group, advantages: float(np.var(group.rewards)),
    "reward": lambda group, advantages: float(np.mean(group.rewards)),
    "recency": lambda group, advantages: 1.0,  # the priority depends only on the time of the draw
}
"""Values of `replay.priority`: the mean absolute advantage, and the variance and mean of the rewards."""


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """Priorities and beta schedule of a run, which the controller computes."""

    config: ReplayConfig
    """Replay settings of the run."""
    num_steps: int
    """Number of training steps of the run."""
    custom_priority: Callable[..., float] | None = None
    """User-defined priority; None selects the built-in one that the configuration names."""

    def beta(self, step: int) -> float:
        """Return the exponent of the importance weights after `step` steps, annealed linearly to `beta_end`."""
        progress = min(step / max(self.num_steps - 1, 1), 1.0)
        if progress == 1.0:
            return self.config.beta_end
        return self.config.beta + (self.config.beta_end - self.config.beta) * progress

    def priorities(
        self, records: RecordTable, advantages_N: DoubleArray, weight_of: WeightOf = lambda part, task: 1.0
    ) -> DoubleArray:
        """Return the priority of each group of a batch; `records` are in prompt order, with the advantages of the rollouts."""
        ends = np.cumsum(records.groups["num_rollouts"])
        groups = zip(group_rewards(records, weight_of), np.split(advantages_N, ends[:-1]), strict=True)
        values = []
        for group, advantages in groups:
            if self.custom_priority is None:
                values.append(PRIORITIES[self.config.priority](group, advantages))
                continue
            name = self.config.priority
            try:
                value = float(self.custom_priority(group, advantages.tolist()))
            except Exception as error:  # user-defined code may raise anything
                raise ValueError(
                    f"replay.priority: {name} raised {type(error).__name__}: {error}. Correct the priority."
                ) from error
            if not np.isfinite(value):
                raise ValueError(f"replay.priority: {name} must return a finite number (got {value}). Correct the priority.")
            values.append(value)
        return np.array(values)
