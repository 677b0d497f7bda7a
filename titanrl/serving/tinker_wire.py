"""Tinker's wire format: protobuf passes and JSON requests of the official client, to and from the data of a session.

Functions here are pure. The schema comes with the package `tinker`, whose import takes the whole client along. So this file
imports it only in `schema`, which only a server for Tinker calls.

Shape suffixes: T tokens, K targets per token.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanrl.carriers.types import (
    AdamParams,
    Completion,
    Datum,
    FloatArray,
    ForwardBackwardOutput,
    IntArray,
    SamplingParams,
    TopTokens,
)
from titanrl.serving.calls import MAX_SEED, MAX_TOP, Fields, Refused, wrong

PROTOBUF = b"application/x-protobuf"
MAX_TARGETS = 64
"""Largest number of targets per token; each costs a pass over its datum."""
MAX_VALUES = 1 << 24
"""Largest number of tokens and loss inputs of a pass; the client sends about a million. Sparse tensors count as dense ones."""
LOSSES: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("target_tokens", "logprobs", "advantages")),
    "gspo": ("target_tokens", "logprobs", "advantages", "weights"),  # a prompt must not count in the ratio of the sequence
}
"""Inputs that each loss requires. `weights` are optional for the others, 1 by default."""
REFUSED_LOSSES = {
    "stable_reinforce": "its formula is not published. Use importance_sampling, for example with loss_fn=importance_sampling",
    "custom": "a custom loss runs in the client. Use forward_backward_custom",
}
UNKNOWN_LOGPROB = -99999.0
"""Log-probability of the most likely tokens where there are none."""
REDUCTIONS = ("sum", "mean", "max", "min")
"""Reductions of metrics that the client knows."""
_DTYPES: Mapping[int, "np.dtype[Any]"] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


class Malformed(Exception):
    """The body is no message of the protocol, or asks for something that cannot be done."""


@functools.cache
def schema() -> Any:
    """Return the protobuf messages of Tinker."""
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Data of a forward or forward-backward pass, as the trainer takes it."""

    data: tuple[Datum, ...]
    """Data with one target per token. A datum with K targets per token is K of them, because the loss is a sum."""
    widths: tuple[int | None, ...]
    """Number of targets per token of each of the client's data; None if its targets are `[T]`."""
    loss_fn: str
    options: Mapping[str, float]
    """Options of the loss, by Tinker's names. The trainer checks them, before it runs anything."""
    backward: bool
    """True to accumulate the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for completions of a prompt, and for the log-probabilities of its tokens."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, `[P]`."""
    num_samples: int
    sampling: SamplingParams
    """Sampling options."""
    prompt_logprobs: bool
    """True to also return the log-probability of each prompt token."""
    num_top: int
    """Number of most likely tokens to return at each prompt token; 0 returns none."""


def read_pass(body: bytes) -> Any:
    """Return the protobuf message of a pass; raise `Malformed` if it is none."""
    message = schema().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's decoder; its classes depend on the implementation
        raise Malformed(f"body: must be a ForwardBackwardRequest in protobuf ({type(error).__name__})") from None
    if not message.model_id:
        raise Malformed("body: a ForwardBackwardRequest must have a model_id")
    return message


def digest(body: bytes) -> bytes:
    """Return a short digest of a body."""
    return hashlib.blake2b(body, digest_size=16).digest()


def pass_of(message: Any, vocab_size: int) -> Pass:
    """Return the data of a pass; raise `Malformed` if a datum is not supported, or does not fit the loss."""
    loss_fn = message.loss_fn
    if loss_fn not in LOSSES:
        why = REFUSED_LOSSES.get(loss_fn, f"unknown loss. Choose one of {', '.join(LOSSES)}")
        raise Malformed(f"loss_fn: {why} (got {loss_fn[:40]!r}).")
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise Malformed(f"loss_fn_config.{name[:40]}: must be a number (got {value.text[:40]!r}).")
        options[name] = value.number
    if not message.data:
        raise Malformed("data: must not be empty. Send at least one datum.")
    data, widths, num_left = list[Datum](), list[int | None](), MAX_VALUES
    for index, each in enumerate(message.data):
        columns, width, num_values = _data_of(each, f"data[{index}]", loss_fn, vocab_size, num_left)
        num_left -= num_values
        widths.append(width)
        data += columns
    return Pass(data=tuple(data), widths=tuple(widths), loss_fn=loss_fn, options=options, backward=not message.forward_only)


