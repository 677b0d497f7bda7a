"""Keys of callers, and the form of replies."""

import numpy as np
import pytest

from tests.serving.policies import Scripted
from titanrl.carriers.types import Completion, FinishReason
from titanrl.environments import Message
from titanrl.serving import calls
from titanrl.serving.calls import Call, Callers, Refused, Reply


def test_a_key_finds_its_own_caller() -> None:
    callers, one, two = Callers(), Scripted(), Scripted()
    key_of_one, key_of_two = callers.open(one), callers.open(two)
    assert callers.find(key_of_one) is one
    assert callers.find(key_of_two) is two
    assert callers.find("guessed") is None
    assert len(key_of_one) > 40


def test_a_key_after_the_end_is_refused_with_410() -> None:
    callers = Callers()
    key = callers.open(Scripted())
    callers.close(key)
    callers.close(key)
    with pytest.raises(Refused, match="has ended") as refused:
        callers.find(key)
    assert refused.value.status == 410


def test_memory_of_ended_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ENDED", 2)
    callers = Callers()
    keys = [callers.open(Scripted()) for _ in range(3)]
    for key in keys:
        callers.close(key)
    assert callers.find(keys[0]) is None
    with pytest.raises(Refused):
        callers.find(keys[1])


@pytest.mark.parametrize(
    ("finish_reason", "message", "expected"),
    [
        ("stop", {"content": "a"}, "stop"),
        ("stop", {"content": "", "tool_calls": [{}]}, "tool_calls"),
        ("length", {"content": "", "tool_calls": [{}]}, "length"),
    ],
)
def test_finish_reason_is_openais(finish_reason: FinishReason, message: Message, expected: str) -> None:
    empty = np.zeros(0, np.int64)
    completion = Completion(token_ids=empty, logprobs=np.zeros(0, np.float32), versions=empty, finish_reason=finish_reason)
    assert Reply(prompt_ids=(1,), completion=completion, message=message).finish_reason == expected


ONE: Message = {"content": "", "tool_calls": [{}]}
TWO: Message = {"content": "", "tool_calls": [{}, {}]}


@pytest.mark.parametrize(
    ("call", "message", "differs"),
    [
        (Call(), {"content": "no"}, False),
        (Call(), TWO, False),
        (Call(requires_tool=True), {"content": "no"}, True),
        (Call(requires_tool=True), ONE, False),
        (Call(refuses_parallel=True), {"content": "no"}, False),
        (Call(refuses_parallel=True), ONE, False),
        (Call(refuses_parallel=True), TWO, True),
        (Call(requires_json=True), {"content": '{"a": 1}'}, False),
        (Call(requires_json=True), {"content": "[1]"}, True),
        (Call(requires_json=True), {"content": '{"a": 1'}, True),
        (Call(requires_json=True), ONE, False),
        (Call(requires_json=True, refuses_parallel=True), TWO, True),
    ],
)
def test_reply_can_differ_from_the_form_that_a_call_requires(call: Call, message: Message, differs: bool) -> None:
    empty = np.zeros(0, np.int64)
    completion = Completion(token_ids=empty, logprobs=np.zeros(0, np.float32), versions=empty, finish_reason="stop")
    reply = Reply(prompt_ids=(1,), completion=completion, message={"role": "assistant", **message})
    assert reply.differs_in_form(call) is differs
