"""Render conversations with the model's chat template, and refuse those of which the template leaves something out.

A template ignores keys, roles and tools that it does not know, without an error. So what matters is compared with and without:
a part that does not change the rendered text has not reached the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.data.entries import Message
from titanrl.data.rows import BadRow
from titanrl.data.tokenizer import Tokenizer

_IDENTIFIERS = ("name", "tool_call_id")
"""Keys that many templates do not need, because the order of the messages says the same."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning of a message. A template knows at most one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation as the chat template takes it."""

    messages: Sequence[Message]
    """The messages, with the keys and roles that the template knows."""
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any]
    """Variables of the template."""

    def start(self, length: int) -> "Chat":
        """Return the first messages of the conversation."""
        return replace(self, messages=self.messages[:length])


class ChatFormat:
    """The chat template of a tokenizer, with the variables of a configuration."""

    def __init__(
        self, tokenizer: Tokenizer, options: Mapping[str, Any] = MappingProxyType({}), *, control_tokens: bool = False
    ) -> None:
        """Store the arguments. Raise `BrokenRules` if the template has no variable of an option.

        Variables of a row override `options`. With `control_tokens`, the text of a special token in a message is encoded as the
        token.
        """
        if unknown := tokenizer.unknown_options(options):
            values = {f"data.chat_template_kwargs.{unknown[0]}": options[unknown[0]]}
            rule, fix = "the chat template has no such variable", "correct its name, or remove it"
            raise BrokenRules(BrokenRule(values, rule, fix))
        self.tokenizer = tokenizer
        """Tokenizer with the chat template."""
        self._options, self._control_tokens = options, control_tokens
        self._known: set[tuple[str, str]] = set()  # role and key of parts that the template is known to use
        self._calls_as_text = False

    def fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        reply_follows: bool,
    ) -> tuple[Chat, str]:
        """Return a conversation as the template takes it, and its text.

        The role `developer` becomes `system`, the key of the reasoning gets the name that the template knows, and the arguments
        of tool calls become JSON text, if the template does not take them otherwise. `options` are the variables that a row
        sets. With `reply_follows`, the text ends with the start of the assistant's reply. Raise `BadRow` if the template
        rejects the conversation, or leaves a part of it out.
        """
        if unknown := self.tokenizer.unknown_options(options or {}):
            raise BadRow(f"the chat template has no variable {unknown[0]}", "remove it from chat_template_kwargs")
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        chat = Chat(messages=messages, tools=tools, options={**self._options, **(options or {})})
        chat, text = self._rendered(chat, reply_follows)
        for index, message in enumerate(chat.messages):
            for key in message:
                if key != "role" and key not in _IDENTIFIERS and not self._uses(chat, index, key, text, reply_follows):
                    chat, text = self._renamed(chat, index, key, reply_follows)
        if tools and ("", "tools") not in self._known:
            if self._text(replace(chat, tools=None), reply_follows) == text:
                raise BadRow("the chat template ignores tools", "remove them, or use a model with a template for tools")
            self._known.add(("", "tools"))
        return chat, text

    def text(self, chat: Chat, *, reply_follows: bool) -> str:
        """Return the text of a conversation, or of its start. Raise `ValueError` if the template rejects the conversation."""
        return self.tokenizer.chat_text(
            chat.messages,
            reply_follows=reply_follows,
            tools=chat.tools,
            options=chat.options,
            control_tokens=self._control_tokens,
        )

    def _rendered(self, chat: Chat, reply_follows: bool) -> tuple[Chat, str]:
        as_text = _with_call_texts(chat)
        if self._calls_as_text:
            chat = as_text
        try:
            return chat, self.text(chat, reply_follows=reply_follows)
        except ValueError as error:
            if chat is not as_text and (text := self._text(as_text, reply_follows)) is not None:
                self._calls_as_text = True
                return as_text, text
            fix = "correct the template or the messages; data.chat_template: never tokenizes prompts without it"
            raise BadRow(str(error).removesuffix("."), fix) from error

    def _text(self, chat: Chat, reply_follows: bool) -> str | None:
        """Return the text of a conversation; None if the template rejects it."""
        try:
            return self.text(chat, reply_follows=reply_follows)
        except ValueError:
            return None

    def _uses(self, chat: Chat, index: int, key: str, text: str, reply_follows: bool) -> bool:
        message = chat.messages[index]
        part, value, empty = (message["role"], key), message[key], {"content": ""} if key == "content" else {}
        if key == "content" and (not value.strip() or (part in self._known and value.strip() in text)):
            return True
        if key != "content" and part in self._known:
            return True
        without = _replaced(chat, index, {k: v for k, v in message.items() if k != key} | empty)
        used = self._text(without, reply_follows) != text
        if not used and message["role"] == "assistant":
            # Some templates leave out the reasoning of earlier turns on purpose. They use it in the last turn.
            used = self._text(without.start(index + 1), False) != self._text(chat.start(index + 1), False)
        if used:
            self._known.add(part)
        return used

    def _renamed(self, chat: Chat, index: int, key: str, reply_follows: bool) -> tuple[Chat, str]:
        """Return the conversation with another name for a key that the template does not use."""
        message = chat.messages[index]
        for name in _THOUGHTS if key in _THOUGHTS else ():
            if name not in message:
                other = _replaced(chat, index, {name if k == key else k: v for k, v in message.items()})
                text = self._text(other, reply_follows)
                if text is not None and self._uses(other, index, name, text, reply_follows):
                    return other, text
        fix = "remove it, or use a model whose template knows it"
        if key == "content":
            raise BadRow(f"the chat template leaves out messages[{index}], with the role {message['role']}", fix)
        raise BadRow(f"the chat template ignores messages[{index}].{key}", fix)

    @cached_property
    def _knows_developer(self) -> bool:
        asked = [{"role": "developer", "content": "zxq"}, {"role": "user", "content": "a"}]
        return "zxq" in (self._text(Chat(messages=asked, options=self._options), True) or "")


def _replaced(chat: Chat, index: int, message: Message) -> Chat:
    return replace(chat, messages=[*chat.messages[:index], message, *chat.messages[index + 1 :]])


def _with_call_texts(chat: Chat) -> Chat:
    """Return a conversation with the arguments of tool calls as JSON text; the same object if there are none."""
    if not any("tool_calls" in message for message in chat.messages):
        return chat
    messages = []
    for message in chat.messages:
        calls = []
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        messages.append({**message, "tool_calls": calls} if calls else message)
    return replace(chat, messages=messages)
