"""Pickling of carriers."""

import pickle
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest

from titanrl.carriers.supports import first_recorded, has_ids_S, id_dtype, joined_experts, supports_of
from titanrl.carriers.tables import SequencePlan
from titanrl.carriers.types import Completion, GenerationRequest, GroupHandle, SamplingParams, Segment

HANDLE = GroupHandle(shard=1, location=7, serial=3)
CARRIERS = (
    HANDLE,
    SequencePlan(handle=HANDLE, segment=2, length=20, advantage=-0.5, weight=0.25),
    GenerationRequest(token_ids=(3, 4), sampling=SamplingParams(max_new_tokens=5, temperature=1.0, seed=None)),
)


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: type(carrier).__name__)
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=lambda pickler: pickler.__name__)
def test_carriers_are_pickled_without_dataclass_reduce(carrier: object, pickler: object) -> None:
    dumps = {"pickle": pickle.dumps, "cloudpickle": cloudpickle.dumps}[vars(pickler)["__name__"]]
    data = dumps(carrier)
    assert pickle.loads(data) == carrier
    assert b"_filled" in data


def arrays_of(carrier: Completion | Segment) -> dict[str, np.ndarray]:
    values = {name: getattr(carrier, name) for name in carrier.__slots__}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=lambda pickler: pickler.__name__)
def test_tokens_pickle_bit_for_bit_in_half_the_bytes(pickler: object) -> None:
    whole = np.arange(4000)
    logprobs = np.linspace(-9.0, 0.0, 4000, dtype=np.float32)
    logprobs[[3, 5]] = -np.inf, np.nan
    piece = slice(1, None, 2)  # a strided view
    sent = Segment(
        token_ids=whole[piece],
        mask=(whole > 9)[piece],
        logprobs=logprobs[piece],
        versions=(whole // 100 - 1)[piece],
    )
    completion = Completion(token_ids=sent.token_ids, logprobs=sent.logprobs, versions=sent.versions, finish_reason="length")
    dumps = {"pickle": pickle.dumps, "cloudpickle": cloudpickle.dumps}[vars(pickler)["__name__"]]
    for carrier in (sent, completion):
        data = dumps(carrier)
        assert len(data) < 13 * 2000 + 500
        arrived = pickle.loads(data)
        assert type(arrived) is type(carrier)
        for name, values in arrays_of(carrier).items():
            got = arrays_of(arrived)[name]
            assert (got.dtype, got.tobytes()) == (values.dtype, values.tobytes()), name
    assert pickle.loads(dumps(completion)).finish_reason == "length"


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=lambda pickler: pickler.__name__)
def test_supports_are_pickled_only_with_truncated_sampling(pickler: object) -> None:
    dumps = {"pickle": pickle.dumps, "cloudpickle": cloudpickle.dumps}[vars(pickler)["__name__"]]
    tokens = np.arange(1000)
    plain = Segment(token_ids=tokens, mask=tokens > 9, logprobs=np.zeros(1000, np.float32), versions=tokens)
    supports = supports_of([np.arange(20, dtype=np.int32)] * 1000, 150_000)
    truncated = replace(plain, supports=supports)
    assert b"supports" not in dumps(plain)
    assert pickle.loads(dumps(plain)).supports is None
    assert len(dumps(truncated)) - len(dumps(plain)) < 1000 * (4 + 20 * 4) + 200
    completion = Completion(
        token_ids=tokens, logprobs=plain.logprobs, versions=tokens, finish_reason="stop", supports=supports[:7]
    )
    for carrier, length in ((truncated, 1000), (completion, 7)):
        arrived = pickle.loads(dumps(carrier)).supports
        assert arrived.vocab_size == 150_000
        assert arrived.counts_S.tolist() == [20] * length
        assert arrived.words_K.tobytes() == supports.words_K.tobytes()[: 80 * length]


@pytest.mark.parametrize(("num_experts", "size"), [(128, 1), (255, 1), (256, 2), (65_535, 2)])
def test_recorded_experts_take_one_or_two_bytes_each(num_experts: int, size: int) -> None:
    tokens = np.arange(1000)
    ids = np.random.default_rng(0).integers(0, num_experts, (1000, 48, 8)).astype(id_dtype(num_experts))
    plain = Segment(token_ids=tokens, mask=tokens > 9, logprobs=np.zeros(1000, np.float32), versions=tokens)
    recorded = replace(plain, experts=ids)
    assert len(pickle.dumps(recorded)) - len(pickle.dumps(plain)) < 1000 * 48 * 8 * size + 200
    completion = Completion(token_ids=tokens, logprobs=plain.logprobs, versions=tokens, finish_reason="stop", experts=ids[::2])
    for carrier in (recorded, completion, recorded_slice(recorded)):
        arrived = pickle.loads(pickle.dumps(carrier)).experts
        assert (arrived.dtype, arrived.shape) == (carrier.experts.dtype, carrier.experts.shape)
        assert (arrived == carrier.experts).all()
    assert pickle.loads(pickle.dumps(plain)).experts is None


def recorded_slice(segment: Segment) -> Segment:
    return replace(segment, experts=segment.experts[3:7])


def test_first_recorded_experts_of_a_token_count() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.uint8)[:, None, None]

    merged = first_recorded([ids(1, 2, 255), ids(3, 4, 5, 6, 255)], 6)
    assert merged.ravel().tolist() == [1, 2, 5, 6, 255, 255]
    assert has_ids_S(merged).tolist() == [True, True, True, True, False, False]
    assert first_recorded([], 3) is None


def test_segments_without_experts_keep_the_places_of_the_others() -> None:
    known = np.array([[[0, 5]], [[7, 1]]], np.uint8)
    joined = joined_experts([(None, 1), (known, 2), (None, 2)])
    assert has_ids_S(joined).tolist() == [False, True, True, False, False]
    assert joined[1:3].tolist() == known.tolist()
    assert joined_experts([(None, 3)]) is None
