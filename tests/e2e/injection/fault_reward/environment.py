"""An environment of one turn that misbehaves on command, in a process of its own."""

from fault_reward import at
from titanrl.environments import Done, Message
from titanrl.environments.single_turn import SingleTurn


class Task(SingleTurn):
    """Asks the question, and ends with the answer."""

    async def step(self, message: Message) -> Done:
        """Misbehave if that was commanded, or end the episode."""
        at("environment.step")
        return await super().step(message)
