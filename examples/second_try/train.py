"""Train the quick start in a custom environment that gives the policy two tries at each sum.

python examples/second_try/train.py num_steps=60
"""

import asyncio
import re
import sys

import titanrl
from titanrl.environments import Done, Episode, Message, Observation


class SecondTry:
    """Asks a sum again after a wrong answer; a right second answer is worth half."""

    async def reset(self, episode: Episode) -> Observation:
        """Ask the question."""
        self.question, self.answer, self.reward = episode.question, episode.entry["answer"], 1.0
        return Observation(messages=[{"role": "user", "content": self.question}])

    async def step(self, message: Message) -> Observation | Done:
        """Return the reward, or the question again after a wrong first answer."""
        found = re.findall("<answer>(.*?)</answer>", message["content"])
        is_right = bool(found) and found[-1].strip() == self.answer
        if is_right or self.reward < 1.0:
            return Done(rewards={"right": self.reward * is_right})
        self.reward = 0.5
        return Observation(messages=[{"role": "user", "content": self.question}])

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


async def main(overrides: list[str]) -> None:
    """Train, then export the model."""
    config = titanrl.load_config("quickstart", ["name=second_try", "trainer.row_tokens=256", *overrides])
    async with titanrl.GRPO(config, environment=SecondTry) as run:
        await run.train()
        await run.export()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
