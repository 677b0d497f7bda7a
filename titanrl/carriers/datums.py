"""Training data for custom loops, in Tinker's format, with helpers to build and batch it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TypeVar

import numpy as np

from titanrl.base.arguments import check_count, check_list, check_number, check_type, checked_numbers, checked_tokens
from titanrl.carriers.supports import ExpertIds, Supports, placed
from titanrl.carriers.types import FloatArray, IntArray, LossSums, TopTokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A training sequence in Tinker's format. Targets are already shifted, and all arrays are `[S]`.

    Example: for tokens `[5, 6, 7, 1]`, the last two of which were sampled, `model_input=[5, 6, 7]` and
    `loss_fn_inputs={"target_tokens": [6, 7, 1], "logprobs": [0, -0.1, -0.7], "advantages": [0, 1.5, 1.5]}`; with the loss
    `cross_entropy`, `loss_fn_inputs={"target_tokens": [6, 7, 1], "weights": [0, 1, 1]}`.
    """

    model_input: IntArray
    """Input tokens of the model."""
    loss_fn_inputs: Mapping[str, IntArray | FloatArray]
    """Inputs of the loss: `target_tokens` (the token after each input token), `weights` (loss weights, 1 by default),
    `logprobs` (from the sampler) and `advantages`."""
    supports: Supports | None = None
    """Supports of the sampling distributions, if sampling was truncated; the trainer normalizes over the same tokens."""
    experts: ExpertIds | None = None
    """Experts that the generator of a mixture of experts chose for the input tokens, `[S, layers, experts of a token]`; used
    with `trainer.routing: compared` or `replayed`."""
    teacher_input: IntArray | None = None
    """Input tokens of the teacher, for a loss that compares with it: another prompt, and the same completion at the end."""
    teacher_top: TopTokens | None = None
    """Most likely tokens of another model at the last targets, `[T, K]`, for the loss `forward_kl`. If any datum has them, no
    other teacher is computed, and data without them have no divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataResult:
    """Results of one rank's share of the data. Only one of the ranks with the same share reports them."""

    logprobs: Mapping[int, FloatArray]
    """Log-probabilities of the targets by index of the datum, `[S]` each."""
    sums: tuple[LossSums, ...]
    version: int
    """Policy version of the weights that were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a forward or forward-backward pass."""

    loss_fn_outputs: tuple[Mapping[str, FloatArray], ...]
    """Outputs of each datum, in input order: `logprobs` of its targets, `[S]`."""
    metrics: Mapping[str, float]
    """Metrics; the suffix of a name is the reduction, as in `loss:sum`."""
    version: int
    """Policy version that computed them."""


def sampled_datum(
    prompt: Sequence[int] | IntArray,
    tokens: Sequence[int] | IntArray,
    logprobs: Sequence[float] | FloatArray,
    advantage: float | Sequence[float] | FloatArray,
    weight: float = 1.0,
    supports: Supports | None = None,
    experts: ExpertIds | None = None,
) -> Datum:
    """Build the datum of a sampled completion for a policy loss such as `ppo` or `importance_sampling`.

    Args:
        prompt: Prompt tokens, `[P]`; their loss weight is 0.
        tokens: Sampled tokens, `[T]`.
        logprobs: Log-probability of each sampled token under the policy that sampled it, `[T]`.
        advantage: Advantage of the completion, or of each of its tokens, `[T]`.
        weight: Loss weight of each sampled token, such as 1 / number of tokens in the batch for a mean.
        supports: Support of each sampled token, `[T]`, if sampling was truncated.
        experts: Experts of the tokens of prompt and completion, `[P + T, ...]`, if they were recorded.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are no tokens, or another number of values than tokens.
    """
    prompt, tokens = checked_tokens("prompt", prompt), checked_tokens("tokens", tokens)
    fix = "Give one number per sampled token."
    by_token = {"logprobs": checked_numbers("logprobs", logprobs, fix)}
    if isinstance(advantage, Real):
        check_number("advantage", advantage, "Check the rewards.")
        by_token["advantages"] = np.full(len(tokens), advantage)
    else:
        by_token["advantages"] = checked_numbers("advantage", advantage, "Give one number, or one per sampled token.")
    check_number("weight", weight, "Give a number such as 1.")
    for name, values in by_token.items():
        if len(values) != len(tokens):
            raise ValueError(f"{name}: must have one value per token, {len(tokens)} (got {len(values)}). {fix}")
    inputs = {name: values.astype(np.float32) for name, values in by_token.items()}
    datum = _datum(prompt, tokens, {**inputs, "weights": np.full(len(tokens), weight, np.float32)})
    if supports is not None:
        datum = replace(datum, supports=placed([(len(prompt) - 1, supports)], len(prompt) - 1 + len(supports)))
    return datum if experts is None else replace(datum, experts=experts[: len(datum.model_input)])


