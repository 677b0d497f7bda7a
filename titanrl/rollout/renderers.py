"""Renderers: convert chat messages to tokens and completions to messages.

A conversation is rendered once. Later turns append tokens instead of rendering it again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import Message, Tool
from titanrl.models.families import FAMILIES
from titanrl.packages import installed_version

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LIBRARY = "renderers"


class Renderer(Protocol):
    """Converts conversations to tokens, and completions to messages."""

    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation, including the prefix of the policy's reply."""

    def extend(
        self, token_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the tokens to append after a completion, so that the policy's next reply can follow.

        Args:
            token_ids: Tokens before the completion.
            completion_ids: Tokens that the policy sampled.
            messages: Messages that follow the policy's message.
            tools: Functions that the policy may call.

        Returns:
            Tokens to append; None if the conversation must be rendered again, for example because the model's template strips
            the thinking of earlier turns.
        """

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion into a message. The `arguments` of a malformed tool call are its text instead of a mapping."""


class PlainRenderer:
    """Renderer for models without a chat template.

    Messages are concatenated as plain text; only the policy's turns end with a token. A tool call is
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If the only tool has a single parameter, the tags may contain
    just its value. A tool result is `<tool_response>...</tool_response>`. The tools are not described to the policy, which must
    already know them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Use the end-of-sequence tokens of the tokenizer."""
        self._tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = tokenizer.eos_ids

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation. Each turn of the policy ends with the end-of-sequence token."""
        return [*self._tokenizer.start_ids, *self._messages(messages)]

    def extend(
        self, token_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the tokens of the messages, preceded by an end-of-sequence token if the completion lacks one."""
        has_ended = len(completion_ids) > 0 and completion_ids[-1] in self.stop_ids
        return [*(() if has_ended else self.stop_ids[:1]), *self._messages(messages)]

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion into the text outside of tool calls, and the calls."""
        text = self._tokenizer.decode(list(completion_ids))
        message: dict[str, Any] = {"role": "assistant", "content": _CALL.sub("", text)}
        calls = [self._call(match.group(1).strip(), number, tools) for number, match in enumerate(_CALL.finditer(text))]
        return message | ({"tool_calls": calls} if calls else {})

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in self._message(message)]

    def _message(self, message: Message) -> list[int]:
        match message["role"]:
            case "assistant":
                calls = "".join(f"<tool_call>{_call_text(call)}</tool_call>" for call in message.get("tool_calls") or ())
                return [*self._tokenizer.encode(f"{message.get('content') or ''}{calls}"), self.stop_ids[0]]
            case "tool":
                return self._tokenizer.encode(f"<tool_response>{message['content']}</tool_response>")
            case _:
                return self._tokenizer.encode(message["content"])

    def _call(self, text: str, number: int, tools: Sequence[Tool]) -> dict[str, Any]:
        name: str = ""
        arguments: Any = text
        try:
            call = json.loads(text)
        except ValueError:
            call = None
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            name, arguments = call["name"], call.get("arguments", {})
            arguments = arguments if isinstance(arguments, dict) else json.dumps(arguments)
        elif len(tools) == 1 and len(only := list(tools[0].parameters.get("properties", {}))) == 1:
            name, arguments = tools[0].name, {only[0]: text}
        return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


class LibraryRenderer:
    """Renderer from the package `renderers`, which supports the chat templates of many model families."""

    def __init__(self, tokenizer: Tokenizer, name: str, options: Mapping[str, Any]) -> None:
        """Load the renderer.

        Args:
            tokenizer: Tokenizer of the policy.
            name: Name of the renderer in the package, such as `glm-5`.
            options: Options of the renderer, such as `enable_thinking`.

        Raises:
            ValueError: The package is missing or has no such renderer or option, or the tokenizer lacks a required token.
        """
        if installed_version(_LIBRARY) is None:
            raise ValueError(
                f"data.environment.renderer: the package {_LIBRARY} is not installed (got {name}). "
                "Run `pip install 'titanrl[chat]'`."
            )
        import pydantic
        import renderers
        from renderers import configs
        from transformers import AutoTokenizer

        try:
            config = pydantic.TypeAdapter(configs.RendererConfig).validate_python({"name": name, **options})
            backend = AutoTokenizer.from_pretrained(tokenizer.path, local_files_only=True)
            self._renderer: Any = renderers.create_renderer(backend, config)
        except (ValueError, AssertionError) as error:
            cause = str(error)
            if isinstance(error, pydantic.ValidationError):
                details = error.errors(include_url=False)[0]
                cause = ": ".join([".".join(map(str, details["loc"][1:])), details["msg"]]).removeprefix(": ")
            raise ValueError(
                f"data.environment.renderer: {name} cannot be used with {tokenizer.path}: {cause}. Choose another renderer."
            ) from error
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation in the model's chat template."""
        ids: list[int] = self._renderer.render_ids(
            [dict(message) for message in messages], tools=_specs(tools), add_generation_prompt=True
        )
        return ids

    def extend(
        self, token_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the tokens of the messages in the model's chat template; None if the template changes earlier tokens."""
        before, completion = list(token_ids), list(completion_ids)
        bridged = self._renderer.bridge_to_next_turn(
            before, completion, [dict(message) for message in messages], tools=_specs(tools)
        )
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        known = len(before) + len(completion)
        return ids[known:] if ids[:known] == before + completion else None

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion in the model's format."""
        parsed = self._renderer.parse_response(list(completion_ids), tools=_specs(tools))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        numbers = count()
        calls = [
            {
                "id": call.id or f"call_{next(numbers)}",
                "type": "function",
                "function": {
                    "name": call.name or "",
                    "arguments": call.arguments if call.status == "ok" and isinstance(call.arguments, dict) else call.raw,
                },
            }
            for call in parsed.tool_calls
        ]
        return message | ({"tool_calls": calls} if calls else {})


def make_renderer(tokenizer: Tokenizer, name: str, options: Mapping[str, Any]) -> Renderer:
    """Create a renderer by name. `auto` selects the renderer of the model's family, or `plain` without a chat template.

    Raises:
        ValueError: The renderer cannot be used with the model.
    """
    if name == "auto":
        name = _automatic(tokenizer)
    if name == "plain":
        return PlainRenderer(tokenizer)
    return LibraryRenderer(tokenizer, name, options)


def _automatic(tokenizer: Tokenizer) -> str:
    """Return the name of the renderer for a model, based on the `model_type` in its `config.json`.

    Raises:
        ValueError: The model has a chat template, but no known renderer.
    """
    if not tokenizer.chat_template:
        return "plain"
    model_type = json.loads((tokenizer.path / "config.json").read_text(encoding="utf-8")).get("model_type")
    family = FAMILIES.get(model_type)
    if family is None or family.renderer is None:
        raise ValueError(
            f"data.environment.renderer: no renderer is known for models of type {model_type} (got auto). "
            "Name a renderer of the package renderers, or plain."
        )
    return family.renderer


def _specs(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [{"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools] or None


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return str(function["arguments"])
    return json.dumps({"name": function["name"], "arguments": function["arguments"]})
