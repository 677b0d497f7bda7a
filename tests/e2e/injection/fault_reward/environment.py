"""A single-turn environment that causes faults on command, in a separate process."""

from fault_reward import at
from titanrl.environments import Done, Message
from titanrl.environments.factories import SingleTurn


class Task(SingleTurn):
    """Asks the question, and ends with the answer."""

    async def step(self, message: Message) -> Done:
        """Cause a fault if one was requested, or end the episode."""
        at("environment.step")
        return await super().step(message)
