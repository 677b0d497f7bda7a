"""Loss weights: the objective of one optimizer step is sum_it w_i * l_it over its sampled tokens, and nothing else scales it.

The weights are computed before the first micro-batch from the counts of the whole step, over all ranks. So neither the
micro-batch split nor the number of data-parallel ranks changes the gradient. A mean of micro-batch means would change it.

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
    """Return the weight w_i of every sampled token of sequence i, for all sequences of an optimizer step, `[N]`.

    With n tokens in total, n_i in the sequence and n_p in the sequence's prompt, N sequences and P prompts with a token:

    - `sum`: 1
    - `token_mean`: 1 / n
    - `sequence_mean`: 1 / (N * n_i)
    - `sequence_mean_token_sum`: 1 / N
    - `prompt_mean`: 1 / (P * n_p)
    - `constant`: 1 / (N * constant_length), as in Dr. GRPO (arXiv:2503.20783)

    A sequence without sampled tokens has weight 0 and is in no count. `prompt_of[i]` is the id of sequence i's prompt.
    """
    counts_N = np.asarray(num_sampled, np.int64)
    _, place_N = np.unique(np.asarray(prompt_of), return_inverse=True)
    prompt_tokens_P = np.bincount(place_N, weights=counts_N).astype(np.int64)
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
            denominators_N = np.count_nonzero(prompt_tokens_P) * prompt_tokens_P[place_N]
        case "constant":
            denominators_N = np.full_like(counts_N, num_sequences * constant_length)
    return np.divide(1.0, denominators_N, out=np.zeros(len(counts_N)), where=counts_N > 0)


def correction_totals(sums: Mapping[str, float]) -> CorrectionTotals:
    """Compute the effect of a correction on the step from `corrections.correction_sums`, summed over micro-batches and ranks.

    A quotient is 1 if its numerator or its denominator is 0.
    """

    def quotient(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[part] and sums[whole] else 1.0

    return CorrectionTotals(
        mean_weight=quotient("weight", "num_weights"),
        kept_tokens_frac=quotient("kept_tokens", "num_tokens"),
        kept_sequences_frac=quotient("kept_sequences", "num_sequences"),
    )
