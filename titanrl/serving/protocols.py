"""The wire protocols of clients. A class per path reads a body into calls, and writes their replies as JSON or as events.

Each of them is an `Exchange`, which describes the methods.

First OpenAI's: chat completions, completions, and vLLM's token in, token out, in which `return_token_ids` adds token ids and
`weight_versions`, the policy versions that sampled them, as vLLM names them. Then `/v1/responses`, in the subset that agent
frameworks use: text, reasoning, function calls, and no stored state. Last Anthropic's `/v1/messages`: text, thinking, tools,
tool results and streaming.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from titanrl.environments.interface import Message, Tool
from titanrl.serving.calls import (
    LOWEST_LOGPROB,
    MAX_CHOICES,
    MAX_SEED,
    MAX_TOP,
    Call,
    Caller,
    Event,
    Exchange,
    Fields,
    Piece,
    Refused,
    Reply,
    arguments_text,
    chosen_tools,
    conversation,
    joined_text,
    new_id,
    read_function,
    reply_version,
    tool_call,
    version_spans,
    wrong,
)
from titanrl.serving.http import dump

MAX_TOKENS = 2**31 - 1
"""Bound on numbers of tokens; the policy has a lower one."""
_NO_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Parameters that name the client, or hint at billing and caches."""
_END: Event = (None, "[DONE]")


