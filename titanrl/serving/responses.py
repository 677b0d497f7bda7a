"""OpenAI's `/v1/responses` in the subset that agent frameworks use: text, reasoning, function calls, and no stored state."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from titanrl.environments.interface import Message, Tool
from titanrl.serving.calls import Call, Caller, Reply
from titanrl.serving.openai import MAX_TOKENS, NO_EFFECT, read_tool_choice, requires_json
from titanrl.serving.protocol import (
    Event,
    Fields,
    Piece,
    arguments_text,
    conversation,
    joined_text,
    new_id,
    read_function,
    reply_version,
    tool_call,
    wrong,
)


class ResponsesRequest:
    """A request to `/v1/responses`."""

    by_token = False

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._numbers = itertools.count()
        self._id, self._message_id, self._reasoning_id = new_id("resp_"), new_id("msg_"), new_id("rs_")
        instructions = fields.text("instructions")
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        tools = [_read_tool(each, f"tools[{index}]") for index, each in enumerate(fields.items("tools"))]
        choice = fields.take("tool_choice")
        shown, requires_tool = read_tool_choice(choice, tools, is_flat=True)
        text = fields.nested("text") or Fields({}, "text")
        is_json = requires_json(text, "format")
        text.only("verbosity", "medium")
        text.done()
        call = Call(
            messages=conversation([*system, *_read_input(fields.take("input"))]),
            tools=shown,
            requires_tool=requires_tool,
            refuses_parallel=not fields.flag("parallel_tool_calls", True),
            requires_json=is_json,
            max_tokens=fields.count("max_output_tokens", 1, MAX_TOKENS),
            temperature=fields.number("temperature", 0, 1e6),
            top_p=fields.number("top_p", 0, 1),
        )
        self.calls: tuple[Call, ...] = (call,)
        self.streams = fields.flag("stream")
        options = fields.nested("stream_options") or Fields({})
        options.only("include_obfuscation", False)
        options.done()
        (fields.nested("reasoning") or Fields({})).done()
        fields.only("store", False)
        fields.only("background", False)
        fields.only("include", [])
        fields.only("top_logprobs", 0)
        fields.only("truncation", "disabled")
        fields.only("service_tier", "auto", "default")
        fields.skip(*NO_EFFECT)
        fields.done()
        self._head = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": instructions,
            "max_output_tokens": call.max_tokens,
            "temperature": call.temperature,
            "top_p": call.top_p,
            "tools": [_sent_tool(tool) for tool in tools],
            "tool_choice": choice or "auto",
            "parallel_tool_calls": not call.refuses_parallel,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "json_object" if call.requires_json else "text"}},
            "truncation": "disabled",
            "background": False,
            "incomplete_details": None,
            "error": None,
        }

    def body(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the JSON response."""
        (reply,) = replies
        is_complete = reply.finish_reason != "length"
        prompt, sampled = len(reply.prompt_ids), len(reply.completion.token_ids)
        return self._head | {
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "metadata": {"policy_version": reply_version(reply).removeprefix("version-")},
            "output": self._output(reply),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def start(self) -> Iterator[Event]:
        """Return the first events of a stream."""
        self._open_kind: str | None = None  # of the output item that is being sent
        self._output_index, self._sent = 0, {"message": "", "reasoning": ""}  # text sent so far, by kind
        started = self._head | {"status": "in_progress", "metadata": {}, "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=started)

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        """Return the events of a part of the completion."""
        if piece.reasoning:
            yield from self._delta("reasoning", piece.reasoning)
        if piece.text:
            yield from self._delta("message", piece.text)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        """Return the events of the last part of the completion."""
        yield from self.extend(index, piece)
        if not self._sent["message"] and not reply.message.get("tool_calls"):
            yield from self._delta("message", "")  # an empty reply is a message, too
        yield from self._close()
        for call in reply.message.get("tool_calls", ()):
            item = _sent_call(call)
            place = {"output_index": self._output_index, "item_id": item["id"]}
            added = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=self._output_index, item=added)
            yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=self._output_index, item=item)
            self._output_index += 1

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Return the last events of a stream."""
        response = self.body(replies)
        yield self._event(f"response.{response['status']}", response=response)

    def _delta(self, kind: str, text: str) -> Iterator[Event]:
        if self._open_kind != kind:
            yield from self._close()
            self._open_kind = kind
            yield self._event("response.output_item.added", output_index=self._output_index, item=self._item(kind, None))
            if kind == "message":
                yield self._event("response.content_part.added", **self._part(), part=_text_part(""))
        self._sent[kind] += text
        if kind == "message":
            yield self._event("response.output_text.delta", **self._part(), delta=text, logprobs=[])
        else:
            yield self._event("response.reasoning_text.delta", **self._part(), delta=text)

    def _close(self) -> Iterator[Event]:
        if self._open_kind is None:
            return
        kind, text = self._open_kind, self._sent[self._open_kind]
        if kind == "message":
            yield self._event("response.output_text.done", **self._part(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._part(), part=_text_part(text))
        else:
            yield self._event("response.reasoning_text.done", **self._part(), text=text)
        yield self._event("response.output_item.done", output_index=self._output_index, item=self._item(kind, text))
        self._open_kind, self._output_index = None, self._output_index + 1

    def _part(self) -> dict[str, Any]:
        item_id = self._message_id if self._open_kind == "message" else self._reasoning_id
        return {"item_id": item_id, "output_index": self._output_index, "content_index": 0}

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        message = reply.message
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
        return [
            *([self._item("reasoning", reasoning)] if reasoning else ()),
            *([self._item("message", message["content"])] if message["content"] or not calls else ()),
            *(_sent_call(call) for call in calls),
        ]

    def _item(self, kind: str, text: str | None) -> dict[str, Any]:
        if kind == "reasoning":
            content = [] if text is None else [{"type": "reasoning_text", "text": text}]
            return {"id": self._reasoning_id, "type": "reasoning", "summary": [], "content": content}
        parts = [] if text is None else [_text_part(text)]
        status = "in_progress" if text is None else "completed"
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": parts}

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}


def _read_input(value: object) -> list[Message]:
    """Return the messages of the input. Items of one turn of the policy become one message, as the policy wrote it."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", "must be a text or a list of items", value)
    messages = list[dict[str, Any]]()
    for index, item in enumerate(value):
        fields = Fields(item, f"input[{index}]")
        kind = fields.text("type", "message", "function_call", "function_call_output", "reasoning") or "message"
        fields.skip("id", "status")
        if kind == "function_call_output":
            content = joined_text(fields.take("output"), fields.name("output"), "input_text")
            messages.append({"role": "tool", "content": content, "tool_call_id": fields.needed("call_id")})
        elif kind == "message" and (role := fields.needed("role", "user", "system", "developer", "assistant")) != "assistant":
            content = joined_text(fields.take("content"), fields.name("content"), "input_text")
            messages.append({"role": "system" if role == "developer" else role, "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant" or (kind != "function_call" and messages[-1].get("content")):
                messages.append({"role": "assistant", "content": ""})
            messages[-1] |= _read_reply(kind, fields, messages[-1])
        fields.done()
    return list(messages)


def _read_reply(kind: str, fields: Fields, message: Message) -> Message:
    """Return what an item adds to the message of the policy."""
    if kind == "function_call":
        call = tool_call(fields.needed("call_id"), fields.needed("name"), fields.needed("arguments"))
        return {"tool_calls": [*message.get("tool_calls", ()), call]}
    if kind == "message":
        return {"content": joined_text(fields.take("content"), fields.name("content"), "output_text", "input_text")}
    fields.only("summary", [])
    fields.only("encrypted_content")
    return {"reasoning_content": joined_text(fields.take("content"), fields.name("content"), "reasoning_text")}


def _read_tool(value: object, path: str) -> Tool:
    fields = Fields(value, path)
    fields.needed("type", "function")
    tool = read_function(fields, "parameters")
    fields.flag("strict")  # a wish: sampling is not constrained
    fields.done()
    return tool


def _sent_tool(tool: Tool) -> dict[str, Any]:
    sent = {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return sent | {"strict": False}


def _sent_call(call: Any) -> dict[str, Any]:
    item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed"}
    return item | {"name": call["function"]["name"], "arguments": arguments_text(call)}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
