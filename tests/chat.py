"""Conversations as token ids, in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.data.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    reply_follows: bool = True,
    **arguments: Any,
) -> list[int]:
    """Return the token ids of a conversation. The arguments are those of `Tokenizer.chat_text`."""
    return tokenizer.encode_chat(tokenizer.chat_text(messages, reply_follows=reply_follows, **arguments))
