"""Renderers: convert chat messages to tokens and completions to messages.

A conversation is rendered once. Later turns append tokens instead of rendering it again.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from titanrl.config.device import installed_version
from titanrl.data.entries import BadRow
from titanrl.data.tokenizer import ChatFormat, Tokenizer
from titanrl.environments import Message, Tool
from titanrl.environments.interface import NotAnObject, parse_object, readable, readable_text
from titanrl.models.families import FAMILIES

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LIBRARY = "renderers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """A conversation at the end of a turn of the policy."""

    token_ids: Sequence[int]
    """Tokens before the turn."""
    completion_ids: Sequence[int]
    """Tokens of the turn, which the policy sampled."""
    messages: Sequence[Message]
    """Messages of the conversation; the last one is the policy's."""

    @property
    def known_ids(self) -> list[int]:
        """All tokens of the conversation."""
        return [*self.token_ids, *self.completion_ids]


class Renderer(Protocol):
    """Converts conversations to tokens, and completions to messages."""

    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation, including the prefix of the policy's reply."""

    def extend(self, end: TurnEnd, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens to append after a turn of the policy and further messages, so that its next turn can follow.

        Return None if the conversation must be rendered again, for example because the model's template strips the thinking of
        earlier turns.
        """

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion into a message, whatever it contains.

        The `arguments` of a malformed tool call are its text instead of a mapping. U+FFFD replaces NUL and unpaired surrogates,
        so that an environment can repeat every text and argument.
        """


class PlainRenderer:
    """Renderer for models without a chat template.

    Messages are concatenated as plain text; only the policy's turns end with a token. A tool call is
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If the only tool has a single parameter, or a single
    required one, the tags may contain just its value. A tool result is `<tool_response>...</tool_response>`. The tools are not
    described to the policy, which must already know them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Use the tokens of the tokenizer that end a completion; the first one ends the turns of the policy."""
        self._tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = tokenizer.stop_ids

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation. Each turn of the policy ends with the end-of-sequence token."""
        return [*self._tokenizer.start_ids, *self._messages(messages)]

    def extend(self, end: TurnEnd, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens of the messages, preceded by an end-of-sequence token if the completion lacks one."""
        has_ended = len(end.completion_ids) > 0 and end.completion_ids[-1] in self.stop_ids
        return [*(() if has_ended else self.stop_ids[:1]), *self._messages(messages)]

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion into the text outside of tool calls, and the calls."""
        return _parse_tags(self._tokenizer.decode_completion(list(completion_ids)), tools)

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in self._message(message)]

    def _message(self, message: Message) -> list[int]:
        match message["role"]:
            case "assistant":
                text = message.get("content") or ""
                for function in [call["function"] for call in message.get("tool_calls") or ()]:
                    given = function["arguments"]  # text if it is malformed
                    call = given if isinstance(given, str) else json.dumps({"name": function["name"], "arguments": given})
                    text += f"<tool_call>{call}</tool_call>"
                return [*self._tokenizer.encode(text), self.stop_ids[0]]
            case "tool":
                return self._tokenizer.encode(f"<tool_response>{message['content']}</tool_response>")
            case _:
                return self._tokenizer.encode(message["content"])


class TemplateRenderer:
    """Renderer that uses the chat template of the model's tokenizer.

    The policy calls a tool by `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many templates tell it to.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        """Check the template; `options` are variables of the chat template, such as `enable_thinking`."""
        if not tokenizer.chat_template:
            rule = f"the tokenizer has no chat template (got {tokenizer.path})"
            raise ValueError(f"data.environment.renderer: {rule}. Use the renderer plain.")
        if unknown := tokenizer.unknown_options(options):
            rule = f"the chat template does not use it (got {options[unknown[0]]!r})"
            raise ValueError(f"data.environment.renderer_options.{unknown[0]}: {rule}. Remove it.")
        self._tokenizer, self._format, self._has_readable_calls = tokenizer, ChatFormat(tokenizer, dict(options)), False
        self._mark = f"end{secrets.token_hex(8)}"  # occurs in no message
        end = () if tokenizer.turn_end_id is None else (tokenizer.turn_end_id,)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*end, *tokenizer.eos_ids]))
        try:
            self._chat_text([{"role": "user", "content": "a"}], ())
        except ValueError as error:
            raise ValueError(f"data.environment.renderer: {error} (got a question). Choose another renderer.") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation in the model's chat template."""
        return self._tokenizer.encode_chat(self._chat_text(messages, tools))

    def extend(self, end: TurnEnd, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens that the chat template puts after the turn; None if it changes the conversation before them."""
        *earlier, _ = end.messages
        said = self._tokenizer.decode_completion(end.completion_ids)
        reply = {"role": "assistant", "content": f"{said}{self._mark}"}
        head, mark, rest = self._chat_text([*earlier, reply, *messages], tools).partition(self._mark)
        sampled, _, _ = str(self._tokenizer.marked(reply["content"])).partition(self._mark)
        if not mark or _without_space(head) != _without_space(self._chat_text(earlier, tools) + sampled):
            return None
        added = self._tokenizer.encode_chat(rest)
        if not end.completion_ids or end.completion_ids[-1] not in self.stop_ids:
            return added
        return added[1:] if added[0] in self.stop_ids else None

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion into the text outside of tool calls, and the calls."""
        return _parse_tags(self._tokenizer.decode_completion(list(completion_ids)), tools, takes_values=False)

    def _chat_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the text of a conversation. Raise `ValueError` if the policy would miss a part, or could not call tools."""
        functions = [{"type": "function", "function": spec} for spec in _specs(tools) or ()] or None
        call = _tool_call(0, tools[0].name if tools else "", {"a": self._mark})
        asked = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            _, text = self._format.fitted(messages, functions, reply_follows=True, is_sampled=True)
            if tools and not self._has_readable_calls:
                _, written = self._format.fitted(asked, functions, reply_follows=False)
                calls = [each["function"] for each in _parse_tags(written, ()).get("tool_calls", ())]
                if call["function"] not in calls:
                    raise ValueError("the chat template writes tool calls in another format than JSON in <tool_call> tags")
                self._has_readable_calls = True
        except BadRow as error:  # its fix is that of a row
            raise ValueError(error.problem) from error
        return text


class LibraryRenderer:
    """Renderer from the package `renderers`, which supports the chat templates of many model families."""

    def __init__(self, tokenizer: Tokenizer, name: str, options: Mapping[str, Any]) -> None:
        """Load a renderer of the package, such as `glm-5`, with its options, such as `enable_thinking`."""
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
            loaded = AutoTokenizer.from_pretrained(tokenizer.path, local_files_only=True, trust_remote_code=False)
            backend = _LibraryTokenizer(loaded, tokenizer)
            self._renderer: Any = renderers.create_renderer(backend, config)
            self._appending = _that_appends(self._renderer, backend)
        except (ValueError, AssertionError) as error:
            cause = str(error)
            if isinstance(error, pydantic.ValidationError):
                details = error.errors(include_url=False)[0]
                cause = ": ".join([".".join(map(str, details["loc"][1:])), details["msg"]]).removeprefix(": ")
            raise ValueError(
                f"data.environment.renderer: {name} cannot be used with {tokenizer.path}: {cause}. "
                "Choose another, such as template."
            ) from error
        self._tokenizer, self._backend = tokenizer, backend
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._marked: Callable[[Any], Any] = tokenizer.marked
        if not self._keeps_text():
            self._marked = lambda value: value  # the renderer has its own tokenizer
        if not self._keeps_text():
            rule = f"{name} turns the text of a special token in a message into the token"
            raise ValueError(f"data.environment.renderer: {rule} (got {tokenizer.path}). Choose another renderer.")

    def _keeps_text(self) -> bool:
        """Return True if the text of a special token in a message stays text."""
        end = self.stop_ids[0]
        written = f"a {self._tokenizer.token_text(end)} b"
        without, rendered = (self.render([{"role": "user", "content": text}], ()) for text in ("a", written))
        shown = self._backend.decode([token for token in rendered if token != end], skip_special_tokens=False)
        return rendered.count(end) == without.count(end) and written in shown

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation in the model's chat template."""
        conversation = self._marked([dict(message) for message in messages])
        ids: list[int] = self._renderer.render_ids(conversation, tools=self._marked(_specs(tools)), add_generation_prompt=True)
        return ids

    def extend(self, end: TurnEnd, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens of the messages in the model's chat template; None if the template changes earlier tokens.

        The library never appends a user message after a turn of a thinking model, because the chat template then strips the
        thinking. If there is none, nothing changes, and the message is appended.
        """
        added = self._bridge(self._renderer, end, messages, tools)
        if added is not None or self._appending is None:
            return added
        added = self._bridge(self._appending, end, messages, tools)
        if added is None:
            return None
        rendered = self.render([*end.messages, *messages], tools)
        return added if self._text([*end.known_ids, *added]) == self._text(rendered) else None

    def _bridge(self, renderer: Any, end: TurnEnd, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens that a renderer of the library appends; None if it cannot, or would change earlier tokens."""
        conversation = self._marked([dict(message) for message in messages])
        before, completion = list(end.token_ids), list(end.completion_ids)
        bridged = renderer.bridge_to_next_turn(before, completion, conversation, tools=self._marked(_specs(tools)))
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        known = end.known_ids
        return ids[len(known) :] if ids[: len(known)] == known else None

    def _text(self, token_ids: Sequence[int]) -> str:
        return _without_space(str(self._backend.decode(list(token_ids), skip_special_tokens=False)))

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """Parse a completion in the model's format into an assistant message; see `Renderer.parse`."""
        try:
            parsed = self._renderer.parse_response(list(completion_ids), tools=_specs(tools))
        except Exception:  # the library parses what the policy wrote, for example JSON that is nested too deeply
            text = readable_text(self._tokenizer.decode(list(completion_ids)))
            return {"role": "assistant", "content": "", "tool_calls": [_tool_call(0, "", text)]}
        message: dict[str, Any] = {"role": "assistant", "content": readable_text(parsed.content)}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = readable_text(parsed.reasoning_content)
        calls = [_library_call(number, call) for number, call in enumerate(parsed.tool_calls)]
        return message | ({"tool_calls": calls} if calls else {})


class _LibraryTokenizer:
    """transformers' tokenizer for the package `renderers`, but text is encoded by `Tokenizer.encode_chat`.

    The library encodes the texts of messages together with the control tokens around them. Marks in the messages keep the text
    of special tokens apart.
    """

    def __init__(self, loaded: Any, tokenizer: Tokenizer) -> None:
        self._loaded, self._tokenizer = loaded, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("offsets of tokens in the text")  # the library then uses `encode`

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._tokenizer.encode_chat(text)

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        text = self._loaded.apply_chat_template(messages, **{**options, "tokenize": False})
        return self._tokenizer.encode_chat(text)


def make_renderer(tokenizer: Tokenizer, name: str, options: Mapping[str, Any]) -> Renderer:
    """Create a renderer by name: `auto`, `plain`, `template`, or a name from the package `renderers`.

    `auto` selects the renderer of the model's family (`model_type` in its `config.json`), or `plain` without a chat template.
    Raise `ValueError` if the renderer cannot be used with the model.
    """
    if name == "auto" and not tokenizer.chat_template:
        name = "plain"
    elif name == "auto":
        model_type = json.loads((tokenizer.path / "config.json").read_text(encoding="utf-8")).get("model_type")
        family = FAMILIES.get(model_type)
        if family is None or family.renderer is None:
            raise ValueError(
                f"data.environment.renderer: no renderer is known for models of type {model_type} (got auto). "
                "Name a renderer of the package renderers, or template if the model's chat template writes tool calls as JSON "
                "in <tool_call> tags, or plain."
            )
        name = family.renderer
    if name == "template":
        return TemplateRenderer(tokenizer, options)
    if name == "plain":
        if options:
            rule = f"the renderer plain has no options (got {sorted(options)})"
            raise ValueError(f"data.environment.renderer_options: {rule}. Remove them.")
        return PlainRenderer(tokenizer)
    return LibraryRenderer(tokenizer, name, options)


def _specs(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [{"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools] or None


def _that_appends(renderer: Any, backend: Any) -> Any:
    """Return the same renderer, but one that appends user messages even if the chat template would strip thinking.

    None if it already does, or cannot.
    """
    import renderers

    if renderer.effective_thinking_retention != "tool_cycle":
        return None
    fields = renderer.config.model_dump(exclude_unset=True) | {"name": renderer.config.name, "thinking_retention": "all"}
    try:
        return renderers.create_renderer(backend, type(renderer.config)(**fields))
    except (ValueError, AssertionError):  # an option of the renderer says the opposite
        return None


def _without_space(text: str) -> str:
    """Return a text without white space, which parsing a message and rendering it again may change."""
    return "".join(text.split())


def _parse_tags(text: str, tools: Sequence[Tool], *, takes_values: bool = True) -> dict[str, Any]:
    """Parse a completion into the text outside of `<tool_call>` tags, and the calls.

    With `takes_values`, a call may be just the value of the only (required) parameter of the only tool.
    """
    text = readable_text(text)
    matches = enumerate(_CALL.finditer(text))
    calls = [_tagged_call(number, match[1].strip(), tools if takes_values else ()) for number, match in matches]
    return {"role": "assistant", "content": _CALL.sub("", text)} | ({"tool_calls": calls} if calls else {})


def _tagged_call(number: int, text: str, tools: Sequence[Tool]) -> dict[str, Any]:
    call: dict[str, Any] = {}
    try:
        call = parse_object(text)
    except NotAnObject:
        pass
    except ValueError:
        return _tool_call(number, "", text)
    if isinstance(call.get("name"), str):
        arguments = call.get("arguments", {})
        return _tool_call(number, call["name"], arguments if isinstance(arguments, dict) else json.dumps(arguments))
    for field in ("properties", "required") if len(tools) == 1 else ():
        names = tools[0].parameters.get(field)
        if isinstance(names, Mapping | list | tuple) and len(names) == 1:
            return _tool_call(number, tools[0].name, {str(next(iter(names))): text})
    return _tool_call(number, "", text)


def _library_call(number: int, call: Any) -> dict[str, Any]:
    """Return a call that the library parsed; it accepts JSON leniently, and reports names and arguments of any type."""
    name = readable_text(call.name) if isinstance(call.name, str) else ""
    arguments: dict[str, Any] | str = readable_text(str(call.raw))
    if name and call.status == "ok" and isinstance(call.arguments, dict):
        with suppress(ValueError):
            with suppress(NotAnObject):  # another format than JSON
                parse_object(str(call.raw))
            arguments = readable(call.arguments)
    return _tool_call(number, name, arguments) | ({"id": readable_text(call.id)} if isinstance(call.id, str) else {})


def _tool_call(number: int, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
