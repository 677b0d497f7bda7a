"""The token driver: connects a policy, which processes tokens, to an environment, which exchanges messages.

First the tree of calls, which turns the calls of an episode into segments. Each call is a conversation, to which the policy
replies. A call that repeats the messages of an earlier call, then its reply, then new messages, continues that call: only the
new messages are rendered. Any other call is rendered as a whole, as is one to whose tokens the chat template cannot append. If
its tokens start with all tokens of an earlier call, it continues that call, too. Otherwise it is a branch.

    call 0   [question]                          -> reply 0        segment 0: question, reply 0, result, reply 1
    call 1   [question, reply 0, result]         -> reply 1
    call 2   [question, summary of both]         -> reply 2        segment 1: question, summary, reply 2
    call 3   [question, reply 0, other result]   -> reply 3        segment 2: question, reply 0 (context), other result, reply 3

A call continues the segment of the call before it; if another call does already, it starts a segment. Each sampled token is in
the mask of one segment. In the prefix of other segments it is context.

Then the driver. The first turn renders the conversation. Each later turn appends tokens, so the policy is trained on exactly
the tokens that it sampled. Appending is impossible if the environment edits the history or changes the tools, or if the model's
template strips the thinking of earlier turns. The conversation then continues in a new segment.
"""

import asyncio
import json
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from titanrl.base.errors import USER_ERRORS, TitanRLError, describe_user_error
from titanrl.carriers.record import span
from titanrl.carriers.supports import first_recorded, placed
from titanrl.carriers.types import Completion, FinishReason, GenerationRequest, Outcome, SamplingParams, Segment, Turn
from titanrl.data.tokenizer import MAX_TOKEN_CHARS
from titanrl.environments.interface import (
    Done,
    Environment,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    InvalidReward,
    JudgesTruncated,
    Limit,
    Message,
    Observation,
    Tool,
    checked,
    parse_object,
    readable_text,
    shown,
)
from titanrl.rollout.group import GenerateTokens
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
    """Number of messages at the start that an earlier call and its reply have, also if that call is not the parent."""
    state: str = ""
    """Name of the environment's state; if empty, its new messages are its state."""

    @property
    def state_hash(self) -> int:
        """The environment's state as a signed integer of 64 bits: its name, the new messages, or without them the tokens.

        Turns with one state are compared with each other (`algorithm.credit: state`).
        """
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
        """Return a conversation as tokens: those of an earlier call and the rendered rest, or all of it rendered.

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
        return tuple(self._segment(chain) for chain in self.chains() if self._segment_len(chain))

    def turns(self, rewards: Sequence[float]) -> tuple[Turn, ...]:
        """Return the turns of all segments, one per call, with the given rewards, which are those of the calls in this order.

        A turn without sampled tokens covers none: it ends with its segment at the latest. In a conversation without any, it
        ends with the previous turn.
        """
        turns: list[Turn] = []
        number, end = -1, 0
        for chain in self.chains():
            length = self._segment_len(chain)
            number += length > 0
            for call in chain:
                end = min(len(self._calls[call].known_ids), length) if length else end
                state = self._calls[call].context.state_hash
                turns.append(Turn(segment=max(number, 0), end=end, reward=rewards[call], state=state))
        return tuple(turns)

    def _segment_len(self, chain: Sequence[int]) -> int:
        """Return the number of tokens up to the last sampled one; 0 if there is none."""
        calls = [self._calls[number] for number in chain]
        return max((len(call.known_ids) for call in calls if len(call.completion.token_ids)), default=0)

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
    if message.get("tool_calls"):
        meaning["tool_calls"] = []
        for call in message["tool_calls"]:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = parse_object(arguments)
                except ValueError:  # a malformed call, whose arguments are its text, in Anthropic's protocol as an object
                    arguments = arguments and {"arguments": arguments}
            meaning["tool_calls"].append([call.get("id"), call["function"].get("name"), arguments or {}])
    return meaning


def _extended(key: bytes, message: Message) -> bytes:
    return _digest(json.dumps(canonical(message), sort_keys=True, default=str), key)


def _digest(text: str, key: bytes = b"") -> bytes:
    return blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


StopText = Callable[[Sequence[int], Sequence[str | int]], str]
"""Function that returns the stop text at the end of a turn, which its message leaves out. It takes the tokens of the turn, and
the stop texts and tokens that its call has in addition to the configured ones."""
_MAX_ERROR_CHARS = 2000


class EpisodeError(TitanRLError):
    """Raised if an episode fails. The episode has no reward, and none of its tokens are trained on."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        """Create the error with the kind of failure and a message, of which only the start is kept if it is long."""
        super().__init__(readable_text(text[:_MAX_ERROR_CHARS]))
        self.outcome: Outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an episode."""

    max_turns: int
    max_tokens: int
    """Maximum length of a segment in tokens: the conversation so far and the policy's next turn."""
    max_new_tokens: int
    """Maximum length of one turn of the policy, in tokens."""
    step_timeout_s: float
    """Time limit of one call of the environment, in seconds."""
    episode_timeout_s: float
    """Time limit of all calls of the environment together, in seconds."""
    may_queue: bool = False
    """True if `reset` may wait for a free process. It then has no time limit here, because the process enforces one."""


