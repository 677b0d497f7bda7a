"""Messages of conversations in files of the user."""

from collections.abc import Mapping
from typing import Any

from titanrl.config.errors import inline
from titanrl.data.jsonl import BadLine

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


def read_messages(content: Any) -> list[Message]:
    """Return the messages of a conversation.

    Raises:
        BadLine: A message has no role or no text.
    """
    if not isinstance(content, list) or not content:
        raise BadLine("messages must be a list of messages", 'write [{"role": "user", "content": "..."}, ...]')
    for index, message in enumerate(content):
        if not isinstance(message, dict):
            raise BadLine(f"messages[{index}] must be an object, got {type(message).__name__}", "give it role and content")
        if message.get("role") not in ROLES:
            got = inline(message.get("role"))
            raise BadLine(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {got}", "correct it")
        if not isinstance(message.get("content"), str):
            got = inline(message.get("content"))
            raise BadLine(f"messages[{index}].content must be a string, got {got}", "give it a text")
    return content
