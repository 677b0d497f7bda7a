"""The interface of environments. They exchange chat messages with the policy, and do not depend on tokens or actors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from titanrl.base.errors import TitanRLError

Message = Mapping[str, Any]
"""Chat message in OpenAI's format: `role` (`system`, `user`, `assistant` or `tool`), `content`, and optionally `tool_calls`
(`[{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]`, with parsed arguments) or
`tool_call_id`. All values are JSON values, without NUL and unpaired surrogates."""

Limit = Literal["turn_tokens", "conversation_tokens", "turns"]
"""Limit that ends an episode: `rollout.max_new_tokens` of a turn, `max_conversation_tokens` or `max_turns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The task that an environment receives at the start of an episode.

    Example: `Episode(task_id="chain_sum/17", question="7 + 5 - 3 =", entry={"answer": "9", ...}, seed=123)`
    """

    task_id: str
    """Identifier of the task, equal for all episodes of the same prompt, in every run."""
    question: str
    """Question from the prompt source, without a chat template."""
    entry: Mapping[str, Any]
    """Data from the prompt source, as rewards receive it: `question`, `answer`, `metadata`."""
    seed: int
    """Seed for all randomness in the episode, shared by all episodes of a group. It is derived from the prompt and, for
    training episodes, from the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """Name of the function."""
    description: str = ""
    """Description for the policy, one or two sentences."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Messages for the policy's next turn."""

    messages: Sequence[Message]
    """Messages to append to the conversation; with `replaces`, the complete new conversation."""
    tools: Sequence[Tool] = ()
    """Functions that the policy may call from now on; empty keeps those of the last observation. Chat templates put them before
    the conversation, so other tools start a new segment."""
    reward: float = 0.0
    """Reward of the turn that just ended."""
    replaces: bool = False
    """True if the messages replace the conversation, for example with a summary. The policy's next turn then starts a new
    segment, because the tokens of the earlier turns are no longer a prefix of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode so far, as in `Done`. They are reported if a limit ends the episode before `Done`."""
    state: str = ""
    """Name of the environment's state, for `algorithm.credit: state`. If it is empty, observations with equal messages are in
    the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the episode by name, reported as `reward/<name>`. The rewards of the configuration, which score the policy's
    last message, are added to them."""
    reward: float = 0.0
    """Reward of the last turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode by name, such as the number of tool calls. The mean of each over the episodes that report it is
    logged as `environment/<name>_mean`."""


@runtime_checkable
class Environment(Protocol):
    """An environment for one episode. If a method raises, the episode fails; it does not get a reward of 0.

    Example:
        class GuessNumber:
            async def reset(self, episode: Episode) -> Observation:
                self.secret = random.Random(episode.seed).randint(1, 9)
                return Observation(messages=[{"role": "user", "content": "Guess a number from 1 to 9."}])

            async def step(self, message: Message) -> Observation | Done:
                guess = message["content"].strip()
                if guess == str(self.secret):
                    return Done(rewards={"found": 1.0})
                return Observation(messages=[{"role": "user", "content": "No. Try another one."}])

            async def close(self) -> None:
                pass
    """

    async def reset(self, episode: Episode) -> Observation:
        """Start the episode and return the first messages."""

    async def step(self, message: Message) -> Observation | Done:
        """Process a message of the policy, and continue or end the episode."""

    async def close(self) -> None:
        """Release the resources of the episode. This is called once, even after a failure."""


@runtime_checkable
class JudgesTruncated(Protocol):
    """The optional method of an environment that judges episodes that a limit ends before `Done`.

    Without it, such an episode gets `data.environment.truncated_reward` in place of the environment's rewards.

    Example:
        class GuessNumber:
            ...
            async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
                return Done(rewards={"found": 0.0})
    """

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
        """Return the rewards of an episode that a limit ended; None for `truncated_reward`. Only `close` follows.

        Args:
            message: Last message of the policy if it was cut off, so that `step` did not receive it; None otherwise.
            limit: The limit.
        """


@runtime_checkable
class Prepares(Protocol):
    """The optional method of an environment that needs something before the first episode, such as a server."""

    async def prepare(self) -> None:
        """Start or check it. The method is called once per process, on an environment that plays no episode.

        Raises:
            EnvironmentFailure: It cannot be used, so that the run cannot start.
        """


def opening(episode: Episode, system_prompt: str | None) -> list[Message]:
    """Return the first messages of an episode: the conversation from the prompt source, or else the question.

    The system prompt is prepended unless the conversation starts with a system message.
    """
    asked: list[Message] = list(episode.entry.get("messages") or [{"role": "user", "content": episode.question}])
    if system_prompt is None or asked[0]["role"] in ("system", "developer"):
        return asked
    return [{"role": "system", "content": system_prompt}, *asked]


# Exceptions. A failed episode is retried or dropped; it does not get a reward of 0.


class EnvironmentFailure(TitanRLError):
    """Raised if an environment fails: it raised an exception, returned an invalid value, or its process died."""


class EnvironmentTimeout(EnvironmentFailure):
    """Raised if a call of an environment exceeds its time limit."""


class InvalidReward(EnvironmentFailure):
    """Raised if a reward of an environment is not a finite number."""


class EnvironmentDied(EnvironmentFailure):
    """Raised if the process of an environment died."""


class ToolError(TitanRLError):
    """Raised by a tool to reject a call that the policy got wrong. The policy sees the message, and the episode continues.

    Any other exception that a tool raises fails the episode.

    Example: `raise ToolError(f"There is no article {number}. The numbers are 1 to {len(self._articles)}.")`
    """
