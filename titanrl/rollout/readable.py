"""Human-readable groups and completions for `rollouts.jsonl`."""

from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.carriers.types import FinishReason, FloatArray, IntArray, Prompt
from titanrl.data.tokenizer import Tokenizer


def readable_group(prompt: Prompt, version: int, completions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a line of `rollouts.jsonl`.

    Args:
        prompt: Prompt of the group.
        version: Newest policy version that sampled the group.
        completions: Results of `readable_completion`, extended by the rewards; completions with a reward come first.
    """
    return {
        "version": version,
        "index": prompt.index,
        "task": prompt.task,
        "prompt": prompt.text,
        "answer": prompt.entry.get("answer"),
        "completions": completions,
    }


def readable_completion(
    tokenizer: Tokenizer, text: str, token_ids: IntArray, logprobs: FloatArray, finish_reason: FinishReason
) -> dict[str, Any]:
    """Return the text of a completion as rewards receive it, that of each token, and log-probabilities of four decimals."""
    ids = token_ids.tolist()
    return {
        "text": text,
        "num_tokens": len(ids),
        "finish_reason": finish_reason,
        "tokens": [tokenizer.token_text(token_id) for token_id in ids],
        "logprobs": [round(float(logprob), 4) for logprob in logprobs],
    }
