"""Loss weights: the objective of one optimizer step is sum_it w_i * l_it over all sampled tokens t of all sequences i.

Nothing else scales the loss. The weights are computed before the first micro-batch from the token and sequence counts of the
complete step, over all ranks. The gradient therefore depends neither on the split into micro-batches nor on the number of
data-parallel ranks. A mean of micro-batch means would depend on both.

Shape suffixes: N rollouts, P prompts, S sequences (segments of rollouts).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from titanrl.base.choices import Reduction
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import CorrectionTotals, MeasuredCorrection


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

    Args:
        reduction: Value of `algorithm.reduction`.
        num_sampled: Number of sampled tokens of each sequence, `[N]`.
        prompt_of: Id of each sequence's prompt, `[N]`.
        constant_length: Divisor of `constant`, in tokens.
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


def correction_totals(measured: Iterable[MeasuredCorrection]) -> CorrectionTotals:
    """Return the mean correction weight of a step, over all micro-batches and ranks; 1 if there is no weight, or all are 0."""
    measured = list(measured)
    weight, num_weights = sum(each.weight for each in measured), sum(each.num_weights for each in measured)
    return CorrectionTotals(mean_weight=weight / num_weights if weight and num_weights else 1.0)


def without_rejected(
    microbatches: Sequence[MicroBatch], measured: Sequence[Sequence[MeasuredCorrection]], reduction: Reduction
) -> list[MicroBatch]:
    """Return micro-batches with the loss weights that the step would have without the tokens that the correction rejects.

    A rollout or prompt counts if one of its tokens is kept, in whichever segment, row, micro-batch and rank that is.

    Args:
        microbatches: All micro-batches of an optimizer step.
        measured: For each micro-batch, the counts of every rank.
        reduction: Value of `algorithm.reduction`.
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
