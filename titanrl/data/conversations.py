"""Tokenize conversations, and mark exactly the tokens to train on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from titanrl.config.choices import TrainOn
from titanrl.data.demonstrations import Demonstration
from titanrl.data.jsonl import BadLine
from titanrl.data.messages import Message
from titanrl.data.tokenizer import Tokenizer


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    train_on: TrainOn,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    control_tokens: bool = False,
) -> Demonstration:
    """Tokenize a conversation with the model's chat template, up to the last message to train on.

    The mask covers what the model would have generated: each trained assistant message, and the token that ends its turn. The
    tokens before a message must equal the prompt from which the model would generate it. A template that changes earlier
    messages when others follow, or that adds no token after a message, does not meet this condition.

    Args:
        tokenizer: Tokenizer of the model, with a chat template.
        messages: The conversation.
        train_on: Messages to train on.
        tools: JSON schemas of the functions that the policy may call.
        options: Other variables of the chat template, such as `enable_thinking`.
        control_tokens: True to encode the text of a special token in the messages as the token.

    Raises:
        BadLine: There is nothing to train on, or the chat template or the tokenization does not meet the condition.
    """
    chat_text = partial(tokenizer.chat_text, tools=tools, options=options, control_tokens=control_tokens)
    try:
        if train_on == "all":
            token_ids = tokenizer.encode_chat(chat_text(messages, reply_follows=False))
            return Demonstration(token_ids=np.array(token_ids, np.int64), mask=np.ones(len(token_ids), np.bool_))
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise BadLine("no message has the role assistant", "add an assistant message, or set sft.train_on to all")
        trained = replies if train_on == "assistant" else replies[-1:]
        return _with_replies(tokenizer, chat_text, messages[: replies[-1] + 1], trained)
    except ValueError as error:  # raised by the template, or for a character without a token
        raise BadLine(str(error), "correct the messages, or use a model whose template and tokenizer support them") from error


def _with_replies(
    tokenizer: Tokenizer, chat_text: Callable[..., str], messages: Sequence[Message], replies: Sequence[int]
) -> Demonstration:
    """Tokenize a conversation that ends with an assistant message, and mark the given assistant messages."""
    text = chat_text(messages, reply_follows=False).rstrip()
    token_ids = tokenizer.encode_chat(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for index in replies:
        prompt = chat_text(messages[:index], reply_follows=True)
        reply = chat_text(messages[: index + 1], reply_follows=False).rstrip()  # drop a newline after the turn
        if not (reply.startswith(prompt) and text.startswith(reply)):
            raise BadLine(
                f"the chat template does not extend the conversation verbatim at messages[{index}], so the model would "
                "generate this message from another prompt than the text before it",
                "set sft.train_on to last" if len(replies) > 1 else "use a model with another chat template",
            )
        start, end = (_num_tokens(tokenizer, part, token_ids, index) for part in (prompt, reply))
        mask[start:end] = True
        if not tokenizer.is_special(token_ids[end - 1]):
            raise BadLine(
                f"the chat template does not end messages[{index}] with a special token, so the model would not learn to stop",
                "use a model with another chat template",
            )
    return Demonstration(token_ids=np.array(token_ids, np.int64), mask=mask)


def _num_tokens(tokenizer: Tokenizer, part: str, token_ids: Sequence[int], index: int) -> int:
    """Return the number of tokens of `part`, the start of a text. Its tokens must be the first tokens of the whole text."""
    first = tokenizer.encode_chat(part)
    if token_ids[: len(first)] != first:
        raise BadLine(
            f"the start of messages[{index}] is tokenized together with the text before it, which the model could not generate",
            "remove whitespace from the start of the message",
        )
    return len(first)
