"""Correct answers to chain_sum questions, written by rule, for the supervised training before RL."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from titanrl.config.sections import WarmStartConfig
from titanrl.data.streams import PromptStream
from titanrl.data.tokenizer import Tokenizer
from titanrl.types import BoolArray, IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and its answer.

    Example: prompt `[5, 6]`, answer `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`.
    """

    token_ids: IntArray
    """Prompt and answer, the end-of-sequence token included, `[S]`."""
    mask: BoolArray
    """True at the answer, which alone is trained on, `[S]`."""


def chain_sum_demonstrations(
    stream: PromptStream, tokenizer: Tokenizer, warm_start: WarmStartConfig, seed: int
) -> Iterator[list[Demonstration]]:
    """Yield `batch_size` demonstrations for each of `num_steps` optimizer steps, over training prompts in stream order.

    The first `num_long_only_steps` batches show the working; after that each answer is short with `short_fraction`.
    """
    for step in range(warm_start.num_steps):
        short_fraction = warm_start.short_fraction if step >= warm_start.num_long_only_steps else 0.0
        is_short = np.random.default_rng((seed, step)).random(warm_start.batch_size) < short_fraction
        start = step * warm_start.batch_size
        yield [_demonstrate(stream[start + i], tokenizer, short=bool(short)) for i, short in enumerate(is_short)]


def _demonstrate(prompt: Prompt, tokenizer: Tokenizer, *, short: bool) -> Demonstration:
    working, answer = _work_out(prompt.entry["metadata"]["expression"])
    assert answer == int(prompt.entry["answer"])
    thought = "" if short else f"<think>{working}</think>"
    answer_ids = [*tokenizer.encode(f"{thought}<answer>{answer}</answer>"), tokenizer.eos_ids[0]]
    token_ids = np.array([*prompt.token_ids, *answer_ids], np.int64)
    return Demonstration(token_ids=token_ids, mask=np.arange(len(token_ids)) >= len(prompt.token_ids))


def _work_out(expression: str) -> tuple[str, int]:
    """Running sum from left to right: `7 + 5 - 3` gives `7+5=12-3=9` and 9."""
    first, *rest = expression.split()
    working, total = first, int(first)
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if operator == "+" else -int(term)
        working += f"{operator}{term}={total}"
    return working, total
