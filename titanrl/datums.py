"""Data of a loop of one's own, in Tinker's format, and the helpers that keep such a loop short."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from titanrl.supports import Supports, join, whole_vocabulary
from titanrl.types import FloatArray, IntArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A sequence from the user, in Tinker's format: targets are already shifted, all arrays are `[S]`.

    Example: tokens `[5, 6, 7, 1]` with the last two sampled: `model_input=[5, 6, 7]`, `loss_fn_inputs={"target_tokens":
    [6, 7, 1], "logprobs": [0, -0.1, -0.7], "advantages": [0, 1.5, 1.5]}`; for `cross_entropy` `{"target_tokens": [6, 7, 1],
    "weights": [0, 1, 1]}`.
    """

    model_input: IntArray
    """Input tokens of the model."""
    loss_fn_inputs: Mapping[str, IntArray | FloatArray]
    """`target_tokens`, the token that follows each input token, and the inputs of the loss: `weights` (loss weights, 1 by
    default), `logprobs` (of the sampler) and `advantages`."""
    supports: Supports | None = None
    """Supports of the distributions that the targets were sampled from, if sampling was truncated; the trainer normalizes over
    the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a pass over data."""

    loss_fn_outputs: tuple[Mapping[str, FloatArray], ...]
    """Outputs of each datum, in the order of the data: `logprobs` of its targets, `[S]`."""
    metrics: Mapping[str, float]
    """Metrics; the suffix of a name is its reduction, as in `loss:sum`."""
    version: int
    """Policy version that computed them."""


def sampled_datum(
    prompt: Sequence[int] | IntArray,
    tokens: Sequence[int] | IntArray,
    logprobs: Sequence[float] | FloatArray,
    advantage: float | Sequence[float] | FloatArray,
    weight: float = 1.0,
    supports: Supports | None = None,
) -> Datum:
    """Return the datum of a sampled completion for a policy loss, such as `ppo` or `importance_sampling`.

    Args:
        prompt: Prompt tokens, `[P]`; they have the loss weight 0.
        tokens: Sampled tokens, `[T]`.
        logprobs: Log-probability of each sampled token under the policy that sampled it, `[T]`.
        advantage: Advantage of the completion, or of each of its tokens, `[T]`.
        weight: Loss weight of each sampled token, such as 1 / number of tokens of the batch for a mean.
        supports: Support of each sampled token, `[T]`, if sampling was truncated.
    """
    inputs = {
        "logprobs": np.asarray(logprobs, np.float32),
        "advantages": np.broadcast_to(np.asarray(advantage, np.float32), (len(tokens),)),
        "weights": np.full(len(tokens), weight, np.float32),
    }
    datum = _datum(prompt, tokens, inputs)
    if supports is None:
        return datum
    return replace(datum, supports=join((whole_vocabulary(len(prompt) - 1, supports.vocab_size), supports)))


def supervised_datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, weight: float = 1.0) -> Datum:
    """Return the datum of a prompt and the answer to learn, for the loss `cross_entropy`.

    Args:
        prompt: Prompt tokens, `[P]`; they have the loss weight 0.
        tokens: Answer tokens, `[T]`.
        weight: Loss weight of each answer token.
    """
    return _datum(prompt, tokens, {"weights": np.full(len(tokens), weight, np.float32)})


def batches(items: Sequence[T], size: int, *, seed: int = 0, num_epochs: int | None = None) -> Iterator[list[T]]:
    """Yield batches of `size` items, shuffled again in every epoch; the last items of an epoch that fill no batch are left out.

    Args:
        items: Items to choose from.
        size: Items of a batch.
        seed: Seed of the order.
        num_epochs: Number of epochs; None repeats forever.

    Raises:
        ValueError: There are fewer than `size` items.
    """
    if len(items) < size:
        raise ValueError(f"size: must not exceed the number of items (got {size} of {len(items)}). Lower size, or add items.")
    epoch = 0
    while num_epochs is None or epoch < num_epochs:
        order = np.random.default_rng((seed, epoch)).permutation(len(items))
        for start in range(0, len(items) - size + 1, size):
            yield [items[index] for index in order[start : start + size]]
        epoch += 1


def _datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, after_prompt: Mapping[str, FloatArray]) -> Datum:
    """Shift prompt and tokens by one, and put zeros before the values that belong to the tokens."""
    if not (len(prompt) and len(tokens)):
        raise ValueError(
            f"prompt, tokens: must not be empty (got {len(prompt)} and {len(tokens)} tokens). Leave the datum out."
        )
    whole = np.concatenate([np.asarray(prompt, np.int64), np.asarray(tokens, np.int64)])
    zeros = np.zeros(len(prompt) - 1, np.float32)
    inputs = {name: np.concatenate([zeros, values]) for name, values in after_prompt.items()}
    return Datum(model_input=whole[:-1], loss_fn_inputs={"target_tokens": whole[1:], **inputs})
