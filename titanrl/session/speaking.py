"""The policy of a session as a caller: renders the calls of clients, samples, and reads the completions as messages."""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from titanrl.base.errors import FaultError
from titanrl.carriers.types import Completion, GenerationRequest, OnTokens, SamplingParams
from titanrl.config.schema import Config
from titanrl.data.tokenizer import MAX_TOKEN_CHARS, Tokenizer
from titanrl.environments.interface import Message
from titanrl.launch.supervision import DeadlineError
from titanrl.rollout.renderers import Renderer, make_renderer
from titanrl.serving.calls import MAX_SEED, Call, Refused, Reply, new_id
from titanrl.session.sampling import Sampler


class Speaker:
    """The policy of a session as a `Caller`. Each call is rendered on its own; the prefix cache keeps the computed tokens."""

    def __init__(self, sampler: Sampler, renderer: Renderer, *, version: int | None = None) -> None:
        """Use the sampler of a session.

        Args:
            sampler: Requests to the generators. The section `rollout` of its configuration has the defaults of sampling.
            renderer: Renderer of conversations.
            version: Version of weights that never change, which generators call 0; None keeps the versions of the generators.
        """
        self._sampler, self._renderer, self._version = sampler, renderer, version
        self._tokenizer, self._rollout = sampler.tokenizer, sampler.config.rollout
        self._max_tokens = sampler.config.max_sequence_tokens
        self.stop: tuple[str, ...] = self._rollout.stop_texts

    async def call(self, call: Call, on_tokens: OnTokens | None = None) -> Reply:
        """Return the policy's reply; raise `Refused` if the prompt does not fit, or the policy cannot be sampled."""
        prompt_ids = self._prompt(call)
        request = GenerationRequest(token_ids=prompt_ids, sampling=self._sampling(call, self._max_tokens - len(prompt_ids)))
        try:
            completion = await self._sampler.stream(request, on_tokens)
        except ValueError as error:
            raise Refused(str(error), param=_source(call)) from error
        except DeadlineError as error:
            raise Refused(str(error), status=504) from error
        except FaultError as error:
            raise Refused(f"the policy cannot be sampled: {error}", status=503) from error
        if completion.finish_reason == "abort":
            raise Refused("the completion was cancelled. Try again.", status=503)
        if self._version is not None:
            completion = replace(completion, versions=np.full_like(completion.versions, self._version))
        return Reply(prompt_ids=prompt_ids, completion=completion, message=self._message(call, completion))

    def read(self, call: Call, token_ids: Sequence[int]) -> Message:
        """Return the message that the first tokens of a completion are read as."""
        parsed = None if call.messages is None else self._renderer.parse(token_ids, call.tools)
        if parsed is None or (parsed.get("tool_calls") and not call.tools):
            return {"role": "assistant", "content": self._text(call, token_ids)}
        if not self._stop(call):
            return parsed
        content, end = parsed["content"], self._tokenizer.decode_completion(token_ids)[len(self._text(call, token_ids)) :]
        end = end if content.endswith(end) else end.rstrip()  # a renderer may have trimmed the content
        return parsed | {"content": content.removesuffix(end)}

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens."""
        return self._tokenizer.token_text(token_id)

    def _message(self, call: Call, completion: Completion) -> Message:
        """Return the message of a whole completion, with unique ids of its tool calls.

        If one of them has no name, the message is text, because no client could use the call.
        """
        token_ids = completion.token_ids.tolist()
        message = self.read(call, token_ids)
        calls = [each | {"id": new_id("call_")} for each in message.get("tool_calls", ())]
        if not all(each["function"]["name"] for each in calls):
            return {"role": "assistant", "content": self._text(call, token_ids)}
        return {**message, "tool_calls": calls} if calls else message

    def _text(self, call: Call, token_ids: Sequence[int]) -> str:
        """Return the text of a completion without the stop text that ended it."""
        return self._tokenizer.decode_completion(token_ids, self._stop(call))

    def _stop(self, call: Call) -> tuple[str | int, ...]:
        return (*self._rollout.stop, *call.stop, *call.stop_ids)

    def _prompt(self, call: Call) -> tuple[int, ...]:
        def render() -> Sequence[int]:
            if call.messages is not None:
                return self._renderer.render(call.messages, call.tools)
            return self._tokenizer.encode_start(call.text) if call.text is not None else call.prompt_ids or ()

        messages = call.messages or ()
        num_chars = len(call.text or "") + sum(len(message["content"]) for message in messages)
        if num_chars > self._max_tokens * MAX_TOKEN_CHARS:  # do not tokenize what cannot fit
            raise Refused(f"{_source(call)}: too long ({num_chars} characters). {self._room}", param=_source(call))
        try:
            prompt_ids = tuple(render())
        except Exception as error:  # a chat template may reject any message with any exception, and the tokenizer any text
            reason = str(error).removeprefix(f"{self._tokenizer.path}: ")  # a path is not the client's business
            raise Refused(f"{_source(call)}: cannot be encoded: {reason}", param=_source(call)) from error
        if not 0 < len(prompt_ids) < self._max_tokens:
            raise Refused(f"{_source(call)}: has {len(prompt_ids)} tokens. {self._room}", param=_source(call))
        return prompt_ids

    @property
    def _room(self) -> str:
        return f"Prompt and completion together may have 2 to {self._max_tokens} tokens."

    def _sampling(self, call: Call, room: int) -> SamplingParams:
        rollout = self._rollout
        temperature = rollout.temperature if call.temperature is None else call.temperature
        seed = secrets.randbelow(MAX_SEED) if call.seed is None else call.seed
        if call.top_p == 0:
            raise Refused("top_p: must be greater than 0 (got 0). Use temperature=0 for greedy decoding.", param="top_p")
        return SamplingParams(
            max_new_tokens=min(call.max_tokens or rollout.max_new_tokens, room),
            temperature=temperature,
            seed=seed if temperature > 0 else None,
            prompt_logprobs=call.prompt_logprobs,
            top_p=rollout.top_p if call.top_p is None else call.top_p,
            top_k=rollout.top_k if call.top_k is None else call.top_k,
            min_p=rollout.min_p if call.min_p is None else call.min_p,
            stop=(*rollout.stop_texts, *call.stop),
            stop_ids=(*(self._renderer.stop_ids if call.messages is not None else ()), *rollout.stop_ids, *call.stop_ids),
        )


def trained_renderer(config: Config, tokenizer: Tokenizer) -> Renderer:
    """Return the renderer of the first environment that the policy is trained in.

    Without an environment, the policy was trained on prompts, and conversations are rendered as these were: without a chat
    template, or with the chat template of the model and its variables. If no variables are set, the renderer of the model's
    family does the same and also reads reasoning and tool calls; it is used if it is installed.

    Raises:
        ValueError: The renderer cannot be used with the model.
    """
    first, *_ = tasks = list(config.data.tasks.values())
    for task in tasks:
        if task.environment is not None:
            return make_renderer(tokenizer, task.environment.renderer, task.environment.renderer_options)
    if first.chat_template == "never" or not tokenizer.chat_template:
        return make_renderer(tokenizer, "plain", {})
    if not first.chat_template_kwargs:
        with suppress(ValueError):  # none is known for the family, or its package is missing
            return make_renderer(tokenizer, "auto", {})
    return make_renderer(tokenizer, "template", first.chat_template_kwargs)


def _source(call: Call) -> str:
    return "messages" if call.messages is not None else "prompt"
