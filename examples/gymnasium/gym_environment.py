"""Play any Gymnasium or GEM environment: observations are shown as text, and the policy's text is the action."""

import importlib
import json
from typing import Any

from titanrl.environments import Done, Episode, Limit, Message, Observation


class Gym:
    """An environment of `module`, whose `make` returns objects with `reset(seed=...)` and `step(action)`."""

    def __init__(self, name: str, module: str = "gymnasium", text_actions: bool = False, **options: Any) -> None:
        self.game = importlib.import_module(module).make(name, **options)
        self.text_actions, self.total = text_actions, 0.0

    async def reset(self, episode: Episode) -> Observation:
        """Show the question and the first observation."""
        observation, _ = self.game.reset(seed=episode.seed % 2**31)
        return Observation(messages=[{"role": "user", "content": f"{episode.question}\n{observation}"}])

    async def step(self, message: Message) -> Observation | Done:
        """Act. A text that is no action of the game loses 1 and ends it."""
        action: Any = message["content"]
        if not self.text_actions:
            try:
                action = json.loads(action)
            except ValueError:
                action = None
            if not self.game.action_space.contains(action):
                return Done(rewards={"game": self.total - 1.0}, metrics={"illegal": 1.0})
        observation, reward, terminated, truncated, _ = self.game.step(action)
        self.total += float(reward)
        if terminated or truncated:
            return Done(rewards={"game": self.total}, metrics={"illegal": 0.0})
        return Observation(messages=[{"role": "user", "content": str(observation)}])

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Count what was won before a limit."""
        return Done(rewards={"game": self.total})

    async def close(self) -> None:
        """End the game."""
        self.game.close()
