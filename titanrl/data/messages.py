"""Validation of chat messages read from data files."""

from collections.abc import Mapping
from typing import Any

from titanrl.config.errors import inline
from titanrl.data.jsonl import BadLine

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


def read_messages(content: Any) -> list[Message]:
    """Validate and return the messages of a conversation.

    Raises:
        BadLine: A message has no valid role or no string content.
    """
    if not isinstance(content, list) or not content:
        raise BadLine("messages must be a non-empty list", 'write [{"role": "user", "content": "..."}, ...]')
    for index, message in enumerate(content):
        if not isinstance(message, dict):
            raise BadLine(
                f"messages[{index}] must be an object, got {type(message).__name__}", "write an object with role and content"
            )
        if message.get("role") not in ROLES:
            got = inline(message.get("role"))
            raise BadLine(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {got}", "correct the role")
        if not isinstance(message.get("content"), str):
            got = inline(message.get("content"))
            raise BadLine(f"messages[{index}].content must be a string, got {got}", "write the content as a string")
    return content