def supervised_datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, weight: float = 1.0) -> Datum:
    """Build the datum of a prompt and the answer to learn, for the loss `cross_entropy`.

    Args:
        prompt: Prompt tokens, `[P]`; their loss weight is 0.
        tokens: Answer tokens, `[T]`.
        weight: Loss weight of each answer token.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are no tokens.
    """
    prompt, tokens = checked_tokens("prompt", prompt), checked_tokens("tokens", tokens)
    check_number("weight", weight, "Give a number such as 1.")
    return _datum(prompt, tokens, {"weights": np.full(len(tokens), weight, np.float32)})


def batches(items: Sequence[T], size: int, *, seed: int = 0, num_epochs: int | None = None) -> Iterator[list[T]]:
    """Yield batches of `size` items, reshuffled every epoch. An incomplete last batch of an epoch is dropped.

    Args:
        items: Items to batch.
        size: Number of items per batch.
        seed: Seed of the order.
        num_epochs: Number of epochs; None repeats forever.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are fewer than `size` items.
    """
    check_list("items", items, "data", "Give a list.")
    check_count("size", size, "Give the number of items per batch.")
    check_count("seed", seed, "Give an integer such as 0.", least=0)
    if num_epochs is not None:
        check_count("num_epochs", num_epochs, "None repeats forever.", least=0)
    if len(items) < size:
        raise ValueError(f"size: must not exceed the number of items (got {size} of {len(items)}). Lower size, or add items.")
    return _batches(items, size, seed, num_epochs)


def check_data(data: object, name: str = "data") -> None:
    """Check that data can be trained on, as far as that does not depend on the model and the loss.

    Raises:
        TypeError: It is not a list of `Datum`, or a datum has an array of another type.
        ValueError: An array has another length than the input.
    """
    fix = "Build data with titanrl.sampled_datum or titanrl.supervised_datum."
    for index, datum in enumerate(check_list(name, data, "Datum", fix)):
        check_type(f"{name}[{index}]", datum, Datum, "a Datum", fix)
        length = len(checked_tokens(f"{name}[{index}].model_input", datum.model_input))
        where = f"{name}[{index}].loss_fn_inputs"
        check_type(where, datum.loss_fn_inputs, Mapping, "a mapping of names to arrays", fix)
        for key, values in datum.loss_fn_inputs.items():
            if key == "target_tokens":
                num_values = len(checked_tokens(f"{where}[{key!r}]", values))
            else:
                num_values = len(checked_numbers(f"{where}[{key!r}]", values, "Give one number per input token."))
            if num_values != length:
                fix_length = f"Give one value per input token: ({length},)."
                raise ValueError(f"{where}[{key!r}]: wrong shape (got ({num_values},)). {fix_length}")


def _batches(items: Sequence[T], size: int, seed: int, num_epochs: int | None) -> Iterator[list[T]]:
    epoch = 0
    while num_epochs is None or epoch < num_epochs:
        order = np.random.default_rng((seed, epoch)).permutation(len(items))
        for start in range(0, len(items) - size + 1, size):
            yield [items[index] for index in order[start : start + size]]
        epoch += 1


def _datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, after_prompt: Mapping[str, FloatArray]) -> Datum:
    """Build a datum: shift prompt and tokens by one, and pad the per-token inputs with zeros at the prompt."""
    if not (len(prompt) and len(tokens)):
        raise ValueError(
            f"prompt, tokens: must not be empty (got {len(prompt)} and {len(tokens)} tokens). Leave the datum out."
        )
    sequence = np.concatenate([np.asarray(prompt, np.int64), np.asarray(tokens, np.int64)])
    zeros = np.zeros(len(prompt) - 1, np.float32)
    inputs = {name: np.concatenate([zeros, values]) for name, values in after_prompt.items()}
    return Datum(model_input=sequence[:-1], loss_fn_inputs={"target_tokens": sequence[1:], **inputs})
