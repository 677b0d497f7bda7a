"""The interface of environments. They talk to the policy in chat messages, and know no token, no weight and no actor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""Chat message in OpenAI's form: `role` (`system`, `user`, `assistant` or `tool`), `content`, and where they apply `tool_calls`
(`[{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]`, with parsed arguments) and
`tool_call_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A task, as its environment gets it.

    Example: `Episode(task_id="chain_sum/17", question="7 + 5 - 3 =", entry={"answer": "9", ...}, seed=123)`
    """

    task_id: str
    """Name of the task; the same for every episode of it, in every run."""
    question: str
    """Question of the prompt source, without chat template."""
    entry: Mapping[str, Any]
    """Data of the prompt source, as rewards get it: `question`, `answer`, `metadata`."""
    seed: int
    """Seed of everything random in the episode, derived from the run's seed, the prompt and the place in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """Name of the function."""
    description: str = ""
    """One or two sentences for the policy."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Messages for the policy's next turn."""

    messages: Sequence[Message]
    """Messages after those of the conversation so far; with `replaces`, the whole conversation."""
    tools: Sequence[Tool] = ()
    """Functions that the policy may call; read from the first observation only."""
    reward: float = 0.0
    """Reward of the turn that just ended."""
    replaces: bool = False
    """True if the messages replace the conversation, for example by a summary of it. The policy's next turn then starts a new
    segment, because the tokens of the earlier turns are not its prefix."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the episode so far, as in `Done`. They count if a limit ends the episode before `Done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the episode by name, each reported as `reward/<name>`. The rewards of the configuration, which score the last
    message of the policy, are added to them."""
    reward: float = 0.0
    """Reward of the last turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the episode by name, such as calls of a tool. The mean of each over the episodes that have it is reported as
    `environment/<name>_mean`."""


@runtime_checkable
class Environment(Protocol):
    """One episode. An exception that a method raises fails the episode; it is not a reward of 0.

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
        """Start the episode."""

    async def step(self, message: Message) -> Observation | Done:
        """Answer a message of the policy."""

    async def close(self) -> None:
        """Release what the episode holds. It is called once, also after a failure."""
