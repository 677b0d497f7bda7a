"""Policies without an engine: their tokens are bytes, and their replies are given."""

import asyncio
import json
from collections.abc import Callable, Sequence

import numpy as np

from titanrl.carriers.types import Completion, FinishReason, OnTokens, TopTokens
from titanrl.environments import Message
from titanrl.serving.calls import Call, Refused, Reply

END = 256
"""Token that ends a reply; the others are bytes."""


class Scripted:
    """A policy whose next replies are given as messages, or else are the last message in reverse.

    Token `i` of a completion has log-probability `-i / 8` and version 3. Reasoning is sampled before the content, between the
    bytes 2 and 3. At token `i` of a prompt, the tokens 0, 1 and so on are the most likely ones, with log-probabilities -1, -2
    and so on, and the token itself has `-i / 8`, or that of its rank. It counts its calls, those cancelled, and errors.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, *replies: Message, pause: "Callable[[], asyncio.Event] | None" = None) -> None:
        self.replies, self.calls, self.num_cancelled = list(replies), list[Call](), 0
        self.num_refused = 0
        self.pause = pause
        """Returns an event to wait for after the first half of a completion."""

    async def call(self, call: Call, on_tokens: OnTokens | None = None) -> Reply:
        self.calls.append(call)
        if call.prompt_ids is not None and max(call.prompt_ids, default=0) > END:
            raise Refused(f"token_ids: must be at most {END}", param="token_ids")
        message, token_ids, finish_reason = self._said(call)
        logprobs = [-index / 8 for index in range(len(token_ids))]
        try:
            for index, token in enumerate(token_ids):
                if message.get("fails") and index == 1:
                    raise RuntimeError("a secret of the server")
                if on_tokens is not None:
                    on_tokens([token], [logprobs[index]])
                if self.pause is not None and index == len(token_ids) // 2:
                    await self.pause().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        prompt, num_top = self._prompt(call), call.prompt_logprobs
        places = np.arange(1, len(prompt))
        top_ids = np.tile(np.arange(num_top or 0), (len(places), 1))
        own = np.array([-(1.0 + token) if token < (num_top or 0) else -place / 8 for place, token in enumerate(prompt)][1:])
        return Reply(
            prompt_ids=tuple(prompt),
            completion=Completion(
                prompt_logprobs=None if num_top is None else own.astype(np.float32),
                prompt_top=TopTokens(token_ids=top_ids, logprobs=-(top_ids + 1.0).astype(np.float32)) if num_top else None,
                token_ids=np.asarray(token_ids, np.int64),
                logprobs=np.asarray(logprobs, np.float32),
                versions=np.full(len(token_ids), 3, np.int64),
                finish_reason=finish_reason,
            ),
            message=message,
        )

    def refused(self, refused: Refused) -> None:
        self.num_refused += 1

    def read(self, call: Call, token_ids: Sequence[int]) -> Message:
        text = bytes(token for token in token_ids if token != END).decode("utf-8", "replace")
        reasoning, _, text = text[1:].partition("\3") if text.startswith("\2") else ("", "", text)
        content, mark, _ = text.partition("<tool_call>") if call.tools else (text, "", "")
        ends = [(content.find(stop) + len(stop), content.find(stop)) for stop in call.stop if stop in content]
        content = content[: min(ends)[1]] if ends else content
        message = {"role": "assistant", "content": content} | ({"tool_calls": [{}]} if mark else {})
        return message | ({"reasoning_content": reasoning} if reasoning else {})

    def token_text(self, token_id: int) -> str:
        return "<end>" if token_id == END else bytes([token_id]).decode("utf-8", "replace")

    def _prompt(self, call: Call) -> list[int]:
        if call.prompt_ids is not None:
            return list(call.prompt_ids)
        return list((json.dumps(call.messages) if call.text is None else call.text).encode())

    def _said(self, call: Call) -> tuple[Message, list[int], FinishReason]:
        asked = (
            str(self.read(Call(), self._prompt(call))["content"])
            if call.messages is None
            else str(call.messages[-1]["content"])
        )
        message = dict(self.replies.pop(0) if self.replies else {"role": "assistant", "content": asked[::-1]})
        content = str(message["content"])
        written = content + "".join(
            f"<tool_call>{json.dumps(each['function'])}</tool_call>" for each in message.get("tool_calls", ())
        )
        written = f"\2{message['reasoning_content']}\3{written}" if message.get("reasoning_content") else written
        tokens: list[int] = [*written.encode(), END]
        reason: FinishReason = "stop"
        if call.max_tokens is not None and len(tokens) > call.max_tokens:
            tokens, reason = tokens[: call.max_tokens], "length"
            message = {"role": "assistant", "content": self.read(Call(), tokens)["content"]}
        ends = [(content.find(stop) + len(stop), content.find(stop)) for stop in call.stop if stop in content]
        if ends and len(content[: min(ends)[0]].encode()) <= len(tokens):
            end, start = min(ends)
            tokens, reason = list(content[:end].encode()), "stop"
            message = {"role": "assistant", "content": content[:start]}
        return message, tokens, reason