def pass_result(asked: Pass, output: ForwardBackwardOutput) -> bytes:
    """Return the protobuf result of a pass: `logprobs` of each datum, in the shape of its targets, and the metrics."""
    pb, rest = schema(), iter(output.loss_fn_outputs)
    arrays = list[FloatArray]()
    for width in asked.widths:
        columns = [np.asarray(next(rest)["logprobs"], "<f4") for _ in range(width or 1)]
        arrays.append(columns[0] if width is None else np.stack(columns, axis=1))
    result = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    start = 0
    for end in range(1, len(arrays) + 1):
        if end < len(arrays) and asked.widths[end] == asked.widths[start]:
            continue
        run, width = arrays[start:end], asked.widths[start]  # a record has one shape after the first dimension
        offsets = np.cumsum([0, *(array.nbytes for array in run)]).astype("<i8")
        tensor = pb.BatchedTensor(
            data=b"".join(array.tobytes() for array in run),
            offsets=offsets.tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=[] if width is None else [width],
        )
        result.loss_fn_outputs.append(pb.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(run)))
        start = end
    for name, value in output.metrics.items():
        stem, _, reduction = name.rpartition(":")  # the client accepts exactly one colon, before a reduction
        is_accepted = stem and ":" not in stem and reduction in REDUCTIONS
        result.metrics[name if is_accepted else f"{name.replace(':', '.')}:mean"] = float(value)
    encoded: bytes = result.SerializeToString()
    return encoded


def sample_result(
    completions: Sequence[Completion], prompt_logprobs: FloatArray | None, prompt_top: TopTokens | None = None
) -> bytes:
    """Return the protobuf result of a sample request.

    The first prompt token has no log-probability, which is NaN, and no likely tokens, so `prompt_top` begins with the second.
    """
    pb = schema()
    result = pb.SampleResponse()
    for completion in completions:
        result.sequences.append(
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_LENGTH if completion.finish_reason == "length" else pb.STOP_REASON_STOP,
                tokens=completion.token_ids.astype("<i4").tobytes(),
                logprobs=completion.logprobs.astype("<f4").tobytes(),
            )
        )
    if prompt_logprobs is not None:
        result.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if prompt_top is not None:
        length, num_top = prompt_top.token_ids.shape
        result.topk_prompt_logprobs.length, result.topk_prompt_logprobs.k = length + 1, num_top
        unknown_ids, unknown = np.zeros((1, num_top), "<i4"), np.full((1, num_top), UNKNOWN_LOGPROB, "<f4")
        result.topk_prompt_logprobs.token_ids = np.concatenate([unknown_ids, prompt_top.token_ids.astype("<i4")]).tobytes()
        result.topk_prompt_logprobs.logprobs = np.concatenate([unknown, prompt_top.logprobs.astype("<f4")]).tobytes()
    encoded: bytes = result.SerializeToString()
    return encoded


