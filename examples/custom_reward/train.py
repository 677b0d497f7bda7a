"""Train the quick start with two custom rewards: correctness, and brevity within the group.

python examples/custom_reward/train.py num_steps=60
"""

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import titanrl


def right(completion: str, entry: Mapping[str, Any]) -> float:
    """Return 1 if the text in the last answer tags is the answer, else 0."""
    answers = re.findall("<answer>(.*?)</answer>", completion)
    return float(bool(answers) and answers[-1].strip() == entry["answer"])


@titanrl.group_reward
def brief(completions: Sequence[str], entry: Mapping[str, Any], num_tokens: Sequence[int]) -> list[float]:
    """Return, for each completion, the share of the others that are longer."""
    return [sum(other > num for other in num_tokens) / (len(num_tokens) - 1 or 1) for num in num_tokens]


async def main(overrides: list[str]) -> None:
    """Train, then export the model."""
    config = titanrl.load_config("quickstart", ["name=custom_reward", *overrides])
    rewards = {"right": right, "brief": titanrl.Reward(brief, weight=0.1)}
    async with titanrl.GRPO(config, rewards=rewards) as run:
        await run.train()
        await run.export()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
