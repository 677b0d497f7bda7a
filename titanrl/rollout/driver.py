"""The token driver: connects a policy, which processes tokens, to an environment, which exchanges messages.

A conversation is rendered once. Each later turn appends tokens, so the policy is trained on exactly the tokens that it sampled.
Appending is impossible if the environment edits the history, or if the model's template strips the thinking of earlier turns.
The conversation then continues in a new segment, in which the earlier turns are context only.

Shape suffix: S tokens of a segment.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from titanrl.base.errors import TitanRLError
from titanrl.carriers.supports import Supports, placed
from titanrl.carriers.types import Completion, FinishReason, GenerationRequest, Outcome, SamplingParams, Segment, Turn
from titanrl.data.tokenizer import MAX_TOKEN_CHARS
from titanrl.environments import (
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
)
from titanrl.environments.results import checked, readable_text, shown
from titanrl.rollout.renderers import Renderer, TurnEnd

T = TypeVar("T")

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
    """Maximum number of turns of the policy."""
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


@dataclass(slots=True)
class _SegmentBuilder:
    """A segment under construction, with the columns of `Segment`."""

    token_ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[tuple[int, Supports]] = field(default_factory=list)
    """Supports of each turn of the policy, with the index of the turn's first token."""
    turn_ends: list[int] = field(default_factory=list)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids += token_ids
        self._pad()

    def add(self, completion: Completion) -> None:
        """Append the tokens that the policy sampled, as the generator recorded them."""
        self._pad()
        if completion.supports is not None:
            self.supports.append((len(self.token_ids), completion.supports))
        self.token_ids += completion.token_ids.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        self.turn_ends.append(len(self.token_ids))

    def segment(self) -> Segment:
        """Return the segment up to the last sampled token. Later tokens are not needed for any loss."""
        end = len(self.mask) - self.mask[::-1].index(True)
        return Segment(
            token_ids=np.array(self.token_ids[:end], np.int64),
            mask=np.array(self.mask[:end], np.bool_),
            logprobs=np.array(self.logprobs[:end], np.float32),
            versions=np.array(self.versions[:end], np.int64),
            supports=placed(self.supports, len(self.token_ids))[:end] if self.supports else None,
        )

    def _pad(self) -> None:
        missing = len(self.token_ids) - len(self.mask)
        self.mask += [False] * missing
        self.logprobs += [0.0] * missing
        self.versions += [-1] * missing


