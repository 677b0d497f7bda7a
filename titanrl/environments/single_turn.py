"""One question, one answer. The rewards are those of the configuration."""

from titanrl.environments.interface import Done, Episode, Message, Observation


class SingleTurn:
    """Asks the question, and ends with the answer."""

    def __init__(self, *, system_prompt: str | None = None) -> None:
        """Keep the system message before the question."""
        self._system_prompt = system_prompt

    async def reset(self, episode: Episode) -> Observation:
        """Return the question."""
        return Observation(messages=opening(episode, self._system_prompt))

    async def step(self, message: Message) -> Done:
        """End the episode."""
        return Done()

    async def close(self) -> None:
        """Release nothing."""


def opening(episode: Episode, system_prompt: str | None) -> list[Message]:
    """Return the question, or the conversation of the prompt source, after the system message unless it has its own."""
    asked: list[Message] = list(episode.entry.get("messages") or [{"role": "user", "content": episode.question}])
    if system_prompt is None or asked[0]["role"] == "system":
        return asked
    return [{"role": "system", "content": system_prompt}, *asked]
