"""The plan of one optimizer step: which sequence runs where, with which advantage and which loss weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from titanrl.algorithms.advantages import batch_advantages
from titanrl.algorithms.packing import balance, pack, pack_sharing, row_cost
from titanrl.algorithms.weights import sequence_weights
from titanrl.config.sections import AlgorithmConfig
from titanrl.types import BatchPlan, GroupRecord, Handle, MicroBatch, Row, SequencePlan


def plan_batch(
    records: Sequence[GroupRecord],
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
    ordered = sorted(records, key=lambda record: record.index)
    assert len({record.index for record in ordered}) == len(ordered), "a group must not be in a batch twice"
    sequences = _sequences_with_gradient(ordered, algorithm, constant_length)
    prompt_lens = {record.handle: record.prompt_len for record in ordered} if share_prompts else {}
    microbatches = _microbatches(pack_sequences(sequences, prompt_lens, row_tokens), rows_per_microbatch, dp_size)
    return BatchPlan(
        microbatches=microbatches,
        records=tuple(ordered),
        num_tokens=sum(sum(record.num_sampled) for record in ordered),
        packing_efficiency=_num_placed(microbatches) / (_num_rows_run(microbatches) * row_tokens),
    )


def plan_demonstrations(
    record: GroupRecord, *, row_tokens: int, rows_per_microbatch: int, dp_size: int
) -> tuple[MicroBatch, ...]:
    """Micro-batches of a batch of demonstrations, every trained token with the same weight (`token_mean`)."""
    weights = sequence_weights(
        "token_mean", num_sampled=record.num_sampled, prompt_of=range(len(record.lengths)), constant_length=1
    )
    sequences = [
        SequencePlan(handle=record.handle, rollout=rollout, length=length, advantage=0.0, weight=weight)
        for rollout, (length, weight) in enumerate(zip(record.lengths, weights, strict=True))
    ]
    return _microbatches(pack_sequences(sequences, {}, row_tokens), rows_per_microbatch, dp_size)


def _sequences_with_gradient(
    records: Sequence[GroupRecord], algorithm: AlgorithmConfig, constant_length: int
) -> list[SequencePlan]:
    """Plans of the sequences that have a gradient, in order of group and rollout."""
    places = [(record, rollout) for record in records for rollout in range(len(record.rewards))]
    by_group = batch_advantages(
        [record.rewards for record in records],
        [record.num_sampled for record in records],
        algorithm.advantage,
        std_ddof=algorithm.std_ddof,
        pass_k=algorithm.pass_k,
    )
    advantages = [advantage for group in by_group for advantage in group]
    weights = sequence_weights(
        algorithm.reduction,
        num_sampled=[record.num_sampled[rollout] for record, rollout in places],
        prompt_of=[record.index for record, _ in places],
        constant_length=constant_length,
    )
    sequences = []
    for (record, rollout), advantage, weight in zip(places, advantages, weights, strict=True):
        if weight and (advantage or algorithm.runs_without_advantage):
            assert record.has_payload, f"group {record.index} has a gradient but no payload"
            length = record.lengths[rollout]
            sequences.append(
                SequencePlan(handle=record.handle, rollout=rollout, length=length, advantage=advantage, weight=weight)
            )
    return sequences


def pack_sequences(sequences: Sequence[SequencePlan], prompt_lens: Mapping[Handle, int], row_tokens: int) -> list[Row]:
    """Rows of the sequences; those of a group share its prompt where the lengths of prompts are given and that saves rows.

    The last token of the prompt is never shared: it predicts the first of each completion.
    """
    lengths = [sequence.length for sequence in sequences]
    apart = pack(lengths, row_tokens)
    if not prompt_lens:
        return [tuple(sequences[i] for i in row) for row in apart]
    place_of = {handle: place for place, handle in enumerate(prompt_lens)}
    groups = [place_of[sequence.handle] for sequence in sequences]
    num_shared = [prompt_lens[sequence.handle] - 1 for sequence in sequences]
    together = pack_sharing(lengths, groups, num_shared, row_tokens)
    if len(apart) < len(together):
        return [tuple(sequences[i] for i in row) for row in apart]
    return [
        tuple(
            replace(sequences[i], num_shared=num_shared[i])
            if before is not None and groups[before] == groups[i]
            else sequences[i]
            for before, i in zip([None, *row], row, strict=False)
        )
        for row in together
    ]


def _microbatches(rows: Sequence[Row], rows_per_microbatch: int, dp_size: int) -> tuple[MicroBatch, ...]:
    """Balance the rows over ranks and cut each rank's share; a rank whose share ends early gets empty micro-batches."""
    costs = [row_cost([sequence.length for sequence in row], [sequence.num_shared for sequence in row]) for row in rows]
    ranks = [[rows[i] for i in indices] for indices in balance(costs, dp_size)]
    num_microbatches = max(1, math.ceil(max(len(rank) for rank in ranks) / rows_per_microbatch))
    starts = [i * rows_per_microbatch for i in range(num_microbatches)]
    return tuple(MicroBatch(rows=tuple(tuple(rank[start : start + rows_per_microbatch]) for rank in ranks)) for start in starts)


def _num_placed(microbatches: Sequence[MicroBatch]) -> int:
    return sum(
        sequence.num_placed for microbatch in microbatches for rank in microbatch.rows for row in rank for sequence in row
    )


def _num_rows_run(microbatches: Sequence[MicroBatch]) -> int:
    """Rows that go through the model: a rank without rows still runs an empty one."""
    return sum(max(len(rank), 1) for microbatch in microbatches for rank in microbatch.rows)
