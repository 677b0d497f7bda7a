"""Tinker's protobuf and JSON, against the codec of the official client."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from titanrl.carriers.types import AdamParams, Completion, ForwardBackwardOutput
from titanrl.serving import tinker_wire as wire
from titanrl.serving.calls import Fields, Refused

VOCAB = 50


@pytest.fixture(scope="module")
def tinker() -> Any:
    return pytest.importorskip("tinker")


def request_of(tinker: Any, data: list[Any], loss_fn: str = "cross_entropy", **fields: Any) -> bytes:
    """Return the bytes that the client sends for a pass."""
    from tinker.proto import request_conv

    convert = next(
        function for name, function in vars(request_conv).items() if name.endswith("forward_backward_request_to_proto")
    )
    asked = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=fields.pop("config", None))
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=asked, model_id="s:train:0", seq_id=1, **fields)
    message = convert(request)
    return message if isinstance(message, bytes) else message.SerializeToString()


def datum_of(tinker: Any, tokens: list[int], **inputs: Any) -> Any:
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def pass_of(body: bytes) -> wire.Pass:
    return wire.pass_of(wire.read_pass(body), VOCAB)


def test_data_of_the_client_are_read(tinker: Any) -> None:
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.array([0.0, 1.0, 0.5], np.float32)}
    asked = pass_of(request_of(tinker, [datum_of(tinker, [1, 2, 3], **inputs)]))
    (datum,) = asked.data
    assert (asked.loss_fn, asked.backward, asked.widths) == ("cross_entropy", True, (None,))
    assert datum.model_input.tolist() == [1, 2, 3]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_several_targets_per_token_become_data_of_their_own(tinker: Any, is_sparse: bool) -> None:
    targets = np.array([[1, 0], [0, 2], [3, 4]])
    weights = np.array([[1.0, 0.0], [0.0, 0.5], [0.25, 0.75]], np.float32)
    pb = wire.schema()
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", forward_only=True)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    for name, array, dtype in (("target_tokens", targets, pb.DTYPE_INT64), ("weights", weights, pb.DTYPE_FLOAT32)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = dtype
        tensor.shape.extend(array.shape)
        if is_sparse:
            rows, columns = np.nonzero(array)
            tensor.sparse_csr.values = array[rows, columns].tobytes()
            counts = np.count_nonzero(array, axis=1)
            tensor.sparse_csr.crow_indices = np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tobytes()
            tensor.sparse_csr.col_indices = columns.astype("<i8").tobytes()
        else:
            tensor.dense = array.tobytes()
    asked = pass_of(message.SerializeToString())
    assert (asked.widths, asked.backward) == ((2,), False)
    assert [datum.loss_fn_inputs["target_tokens"].tolist() for datum in asked.data] == targets.T.tolist()
    assert [datum.loss_fn_inputs["weights"].tolist() for datum in asked.data] == weights.T.tolist()


def test_result_has_the_shape_of_the_targets(tinker: Any) -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    asked = wire.Pass(data=(), widths=(None, 2, None), loss_fn="cross_entropy", options={}, backward=True)
    columns = [np.array(values, np.float32) for values in ([-1, -2], [-3], [-4], [-5, -6, -7])]
    output = ForwardBackwardOutput(
        loss_fn_outputs=tuple({"logprobs": values} for values in columns),
        metrics={"loss:sum": 2.5, "clip:mean": 0.5, "kl": 1.0, "a:b:sum": 2.0},
        version=3,
    )
    read = deserialize_forward_backward_output(wire.pass_result(asked, output))
    found = [(each["logprobs"].shape, each["logprobs"].to_numpy().reshape(-1).tolist()) for each in read.loss_fn_outputs]
    assert found == [([2], [-1, -2]), ([1, 2], [-3, -4]), ([3], [-5, -6, -7])]
    assert read.metrics == {"loss:sum": 2.5, "clip:mean": 0.5, "kl:mean": 1.0, "a.b.sum:mean": 2.0}


def test_completions_are_sent(tinker: Any) -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    completion = Completion(
        token_ids=np.array([5, 6]),
        logprobs=np.array([-0.5, -1.5], np.float32),
        versions=np.array([3, 3]),
        finish_reason="length",
    )
    read = deserialize_sample_response(wire.sample_result([completion], np.array([np.nan, -2.0], np.float32)))
    (sequence,) = read.sequences
    assert (list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason) == ([5, 6], [-0.5, -1.5], "length")
    assert list(read.prompt_logprobs) == [None, -2.0]


BAD: list[tuple[str, Callable[[Any], bytes]]] = [
    ("loss_fn: its formula is not published. Use importance_sampling", lambda t: request_of(t, [plain(t)], "stable_reinforce")),
    ("data: must not be empty", lambda t: request_of(t, [])),
    ("0 to 49 (got 50)", lambda t: request_of(t, [datum_of(t, [1, 50], target_tokens=np.array([1, 2]))])),
    ("0 to 49 (got -1)", lambda t: request_of(t, [datum_of(t, [1, 2], target_tokens=np.array([1, -1]))])),
    ("one row per input token, 2", lambda t: request_of(t, [datum_of(t, [1, 2], target_tokens=np.array([1]))])),
    ("cross_entropy does not use it", lambda t: request_of(t, [plain(t, mask=np.ones(2, np.float32))])),
    ("must be finite", lambda t: request_of(t, [plain(t, weights=np.array([1, np.nan], np.float32))])),
    ("cross_entropy requires target_tokens", lambda t: request_of(t, [datum_of(t, [1, 2])])),
    ("ppo requires logprobs", lambda t: request_of(t, [plain(t)], "ppo")),
    ("gspo requires weights", lambda t: request_of(t, [rl(t)], "gspo")),
    ("only cross_entropy takes [T, K]", lambda t: request_of(t, [rl(t, target_tokens=np.ones((2, 2), np.int64))], "ppo")),
    ("must have the shape of target_tokens", lambda t: request_of(t, [plain(t, weights=np.ones((2, 2), np.float32))])),
]


def test_options_of_the_loss_are_read(tinker: Any) -> None:
    assert pass_of(request_of(tinker, [rl(tinker)], "ppo", config={"clip_low_threshold": 0.5})).options == {
        "clip_low_threshold": 0.5
    }


def plain(tinker: Any, **inputs: Any) -> Any:
    return datum_of(tinker, [1, 2], **{"target_tokens": np.array([2, 3]), **inputs})


def rl(tinker: Any, **inputs: Any) -> Any:
    ones = np.ones(2, np.float32)
    return plain(tinker, **{"logprobs": -ones, "advantages": ones, **inputs})


@pytest.mark.parametrize(("problem", "make"), BAD, ids=[problem for problem, _ in BAD])
def test_data_that_cannot_be_trained_on_are_named(tinker: Any, problem: str, make: Callable[[Any], bytes]) -> None:
    with pytest.raises(wire.Malformed, match=re.escape(problem)):
        pass_of(make(tinker))


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": [1 << 40, 1 << 40]},
        {"shape": [-1, 2]},
        {"shape": [2, 2, 2]},
        {"crow_indices": np.array([0, 5, 1]).tobytes()},
        {"col_indices": np.array([1 << 40]).tobytes()},
        {"col_indices": b"123"},
        {"crow_indices": b""},
        {"values": b""},
    ],
    ids=str,
)
def test_sparse_tensor_that_lies_takes_no_memory(tinker: Any, damage: dict[str, Any]) -> None:
    pb = wire.schema()
    fields: dict[str, Any] = {"values": np.array([1]).tobytes(), "crow_indices": np.array([0, 1, 1]).tobytes()}
    fields |= {"col_indices": np.array([0]).tobytes()}
    shape = damage.pop("shape", [2, 2]) if "shape" in damage else [2, 2]
    tensor = pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, sparse_csr=pb.SparseCsr(**{**fields, **damage}))
    with pytest.raises(wire.Malformed, match="t: "):
        wire.dense(tensor, "t", most=100)


def test_pass_has_a_bounded_number_of_values(tinker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = request_of(tinker, [plain(tinker)] * 3)
    monkeypatch.setattr(wire, "MAX_VALUES", 12)
    assert len(pass_of(body).data) == 3
    for limit, problem in ((11, "must have one or two dimensions, and at most 1 values"), (9, "at most 9 values. Send fewer")):
        monkeypatch.setattr(wire, "MAX_VALUES", limit)
        with pytest.raises(wire.Malformed, match=problem):
            pass_of(body)


def test_bytes_that_are_no_message_are_malformed(tinker: Any) -> None:
    rng = np.random.default_rng(0)
    valid = request_of(tinker, [rl(tinker)], "ppo")
    for trial in range(300):
        damaged = bytearray(valid)
        for place in rng.integers(0, len(valid), 1 + trial % 5):
            damaged[place] = int(rng.integers(256))
        try:
            asked = pass_of(bytes(damaged[: int(rng.integers(1, len(valid) + 1))]))
        except wire.Malformed:
            continue
        assert all(datum.model_input.max() < VOCAB for datum in asked.data)


def test_repeated_pass_has_the_same_digest(tinker: Any) -> None:
    bodies = [request_of(tinker, [rl(tinker)], "ppo") for _ in range(2)] + [request_of(tinker, [rl(tinker)], "cispo")]
    digests = [wire.digest(wire.read_pass(body).SerializeToString(deterministic=True)) for body in bodies]
    assert digests[0] == digests[1] != digests[2]
    assert len(hashlib.blake2b(digests[0]).digest()) == 64


def sampled(**fields: Any) -> wire.SampleRequest:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return wire.read_sample(Fields({"prompt": prompt, "num_samples": 2, **fields}), VOCAB, 16, max_tokens=10)


def test_sampling_options_are_read() -> None:
    params = {"max_tokens": 3, "seed": -1, "stop": ["a", "b"], "temperature": 0.5, "top_k": -1, "top_p": 0.9}
    asked = sampled(sampling_params=params, prompt_logprobs=True, record_stability_info=True)
    assert (asked.prompt, asked.num_samples, asked.prompt_logprobs) == ((1, 2), 2, True)
    sampling = asked.sampling
    assert (sampling.max_new_tokens, sampling.seed, sampling.stop) == (3, 2**63 - 2, ("a", "b"))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 0, 0.9)
    assert sampled(sampling_params={"stop": [7]}).sampling.stop_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sampling_params": {"stop": []}}, "the end of sequence always ends"),
        ({"sampling_params": {"stop": [50]}}, "sampling_params.stop"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"temperature": 0.001}}, "temperature"),
        ({"sampling_params": {"best_of": 2}}, "best_of"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs: must be"),
        ({"topk_sample_logprobs": 5}, "topk_sample_logprobs: is not supported"),
        ({"target_prompt_logprobs": {}}, "target_prompt_logprobs: is not supported"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: is not supported"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: is not supported"),
        ({"num_samples": 17}, "num_samples"),
        ({"prompt": {"chunks": []}}, "must have tokens"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "must be encoded_text"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [True]}]}}, "must be integers from 0 to 49"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sampling_that_is_not_supported_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        sampled(**fields)


def test_completion_gets_the_room_after_the_prompt() -> None:
    assert sampled().sampling.max_new_tokens == 8
    assert sampled(sampling_params={"max_tokens": 8}).sampling.max_new_tokens == 8
    with pytest.raises(wire.Malformed, match=r"at most 10 tokens \(got 2 \+ 9\)"):
        sampled(sampling_params={"max_tokens": 9})


def test_options_of_the_optimizer_are_read() -> None:
    adam = {"learning_rate": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 2.0}
    read = wire.read_adam(Fields({"adam_params": adam}))
    assert read == AdamParams(learning_rate=0.5, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, max_grad_norm=2.0)
    with pytest.raises(Refused, match="optimizer_params"):
        wire.read_adam(Fields({"optimizer_params": {"type": "dimuon"}}))
    for wrong in ({"beta1": 1.5}, {"learning_rate": 10**400}, {"grad_clip_norm": float("inf")}, {"learning_rate": None}):
        with pytest.raises(Refused, match=next(iter(wrong))):
            wire.read_adam(Fields({"adam_params": wrong}))
