"""Bodies with odd values in every place are answered or refused, and never fail."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.policies import Scripted
from titanrl.serving.app import App

FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": "hey"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "stop": ["x"],
        "n": 2,
        "seed": 3,
        "logprobs": True,
        "temperature": 1.0,
    },
    "/v1/completions": {"prompt": ["a", [97, 98]], "logprobs": 0, "max_tokens": 3, "best_of": 1, "prompt_logprobs": 2},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hey"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "2"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None},
        "stream": True,
    },
    "/v1/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hey"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a", "signature": ""},
                    {"type": "tool_use", "id": "a", "name": "add", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "add"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
    },
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 3, "n": 2, "top_k": -1}, "stream": True},
}
ODD = (None, True, -1, 10**400, 1.5, "", "x", [], {}, [None], {"x": 1}, [[]], [{}], "x" * 300)


def changed(value: Any, root: Any) -> Iterator[Any]:
    """Yield copies of a body, each with an odd value in one place."""
    places: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    for place in places:
        before = value[place]
        for odd in ODD:
            value[place] = odd
            yield root
        value[place] = before
        if isinstance(before, dict | list):
            yield from changed(before, root)


async def post(app: App, path: str, body: object) -> tuple[int, bytes]:
    """Send a request without a socket; return status and body of the response."""
    sent, waiting = list[dict[str, Any]](), asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await waiting.wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("path", BODIES)
async def test_odd_values_are_answered_or_refused(path: str) -> None:
    app, statuses = App(lambda key: Scripted(), ["policy"]), Counter[int]()
    status, text = await post(app, path, BODIES[path])
    assert status == 200, text
    body = copy.deepcopy(BODIES[path])
    for variant in changed(body, body):
        status, text = await post(app, path, variant)
        assert status in (200, 400, 404), (variant, text)
        assert b"server_error" not in text, (variant, text)
        statuses[status] += 1
    assert body == BODIES[path]
    assert statuses[400] > statuses[200] > 0