class _ChatCompletion:
    """A request to `/v1/chat/completions`."""

    by_token: bool

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._model, self._caller, self._id, self._created = model, caller, new_id("chatcmpl-"), int(time.time())
        messages = [_read_chat_message(each, f"messages[{index}]") for index, each in enumerate(fields.items("messages"))]
        tools = [_read_tool(each, f"tools[{index}]") for index, each in enumerate(fields.items("tools"))]
        shown, requires_tool = _read_tool_choice(fields.take("tool_choice"), tools)
        limits = [fields.count(name, 1, MAX_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
        call = Call(
            messages=conversation(messages),
            tools=shown,
            requires_tool=requires_tool,
            refuses_parallel=not fields.flag("parallel_tool_calls", True),
            requires_json=_requires_json(fields, "response_format"),
            max_tokens=min((n for n in limits if n), default=None),
            **_sampling(fields),
        )
        self.calls = _choices(fields, [call])
        self._logprobs = fields.flag("logprobs")
        self.streams, self._has_usage = _stream(fields)
        self.by_token = self._returns_ids = fields.flag("return_token_ids")
        fields.only("top_logprobs", 0)
        fields.only("store", False)
        fields.only("service_tier", "auto", "default")
        fields.only("modalities", ["text"])
        _end(fields)
        self._chunk_head = dump(self._head("chat.completion.chunk", ()))[:-1]

    def body(self, replies: Sequence[Reply]) -> object:
        choices = []
        for index, reply in enumerate(replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.message["content"], "refusal": None}
            calls = reply.message.get("tool_calls")
            if calls:
                message |= {"content": message["content"] or None, "tool_calls": [_chat_call(call) for call in calls]}
            if reply.message.get("reasoning_content") is not None:
                message["reasoning_content"] = reply.message["reasoning_content"]
            token_ids, logprobs = reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()
            choice = {"index": index, "message": message, "finish_reason": reply.finish_reason}
            choices.append(choice | {"logprobs": self._sent_logprobs(token_ids, logprobs)} | self._ids(token_ids, reply))
        prompt = {"prompt_token_ids": list(replies[0].prompt_ids)} if self._returns_ids else {}
        return self._head("chat.completion", replies) | {"choices": choices, "usage": _openai_usage(replies)} | prompt

    def start(self) -> Iterator[Event]:
        for index in range(len(self.calls)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.text and not (piece.reasoning or self._logprobs or self._returns_ids):  # most events: only the text differs
            choice = f'{{"index":{index},"delta":{{"content":{dump(piece.text)}}},"finish_reason":null,"logprobs":null}}'
            yield None, f'{self._chunk_head},"choices":[{choice}]}}'
            return
        delta = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        yield self._chunk(index, delta | ({"content": piece.text} if piece.text else {}), piece)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        if piece.text or piece.reasoning or (piece.token_ids and (self._logprobs or self._returns_ids)):
            yield from self.extend(index, piece)
        for place, call in enumerate(reply.message.get("tool_calls", ())):
            yield self._chunk(index, {"tool_calls": [{"index": place} | _chat_call(call)]})
        data = self._chunk(index, {}, finish_reason=reply.finish_reason)[1]
        assert isinstance(data, dict)
        if self._returns_ids:
            data["choices"][0]["weight_versions"] = version_spans(reply)
            data["prompt_token_ids"] = list(reply.prompt_ids)
        yield None, data | {"system_fingerprint": reply_version(reply)}

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        if self._has_usage:
            yield None, self._head("chat.completion.chunk", replies) | {"choices": [], "usage": _openai_usage(replies)}
        yield _END

    def _head(self, kind: str, replies: Sequence[Reply]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | ({"system_fingerprint": reply_version(replies[0])} if replies else {})

    def _chunk(self, index: int, delta: object, piece: Piece | None = None, finish_reason: str | None = None) -> Event:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if piece is not None:
            choice["logprobs"] = self._sent_logprobs(piece.token_ids, piece.logprobs)
            choice |= self._ids(piece.token_ids)
        return None, self._head("chat.completion.chunk", ()) | {"choices": [choice]}

    def _ids(self, token_ids: Sequence[int], reply: Reply | None = None) -> dict[str, Any]:
        if not self._returns_ids:
            return {}
        return {"token_ids": list(token_ids)} | ({} if reply is None else {"weight_versions": version_spans(reply)})

    def _sent_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            text = self._caller.token_text(token_id)
            is_whole = "\ufffd" not in text
            entry = {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(text.encode()) if is_whole else None}
            entries.append(entry | {"top_logprobs": []})
        return {"content": entries, "refusal": None}


class _TextCompletion:
    """A request to `/v1/completions`."""

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._model, self._caller, self._id, self._created = model, caller, new_id("cmpl-"), int(time.time())
        options = {"max_tokens": fields.count("max_tokens", 1, MAX_TOKENS)} | _sampling(fields)
        options["prompt_logprobs"] = fields.count("prompt_logprobs", 0, MAX_TOP)
        calls = [Call(**prompt, **options) for prompt in _prompts(fields.take("prompt"))]
        self.calls = _choices(fields, calls)
        fields.only("best_of", len(self.calls) // len(calls))
        self._num_prompts = len(calls)
        num_top = fields.count("logprobs", 0, MAX_TOKENS)
        if num_top:
            raise wrong("logprobs", "must be 0: only those of the sampled tokens are known", num_top)
        self._logprobs = num_top is not None
        self.streams, self._has_usage = _stream(fields)
        if self.streams and calls[0].prompt_logprobs is not None:
            raise Refused("prompt_logprobs: requires stream=false", param="prompt_logprobs")
        self.by_token = self._returns_ids = fields.flag("return_token_ids")
        fields.only("echo", False)
        fields.only("suffix", "")
        _end(fields)

    def body(self, replies: Sequence[Reply]) -> object:
        choices = []
        for index, reply in enumerate(replies):
            token_ids, logprobs = reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()
            piece = Piece(text=reply.message["content"], token_ids=token_ids, logprobs=logprobs)
            choice = self._choice(index, piece, 0) | {"finish_reason": reply.finish_reason} | self._ids(reply)
            if self.calls[index].prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(reply)
            choices.append(choice)
        head = self._head() | {"system_fingerprint": reply_version(replies[0])}
        return head | {"choices": choices, "usage": _openai_usage(replies, self._num_prompts)}

    def start(self) -> Iterable[Event]:
        self._num_chars = [0] * len(self.calls)
        return ()

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        yield None, self._head() | {"choices": [self._choice(index, piece, self._num_chars[index])]}
        self._num_chars[index] += sum(len(self._caller.token_text(token_id)) for token_id in piece.token_ids)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        choice = self._choice(index, piece, self._num_chars[index]) | {"finish_reason": reply.finish_reason}
        yield None, self._head() | {"choices": [choice | self._ids(reply)]}

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        if self._has_usage:
            yield None, self._head() | {"choices": [], "usage": _openai_usage(replies, self._num_prompts)}
        yield _END

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _choice(self, index: int, piece: Piece, first_char: int) -> dict[str, Any]:
        sent = None
        if self._logprobs:
            texts = [self._caller.token_text(token_id) for token_id in piece.token_ids]
            offsets = [first_char + sum(map(len, texts[:place])) for place in range(len(texts))]
            floats = [max(logprob, LOWEST_LOGPROB) for logprob in piece.logprobs]
            sent = {"tokens": texts, "token_logprobs": floats, "top_logprobs": None, "text_offset": offsets}
        choice = {"index": index, "text": piece.text, "logprobs": sent, "finish_reason": None}
        return choice | ({"token_ids": list(piece.token_ids)} if self._returns_ids else {})

    def _ids(self, reply: Reply) -> dict[str, Any]:
        if not self._returns_ids:
            return {}
        return {"prompt_token_ids": list(reply.prompt_ids), "weight_versions": version_spans(reply)}

    def _prompt_logprobs(self, reply: Reply) -> list[dict[str, Any] | None]:
        """Return the log-probabilities at each prompt token as vLLM does: by token id, the most likely tokens first."""
        found, top = reply.completion.prompt_logprobs, reply.completion.prompt_top
        entries = list[dict[str, Any] | None]([None])  # no token precedes the first
        for index, token_id in enumerate(reply.prompt_ids[1:]):
            assert found is not None, "the policy returned no log-probabilities of a prompt"
            known = {} if top is None else dict(zip(top.token_ids[index].tolist(), top.logprobs[index].tolist(), strict=True))
            ranks = {each: rank for rank, each in enumerate(known, 1)}
            known.setdefault(token_id, float(found[index]))
            entries.append(
                {
                    str(each): {
                        "logprob": max(logprob, LOWEST_LOGPROB),
                        "rank": ranks.get(each),
                        "decoded_token": self._caller.token_text(each),
                    }
                    for each, logprob in known.items()
                }
            )
        return entries


class _TokenCompletion:
    """A request to vLLM's `/inference/v1/generate`: tokens in, tokens out."""

    by_token = True

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._id = fields.text("request_id") or new_id("")
        self._model, self._created = model, int(time.time())
        sampling = fields.nested("sampling_params") or Fields({}, "sampling_params")
        options = {"max_tokens": sampling.count("max_tokens", 1, MAX_TOKENS)} | _sampling(sampling)
        self.calls = _choices(sampling, [Call(prompt_ids=_token_ids(fields.take("token_ids"), "token_ids"), **options)])
        sampling.only("logprobs", 0, 1)  # the sampled token's, which is always returned
        sampling.only("detokenize", False, True)
        sampling.only("skip_special_tokens", False, True)
        sampling.only("min_tokens", 0)
        _end(sampling)
        self.streams, self._has_usage = _stream(fields)
        self._returns_prompt = fields.flag("return_token_ids")
        fields.only("output_mode", "tokens")
        fields.only("priority", 0)
        fields.done()

    def body(self, replies: Sequence[Reply]) -> object:
        choices = [
            self._choice(index, reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()) | _token_end(reply)
            for index, reply in enumerate(replies)
        ]
        head = self._head() | {"model": self._model, "created": self._created, "usage": _openai_usage(replies)}
        return head | {"choices": choices} | self._prompt(replies[0])

    def start(self) -> Iterable[Event]:
        return ()

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        yield None, self._head() | {"choices": [self._choice(index, piece.token_ids, piece.logprobs) | {"finish_reason": None}]}

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        choice = self._choice(index, piece.token_ids, piece.logprobs) | _token_end(reply)
        yield None, self._head() | {"choices": [choice]} | self._prompt(reply)

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        if self._has_usage:
            yield None, self._head() | {"choices": [], "usage": _openai_usage(replies)}
        yield _END

    def _head(self) -> dict[str, Any]:
        return {"request_id": self._id, "output_mode": "tokens"}

    def _prompt(self, reply: Reply) -> dict[str, Any]:
        return {"prompt_token_ids": list(reply.prompt_ids)} if self._returns_prompt else {}

    def _choice(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"token_id": token_id, "logprob": max(logprob, LOWEST_LOGPROB), "rank": None, "top_logprobs": []}
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        return {"index": index, "token_ids": list(token_ids), "logprobs": {"content": content}}


def _openai_usage(replies: Sequence[Reply], num_prompts: int = 1) -> dict[str, int]:
    """Return the token counts of a response; the choices of one prompt count it once."""
    step = max(1, len(replies) // num_prompts)
    prompt = sum(len(reply.prompt_ids) for reply in replies[::step])
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_error(refused: Refused) -> dict[str, Any]:
    """Return an error as OpenAI does."""
    return {"error": {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}}


def _read_chat_message(value: object, path: str) -> Message:
    """Read a message of a conversation in the form of chat templates; `developer` becomes `system`.

    `path` is the message's place in the request, such as `messages[0]`, for errors.

    Raises:
        Refused: A field is invalid or not supported.
    """
    fields = Fields(value, path)
    role = fields.needed("role", "system", "developer", "user", "assistant", "tool")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = joined_text(fields.take("content"), fields.name("content"), *kinds)
    if role == "assistant":
        calls = [_read_chat_call(each, f"{path}.tool_calls[{index}]") for index, each in enumerate(fields.items("tool_calls"))]
        reasoning = fields.text("reasoning_content")
        message |= ({"tool_calls": calls} if calls else {}) | ({} if reasoning is None else {"reasoning_content": reasoning})
        fields.only("refusal", "")
        fields.only("annotations", [])
    if role == "tool":
        message["tool_call_id"] = fields.needed("tool_call_id")
    name = fields.text("name")
    fields.done()
    return message if name is None else message | {"name": name}


def _read_chat_call(value: object, path: str) -> dict[str, Any]:
    fields = Fields(value, path)
    call_id, function = fields.needed("id"), Fields(fields.take("function"), f"{path}.function")
    fields.only("type", "function")
    fields.skip("index")
    fields.done()
    read = tool_call(call_id, function.needed("name"), function.needed("arguments"))
    function.done()
    return read


def _read_tool(value: object, path: str, *, is_flat: bool = False) -> Tool:
    """Return a function; `is_flat` as for `_read_tool_choice`."""
    fields = Fields(value, path)
    fields.needed("type", "function")
    function = fields if is_flat else Fields(fields.take("function"), f"{path}.function")
    tool = read_function(function, "parameters")
    function.flag("strict")  # like tool_choice, a wish: sampling is not constrained
    fields.done()
    function.done()
    return tool


def _read_tool_choice(choice: object, tools: Sequence[Tool], *, is_flat: bool = False) -> tuple[tuple[Tool, ...], bool]:
    """Return the functions that the policy sees, and whether the client requires a call.

    Args:
        choice: The field `tool_choice`.
        tools: Functions of the request.
        is_flat: True if the name of a function is beside its type, as in `/v1/responses`.

    Raises:
        Refused: The choice is invalid.
    """
    if isinstance(choice, dict):
        named = Fields(choice, "tool_choice")
        named.needed("type", "function")
        function = named if is_flat else Fields(named.take("function"), "tool_choice.function")
        name = function.needed("name")
        named.done()
        function.done()
        return chosen_tools(tools, name, function.name("name")), True
    if choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", "must be none, auto, required or a function", choice)
    shown = chosen_tools(tools, None, "tool_choice", is_required=choice == "required")
    return () if choice == "none" else shown, choice == "required"


def _requires_json(fields: Fields, key: str) -> bool:
    """Return whether a format is a JSON object, and not text. Raise `Refused` for a schema, which the policy would not see."""
    form = fields.nested(key) or Fields({"type": "text"})
    kind = form.take("type")
    if kind not in ("text", "json_object"):
        rule = "must be text or json_object, because a schema is not enforced. Describe it in a message, or as a function"
        raise wrong(form.name("type"), rule, kind)
    form.done()
    return bool(kind == "json_object")


def _sampling(fields: Fields) -> dict[str, Any]:
    """Read the sampling options that the protocols share."""
    top_k = fields.count("top_k", -1, MAX_TOKENS)  # vLLM disables it with 0 and with -1
    return {
        "temperature": fields.number("temperature", 0, 1e6),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": None if top_k is None else max(top_k, 0),
        "min_p": fields.number("min_p", 0, 1),
        "stop": fields.texts("stop"),
        "stop_ids": _token_ids(fields.take("stop_token_ids") or [], "stop_token_ids"),
        "seed": fields.count("seed", 0, MAX_SEED),
    }


def _choices(fields: Fields, calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return `n` calls for each one; those of a seed have different seeds."""
    num = fields.count("n", 1, MAX_CHOICES) or 1
    if num * len(calls) > MAX_CHOICES:
        raise wrong(fields.name("n"), f"times the number of prompts must be at most {MAX_CHOICES}", num * len(calls))
    return tuple(
        call if call.seed is None else replace(call, seed=(call.seed + index) % (MAX_SEED + 1))
        for call in calls
        for index in range(num)
    )


def _stream(fields: Fields) -> tuple[bool, bool]:
    """Return whether the response is a stream, and whether the stream ends with the token counts."""
    streams, options = fields.flag("stream"), fields.nested("stream_options")
    if options is None:
        return streams, False
    if not streams:
        raise Refused("stream_options: requires stream=true", param="stream_options")
    has_usage = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return True, has_usage


def _end(fields: Fields) -> None:
    """Refuse what is not supported, and drop what has no effect."""
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0, 0.0)
    fields.only("repetition_penalty", 1, 1.0)
    fields.only("logit_bias", {})
    fields.only("ignore_eos", False)
    fields.skip(*_NO_EFFECT)
    fields.done()


def _prompts(value: object) -> list[dict[str, Any]]:
    """Return the prompts of a completion: one or several texts or lists of token ids."""
    if isinstance(value, str):
        return [{"text": value}]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "must be a text, token ids, or a list of them", value)
    if isinstance(value[0], int):
        return [{"prompt_ids": _token_ids(value, "prompt")}]
    return [
        {"text": each} if isinstance(each, str) else {"prompt_ids": _token_ids(each, f"prompt[{index}]")}
        for index, each in enumerate(value)
    ]


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each <= MAX_TOKENS for each in value):
        raise wrong(name, "must be a list of token ids", value)
    return tuple(value)


def _token_end(reply: Reply) -> dict[str, Any]:
    return {"finish_reason": reply.completion.finish_reason, "stop_reason": None, "weight_versions": version_spans(reply)}


def _chat_call(call: Any) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


class _ResponsesRequest:
    """A request to `/v1/responses`."""

    by_token = False

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._numbers = itertools.count()
        self._id, self._message_id, self._reasoning_id = new_id("resp_"), new_id("msg_"), new_id("rs_")
        instructions = fields.text("instructions")
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        tools = [_read_tool(each, f"tools[{index}]", is_flat=True) for index, each in enumerate(fields.items("tools"))]
        choice = fields.take("tool_choice")
        shown, requires_tool = _read_tool_choice(choice, tools, is_flat=True)
        text = fields.nested("text") or Fields({}, "text")
        is_json = _requires_json(text, "format")
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
        fields.skip(*_NO_EFFECT)
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
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                    "strict": False,
                }
                for tool in tools
            ],
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
        (reply,) = replies
        message, is_complete = reply.message, reply.finish_reason != "length"
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
        prompt, sampled = len(reply.prompt_ids), len(reply.completion.token_ids)
        return self._head | {
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "metadata": {"policy_version": reply_version(reply).removeprefix("version-")},
            "output": [
                *([self._item("reasoning", reasoning)] if reasoning else ()),
                *([self._item("message", message["content"])] if message["content"] or not calls else ()),
                *map(_response_call, calls),
            ],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def start(self) -> Iterator[Event]:
        self._open_kind: str | None = None  # of the output item that is being sent
        self._output_index, self._sent = 0, {"message": "", "reasoning": ""}  # text sent so far, by kind
        started = self._head | {"status": "in_progress", "metadata": {}, "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=started)

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._delta("reasoning", piece.reasoning)
        if piece.text:
            yield from self._delta("message", piece.text)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        yield from self.extend(index, piece)
        if not self._sent["message"] and not reply.message.get("tool_calls"):
            yield from self._delta("message", "")  # an empty reply is a message, too
        yield from self._close()
        for call in reply.message.get("tool_calls", ()):
            item = _response_call(call)
            place = {"output_index": self._output_index, "item_id": item["id"]}
            added = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=self._output_index, item=added)
            yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=self._output_index, item=item)
            self._output_index += 1

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
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
            reply = messages[-1]
            if kind == "function_call":
                call = tool_call(fields.needed("call_id"), fields.needed("name"), fields.needed("arguments"))
                reply["tool_calls"] = [*reply.get("tool_calls", ()), call]
            elif kind == "message":
                reply["content"] = joined_text(fields.take("content"), fields.name("content"), "output_text", "input_text")
            else:
                fields.only("summary", [])
                fields.only("encrypted_content")
                reply["reasoning_content"] = joined_text(fields.take("content"), fields.name("content"), "reasoning_text")
        fields.done()
    return list(messages)


def _response_call(call: Any) -> dict[str, Any]:
    item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed"}
    return item | {"name": call["function"]["name"], "arguments": arguments_text(call)}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_ERROR_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _MessagesRequest:
    """A request to `/v1/messages`."""

    by_token = False

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._model, self._caller, self._id = model, caller, new_id("msg_")
        system = joined_text(fields.take("system"), "system", "text")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, each in enumerate(fields.items("messages")):
            messages += _read_messages_message(each, f"messages[{index}]")
        if messages and messages[-1]["role"] == "assistant":
            raise wrong("messages", "must not end with the assistant, because replies are not continued", "assistant")
        max_tokens = fields.count("max_tokens", 1, MAX_TOKENS)
        if max_tokens is None:
            raise wrong("max_tokens", "is required", None)
        tools = [_read_messages_tool(each, f"tools[{index}]") for index, each in enumerate(fields.items("tools"))]
        choice = fields.nested("tool_choice") or Fields({"type": "auto"}, "tool_choice")
        refuses_parallel = choice.flag("disable_parallel_tool_use")
        kind = choice.needed("type", "auto", "any", "tool", "none")
        name = choice.needed("name") if kind == "tool" else None
        choice.done()
        shown = chosen_tools(tools, name, "tool_choice.name" if name else "tool_choice", is_required=kind == "any")
        call = Call(
            messages=conversation(messages),
            tools=() if kind == "none" else shown,
            requires_tool=kind in ("any", "tool"),
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
        return self._head() | {"content": blocks, **self._ending(reply), "usage": _messages_usage(reply)}

    def start(self) -> Iterator[Event]:
        self._open_block: str | None = None  # the content block that is being sent
        self._block_index = 0
        usage = {"input_tokens": 0, "output_tokens": 0}  # the last event has the counts
        message = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _messages_event("message_start", message=message)

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._opened("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        yield from self.extend(index, piece)
        for call in reply.message.get("tool_calls", ()):
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._opened(call["id"], block)
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input_of(call))})
        yield from self._closed()
        yield _messages_event("message_delta", delta=self._ending(reply), usage=_messages_usage(reply))

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        yield _messages_event("message_stop")

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _opened(self, name: str, block: dict[str, Any]) -> Iterator[Event]:
        if self._open_block != name:
            yield from self._closed()
            self._open_block = name
            yield _messages_event("content_block_start", index=self._block_index, content_block=block)

    def _closed(self) -> Iterator[Event]:
        if self._open_block is not None:
            yield _messages_event("content_block_stop", index=self._block_index)
            self._open_block, self._block_index = None, self._block_index + 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _messages_event("content_block_delta", index=self._block_index, delta=delta)

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


def anthropic_error(refused: Refused) -> dict[str, Any]:
    """Return an error as Anthropic does."""
    kind = _ERROR_KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    details = {} if refused.code is None else {"details": {"error_code": refused.code}}
    return {"type": "error", "error": {"type": kind, "message": str(refused)} | details}


def _read_messages_message(value: object, path: str) -> list[Message]:
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


def _read_messages_tool(value: object, path: str) -> Tool:
    fields = Fields(value, path)
    fields.only("type", "custom")
    tool = read_function(fields, "input_schema")
    fields.flag("strict")  # a wish: sampling is not constrained
    fields.flag("eager_input_streaming")  # also a wish: inputs are sent whole
    fields.skip("cache_control")
    fields.done()
    return tool


def _input_of(call: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object, the only form in Anthropic's protocol; malformed ones are a text in it."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else {"arguments": arguments} if arguments else {}


def _messages_usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.completion.token_ids)}


def _messages_event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


PROTOCOLS: Mapping[str, Callable[[Fields, str, Caller], Exchange]] = {
    "/v1/chat/completions": _ChatCompletion,
    "/v1/completions": _TextCompletion,
    "/v1/responses": _ResponsesRequest,
    "/v1/messages": _MessagesRequest,
    "/inference/v1/generate": _TokenCompletion,
}
"""Protocol of each path that takes calls."""
