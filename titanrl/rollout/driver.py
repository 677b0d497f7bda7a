"""The token driver: connects a policy, which processes tokens, to an environment, which exchanges messages.

A conversation is rendered once. Each later turn appends tokens, so the policy is trained on exactly the tokens that it sampled.
Appending is impossible if the environment edits the history or changes the tools, or if the model's template strips the
thinking of earlier turns. The conversation then continues in a new segment, in which the earlier turns are context only
(`titanrl.rollout.tree`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanrl.base.errors import USER_ERRORS, TitanRLError, describe_user_error
from titanrl.carriers.record import span
from titanrl.carriers.types import Completion, FinishReason, GenerationRequest, Outcome, SamplingParams
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
)
from titanrl.environments.interface import checked, readable_text, shown
from titanrl.rollout.group import GenerateTokens
from titanrl.rollout.renderers import Renderer
from titanrl.rollout.tree import CallTree, Context, DoesNotFit, NotRenderable

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
    """One attempt to play an episode with an environment (`Conversation`) or a user's program (`ProgramEpisode`)."""

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
        """Continue with the completions of the last requests."""
        raise NotImplementedError

    async def play(self, generate: GenerateTokens) -> None:
        """Play the episode from its start to its end; raise `EpisodeError` if it fails."""
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
        limit_s = min(self._limits.step_timeout_s, self._remaining_s) if has_limit else None
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._checked(name, call, may_be_none)
        except TimeoutError:
            assert limit.expired()  # `_checked` converts one that the environment raised
            raise EpisodeError("timeout", f"{name} of the environment took longer than {limit_s:g} s") from None
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
