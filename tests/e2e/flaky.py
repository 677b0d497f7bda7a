"""An environment that fails for a share of its episodes, which a hash selects, and logs each failure."""

import asyncio
import os
import zlib
from pathlib import Path

from titanrl.environments import Done, Episode, Message, Observation

ERRORS, HANGS, REWARDS = 0.2, 0.1, 0.1
"""Shares of episodes that raise and that hang, and of rewards that fail."""


def share(*parts: object) -> float:
    """Return a number from 0 to 1 that depends only on the arguments."""
    return zlib.crc32(repr(parts).encode()) / 2**32


def note(outcome: str, index: str) -> None:
    """Append a line to the log."""
    with Path(os.environ["FLAKY_LOG"]).open("a") as log:
        log.write(f"{outcome} {index}\n")


class Flaky:
    """Asks the question; the answer is scored by the configuration."""

    numbers: dict[str, int] = {}  # noqa: RUF012  # number of episodes per task

    async def reset(self, episode: Episode) -> Observation:
        number = Flaky.numbers[episode.task_id] = Flaky.numbers.get(episode.task_id, 0) + 1
        self.place = share(episode.task_id, number)
        self.index = episode.task_id.rpartition("/")[2]
        self.is_training = "/training/" in episode.task_id
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message: Message) -> Observation | Done:
        if self.is_training and self.place < ERRORS:
            note("environment_error", self.index)
            raise RuntimeError("flaky")
        if self.is_training and self.place < ERRORS + HANGS:
            note("timeout", self.index)
            await asyncio.sleep(3600)
        if self.is_training and self.place < ERRORS + HANGS + REWARDS:
            note("reward_error", self.index)
            return Done(rewards={"bonus": float("nan")})
        if self.is_training:
            note("ok", self.index)
        return Done()

    async def close(self) -> None:
        pass
