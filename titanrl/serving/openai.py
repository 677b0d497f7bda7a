"""OpenAI's chat completions and completions, and vLLM's token in, token out.

`return_token_ids` adds token ids and `weight_versions`, the policy versions that sampled them, as vLLM names them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from titanrl.environments.interface import Message, Tool
from titanrl.serving.calls import Call, Caller, Refused, Reply
from titanrl.serving.http import dump
from titanrl.serving.protocol import (
    LOWEST_LOGPROB,
    MAX_CHOICES,
    MAX_SEED,
    MAX_TOP,
    Event,
    Fields,
    Piece,
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

MAX_TOKENS = 2**31 - 1
"""Bound on numbers of tokens; the policy has a lower one."""
NO_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Parameters that name the client, or hint at billing and caches."""
_END: Event = (None, "[DONE]")


class ChatCompletion:
    """A request to `/v1/chat/completions`."""

    by_token: bool

    def __init__(self, fields: Fields, model: str, caller: Caller) -> None:
        self._model, self._caller, self._id, self._created = model, caller, new_id("chatcmpl-"), int(time.time())
        messages = [read_message(each, f"messages[{index}]") for index, each in enumerate(fields.items("messages"))]
        tools = [_read_tool(each, f"tools[{index}]") for index, each in enumerate(fields.items("tools"))]
        shown, requires_tool = read_tool_choice(fields.take("tool_choice"), tools)
        limits = [fields.count(name, 1, MAX_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
        call = Call(
            messages=conversation(messages),
            tools=shown,
            requires_tool=requires_tool,
            refuses_parallel=not fields.flag("parallel_tool_calls", True),
            requires_json=requires_json(fields, "response_format"),
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
        """Return the JSON response."""
        choices = []
        for index, reply in enumerate(replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.message["content"], "refusal": None}
            calls = reply.message.get("tool_calls")
            if calls:
                message |= {"content": message["content"] or None, "tool_calls": [_sent_call(call) for call in calls]}
            if reply.message.get("reasoning_content") is not None:
                message["reasoning_content"] = reply.message["reasoning_content"]
            token_ids, logprobs = reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()
            choice = {"index": index, "message": message, "finish_reason": reply.finish_reason}
            choices.append(choice | {"logprobs": self._sent_logprobs(token_ids, logprobs)} | self._ids(token_ids, reply))
        prompt = {"prompt_token_ids": list(replies[0].prompt_ids)} if self._returns_ids else {}
        return self._head("chat.completion", replies) | {"choices": choices, "usage": usage(replies)} | prompt

    def start(self) -> Iterator[Event]:
        """Return the first events of a stream."""
        for index in range(len(self.calls)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        """Return the events of a part of a completion."""
        if piece.text and not (piece.reasoning or self._logprobs or self._returns_ids):  # most events: only the text differs
            choice = f'{{"index":{index},"delta":{{"content":{dump(piece.text)}}},"finish_reason":null,"logprobs":null}}'
            yield None, f'{self._chunk_head},"choices":[{choice}]}}'
            return
        delta = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        yield self._chunk(index, delta | ({"content": piece.text} if piece.text else {}), piece)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        """Return the events of the last part of a completion."""
        if piece.text or piece.reasoning or (piece.token_ids and (self._logprobs or self._returns_ids)):
            yield from self.extend(index, piece)
        for place, call in enumerate(reply.message.get("tool_calls", ())):
            yield self._chunk(index, {"tool_calls": [{"index": place} | _sent_call(call)]})
        data = self._chunk(index, {}, finish_reason=reply.finish_reason)[1]
        assert isinstance(data, dict)
        if self._returns_ids:
            data["choices"][0]["weight_versions"] = version_spans(reply)
            data["prompt_token_ids"] = list(reply.prompt_ids)
        yield None, data | {"system_fingerprint": reply_version(reply)}

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Return the last events of a stream."""
        if self._has_usage:
            yield None, self._head("chat.completion.chunk", replies) | {"choices": [], "usage": usage(replies)}
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


class TextCompletion:
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
        """Return the JSON response."""
        choices = []
        for index, reply in enumerate(replies):
            token_ids, logprobs = reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()
            piece = Piece(text=reply.message["content"], token_ids=token_ids, logprobs=logprobs)
            choice = self._choice(index, piece, 0) | {"finish_reason": reply.finish_reason} | self._ids(reply)
            if self.calls[index].prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(reply)
            choices.append(choice)
        head = self._head() | {"system_fingerprint": reply_version(replies[0])}
        return head | {"choices": choices, "usage": usage(replies, self._num_prompts)}

    def start(self) -> Iterable[Event]:
        """Return the first events of a stream."""
        self._num_chars = [0] * len(self.calls)
        return ()

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        """Return the events of a part of a completion."""
        yield None, self._head() | {"choices": [self._choice(index, piece, self._num_chars[index])]}
        self._num_chars[index] += sum(len(self._caller.token_text(token_id)) for token_id in piece.token_ids)

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        """Return the events of the last part of a completion."""
        choice = self._choice(index, piece, self._num_chars[index]) | {"finish_reason": reply.finish_reason}
        yield None, self._head() | {"choices": [choice | self._ids(reply)]}

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Return the last events of a stream."""
        if self._has_usage:
            yield None, self._head() | {"choices": [], "usage": usage(replies, self._num_prompts)}
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


class TokenCompletion:
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
        """Return the JSON response."""
        choices = [
            self._choice(index, reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()) | _token_end(reply)
            for index, reply in enumerate(replies)
        ]
        head = self._head() | {"model": self._model, "created": self._created, "usage": usage(replies)}
        return head | {"choices": choices} | self._prompt(replies[0])

    def start(self) -> Iterable[Event]:
        """Return the first events of a stream."""
        return ()

    def extend(self, index: int, piece: Piece) -> Iterator[Event]:
        """Return the events of a part of a completion."""
        yield None, self._head() | {"choices": [self._choice(index, piece.token_ids, piece.logprobs) | {"finish_reason": None}]}

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterator[Event]:
        """Return the events of the last part of a completion."""
        choice = self._choice(index, piece.token_ids, piece.logprobs) | _token_end(reply)
        yield None, self._head() | {"choices": [choice]} | self._prompt(reply)

    def end(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Return the last events of a stream."""
        if self._has_usage:
            yield None, self._head() | {"choices": [], "usage": usage(replies)}
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


def usage(replies: Sequence[Reply], num_prompts: int = 1) -> dict[str, int]:
    """Return the token counts of a response; the choices of one prompt count it once."""
    step = max(1, len(replies) // num_prompts)
    prompt = sum(len(reply.prompt_ids) for reply in replies[::step])
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def error(refused: Refused) -> dict[str, Any]:
    """Return an error as OpenAI does."""
    return {"error": {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}}


def read_message(value: object, path: str) -> Message:
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
        calls = [_read_call(each, f"{path}.tool_calls[{index}]") for index, each in enumerate(fields.items("tool_calls"))]
        reasoning = fields.text("reasoning_content")
        message |= ({"tool_calls": calls} if calls else {}) | ({} if reasoning is None else {"reasoning_content": reasoning})
        fields.only("refusal", "")
        fields.only("annotations", [])
    if role == "tool":
        message["tool_call_id"] = fields.needed("tool_call_id")
    name = fields.text("name")
    fields.done()
    return message if name is None else message | {"name": name}


def _read_call(value: object, path: str) -> dict[str, Any]:
    fields = Fields(value, path)
    call_id, function = fields.needed("id"), Fields(fields.take("function"), f"{path}.function")
    fields.only("type", "function")
    fields.skip("index")
    fields.done()
    read = tool_call(call_id, function.needed("name"), function.needed("arguments"))
    function.done()
    return read


def _read_tool(value: object, path: str) -> Tool:
    fields = Fields(value, path)
    fields.needed("type", "function")
    function = Fields(fields.take("function"), f"{path}.function")
    fields.done()
    tool = read_function(function, "parameters")
    function.flag("strict")  # like tool_choice, a wish: sampling is not constrained
    function.done()
    return tool


def read_tool_choice(choice: object, tools: Sequence[Tool], *, is_flat: bool = False) -> tuple[tuple[Tool, ...], bool]:
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


def requires_json(fields: Fields, key: str) -> bool:
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
    fields.skip(*NO_EFFECT)
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


def _sent_call(call: Any) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}
