"""Anthropic's `/v1/messages`: text, thinking, tools, tool results and streaming."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from titanrl.environments.interface import Message, Tool
from titanrl.serving.calls import Call, Caller, Refused, Reply
from titanrl.serving.openai import MAX_TOKENS
from titanrl.serving.protocol import (
    Event,
    Fields,
    Piece,
    chosen_tools,
    conversation,
    joined_text,
    new_id,
    read_function,
    tool_call,
    wrong,
)

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesRequest:
    """A request to `/v1/messages`."""

    by_token = False

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._model, self._caller, self._id = model, caller, new_id("msg_")
        system = joined_text(fields.take("system"), "system", "text")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, each in enumerate(fields.items("messages")):
            messages += _read_message(each, f"messages[{index}]")
        if messages and messages[-1]["role"] == "assistant":
            raise wrong("messages", "must not end with the assistant, because replies are not continued", "assistant")
        max_tokens = fields.count("max_tokens", 1, MAX_TOKENS)
        if max_tokens is None:
            raise wrong("max_tokens", "is required", None)
        tools = [_read_tool(each, f"tools[{index}]") for index, each in enumerate(fields.items("tools"))]
        choice = fields.nested("tool_choice")
        refuses_parallel = choice is not None and choice.flag("disable_parallel_tool_use")
        shown, requires_tool = _chosen(choice, tools)
        call = Call(
            messages=conversation(messages),
            tools=shown,
            requires_tool=requires_tool,
            refuses_parallel=refuses_parallel,
            max_tokens=max_tokens,
            temperature=fields.number("temperature", 0, 1e6),
            top_p=fields.number("top_p", 0, 1),
            top_k=fields.count("top_k", 0, MAX_TOKENS),
            stop=fields.texts("stop_sequences"),
        )
        self.calls: tuple[Call, ...] = (call,)
        self.streams = fields.flag("stream")
        fields.only("thinking", {"type": "disabled"})
        if fields.take("thread") is not None:  # this code lets Anthropic's tool runner go on without a thread
            raise Refused("thread: is not supported, because no state is stored", code="thread_unsupported_request")
        fields.only("service_tier", "auto", "standard_only")
        fields.skip("metadata", "cache_control")
        fields.done()

    def body(self, replies: Sequence[Reply]) -> object:
        """Return the JSON response."""
        (reply,) = replies
        reasoning, content = reply.message.get("reasoning_content"), reply.message["content"]
        blocks = [
            *([{"type": "thinking", "thinking": reasoning, "signature": ""}] if reasoning else ()),
            *([{"type": "text", "text": content}] if content else ()),
            *(
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input_of(call)}
                for call in reply.message.get("tool_calls", ())
            ),
        ]
        return self._head() | {"content": blocks, **self._ending(reply), "usage": _usage(reply)}

    def start(self) -> Iterator[Event]:
        """Return the first events of a stream."""
        self._open_block: str | None = None  # the content block that is being sent
        self._block_index = 0
        usage = {"input_tokens": 0, "output_tokens": 0}  # the last event has the counts
        message = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        """Return the events of a part of the completion."""
        if piece.reasoning:
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._opened("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        """Return the events of the last part of the completion."""
        yield from self.extend(index, piece)
        for call in reply.message.get("tool_calls", ()):
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._opened(call["id"], block)
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input_of(call))})
        yield from self._closed()
        yield _event("message_delta", delta=self._ending(reply), usage=_usage(reply))

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Return the last events of a stream."""
        yield _event("message_stop")

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _opened(self, name: str, block: dict[str, Any]) -> Iterator[Event]:
        if self._open_block != name:
            yield from self._closed()
            self._open_block = name
            yield _event("content_block_start", index=self._block_index, content_block=block)

    def _closed(self) -> Iterator[Event]:
        if self._open_block is not None:
            yield _event("content_block_stop", index=self._block_index)
            self._open_block, self._block_index = None, self._block_index + 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._block_index, delta=delta)

    def _ending(self, reply: Reply) -> dict[str, Any]:
        """Return why the completion ended, and the stop text that ended it."""
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]
        (call,) = self.calls
        if reply.finish_reason == "stop" and call.stop:
            written = self._caller.read(replace(call, stop=()), reply.completion.token_ids.tolist())["content"]
            rest = written[len(reply.message["content"]) :]
            for stop in call.stop:
                if rest.startswith(stop):
                    return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason, "stop_sequence": None}


def error(refused: Refused) -> dict[str, Any]:
    """Return an error as Anthropic does."""
    kind = _KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    details = {} if refused.code is None else {"details": {"error_code": refused.code}}
    return {"type": "error", "error": {"type": kind, "message": str(refused)} | details}


def _read_message(value: object, path: str) -> list[Message]:
    """Return the messages of a turn; the results of tools are messages of their own, before the text of the user."""
    fields = Fields(value, path)
    role, content = fields.needed("role", "user", "assistant"), fields.take("content")
    fields.done()
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong(f"{path}.content", "must be a text or a list of blocks", content)
    texts, thoughts = list[object](), list[str]()
    calls, results = list[dict[str, Any]](), list[Message]()
    for index, each in enumerate(content):
        block = Fields(each, f"{path}.content[{index}]")
        kinds = ("text", "tool_result") if role == "user" else ("text", "thinking", "tool_use")
        match block.needed("type", *kinds):
            case "text":
                texts.append(each)
                continue
            case "thinking":
                thoughts.append(block.needed("thinking"))
                block.skip("signature")
            case "tool_use":
                arguments = block.take("input")
                if not isinstance(arguments, dict):
                    raise wrong(block.name("input"), "must be an object", arguments)
                calls.append(tool_call(block.needed("id"), block.needed("name"), arguments))
            case "tool_result":
                text = joined_text(block.take("content"), block.name("content"), "text")
                block.flag("is_error")  # the text says so
                results.append({"role": "tool", "content": text, "tool_call_id": block.needed("tool_use_id")})
        block.skip("cache_control")
        block.done()
    message: dict[str, Any] = {"role": role, "content": joined_text(texts, f"{path}.content", "text")}
    if role == "user":
        return [*results, message] if texts or not results else results
    message |= {"tool_calls": calls} if calls else {}
    return [message | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})]


def _read_tool(value: object, path: str) -> Tool:
    fields = Fields(value, path)
    fields.only("type", "custom")
    tool = read_function(fields, "input_schema")
    fields.flag("strict")  # a wish: sampling is not constrained
    fields.flag("eager_input_streaming")  # also a wish: inputs are sent whole
    fields.skip("cache_control")
    fields.done()
    return tool


def _chosen(choice: Fields | None, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], bool]:
    """Return the functions that the policy sees, and whether the client requires a call."""
    if choice is None:
        return chosen_tools(tools, None, "tool_choice"), False
    kind = choice.needed("type", "auto", "any", "tool", "none")
    name = choice.needed("name") if kind == "tool" else None
    choice.done()
    shown = chosen_tools(tools, name, "tool_choice.name" if name else "tool_choice", is_required=kind == "any")
    return () if kind == "none" else shown, kind in ("any", "tool")


def _input_of(call: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object, the only form in Anthropic's protocol; malformed ones are a text in it."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.completion.token_ids)}


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}
