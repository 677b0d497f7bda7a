"""A single-turn environment: one question, one answer, scored by the configured rewards."""

from titanrl.environments.interface import Done, Episode, Limit, Message, Observation


class SingleTurn:
    """Asks the question and ends the episode after the answer."""

    def __init__(self, *, system_prompt: str | None = None) -> None:
        """Set the system message that precedes the question."""
        self._system_prompt = system_prompt

    async def reset(self, episode: Episode) -> Observation:
        """Return the question."""
        return Observation(messages=opening(episode, self._system_prompt))

    async def step(self, message: Message) -> Done:
        """End the episode."""
        return Done()

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Add nothing to the configured rewards, which score the answer that was cut off."""
        return Done()

    async def close(self) -> None:
        """Release nothing."""


def opening(episode: Episode, system_prompt: str | None) -> list[Message]:
    """Return the first messages of an episode: the conversation from the prompt source, or else the question.

    The system prompt is prepended unless the conversation starts with a system message.
    """
    asked: list[Message] = list(episode.entry.get("messages") or [{"role": "user", "content": episode.question}])
    if system_prompt is None or asked[0]["role"] in ("system", "developer"):
        return asked
    return [{"role": "system", "content": system_prompt}, *asked]
