"""Loss weights: the objective of one optimizer step is sum_it w_i * l_it over its sampled tokens, and nothing else scales it.

The weights are fixed before the first micro-batch from the counts of the whole step, all ranks included, so neither the
micro-batch split nor the number of data-parallel ranks can change the gradient (a mean of micro-batch means would).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from titanrl.types import CorrectionTotals

Reduction = Literal["sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]


def sequence_weights(
    reduction: Reduction, *, num_sampled: Sequence[int], prompt_of: Sequence[int], constant_length: int
) -> list[float]:
    """Weight w_i of every sampled token of sequence i, for all sequences of an optimizer step.

    With n tokens in all, n_i in the sequence and n_p in the sequence's prompt, N sequences and P prompts that have a token:

    - `sum`: 1
    - `token_mean`: 1 / n
    - `sequence_mean`: 1 / (N * n_i)
    - `sequence_mean_token_sum`: 1 / N
    - `prompt_mean`: 1 / (P * n_p)
    - `constant`: 1 / (N * constant_length), as in Dr. GRPO (arXiv:2503.20783)

    A sequence without sampled tokens has weight 0 and counts nowhere. `prompt_of[i]` is the id of sequence i's prompt.
    """
    prompt_tokens: Counter[int] = Counter()
    for prompt, count in zip(prompt_of, num_sampled, strict=True):
        prompt_tokens[prompt] += count
    num_tokens = prompt_tokens.total()
    num_sequences = sum(count > 0 for count in num_sampled)
    num_prompts = sum(count > 0 for count in prompt_tokens.values())

    def denominator(prompt: int, count: int) -> int:
        match reduction:
            case "sum":
                return 1
            case "token_mean":
                return num_tokens
            case "sequence_mean":
                return num_sequences * count
            case "sequence_mean_token_sum":
                return num_sequences
            case "prompt_mean":
                return num_prompts * prompt_tokens[prompt]
            case "constant":
                return num_sequences * constant_length

    return [1.0 / denominator(prompt, count) if count else 0.0 for prompt, count in zip(prompt_of, num_sampled, strict=True)]


def correction_totals(sums: Mapping[str, float]) -> CorrectionTotals:
    """What a correction does over the step, from `objective.correction_sums` added up over micro-batches and ranks.

    Where nothing is left there is nothing to divide, and the value is 1.
    """

    def quotient(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[part] and sums[whole] else 1.0

    return CorrectionTotals(
        mean_weight=quotient("weight", "num_weights"),
        kept_tokens_frac=quotient("kept_tokens", "num_tokens"),
        kept_sequences_frac=quotient("kept_sequences", "num_sequences"),
    )