class Attempt:
    """One attempt to play an episode with an environment (`Conversation`) or a user's program (`ProgramEpisode`).

    It is played in one of two ways. With `play`, it calls the policy as soon as it can, beside other episodes. In synchronous
    training and in evaluations, the caller plays many in lockstep instead: after `start`, it repeats `requests` of all, one
    generation, and `take` of all, so that the generators' batches do not depend on the speed of the environments.
    """

    def __init__(
        self,
        renderer: Renderer,
        limits: Limits,
        sampling: Callable[[int, int], SamplingParams],
        stop_text: StopText = lambda ids, more: "",
    ) -> None:
        """Start without calls. `sampling` maps the number of a turn, from 0, and its maximum length to its options."""
        self.messages: list[Message] = []
        """Messages of the whole episode, including messages that were replaced."""
        self.rewards: Mapping[str, float] = {}
        """Rewards of the environment or program, by name."""
        self.turn_rewards: list[float] = []
        """Reward of each turn of the policy."""
        self.metrics: Mapping[str, float] = {}
        """Latest metrics that the environment or program reported, by name."""
        self.num_malformed = 0
        """Number of tool calls that could not be parsed."""
        self.environment_s = 0.0
        """Seconds that the policy has waited for the environment or program."""
        self.is_judged = False
        """True if the environment or program ended the episode; False if a limit did, and it was not judged."""
        self.last_text = ""
        """Text that the configured rewards score: the policy's last message."""
        self.tree = CallTree(renderer, limits.max_tokens)
        self._renderer, self._limits, self._sampling = renderer, limits, sampling
        self._stop_text = stop_text
        self._finish_reason: FinishReason | None = None

    @property
    def is_done(self) -> bool:
        """True if the episode has ended."""
        return self._finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason:
        """`stop`: the environment or program ended the episode; `length`: a limit on turns or tokens was reached."""
        assert self._finish_reason is not None, "the episode has not ended"
        return self._finish_reason

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy has taken."""
        return len(self.tree)

    async def start(self) -> None:
        """Start the episode; raise `EpisodeError` if that fails."""

    async def requests(self) -> Sequence[GenerationRequest]:
        """Wait for the next calls of the policy, and return their requests; none if the episode has ended.

        Raise `EpisodeError` if the episode failed, as all methods but `close` do.
        """
        raise NotImplementedError

    async def take(self, completions: Sequence[Completion]) -> None:
        """Continue with the completions of the last `requests`, one for each, in order."""
        raise NotImplementedError

    async def play(self, generate: GenerateTokens) -> None:
        """Play the whole episode, with its `start`; raise `EpisodeError` if it fails."""
        await self.start()
        while requests := await self.requests():
            await self.take(await generate(requests))

    async def close(self) -> None:
        """Release the resources of the episode. A second call has no effect."""

    def _add(
        self, context: Context, completion: Completion, parsed: dict[str, Any] | None = None, stop: Sequence[str | int] = ()
    ) -> Message:
        """Add a turn of the policy; return its message, without the stop text at its end.

        The completion has a finish reason other than `abort`. `parsed` is the message with all text of the tokens; None parses
        them. `stop` has the stop texts and tokens of this call.
        """
        token_ids = completion.token_ids.tolist()
        if parsed is None:
            parsed = self._renderer.parse(token_ids, context.tools)
        calls = parsed.get("tool_calls", ())
        # The renderer returns arguments that it cannot parse as text.
        self.num_malformed += sum(isinstance(call["function"]["arguments"], str) for call in calls)
        message = parsed | {"content": self._without_stop(parsed["content"], token_ids, stop)}
        self.tree.add(context, completion, parsed, message)
        self.messages.append(message)
        self.last_text = message["content"]
        return message

    def _without_stop(self, content: str, token_ids: Sequence[int], stop: Sequence[str | int]) -> str:
        """Return the content of a message without the stop text at the end of its tokens."""
        end = self._stop_text(token_ids, stop)
        end = end if content.endswith(end) else end.rstrip()  # a renderer may have trimmed the content
        return content.removesuffix(end)

    def _end(self, reason: FinishReason) -> None:
        if not self.tree.num_sampled:
            raise EpisodeError("generation_error", "the policy sampled no token")
        if not math.isfinite(sum(self.turn_rewards)):
            raise EpisodeError("reward_error", f"the rewards of the turns must have a finite sum (got {self.turn_rewards})")
        self._finish_reason = reason


class Conversation(Attempt):
    """One episode between the policy and an environment.

    Example:
        await conversation.play(generate)
        await conversation.close()
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        episode: Episode,
        renderer: Renderer,
        limits: Limits,
        sampling: Callable[[int, int], SamplingParams],
        stop_text: StopText = lambda ids, more: "",
    ) -> None:
        """Prepare an episode, whose environment `start` creates with `make`; see `Attempt` for the other arguments."""
        super().__init__(renderer, limits, sampling, stop_text)
        self.episode = episode
        self._make = make
        self._environment: Environment | None = None
        self._next: Context | None = None
        self._remaining_s = limits.episode_timeout_s

    async def start(self) -> None:
        """Create and reset the environment, and render its first messages; raise `EpisodeError` if that fails."""
        try:
            self._environment = self._make()
        except USER_ERRORS as error:
            raise EpisodeError("environment_error", f"creating it raised {describe_user_error(error)}") from error
        reset = self._environment.reset
        observation = await self._call("reset", lambda: reset(self.episode), has_limit=not self._limits.may_queue)
        if not isinstance(observation, Observation):
            raise EpisodeError("environment_error", f"reset must return an Observation (got {shown(observation)})")
        if observation.reward:
            rule = f"reset must not return a reward, because no turn has ended (got {observation.reward})"
            raise EpisodeError("environment_error", f"{rule}. Return it with the next observation.")
        if not observation.messages:
            raise EpisodeError("environment_error", "there is no message to start the conversation with. Return at least one.")
        self.metrics = observation.metrics
        self.messages += observation.messages
        self._seen, self._tools = list(observation.messages), observation.tools  # what the policy reads next
        try:
            self._next = self._context(observation.state)
        except DoesNotFit as size:
            problem = f"the first messages have {size}, which leaves no room for a reply"
            limit = f"data.environment.max_conversation_tokens={self._limits.max_tokens}"
            raise EpisodeError("environment_error", f"{problem} ({limit})") from None

    async def requests(self) -> Sequence[GenerationRequest]:
        """Return the request for the policy's next turn; none if the episode has ended."""
        if self.is_done or self._next is None:
            return []
        token_ids = self._next.token_ids
        max_new_tokens = min(self._limits.max_new_tokens, self._limits.max_tokens - len(token_ids))
        return [GenerationRequest(token_ids=token_ids, sampling=self._sampling(self.num_turns, max_new_tokens))]

    async def take(self, completions: Sequence[Completion]) -> None:
        """Continue the episode with the policy's turn; raise `EpisodeError` if that fails.

        A turn that was truncated at its limit ends the episode, and the environment does not see it in `step`.
        """
        assert self._environment is not None, "call start first"
        assert self._next is not None, "the episode has ended"
        (completion,) = completions
        environment, context = self._environment, self._next
        if completion.finish_reason == "abort":
            raise EpisodeError("generation_error", "the completion was cancelled")
        message = self._add(context, completion)
        self._seen.append(message)
        if completion.finish_reason != "stop":
            self.turn_rewards.append(0.0)
            has_room = len(context.token_ids) + len(completion.token_ids) < self._limits.max_tokens
            await self._truncate(environment, message, "turn_tokens" if has_room else "conversation_tokens")
            return
        observation = await self._call("step", lambda: environment.step(message))
        assert observation is not None
        self.turn_rewards.append(observation.reward)
        self.metrics = observation.metrics
        if isinstance(observation, Done):
            self.rewards, self.is_judged = observation.rewards, True
            self._end("stop")
            return
        if observation.replaces and not observation.messages:
            raise EpisodeError("environment_error", "there is no message to start the conversation with. Return at least one.")
        self.messages += observation.messages
        self._seen = [*(() if observation.replaces else self._seen), *observation.messages]
        self._tools = observation.tools or self._tools
        try:
            self._next, has_room = self._context(observation.state), True
        except DoesNotFit:
            has_room = False
        if self.num_turns == self._limits.max_turns or not has_room:
            await self._truncate(environment, None, "conversation_tokens" if not has_room else "turns")

    async def close(self) -> None:
        """Close the environment. Ignore exceptions, because the episode is already over; a second call has no effect."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                await environment.close()
        except USER_ERRORS:
            return
        except asyncio.CancelledError:
            if is_cancelled():
                raise

    def _context(self, state: str) -> Context:
        try:
            return replace(self.tree.context(self._seen, self._tools), state=state)
        except NotRenderable as error:
            raise EpisodeError("environment_error", str(error)) from error

    async def _truncate(self, environment: Environment, message: Message | None, limit: Limit) -> None:
        """End the episode at a limit, and let the environment judge it if it can; it has not received `message`."""
        if isinstance(environment, JudgesTruncated):
            judge = environment.judge_truncated
            done = await self._call("judge_truncated", lambda: judge(message, limit), may_be_none=True)
            if isinstance(done, Observation):
                rule = f"judge_truncated must return Done or None (got {shown(done)})"
                raise EpisodeError("environment_error", rule)
            if done is not None:
                self.rewards, self.metrics, self.is_judged = done.rewards, done.metrics, True
                self.turn_rewards[-1] += done.reward
        self._end("length")

    async def _call(
        self, name: str, call: Callable[[], Awaitable[object]], *, has_limit: bool = True, may_be_none: bool = False
    ) -> Observation | Done | None:
        """Await a method of the environment, within the time limits of a call and of the episode, and check its result."""
        total = f"the calls of the environment took longer than {self._limits.episode_timeout_s:g} s together (in {name})"
        spent = f"data.environment.episode_timeout_s: {total}"
        if has_limit and self._remaining_s <= 0.0:  # the call before has blocked the event loop, so no limit could end it
            raise EpisodeError("timeout", spent)
        limit_s = min(self._limits.step_timeout_s, self._remaining_s) if has_limit else None
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._checked(name, call, may_be_none)
        except TimeoutError:
            assert limit.expired()  # `_checked` converts one that the environment raised
            is_spent = self._remaining_s < self._limits.step_timeout_s
            text = spent if is_spent else f"{name} of the environment took longer than {limit_s:g} s"
            raise EpisodeError("timeout", text) from None
        finally:
            seconds = asyncio.get_running_loop().time() - started
            self.environment_s += seconds
            if has_limit:
                self._remaining_s -= seconds

    async def _checked(self, name: str, call: Callable[[], Awaitable[object]], may_be_none: bool) -> Observation | Done | None:
        try:
            with span("call the environment"):
                returned = await call()
        except EnvironmentTimeout as error:
            raise EpisodeError("timeout", f"{name} of the environment: {error}") from error
        except InvalidReward as error:
            raise EpisodeError("reward_error", f"{name} of the environment: {error}") from error
        except USER_ERRORS as error:
            raise EpisodeError("environment_error", f"{name} raised {describe_user_error(error)}") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise EpisodeError("environment_error", f"{name} raised CancelledError") from error
        if returned is None and may_be_none:
            return None
        try:
            return checked(returned)
        except InvalidReward as error:
            raise EpisodeError("reward_error", f"{name} returned an invalid reward. {error}") from error
        except EnvironmentFailure as error:
            raise EpisodeError("environment_error", f"{name} returned an invalid result. {error}") from error


def is_cancelled() -> bool:
    """Return True if the current task is being cancelled; False if user code raised `CancelledError` on its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
