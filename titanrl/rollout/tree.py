"""The tree of calls: turns the calls of an episode into segments, and never renders a token of the policy again.

Each call is a conversation, to which the policy replies. A call that repeats the messages of an earlier call, then its reply,
then new messages, continues that call: only the new messages are rendered. Any other call is rendered as a whole. If its tokens
start with all tokens of an earlier call, it continues that call, too. Otherwise it is a branch.

    call 0   [question]                          -> reply 0        segment 0: question, reply 0, result, reply 1
    call 1   [question, reply 0, result]         -> reply 1
    call 2   [question, summary of both]         -> reply 2        segment 1: question, summary, reply 2
    call 3   [question, reply 0, other result]   -> reply 3        segment 2: question, reply 0 (context), other result, reply 3

A call continues the segment of the call before it; if another call does already, it starts a segment. Each sampled token is in
the mask of one segment. In the prefix of other segments it is context.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from titanrl.base.errors import TitanRLError, describe_user_error
from titanrl.carriers.supports import first_recorded, placed
from titanrl.carriers.types import Completion, Segment, Turn
from titanrl.data.tokenizer import MAX_TOKEN_CHARS
from titanrl.environments.interface import Message, Tool, parse_object
from titanrl.rollout.renderers import Renderer, TurnEnd


class DoesNotFit(TitanRLError):
    """A conversation leaves no room for a reply of the policy; the text is its size."""


class NotRenderable(TitanRLError):
    """The chat template rejects a conversation, or the tokenizer its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A conversation that waits for the policy's reply."""

    token_ids: tuple[int, ...]
    """The rendered conversation, `[P]`."""
    history: tuple[Message, ...] = ()
    """The conversation as its tokens have it: replies of the policy with their stop texts."""
    tools: tuple[Tool, ...] = ()
    """Functions that the policy may call."""
    key: bytes = b""
    """Digest of the conversation as the caller wrote it."""
    parent: int | None = None
    """Call whose tokens these extend; None if there is none."""
    num_known: int = 0
    """Number of messages that the parent already has."""
    state: str = ""
    """Name of the environment's state; if empty, its new messages are its state."""

    @property
    def state_hash(self) -> int:
        """The environment's state as a signed integer of 64 bits: its name, the new messages, or without them the tokens."""
        if self.state:
            digest = _digest(self.state)
        elif self.history:
            digest = b""
            for message in self.history[self.num_known :]:
                digest = _extended(digest, message)
        else:
            digest = blake2b(array("q", self.token_ids).tobytes(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    context: Context
    completion: Completion
    known_ids: tuple[int, ...]
    """Tokens of the conversation and the reply."""
    history: tuple[Message, ...]
    """Messages of the conversation and the reply."""


class CallTree:
    """The calls of an episode, in the order of their replies.

    Example:
        context = tree.context(messages, tools)
        completion = await generate(context.token_ids)
        tree.add(context, completion, parsed, message)
    """

    def __init__(self, renderer: Renderer, max_tokens: int) -> None:
        """Start without calls. A conversation and its reply have at most `max_tokens` tokens."""
        self._renderer, self._max_tokens = renderer, max_tokens
        self._calls: list[_Call] = []
        self._by_key: dict[bytes, int] = {}  # last call of each conversation with its reply

    def __len__(self) -> int:
        """Return the number of calls that the policy has replied to."""
        return len(self._calls)

    def context(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Context:
        """Return the tokens of a conversation, those of an earlier call and the rendered rest.

        Raise `DoesNotFit` if it leaves no room for a reply, and `NotRenderable` if it cannot be rendered, or has no tokens.
        """
        specs, keys = [(tool.name, tool.description, tool.parameters) for tool in tools], []
        key = _digest(json.dumps(specs, sort_keys=True, default=dict))
        for message in messages:
            key = _extended(key, message)
            keys.append(key)
        continued = max((n for n, each in enumerate(keys, 1) if each in self._by_key), default=0)
        if continued:
            parent = self._by_key[keys[continued - 1]]
            before, new = self._calls[parent], messages[continued:]
            self._check_size(new)
            end = TurnEnd(
                token_ids=before.context.token_ids, completion_ids=before.completion.token_ids.tolist(), messages=before.history
            )
            added = self._rendered(self._renderer.extend, end, new, tools)
            history = (*before.history, *new)
            if added is not None:
                token_ids = (*before.known_ids, *added)
                return self._checked(
                    Context(
                        token_ids=token_ids,
                        history=history,
                        tools=tuple(tools),
                        key=key,
                        parent=parent,
                        num_known=continued,
                    )
                )
        else:
            history = tuple(messages)
        self._check_size(history)
        token_ids = tuple(self._rendered(self._renderer.render, history, tools))
        return self.of_tokens(token_ids, history=history, tools=tuple(tools), key=key, num_known=continued)

    def of_tokens(self, token_ids: tuple[int, ...], **fields: Any) -> Context:
        """Return the context of given tokens and other fields. Its parent is the longest call that the tokens start with."""
        starts = [
            (len(call.known_ids), number)
            for number, call in enumerate(self._calls)
            if token_ids[: len(call.known_ids)] == call.known_ids
        ]
        return self._checked(Context(token_ids=token_ids, parent=max(starts)[1] if starts else None, **fields))

    def add(self, context: Context, completion: Completion, parsed: Message, message: Message) -> None:
        """Add the policy's reply to a call: `parsed` has all text of the tokens, `message` is what the caller receives."""
        if context.key:
            # Most clients do not send the reasoning back. The tokens of the reply have it anyway.
            without = {name: value for name, value in message.items() if name != "reasoning_content"}
            for key in (_extended(context.key, without), _extended(context.key, message)):
                self._by_key[key] = len(self._calls)
        known_ids = (*context.token_ids, *completion.token_ids.tolist())
        history = (*context.history, parsed)
        self._calls.append(_Call(context=context, completion=completion, known_ids=known_ids, history=history))

    def chains(self) -> list[list[int]]:
        """Return the calls of each segment, ordered by the last of them, so that the last call ends the last segment."""
        chains: dict[int, list[int]] = {}  # by last call
        for number, call in enumerate(self._calls):
            chain = chains.pop(call.context.parent, []) if call.context.parent is not None else []
            chains[number] = [*chain, number]
        return [chains[last] for last in sorted(chains)]

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(call.completion.token_ids) for call in self._calls)

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens that the policy sampled, in the order of the segments, `[num_sampled]`."""
        return [int(token) for chain in self.chains() for call in chain for token in self._calls[call].completion.token_ids]

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that have a sampled token, each up to the last one. Later tokens are not needed for any loss."""
        return tuple(self._segment(chain) for chain in self.chains() if self._has_tokens(chain))

    def turns(self, rewards: Sequence[float]) -> tuple[Turn, ...]:
        """Return the turns of all segments, one per call, with the given rewards, which are those of the calls in this order.

        A turn of a segment without sampled token is assigned to the end of the previous turn, and covers no tokens.
        """
        turns: list[Turn] = []
        number, end = -1, 0
        for chain in self.chains():
            has_segment = self._has_tokens(chain)
            number += has_segment
            for call in chain:
                end = len(self._calls[call].known_ids) if has_segment else end
                state = self._calls[call].context.state_hash
                turns.append(Turn(segment=max(number, 0), end=end, reward=rewards[call], state=state))
        return tuple(turns)

    def _has_tokens(self, chain: Sequence[int]) -> bool:
        return any(len(self._calls[call].completion.token_ids) for call in chain)

    def _segment(self, chain: Sequence[int]) -> Segment:
        calls = [call for number in chain if len((call := self._calls[number]).completion.token_ids)]
        token_ids = np.array(calls[-1].known_ids, np.int64)
        mask, logprobs = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), -1, np.int64)
        supports = []
        for call in calls:
            turn = slice(len(call.context.token_ids), len(call.known_ids))
            mask[turn], logprobs[turn], versions[turn] = True, call.completion.logprobs, call.completion.versions
            if call.completion.supports is not None:
                supports.append((turn.start, call.completion.supports))
        return Segment(
            token_ids=token_ids,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            supports=placed(supports, len(token_ids)) if supports else None,
            # A later call computes the tokens of an earlier one again, but those of the earlier one sampled its tokens.
            experts=first_recorded([e for call in calls if (e := call.completion.experts) is not None], len(token_ids)),
        )

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Raise `DoesNotFit` for messages that are too long to be tokenized."""
        num_chars = sum(len(message.get("content") or "") for message in messages)
        if num_chars > self._max_tokens * MAX_TOKEN_CHARS:
            raise DoesNotFit(f"{num_chars} characters")

    def _checked(self, context: Context) -> Context:
        if not context.token_ids:
            raise NotRenderable("the messages have no tokens. Return text.")
        if len(context.token_ids) >= self._max_tokens:
            raise DoesNotFit(f"{len(context.token_ids)} tokens")
        return context

    def _rendered(self, render: Any, *arguments: Any) -> Any:
        try:
            return render(*arguments)
        except Exception as error:  # the chat template may reject any message, and the tokenizer any text
            raise NotRenderable(f"the messages cannot be rendered: {describe_user_error(error)}") from error


def canonical(message: Message) -> dict[str, Any]:
    """Return what a message means to a chat template, as JSON values.

    Messages that clients write differently are equal: without `refusal: null` and other empty keys, with arguments of tool
    calls as text or parsed, and with content as text or as a list of text parts.
    """
    meaning = {name: value for name, value in message.items() if value}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]
    meaning["content"] = content or ""
    if calls := message.get("tool_calls"):
        meaning["tool_calls"] = [_canonical_call(call) for call in calls]
    return meaning


def _canonical_call(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # a malformed call, whose arguments are its text
            arguments = parse_object(arguments)
    return [call.get("id"), function.get("name"), arguments or {}]


def _extended(key: bytes, message: Message) -> bytes:
    return _digest(json.dumps(canonical(message), sort_keys=True, default=str), key)


def _digest(text: str, key: bytes = b"") -> bytes:
    return blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
