"""Validation of chat messages and tool schemas from data sources.

Messages are returned in the form that chat templates expect: every message has a role and text, and the arguments of tool calls
are objects. All other keys are kept, so that they reach the template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.config.errors import inline
from titanrl.data.files import BadRow

ROLES = ("system", "developer", "user", "assistant", "tool")

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles by the value of `from` in the ShareGPT format."""

Message = Mapping[str, Any]


def read_messages(content: Any, *, has_fillers: bool = False) -> list[Message]:
    """Validate and return the messages of a conversation.

    - Messages in the ShareGPT format (`from`, `value`) get a role and a content.
    - Text parts (`[{"type": "text", "text": ...}]`) are joined by line breaks, as vLLM does for templates of text models.
    - A missing content is empty text if the message has tool calls or reasoning.
    - The arguments of tool calls may be an object or its JSON text. Keys with the value null are dropped.

    Args:
        content: The messages.
        has_fillers: True if the source fills missing keys of nested objects with null, as Arrow does.

    Raises:
        BadRow: A message has no valid role, no text, or invalid tool calls.
    """
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        raise BadRow("messages must be a non-empty list", 'write [{"role": "user", "content": "..."}, ...]')
    return [_message(message, f"messages[{index}]", has_fillers) for index, message in enumerate(content)]


def read_tools(content: Any, *, has_fillers: bool = False) -> list[Mapping[str, Any]] | None:
    """Validate and return the tools of a row, as JSON schemas of functions; None if there are none.

    A list, or its JSON text, of `{"type": "function", "function": {...}}`, or of functions without this wrapper.

    Raises:
        BadRow: The value is not such a list.
    """
    fix = 'write [{"type": "function", "function": {"name": ..., "parameters": {...}}}], or rename the column'
    if isinstance(content, str) and content.strip():
        content = _parsed(content, "tools", fix)
    if not content:
        return None
    if not isinstance(content, Sequence) or isinstance(content, str):
        raise BadRow(f"tools must be a list of function schemas, got {inline(content)}", fix)
    tools: list[Mapping[str, Any]] = []
    for index, tool in enumerate(content):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools[{index}] must be the schema of a function with a name, got {inline(tool)}", fix)
        tool = tool if "function" in tool else {"type": "function", "function": tool}
        tools.append(_without_nulls(tool) if has_fillers else tool)
    return tools


def question_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one string. For a single message, this is its content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {_shown(message)}" for message in messages)


def _shown(message: Message) -> str:
    thoughts = [message[key] for key in ("reasoning_content", "reasoning", "thinking") if isinstance(message.get(key), str)]
    calls = [json.dumps(call.get("function", call), ensure_ascii=False, default=str) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [*thoughts, message["content"], *calls]))


def _message(message: Any, place: str, has_fillers: bool) -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(f"{place} must be an object, got {type(message).__name__}", "write an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept and "from" in kept and "value" in kept:
        sender = kept.pop("from")
        if sender not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            fix = "write tool calls as an assistant message with tool_calls" if sender == "function_call" else "correct it"
            raise BadRow(f"{place}.from must be one of {known}, got {inline(sender)}", fix)
        kept = {"role": _SHAREGPT_ROLES[sender], "content": kept.pop("value"), **kept}
    if kept.get("role") not in ROLES:
        fix = "write it as the role tool" if kept.get("role") == "function" else "correct the role"
        raise BadRow(f"{place}.role must be one of {', '.join(ROLES)}, got {inline(kept.get('role'))}", fix)
    if "tool_calls" in kept:
        calls = _calls(kept.pop("tool_calls"), f"{place}.tool_calls", has_fillers)
        if calls and kept["role"] != "assistant":
            raise BadRow(f"{place} has tool_calls, but the role {kept['role']}", "only an assistant message can call tools")
        kept |= {"tool_calls": calls} if calls else {}
    for key in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if key in kept and not isinstance(kept[key], str):
            raise BadRow(f"{place}.{key} must be a string, got {inline(kept[key])}", "correct or remove it")
    others = {key: value for key, value in kept.items() if key not in ("role", "content")}
    return {"role": kept["role"], "content": _text(kept.get("content"), f"{place}.content", is_optional=bool(others)), **others}


def _text(content: Any, place: str, *, is_optional: bool) -> str:
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise BadRow(f"{place} must be a string, got {inline(content)}", "write the content as a string")
    texts = []
    for index, part in enumerate(content):
        named = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        text = part if isinstance(part, str) else named.get("text")
        if not isinstance(text, str) or named.keys() - {"type", "text"} or named.get("type", "text") != "text":
            raise BadRow(
                f"{place}[{index}] must be a text part, got {inline(part)}", "only text is supported; write it as a string"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, place: str, has_fillers: bool) -> list[dict[str, Any]]:
    fix = 'write [{"type": "function", "function": {"name": ..., "arguments": {...}}}]'
    if isinstance(calls, str):
        calls = _parsed(calls, place, fix)
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRow(f"{place} must be a list, got {inline(calls)}", fix)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"{place}[{index}] must have a function with a name, got {inline(call)}", fix)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            arguments = _parsed(arguments, f"{place}[{index}].function.arguments", "write an object, or its JSON text")
        elif has_fillers:
            arguments = _without_nulls(arguments)
        if not isinstance(arguments or {}, Mapping):
            raise BadRow(f"{place}[{index}].function.arguments must be an object, got {inline(arguments)}", fix)
        outer = {key: value for key, value in call.items() if value is not None and key in ("id", "type")}
        named = {key: value for key, value in call.items() if value is not None and key not in ("id", "type", "function")}
        inner = {key: value for key, value in function.items() if value is not None}
        if "function" in call and named:
            raise BadRow(f"{place}[{index}] has the unknown key {next(iter(named))}", "remove it")
        if unknown := inner.keys() - {"name", "arguments", "id", "type"}:
            raise BadRow(f"{place}[{index}].function has the unknown key {min(unknown)}", "remove it")
        read.append({"type": "function", **outer, "function": {"name": function["name"], "arguments": dict(arguments or {})}})
    return read


def _parsed(text: str, place: str, fix: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{place} must be valid JSON ({error})", fix) from None


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys whose value is null, which Arrow adds for keys of other rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value
