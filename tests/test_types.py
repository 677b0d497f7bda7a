"""Carriers on their way between processes."""

import pickle

import cloudpickle
import pytest

from titanrl.types import GenerationRequest, Handle, SamplingParams, SequencePlan

HANDLE = Handle(shard=1, slot=7, generation=3)
CARRIERS = (
    HANDLE,
    SequencePlan(handle=HANDLE, rollout=2, length=20, advantage=-0.5, weight=0.25),
    GenerationRequest(token_ids=(3, 4), sampling=SamplingParams(max_new_tokens=5, temperature=1.0, seed=None)),
)


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: type(carrier).__name__)
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=lambda pickler: pickler.__name__)
def test_carriers_arrive_as_they_were_sent_without_the_slow_way_of_dataclasses(carrier: object, pickler: object) -> None:
    dumps = {"pickle": pickle.dumps, "cloudpickle": cloudpickle.dumps}[vars(pickler)["__name__"]]
    data = dumps(carrier)
    assert pickle.loads(data) == carrier
    assert b"_filled" in data
