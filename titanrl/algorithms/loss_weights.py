"""Loss weights: the objective of one optimizer step is sum_it w_i * l_it over all sampled tokens t of all sequences i.

Nothing else scales the loss. The weights are computed before the first micro-batch from the token and sequence counts of the
complete step, over all ranks. The gradient therefore depends neither on the split into micro-batches nor on the number of
data-parallel ranks. A mean of micro-batch means would depend on both.

Shape suffixes: N sequences, P prompts.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from titanrl.config.choices import Reduction
from titanrl.types import CorrectionTotals


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


def correction_totals(sums: Mapping[str, float]) -> CorrectionTotals:
    """Compute the mean weight and the kept fractions of a step.

    `sums` are those of `corrections.correction_sums`, added up over micro-batches and ranks. A quotient is 1 if its numerator
    or denominator is 0.
    """

    def quotient(numerator: str, denominator: str) -> float:
        return sums[numerator] / sums[denominator] if sums[numerator] and sums[denominator] else 1.0

    return CorrectionTotals(
        mean_weight=quotient("weight", "num_weights"),
        kept_tokens_frac=quotient("kept_tokens", "num_tokens"),
        kept_sequences_frac=quotient("kept_sequences", "num_sequences"),
    )