def read_adam(fields: Fields) -> AdamParams:
    """Read the options of an optimizer step; raise `Refused` if it is not AdamW, or a value is invalid."""
    fields.only("optimizer_params")
    adam = fields.nested("adam_params") or Fields({})
    names = {"learning_rate": "learning_rate", "beta1": "beta1", "beta2": "beta2", "eps": "eps", "weight_decay": "weight_decay"}
    names |= {"grad_clip_norm": "max_grad_norm"}
    for name in names:
        adam.refuse_null(name)
    found = {ours: adam.number(theirs, 0.0, sys.float_info.max) for theirs, ours in names.items()}
    adam.done()
    fields.done()
    try:
        return AdamParams(**{name: value for name, value in found.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise Refused(f"adam_params: {str(error).removeprefix('AdamParams.')}") from None


def read_sample(fields: Fields, vocab_size: int, max_samples: int, max_tokens: int) -> SampleRequest:
    """Read a request for at most `max_samples` completions, after the caller has taken what names the sampling session.

    Prompt and completion together have at most `max_tokens`, which is also the limit of a completion without one. Raise
    `Refused` if a field is invalid, `Malformed` if the prompt is too long.
    """
    num_samples = fields.count("num_samples", 1, max_samples)
    prompt = _prompt_of(fields, vocab_size)
    params = fields.nested("sampling_params") or Fields({}, "sampling_params")
    for name in ("temperature", "top_p"):
        params.refuse_null(name)
    temperature = params.number("temperature", 0.0, 1e6)
    top_k = params.count("top_k", -1, vocab_size)
    top_p = params.number("top_p", 0.0, 1.0)
    seed = params.count("seed", -(2**63), 2**64 - 1)
    longest = params.count("max_tokens", 1, 2**31 - 1)
    stop, stop_ids = _stop_of(params, vocab_size)
    params.done()
    wanted = fields.flag("prompt_logprobs")
    num_top = fields.count("topk_prompt_logprobs", 0, min(MAX_TOP, vocab_size)) or 0
    for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
        fields.only(name, 0)
    fields.only("target_prompt_logprobs")
    fields.only("prompt_logprobs_last_n")
    fields.skip("record_stability_info")  # no loss here needs it
    fields.done()
    if top_p is not None and top_p <= 0.0:
        raise wrong("sampling_params.top_p", "must be greater than 0", top_p)
    temperature = 1.0 if temperature is None else temperature
    if 0.0 < temperature < 0.01:
        raise wrong("sampling_params.temperature", "must be 0, or at least 0.01", temperature)
    if (room := max_tokens - len(prompt)) < (longest or 1):
        length = f"{len(prompt)} + {longest or 1}"
        raise Malformed(f"prompt: prompt and completion must have at most {max_tokens} tokens (got {length}).")
    sampling = SamplingParams(
        max_new_tokens=longest or room,
        temperature=temperature,
        seed=None if seed is None else seed % MAX_SEED,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None or top_k < 0 else top_k,
        stop=stop,
        stop_ids=stop_ids,
    )
    return SampleRequest(
        prompt=prompt, num_samples=num_samples or 1, sampling=sampling, prompt_logprobs=wanted, num_top=num_top
    )


def _stop_of(params: Fields, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    stop = params.take("stop")
    found = [stop] if isinstance(stop, str) else [] if stop is None else stop
    is_list = isinstance(found, list) and len(found) <= 64
    if stop is not None and is_list and not found:
        raise wrong("sampling_params.stop", "must not be empty, because the end of sequence always ends a completion", stop)
    if is_list and all(isinstance(each, str) and each for each in found):
        return tuple(found), ()
    if is_list and all(type(each) is int and 0 <= each < vocab_size for each in found):
        return (), tuple(found)
    raise wrong("sampling_params.stop", "must be a text, or a list of up to 64 texts or of tokens", stop)


def _prompt_of(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a prompt, given as chunks."""
    prompt = fields.nested("prompt")
    if prompt is None:
        raise wrong("prompt", "is required", None)
    found = list[int]()
    for index, each in enumerate(prompt.items("chunks")):
        chunk = Fields(each, f"prompt.chunks[{index}]")
        kind = chunk.take("type")
        if kind not in (None, "encoded_text"):
            raise wrong(chunk.name("type"), "must be encoded_text; images and audio are not supported", kind)
        tokens = chunk.items("tokens")
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise wrong(chunk.name("tokens"), f"must be integers from 0 to {vocab_size - 1}", tokens)
        found += tokens
        chunk.skip("spans")
        chunk.done()
    prompt.skip("spans")
    prompt.done()
    if not found:
        raise wrong("prompt.chunks", "must have tokens", [])
    return tuple(found)


def _data_of(message: Any, name: str, loss_fn: str, vocab_size: int, num_left: int) -> tuple[list[Datum], int | None, int]:
    """Return a datum as data with one target per token, the number of its targets per token, and its number of values.

    There is no number of targets if they are `[T]`. A datum may have at most `num_left` values.
    """
    tokens = _tokens_of(message.model_input, f"{name}.model_input")
    num_left -= len(tokens)
    if num_left < 0:
        raise Malformed(f"{name}: a pass must have at most {MAX_VALUES} values. Send fewer data.")
    _check_tokens(f"{name}.model_input", tokens, vocab_size)
    allowed = {*LOSSES[loss_fn], "weights"}
    inputs = dict[str, Any]()
    for key, tensor in message.loss_fn_inputs.items():
        where = f"{name}.loss_fn_inputs[{key[:40]!r}]"
        if key not in allowed:
            raise Malformed(f"{where}: {loss_fn} does not use it. Send only {', '.join(sorted(allowed))}.")
        inputs[key] = array = dense(tensor, where, most=min(len(tokens) * MAX_TARGETS, num_left))
        num_left -= array.size
        if key == "target_tokens":
            _check_tokens(where, array, vocab_size)
        elif not np.isfinite(array).all():
            raise Malformed(f"{where}: must be finite. Remove the tokens without a value.")
        if array.shape[:1] != (len(tokens),) or array.ndim > 2:
            raise Malformed(f"{where}: must have one row per input token, {len(tokens)} (got shape {array.shape}).")
    for key in LOSSES[loss_fn]:
        if key not in inputs:
            raise Malformed(f"{name}.loss_fn_inputs: {loss_fn} requires {key} (got {', '.join(sorted(inputs)) or 'none'}).")
    targets = inputs["target_tokens"]
    num_values = len(tokens) + sum(array.size for array in inputs.values())
    if targets.ndim == 1:
        if wide := [key for key, array in inputs.items() if array.ndim != 1]:
            raise Malformed(f"{name}.loss_fn_inputs[{wide[0]!r}]: must have the shape of target_tokens, {targets.shape}.")
        return [Datum(model_input=tokens, loss_fn_inputs=_typed(inputs))], None, num_values
    if loss_fn != "cross_entropy":
        raise Malformed(f"{name}.loss_fn_inputs['target_tokens']: only cross_entropy takes [T, K] (got {targets.shape}).")
    weights = inputs.get("weights", np.ones(targets.shape, np.float32))
    if weights.shape != targets.shape or not 1 <= targets.shape[1] <= MAX_TARGETS:
        rule = f"weights must have the shape of target_tokens, [T, 1 to {MAX_TARGETS}]"
        raise Malformed(f"{name}.loss_fn_inputs: {rule} (got {weights.shape} and {targets.shape}).")
    columns = [{"target_tokens": targets[:, k], "weights": weights[:, k]} for k in range(targets.shape[1])]
    return [Datum(model_input=tokens, loss_fn_inputs=_typed(column)) for column in columns], len(columns), num_values


def _typed(inputs: Mapping[str, Any]) -> dict[str, IntArray | FloatArray]:
    """Return contiguous arrays of the dtypes that the trainer takes."""
    return {
        key: np.ascontiguousarray(array, np.int64) if key == "target_tokens" else np.ascontiguousarray(array, np.float32)
        for key, array in inputs.items()
    }


def _tokens_of(chunks: Any, name: str) -> IntArray:
    parts = []
    for index, chunk in enumerate(chunks):
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise Malformed(f"{name}[{index}]: must be encoded_text; images and audio are not supported.")
        parts.append(_from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), f"{name}[{index}].tokens"))
    if not sum(map(len, parts)):
        raise Malformed(f"{name}: must have tokens.")
    return np.asarray(np.concatenate(parts), np.int64)


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    if not np.issubdtype(tokens.dtype, np.integer):
        raise Malformed(f"{name}: must be integers (got {tokens.dtype}).")
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        outside = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise Malformed(f"{name}: must be tokens of the model, 0 to {vocab_size - 1} (got {outside}).")


def dense(tensor: Any, name: str, *, most: int) -> Any:
    """Return a tensor as an array, also if it is sparse.

    Args:
        tensor: Protobuf message.
        name: Its name in messages.
        most: Largest number of elements, because a sparse tensor of a few bytes can claim any shape.

    Raises:
        Malformed: It is malformed, too large, or has another dtype than float32, int32 and int64.
    """
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise Malformed(f"{name}: must be float32, int32 or int64 (got dtype {tensor.dtype}).")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _from_bytes(tensor.dense, dtype, name)
        shape = shape or values.shape
        _check_shape(name, shape, most)
        if math.prod(shape) != values.size:
            raise Malformed(f"{name}: has {values.size} values, which do not fit the shape {shape[:4]}.")
        return values.reshape(shape)
    _check_shape(name, shape, most)
    csr = tensor.sparse_csr
    values = _from_bytes(csr.values, dtype, name)
    rows = _from_bytes(csr.crow_indices, np.dtype("<i8"), name)
    columns = _from_bytes(csr.col_indices, np.dtype("<i8"), name)
    counts = np.diff(rows)
    is_valid = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and rows[0] == 0
        and bool((counts >= 0).all())
        and rows[-1] == len(columns) == len(values)
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_valid:
        raise Malformed(f"{name}: is no valid sparse tensor in CSR layout, of shape {shape[:4]}.")
    found = np.zeros(shape, dtype)
    np.add.at(found, (np.repeat(np.arange(shape[0]), counts), columns), values)
    return found


def _check_shape(name: str, shape: Sequence[int], most: int) -> None:
    if len(shape) > 2 or any(size < 0 for size in shape) or math.prod(shape) > most:
        raise Malformed(f"{name}: must have one or two dimensions, and at most {most} values (got shape {shape[:4]}).")


def _from_bytes(data: bytes, dtype: "np.dtype[Any]", name: str) -> Any:
    if len(data) % dtype.itemsize:
        raise Malformed(f"{name}: has {len(data)} bytes, no multiple of {dtype.itemsize}.")
    return np.frombuffer(data, dtype)
