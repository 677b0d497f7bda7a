"""Tokenize conversations, and mark exactly the tokens to train on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanrl.base.choices import TrainOn
from titanrl.data.chat import Chat, ChatFormat
from titanrl.data.demonstrations import Demonstration
from titanrl.data.files import BadRow
from titanrl.data.messages import Message
from titanrl.data.tokenizer import Tokenizer


def render_conversation(
    template: ChatFormat,
    messages: Sequence[Message],
    train_on: TrainOn,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    num_prompt: int = 0,
) -> Demonstration:
    """Tokenize a conversation with the model's chat template, up to the last message to train on.

    The mask covers what the model would have generated: each trained assistant message, and the token that ends its turn. The
    tokens before a message must equal the prompt from which the model would generate it. A template that changes earlier
    messages when others follow, or that adds no token after a message, does not meet this condition.

    Args:
        template: The model's chat template.
        messages: The conversation.
        train_on: Messages to train on.
        tools: JSON schemas of the functions that the model may call.
        options: Variables of the chat template that the row sets.
        num_prompt: Number of messages at the start that are not trained on.

    Raises:
        BadRow: There is nothing to train on, or the chat template or the tokenization does not meet the condition.
    """
    try:
        if train_on == "all":
            _, text = template.fitted(messages, tools, options, reply_follows=False)
            token_ids = template.tokenizer.encode_chat(text)
            return Demonstration(token_ids=np.array(token_ids, np.int64), mask=np.ones(len(token_ids), np.bool_))
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= num_prompt]
        if not replies:
            raise BadRow("no message has the role assistant", "add an assistant message, or set sft.train_on to all")
        trained = replies if train_on == "assistant" else replies[-1:]
        chat, text = template.fitted(messages[: replies[-1] + 1], tools, options, reply_follows=False)
        return _with_replies(template, chat, text.rstrip(), trained)
    except BadRow:
        raise
    except ValueError as error:  # raised by the template, or for a character without a token
        raise BadRow(str(error), "correct the messages, or use a model whose template and tokenizer support them") from error


def _with_replies(template: ChatFormat, chat: Chat, text: str, replies: Sequence[int]) -> Demonstration:
    """Tokenize a conversation that ends with an assistant message, and mark the given assistant messages."""
    tokenizer = template.tokenizer
    token_ids = tokenizer.encode_chat(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for index in replies:
        prompt = template.text(chat.start(index), reply_follows=True)
        reply = template.text(chat.start(index + 1), reply_follows=False).rstrip()  # drop a newline after the turn
        if not (reply.startswith(prompt) and text.startswith(reply)):
            raise BadRow(
                f"the chat template does not extend the conversation verbatim at messages[{index}], so the model would "
                "generate this message from another prompt than the text before it",
                "set sft.train_on to last" if len(replies) > 1 else "use a model with another chat template",
            )
        start, end = (_num_tokens(tokenizer, part, token_ids, index) for part in (prompt, reply))
        mask[start:end] = True
        if token_ids[end - 1] not in tokenizer.stop_ids:
            raise BadRow(
                f"the chat template does not end messages[{index}] with a token that ends a completion, so the model would not "
                "learn to stop",
                "add the id of the token to eos_token_id in the model's generation_config.json"
                if tokenizer.is_special(token_ids[end - 1])
                else "use a model with another chat template",
            )
    return Demonstration(token_ids=np.array(token_ids, np.int64), mask=mask)


def _num_tokens(tokenizer: Tokenizer, part: str, token_ids: Sequence[int], index: int) -> int:
    """Return the number of tokens of `part`, the start of a text. Its tokens must be the first tokens of the whole text."""
    first = tokenizer.encode_chat(part)
    if token_ids[: len(first)] != first:
        raise BadRow(
            f"the start of messages[{index}] is tokenized together with the text before it, which the model could not generate",
            "remove whitespace from the start of the message",
        )
    return len(first)
