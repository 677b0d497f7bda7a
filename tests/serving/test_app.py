"""The endpoint in OpenAI's and Anthropic's protocols, with the official client, over a policy without an engine."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from tests.serving.policies import END, Scripted
from tests.serving.servers import Server, serving, until
from titanrl.environments import Message
from titanrl.serving.app import App
from titanrl.serving.calls import Call, Callers

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
SUBTRACT = {"type": "function", "function": {"name": "subtract"}}
ASKED: list[Any] = [{"role": "user", "content": "héllo"}]
CALLS = {
    "role": "assistant",
    "content": "I <b>add</b>: ",
    "tool_calls": [
        {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "call_b", "type": "function", "function": {"name": "subtract", "arguments": {"ü": "é"}}},
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    callers = Callers()
    callers.open(POLICY, "key")
    with serving(App(callers.find, ["policy", "other"])) as server:
        yield server


POLICY = Scripted()


@pytest.fixture(autouse=True)
def without_replies() -> None:
    POLICY.replies.clear()
    POLICY.calls.clear()


def chunks(stream: Any) -> tuple[list[Any], str]:
    """Return the chunks of a stream, and the text of its first choice."""
    found = list(stream)
    return found, "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)


def test_reply_carries_ids_logprobs_and_versions(server: Server) -> None:
    reply = server.client().chat.completions.create(
        model="policy", messages=ASKED, logprobs=True, top_logprobs=0, extra_body={"return_token_ids": True}
    )
    (choice,) = reply.choices
    said = [*"olléh".encode(), END]
    assert choice.message.content == "olléh"
    assert choice.finish_reason == "stop"
    assert choice.model_extra["token_ids"] == said
    assert choice.model_extra["weight_versions"] == [{"version": "3", "start": 0, "end": len(said)}]
    assert [entry.logprob for entry in choice.logprobs.content] == [-index / 8 for index in range(len(said))]
    assert [entry.bytes for entry in choice.logprobs.content][2:5] == [[108], None, None]
    assert reply.system_fingerprint == "version-3"
    assert reply.usage.prompt_tokens == len(reply.model_extra["prompt_token_ids"])
    assert reply.usage.completion_tokens == len(said)


def test_stream_has_whole_characters_and_the_same_text_and_tokens(server: Server) -> None:
    POLICY.replies.append({"role": "assistant", "content": "añ€😀 z "})
    stream = server.client().chat.completions.create(
        model="policy",
        messages=ASKED,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    found, text = chunks(stream)
    assert text == "añ€😀 z "
    parts = [chunk.choices[0].delta.content for chunk in found if chunk.choices and chunk.choices[0].delta.content]
    assert parts == ["a", "ñ", "€", "😀", " z", " "]
    ids = [token for chunk in found if chunk.choices for token in (chunk.choices[0].model_extra or {}).get("token_ids", ())]
    assert ids == [*"añ€😀 z ".encode(), END]
    assert found[-2].choices[0].finish_reason == "stop"
    assert found[-1].usage.completion_tokens == len(ids)


def test_parallel_tool_calls_are_sent_whole_and_never_as_text(server: Server) -> None:
    POLICY.replies += [CALLS, CALLS]
    client = server.client().chat.completions
    plain = client.create(model="policy", messages=ASKED, tools=[ADD, SUBTRACT]).choices[0]  # type: ignore[list-item]
    assert plain.finish_reason == "tool_calls"
    assert plain.message.content == "I <b>add</b>: "
    sent = [
        (call.id, call.function.name, call.function.arguments) for call in plain.message.tool_calls if call.type == "function"
    ]
    assert sent == [("call_a", "add", '{"a": 1}'), ("call_b", "subtract", '{"ü": "é"}')]
    found, text = chunks(client.create(model="policy", messages=ASKED, tools=[ADD, SUBTRACT], stream=True))  # type: ignore[list-item]
    assert text == "I <b>add</b>: "
    streamed = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id, call.function.name, call.function.arguments) for call in streamed] == [
        (index, *call) for index, call in enumerate(sent)
    ]
    assert found[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("auto", ["add", "subtract"]),
        ("required", ["add", "subtract"]),
        ("none", []),
        ({"type": "function", "function": {"name": "add"}}, ["add"]),
    ],
)
def test_tool_choice_selects_the_tools_that_the_policy_sees(server: Server, choice: Any, shown: list[str]) -> None:
    server.client().chat.completions.create(
        model="policy",
        messages=ASKED,
        tools=[ADD, SUBTRACT],
        tool_choice=choice,  # type: ignore[list-item]
    )
    assert [tool.name for tool in POLICY.calls[-1].tools] == shown


def test_reply_in_another_form_than_required_is_counted() -> None:
    callers = Callers()
    callers.open(POLICY, "key")
    with serving(App(callers.find, ["policy"])) as server:  # of its own: a reply is counted after it is sent
        for choice in ("auto", "required"):
            server.client().chat.completions.create(
                model="policy",
                messages=ASKED,
                tools=[ADD],
                tool_choice=choice,  # type: ignore[call-overload]
            )
        until(
            lambda: server.app.registry.get_sample_value("titanrl_completion_tokens_total") == 2 * len([*"olléh".encode(), END])
        )
        until(lambda: server.app.registry.get_sample_value("titanrl_nonconforming_replies_total") == 1)


@pytest.mark.parametrize(
    ("path", "form", "parallel", "json_object"),
    [
        ("/v1/chat/completions", {"parallel_tool_calls": False}, False, False),
        ("/v1/chat/completions", {"parallel_tool_calls": None, "response_format": {"type": "text"}}, True, False),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, True, True),
        ("/v1/responses", {"parallel_tool_calls": False, "text": {"format": {"type": "json_object"}}}, False, True),
        ("/v1/responses", {"text": {"format": {"type": "text"}, "verbosity": "medium"}}, True, False),
        ("/v1/messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, False, False),
        ("/v1/messages", {"tool_choice": {"type": "auto"}}, True, False),
    ],
)
def test_form_that_a_client_requires_is_accepted(
    server: Server, path: str, form: dict[str, Any], parallel: bool, json_object: bool
) -> None:
    tool = {"name": "add", "input_schema": {}, "eager_input_streaming": True} if path == "/v1/messages" else ADD
    tool = {"type": "function", "name": "add"} if path == "/v1/responses" else tool
    body = {"input": "a"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99}
    response = server.http().post(path, json=body | {"tools": [tool]} | form)
    assert response.status_code == 200, response.text
    asked = POLICY.calls[-1]
    assert (not asked.refuses_parallel, asked.requires_json) == (parallel, json_object)


def test_history_reaches_the_policy_with_parsed_arguments(server: Server) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{a"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    server.client().chat.completions.create(model="policy", messages=messages)
    asked = POLICY.calls[-1].messages
    assert asked[0] == {"role": "system", "content": "one\ntwo"}
    assert [call["function"]["arguments"] for call in asked[2]["tool_calls"]] == [{"a": 1}, "{a"]
    assert asked[3] == {"role": "tool", "content": "2", "tool_call_id": "a"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_ends_the_reply_and_is_not_sent(server: Server, stream: bool) -> None:
    POLICY.replies.append({"role": "assistant", "content": "one STOP two"})
    client = server.client().chat.completions
    if stream:
        _, text = chunks(client.create(model="policy", messages=ASKED, stop=["STOP", "never"], stream=True))
    else:
        text = client.create(model="policy", messages=ASKED, stop="STOP").choices[0].message.content or ""
    assert text == "one "


def test_choices_have_different_seeds(server: Server) -> None:
    reply = server.client().chat.completions.create(model="policy", messages=ASKED, n=3, seed=7, temperature=0.5, top_p=0.9)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(call.seed or 0 for call in POLICY.calls) == [7, 8, 9]
    assert {(call.temperature, call.top_p) for call in POLICY.calls} == {(0.5, 0.9)}


def test_length_limit_is_the_finish_reason(server: Server) -> None:
    reply = server.client().chat.completions.create(model="policy", messages=ASKED, max_completion_tokens=2, max_tokens=5)
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("length", "ol")


def test_completions_continue_texts_and_tokens(server: Server) -> None:
    client = server.client().completions
    reply = client.create(model="policy", prompt=["abc", "xyz"], n=2, logprobs=0)
    assert [choice.text for choice in reply.choices] == ["cba", "cba", "zyx", "zyx"]
    assert reply.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == 6
    assert client.create(model="policy", prompt=[97, 98]).choices[0].text == "ba"
    streamed = list(client.create(model="policy", prompt="abc", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "cba"
    assert streamed[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_tokens_out(server: Server, stream: bool) -> None:
    body = {"token_ids": [97, 98], "sampling_params": {"max_tokens": 8}, "stream": stream, "return_token_ids": True}
    response = server.http().post("/inference/v1/generate", json=body)
    if not stream:
        found = [response.json()]
    else:
        *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert last == "[DONE]"
        found = [json.loads(line) for line in lines]
    choices = [each["choices"][0] for each in found]
    assert [token for choice in choices for token in choice["token_ids"]] == [98, 97, END]
    assert [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]] == [0.0, -0.125, -0.25]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["weight_versions"] == [{"version": "3", "start": 0, "end": 3}]
    assert found[-1]["prompt_token_ids"] == [97, 98]


def test_responses_text_and_tools(server: Server) -> None:
    client = server.client().responses
    assert client.create(model="policy", input="hey", instructions="be brief").output_text == "yeh"
    assert [message["role"] for message in POLICY.calls[-1].messages or ()] == ["system", "user"]
    POLICY.replies.append(CALLS)
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": {}}, {"type": "function", "name": "subtract"}]
    first = client.create(model="policy", input="hey", tools=tools)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
        for item in first.output
        if item.type == "function_call"
    ]
    history: list[Any] = [{"role": "user", "content": "hey"}, *(item.to_dict() for item in first.output), *outputs]
    client.create(model="policy", input=history, tools=tools)
    asked = POLICY.calls[-1].messages
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "tool"]
    assert asked[1] == CALLS  # one message, as the policy wrote it


def test_responses_stream_has_the_plain_response(server: Server) -> None:
    POLICY.replies.append(CALLS)
    tools: list[Any] = [{"type": "function", "name": "add"}, {"type": "function", "name": "subtract"}]
    with server.client().responses.stream(model="policy", input="hey", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "I <b>add</b>: "
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert events[-1].type == "response.completed"


def test_responses_stream_of_reasoning_alone_has_an_empty_message(server: Server) -> None:
    POLICY.replies.append({"role": "assistant", "content": "", "reasoning_content": "hm"})
    with server.client().responses.stream(model="policy", input="hey") as stream:
        items = [event.item.type for event in stream if event.type == "response.output_item.done"]
        final = stream.get_final_response()
    assert items == [item.type for item in final.output] == ["reasoning", "message"]


def test_messages_text_tools_and_results(server: Server) -> None:
    POLICY.replies.append(CALLS)
    tools = [{"name": "add", "input_schema": {"type": "object"}}, {"name": "subtract", "input_schema": {}}]
    body = {"model": "policy", "max_tokens": 999, "system": "be brief", "tools": tools}
    asked = {"role": "user", "content": [{"type": "text", "text": "hey"}]}
    reply = post_messages(server, body | {"messages": [asked]})
    assert reply["stop_reason"] == "tool_use"
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use", "tool_use"]
    assert reply["content"][2]["input"] == {"ü": "é"}
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "2"},
        {"type": "tool_result", "tool_use_id": "call_b", "content": [{"type": "text", "text": "3"}]},
        {"type": "text", "text": "go on"},
    ]
    history = [asked, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
    post_messages(server, body | {"messages": history})
    got = POLICY.calls[-1].messages
    assert [message["role"] for message in got] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert got[2] == CALLS


def test_messages_stream_has_the_plain_content(server: Server) -> None:
    POLICY.replies.append(CALLS)
    tools = [{"name": "add", "input_schema": {}}, {"name": "subtract", "input_schema": {}}]
    body = {
        "model": "policy",
        "max_tokens": 999,
        "messages": [{"role": "user", "content": "hey"}],
        "tools": tools,
        "stream": True,
    }
    events = [
        json.loads(event.partition("data: ")[2])
        for event in server.http().post("/v1/messages", json=body).text.split("\n\n")
        if event
    ]
    texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    inputs = [event["delta"].get("partial_json") for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == "I <b>add</b>: "
    assert [json.loads(each) for each in inputs if each] == [{"a": 1}, {"ü": "é"}]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-1] == {"type": "message_stop"}


def test_messages_names_the_stop_sequence(server: Server) -> None:
    POLICY.replies.append({"role": "assistant", "content": "one STOP two"})
    messages = [{"role": "user", "content": "hey"}]
    reply = post_messages(server, {"model": "policy", "max_tokens": 999, "messages": messages, "stop_sequences": ["STOP"]})
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "one "}]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type"),
        ("/v1/chat/completions", {"guided_json": {}}, "guided_json"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"temperature": True}, "temperature"),
        ("/v1/chat/completions", {"max_tokens": 10**400}, "max_tokens"),
        ("/v1/chat/completions", {"n": 129}, "n"),
        ("/v1/chat/completions", {"stop": [""]}, "stop"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/chat/completions", {"tools": [ADD, ADD]}, "tools"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [[1], [-1]]}, "prompt[1]"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/responses", {"input": "a", "store": True}, "store"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.type"),
        ("/v1/responses", {"input": "a", "tool_choice": "required"}, "tool_choice"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logits_processors": []}}, "sampling_params"),
    ],
)
def test_unsupported_parameter_is_refused_by_name(server: Server, path: str, change: dict[str, Any], param: str) -> None:
    body = {"messages": ASKED} | change if path == "/v1/chat/completions" else change
    response = server.http().post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert response.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"max_tokens": None},
        {"mcp_servers": [1]},
        {"tool_choice": {"type": "any"}},
    ],
)
def test_messages_refuse_in_their_own_format(server: Server, change: dict[str, Any]) -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hey"}]} | change
    response = server.http().post("/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["message"].startswith(next(iter(change)))


def test_tool_runner_of_anthropic_learns_that_threads_are_not_supported(server: Server) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hey"}], "thread": {"type": "create"}}
    error = server.http().post("/v1/messages?beta=true", json=body).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert error["message"].startswith("thread: is not supported")


def test_paths_below_messages_are_refused_in_the_format_of_anthropic(server: Server) -> None:
    response = server.http().post("/v1/messages/count_tokens", json={})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_harmless_parameters_are_accepted(server: Server) -> None:
    server.client().chat.completions.create(
        model="other", messages=ASKED, user="me", metadata={"a": "b"}, store=False, presence_penalty=0, service_tier="auto"
    )


def test_error_during_a_stream_is_an_event(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 256"):  # before the first token: a status
        server.client().completions.create(model="policy", prompt=[999], stream=True)
    POLICY.replies.append({"role": "assistant", "content": "abc", "fails": True})
    with pytest.raises(openai.APIError, match="RuntimeError"):
        chunks(server.client().chat.completions.create(model="policy", messages=ASKED, stream=True))


def test_unreadable_part_of_a_reply_fails_only_its_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: Call, token_ids: Sequence[int]) -> Message:
        raise RuntimeError("unreadable")

    monkeypatch.setattr(POLICY, "read", fail)
    POLICY.replies.append({"role": "assistant", "content": "abc"})
    with pytest.raises(openai.APIError, match="RuntimeError"):
        chunks(server.client().chat.completions.create(model="policy", messages=ASKED, stream=True))
    until(lambda: running(server) == 0)


def running(server: Server) -> float | None:
    return server.app.registry.get_sample_value("titanrl_calls_running")


def test_internal_errors_show_no_traceback(server: Server) -> None:
    POLICY.replies.append({"role": "assistant", "content": "abc", "fails": True})
    with pytest.raises(openai.InternalServerError) as raised:
        server.client().chat.completions.create(model="policy", messages=ASKED)
    assert "Traceback" not in raised.value.response.text
    assert "secret" not in raised.value.response.text


def test_models_health_and_metrics(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["policy", "other"]
    assert server.client().models.retrieve("other").id == "other"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}  # without a key
    server.client().chat.completions.create(model="policy", messages=ASKED)
    until(lambda: "titanrl_calls_running 0.0" in server.http().get("/metrics").text)
    assert 'titanrl_requests_total{path="/v1/chat/completions",status="200"}' in server.http().get("/metrics").text
    with pytest.raises(openai.NotFoundError, match="policy or other"):
        server.client().chat.completions.create(model="gpt-5", messages=ASKED)
    assert server.http().get("/v1/nothing").status_code == 404
    assert server.http().get("/v1/completions").status_code == 405


def test_problem_of_the_policy_is_status_503() -> None:
    problem = "no weights yet"
    with serving(App(lambda key: POLICY, ["policy"], check=lambda: problem)) as server:
        assert server.http().get("/health").json() == {"status": "no weights yet"}
        with pytest.raises(openai.InternalServerError, match="no weights yet"):
            server.client().chat.completions.create(model="policy", messages=ASKED)


def test_async_client_overlaps_calls(server: Server) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key") as client:
            calls = (
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"{i}!"}])
                for i in range(20)
            )
            return [reply.choices[0].message.content for reply in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [f"!{str(i)[::-1]}" for i in range(20)]


def post_messages(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request in Anthropic's protocol."""
    response = server.http().post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found
