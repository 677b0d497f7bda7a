"""Messages of other formats get the form that chat templates expect, and nothing is dropped from them."""

import json
from typing import Any

import pytest

from titanrl.data.files import BadRow
from titanrl.data.messages import question_of, read_messages, read_tools

USER = {"role": "user", "content": "Rain?"}
CALL = {"type": "function", "function": {"name": "forecast", "arguments": {"town": "Norden", "day": 0}}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "human", "value": "Rain?"}, USER),
        ({"from": "gpt", "value": "No", "weight": 0}, {"role": "assistant", "content": "No", "weight": 0}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {**USER, "content": "a\nb"},
        ),
        ({"role": "user", "content": [{"type": "text", "text": "Rain?", "image_url": None}]}, USER),
        ({"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Be brief."}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "reasoning_content": "Hm"}, {"role": "assistant", "content": "", "reasoning_content": "Hm"}),
        ({**USER, "tool_calls": None, "name": None}, USER),
        ({**USER, "tool_calls": []}, USER),
        (
            {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "forecast"},
            {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "forecast"},
        ),
    ],
)
def test_message_gets_a_role_and_text(message: Any, expected: Any) -> None:
    assert read_messages([message]) == [expected]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {**CALL, "function": {"name": "forecast", "arguments": json.dumps(CALL["function"]["arguments"])}},  # type: ignore[index]
        {"name": "forecast", "arguments": {"town": "Norden", "day": 0}},
        {**CALL, "id": None, "function": {"name": "forecast", "arguments": {"town": "Norden", "day": 0, "unit": None}}},
    ],
)
def test_arguments_of_a_call_become_an_object(call: Any) -> None:
    (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], has_fillers=True)
    assert message["tool_calls"] == [CALL]


def test_null_arguments_are_kept_unless_the_source_adds_them() -> None:
    call = {"name": "forecast", "arguments": {"town": None}}
    (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"town": None}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content[0] must be a text part"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
            "messages[0].content[0] must be a text part",
        ),
        ({"role": "user", "content": None}, "messages[0].content must be a string, got null"),
        ({"role": "user", "content": 3}, "messages[0].content must be a string, got 3"),
        ({**USER, "tool_calls": [CALL]}, "messages[0] has tool_calls, but the role user"),
        ({"role": "function", "content": "4"}, "messages[0].role must be one of"),
        ({"from": "function_call", "value": "{}"}, "messages[0].from must be one of"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0] must have a function with a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "messages[0].tool_calls[0].function.arguments must be valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "messages[0].tool_calls[0].function.arguments must be an object, got [1]",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": 1}]}, "messages[0].tool_calls[0] has the unknown key index"),
        ({"role": "assistant", "reasoning_content": ["a"]}, "messages[0].reasoning_content must be a string"),
    ],
)
def test_message_that_would_lose_something_is_named(message: Any, problem: str) -> None:
    with pytest.raises(BadRow) as refused:
        read_messages([message])
    assert refused.value.problem.startswith(problem)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_are_read_in_every_notation(wrapped: bool, as_text: bool) -> None:
    function = {"name": "forecast", "parameters": {"properties": {"day": {"type": "integer"}, "other": None}}}
    listed = [{"type": "function", "function": function} if wrapped else function]
    tools = read_tools(json.dumps(listed) if as_text else listed, has_fillers=True)
    parameters = {"properties": {"day": {"type": "integer"}}}
    assert tools == [{"type": "function", "function": {"name": "forecast", "parameters": parameters}}]
    assert read_tools([]) is read_tools(None) is read_tools("") is None


def test_question_of_a_conversation_shows_calls_and_reasoning() -> None:
    calls = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL]}
    text = question_of(read_messages([USER, calls, {"role": "tool", "content": "rain"}]))
    call = '{"name": "forecast", "arguments": {"town": "Norden", "day": 0}}'
    assert text == f"user: Rain?\n\nassistant: Hm\n{call}\n\ntool: rain"