class Conversation:
    """One episode between the policy and an environment.

    Example:
        await conversation.start()
        while (request := conversation.request()) is not None:
            await conversation.take(await generate(request))
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        episode: Episode,
        renderer: Renderer,
        limits: Limits,
        sampling: Callable[[int, int], SamplingParams],
        stop_text: Callable[[Sequence[int]], str] = lambda ids: "",
    ) -> None:
        """Prepare the episode; `start` creates the environment.

        Args:
            make: Function that creates the environment.
            episode: Task that the environment receives.
            renderer: Renderer of the policy's model.
            limits: Limits of the episode.
            sampling: Function from the index of a turn and its maximum length in tokens to its sampling options.
            stop_text: Function from the tokens of a turn to the text at their end that its message leaves out.
        """
        self.episode = episode
        self.messages: list[Message] = []
        """Messages of the whole episode, including messages that the environment has replaced."""
        self.rewards: Mapping[str, float] = {}
        """Rewards that the environment returned at the end, by name."""
        self.turn_rewards: list[float] = []
        """Reward of each turn of the policy."""
        self.metrics: Mapping[str, float] = {}
        """Latest metrics that the environment reported, by name."""
        self.num_malformed = 0
        """Number of tool calls that could not be parsed."""
        self.num_turns = 0
        """Number of turns that the policy has taken."""
        self.is_judged = False
        """True if the environment returned `Done`; False if a limit ended the episode and the environment did not judge it."""
        self.last_text = ""
        """Text of the policy's last message."""
        self._make, self._renderer, self._limits, self._sampling = make, renderer, limits, sampling
        self._stop_text = stop_text
        self._environment: Environment | None = None
        self._history: list[Message] = []
        self._tools: Sequence[Tool] = ()
        self._segments: list[_SegmentBuilder] = []
        self._finish_reason: FinishReason | None = None
        self._remaining_s = limits.episode_timeout_s

    @property
    def is_done(self) -> bool:
        """True if the episode has ended."""
        return self._finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason:
        """`stop`: the environment ended the episode; `length`: a limit on turns or tokens was reached."""
        assert self._finish_reason is not None, "the episode has not ended"
        return self._finish_reason

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(sum(builder.mask) for builder in self._segments)

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens that the policy sampled in all segments, `[num_sampled]`."""
        return [
            token
            for builder in self._segments
            for token, is_sampled in zip(builder.token_ids, builder.mask, strict=False)  # the mask may end earlier
            if is_sampled
        ]

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that contain a sampled token."""
        return tuple(builder.segment() for builder in self._segments if any(builder.mask))

    def turns(self, rewards: Sequence[float]) -> tuple[Turn, ...]:
        """Return the turns of a finished episode with the given rewards.

        A turn whose segment has no sampled token is assigned to the end of the previous turn, and covers no tokens.
        """
        turns: list[Turn] = []
        number, end = -1, 0
        for builder in self._segments:
            has_segment = any(builder.mask)
            number += has_segment
            for turn_end in builder.turn_ends:
                end = turn_end if has_segment else end
                turns.append(Turn(segment=max(number, 0), end=end, reward=rewards[len(turns)]))
        return tuple(turns)

    async def start(self) -> None:
        """Create and reset the environment, and render its first messages.

        Raises:
            EpisodeError: The environment failed.
        """
        try:
            self._environment = self._make()
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise EpisodeError("environment_error", f"creating it raised {_described(error)}") from error
        reset = self._environment.reset
        observation = await self._call("reset", lambda: reset(self.episode), has_limit=not self._limits.may_queue)
        if not isinstance(observation, Observation):
            raise EpisodeError("environment_error", f"reset must return an Observation (got {shown(observation)})")
        if observation.reward:
            rule = f"reset must not return a reward, because no turn has ended (got {observation.reward})"
            raise EpisodeError("environment_error", f"{rule}. Return it with the next observation.")
        self._tools, self.metrics = observation.tools, observation.metrics
        self.messages += observation.messages
        self._start_segment(observation.messages)

    def request(self) -> GenerationRequest | None:
        """Return the generation request for the policy's next turn; None if the episode has ended."""
        if self.is_done:
            return None
        token_ids = self._segments[-1].token_ids
        max_new_tokens = min(self._limits.max_new_tokens, self._limits.max_tokens - len(token_ids))
        return GenerationRequest(token_ids=tuple(token_ids), sampling=self._sampling(self.num_turns, max_new_tokens))

    async def take(self, completion: Completion) -> None:
        """Continue the episode with the policy's turn.

        A turn that was truncated at its limit ends the episode, and the environment does not see it in `step`.

        Raises:
            EpisodeError: The environment failed, or the completion was cancelled.
        """
        assert self._environment is not None, "call start first"
        if completion.finish_reason == "abort":
            raise EpisodeError("generation_error", "the completion was cancelled")
        segment, environment = self._segments[-1], self._environment
        before = tuple(segment.token_ids)
        segment.add(completion)
        parsed, message = self._parse(completion)
        self._history.append(parsed)
        self.messages.append(message)
        self.last_text = message["content"]
        self.num_turns += 1
        if completion.finish_reason != "stop":
            self.turn_rewards.append(0.0)
            has_room = len(segment.token_ids) < self._limits.max_tokens
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
        self.messages += observation.messages
        has_room = self._continue(before, completion, observation)
        if self.num_turns == self._limits.max_turns or not has_room:
            await self._truncate(environment, None, "conversation_tokens" if not has_room else "turns")

    async def close(self) -> None:
        """Close the environment. Ignore exceptions, because the episode is already over; a second call has no effect."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            await asyncio.wait_for(environment.close(), self._limits.step_timeout_s)
        except (Exception, SystemExit):  # user code may raise anything
            return
        except asyncio.CancelledError:
            if _is_cancelled():
                raise

    def _start_segment(self, messages: Sequence[Message], known_ids: Sequence[int] = ()) -> bool:
        """Start a segment with the rendered messages, or continue the current one if they extend its tokens.

        Args:
            messages: The conversation.
            known_ids: Tokens of the current segment; empty if it must not be continued.

        Returns:
            False if the messages leave no room for a turn of the policy.
        """
        self._history = list(messages)
        if not messages:
            raise EpisodeError("environment_error", "there is no message to start the conversation with. Return at least one.")
        num_chars = sum(len(message["content"]) for message in messages)
        fits = num_chars <= self._limits.max_tokens * MAX_TOKEN_CHARS  # do not tokenize what cannot fit
        token_ids = self._rendered(lambda: self._renderer.render(self._history, self._tools)) if fits else []
        if not fits or len(token_ids) >= self._limits.max_tokens:
            if not self._segments:
                size = f"{len(token_ids)} tokens" if fits else f"{num_chars} characters"
                problem = f"the first messages have {size}, which leaves no room for a reply"
                limit = f"data.environment.max_conversation_tokens={self._limits.max_tokens}"
                raise EpisodeError("environment_error", f"{problem} ({limit})")
            return False
        if not token_ids:
            raise EpisodeError("environment_error", "the messages have no tokens. Return text.")
        if known_ids and token_ids[: len(known_ids)] == known_ids:
            self._segments[-1].add_context(token_ids[len(known_ids) :])
            return True
        self._segments.append(_SegmentBuilder(token_ids))
        self._segments[-1].add_context(())
        return True

    def _continue(self, before: Sequence[int], completion: Completion, observation: Observation) -> bool:
        """Append the environment's messages to the segment, or start a new segment if that is impossible.

        Returns:
            False if they leave no room for another turn of the policy.
        """
        if observation.replaces:
            return self._start_segment(observation.messages)
        if sum(len(message["content"]) for message in observation.messages) > self._limits.max_tokens * MAX_TOKEN_CHARS:
            return False
        end = TurnEnd(token_ids=before, completion_ids=completion.token_ids.tolist(), messages=tuple(self._history))
        self._history += observation.messages
        added = self._rendered(lambda: self._renderer.extend(end, observation.messages, self._tools))
        if added is None:
            return self._start_segment(self._history, end.known_ids)
        self._segments[-1].add_context(added)
        return len(self._segments[-1].token_ids) < self._limits.max_tokens

    def _rendered(self, render: Callable[[], T]) -> T:
        try:
            return render()
        except Exception as error:  # the chat template may reject any message, and the tokenizer any text
            raise EpisodeError("environment_error", f"its messages cannot be rendered: {_described(error)}") from error

    def _parse(self, completion: Completion) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the policy's message with all of its text, as its tokens are, and without the stop text at its end."""
        token_ids = completion.token_ids.tolist()
        parsed = self._renderer.parse(token_ids, self._tools)
        calls = parsed.get("tool_calls", ())
        self.num_malformed += sum(isinstance(call["function"]["arguments"], str) for call in calls)
        content, end = parsed["content"], self._stop_text(token_ids)
        end = end if content.endswith(end) else end.rstrip()  # a renderer may have trimmed the content
        return parsed, parsed | {"content": content.removesuffix(end)}

    async def _truncate(self, environment: Environment, message: Message | None, limit: Limit) -> None:
        """End the episode at a limit, and let the environment judge it if it can.

        Args:
            environment: The environment.
            message: The policy's last message, if the environment has not received it.
            limit: Limit that ended the episode.
        """
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

    def _end(self, reason: FinishReason) -> None:
        if not self.num_sampled:
            raise EpisodeError("generation_error", "the policy sampled no token")
        if not math.isfinite(sum(self.turn_rewards)):
            raise EpisodeError("reward_error", f"the rewards of the turns must have a finite sum (got {self.turn_rewards})")
        self._finish_reason = reason

    async def _call(
        self, name: str, call: Callable[[], Awaitable[object]], *, has_limit: bool = True, may_be_none: bool = False
    ) -> Observation | Done | None:
        """Await a method of the environment, within the time limits of a call and of the episode, and check its result."""
        if not has_limit:
            return await self._checked(name, call, may_be_none)
        limit_s = min(self._limits.step_timeout_s, self._remaining_s)
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._checked(name, call, may_be_none)
        except TimeoutError:
            assert limit.expired()
            raise EpisodeError("timeout", f"{name} of the environment took longer than {limit_s:g} s") from None
        finally:
            self._remaining_s -= asyncio.get_running_loop().time() - started

    async def _checked(self, name: str, call: Callable[[], Awaitable[object]], may_be_none: bool) -> Observation | Done | None:
        try:
            returned = await call()
        except EnvironmentTimeout as error:
            raise EpisodeError("timeout", f"{name} of the environment: {error}") from error
        except InvalidReward as error:
            raise EpisodeError("reward_error", f"{name} of the environment: {error}") from error
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise EpisodeError("environment_error", f"{name} raised {_described(error)}") from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
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


def _described(error: BaseException) -> str:
    """Return the type and message of an exception of user code, whose `__str__` may raise, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # user code may raise anything
        return type(error).__name__


def _is_cancelled() -> bool:
    """Return True if the current task is being cancelled; False if user code raised `CancelledError` on its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
